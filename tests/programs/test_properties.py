"""Random programs: the compiled program and the per-replica executor mean the same."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import replicax
from replicax.variables.partitioners import over_all
from tests.conftest import strategy_of
from tests.programs.random_programs import BRANCHING, DTYPES, KINDS, SHAPES, RandomProgram, random_programs, run_program

PER_REPLICA = replicax.RunOptions(executor="per_replica")

# The same examples every time. To hunt, set the number of examples of each test, which are random then.
_HUNT = os.environ.get("REPLICAX_RANDOM_PROGRAMS")
the_usual = functools.partial(
    settings,
    derandomize=_HUNT is None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    print_blob=True,
    database=None,
)


@functools.cache
def the_strategy_of(replicas: int, split: bool) -> replicax.Strategy:
    if not split:
        return strategy_of(replicas)
    devices, size = [f"cpu:{i}" for i in range(replicas)], 2 if replicas % 2 == 0 else replicas  # pairs, or all
    return replicax.ShardedStrategy(devices, replicax.variables.GroupPartitioner(size, over_all(size, min_bytes=0)))


def is_per_replica(leaf: Any) -> bool:
    return isinstance(leaf, replicax.PerReplica)


class Trial:
    """A program with its variables, ready to be run by either executor."""

    def __init__(self, program: RandomProgram, replicas: int, split: bool) -> None:
        self.program = program
        self.strategy = the_strategy_of(replicas, split)
        with self.strategy.scope():
            self.variables = [
                replicax.Variable(
                    np.zeros(SHAPES[v.kind], DTYPES[v.kind]),
                    synchronization=v.synchronization,
                    aggregation=v.aggregation,
                )
                for v in program.variables
            ]
        mirrored = [jnp.full(SHAPES[k], 2, DTYPES[k]) for k in KINDS]
        own = [
            self.strategy.distribute_values_from_function(
                lambda ctx, k=k: program.argument(k, ctx.replica_id_in_sync_group)
            )
            for k in KINDS
        ]
        self.arguments = (*mirrored, *own)
        self.initial = [self._initial(i, v) for i, v in enumerate(self.variables)]

    def _initial(self, number: int, variable: replicax.Variable) -> np.ndarray[Any, Any]:
        """Other numbers for each variable, and for each copy of an on-read one."""
        value = np.asarray(variable.slot.array)
        copies = np.arange(len(value)) if variable.is_stacked else np.zeros(())
        return (value + copies.reshape(copies.shape + (1,) * (value.ndim - copies.ndim)) + number + 1).astype(
            value.dtype
        )

    def run(self, options: replicax.RunOptions | None) -> tuple[Any, list[np.ndarray[Any, Any]], Exception | None]:
        """What the step returns, what the variables hold then, and the error."""
        for variable, value in zip(self.variables, self.initial, strict=True):
            variable.slot.array = jax.device_put(value, variable.sharding, may_alias=False)

        def step(*arguments: Any) -> Any:
            return run_program(self.program, self.variables, *arguments)

        result, error = None, None
        try:
            result = self.strategy.run(step, args=self.arguments, options=options)
        except Exception as caught:
            error = caught
        stored = [np.array(v.slot.array) for v in self.variables]
        found = [s if v.is_stacked else np.array(v.from_storage()) for v, s in zip(self.variables, stored, strict=True)]
        if error is not None:
            for mine, before in zip(stored, self.initial, strict=True):
                np.testing.assert_array_equal(mine, before, err_msg="a step that was refused changed a variable")
            total = self.strategy.run(add_one_up, options=options)
            assert float(total) == self.strategy.num_replicas_in_sync
        return result, found, error


def add_one_up() -> Any:
    replica = replicax.get_replica_context()
    assert replica is not None
    return replica.all_reduce("sum", jnp.float32(1))


def check_errors(program: RandomProgram, compiled: Exception | None, exact: Exception | None) -> None:
    """Both executors raise the same error, but for deliberate differences."""
    if type(compiled) is type(exact):
        return
    found = ("compiled", compiled, "exact", exact)
    branching = program.has(BRANCHING)
    static = replicax.errors.LocalityError, replicax.errors.DeadlockError
    # The compiled check is static: what comes out of a decision that may differ may differ. The per-replica executor
    # follows values: results differ only if they do, and replicas are stuck only if they do part ways, perhaps where
    # one of them has come upon another error already.
    if branching and isinstance(compiled, static) and (exact is None or isinstance(exact, ValueError)):
        return
    # So a loss that may differ, but does not, is a mirrored one there.
    if (
        branching
        and compiled is None
        and isinstance(exact, replicax.errors.LocalityError)
        and "the loss is" in str(exact)
    ):
        return
    # JAX drops what a derivative does not need from a compiled program; in the exact one it has run.
    if branching and program.has({"grad", "value_and_grad"}) and compiled is None and isinstance(exact, ValueError):
        return
    # What replicas differ in is known to the compiled program after the step's Python has run, so an error of
    # Python comes first there.
    before = ValueError if branching else replicax.errors.LocalityError
    if compiled is not None and not isinstance(compiled, static) and isinstance(exact, before):
        return
    raise AssertionError(found)


def check_results(trial: Trial, compiled: Any, exact: Any) -> None:
    """The same structure, the same locality and the same values."""
    mine, tree = jax.tree.flatten(compiled, is_leaf=is_leaf)
    theirs, exact_tree = jax.tree.flatten(exact, is_leaf=is_leaf)
    assert tree == exact_tree
    numbers = [c for leaf in mine if is_array(leaf) for c in trial.strategy.local_results(leaf)]
    scale = max([1.0, *(float(np.max(np.abs(n), initial=0)) for n in numbers)])
    for a, b in zip(mine, theirs, strict=True):
        if not is_array(a):
            assert a is b or a == b
            continue
        mine_of_each, theirs_of_each = (trial.strategy.local_results(x) for x in (a, b))
        if is_per_replica(a) != is_per_replica(b):
            # What comes out of a decision that may differ is PerReplica in a compiled program, and in the exact
            # executor if it does differ.
            assert trial.program.has(BRANCHING), f"other localities: compiled {a}, exact {b}"
            assert is_per_replica(a), f"other localities: compiled {a}, exact {b}"
        for x, y in zip(mine_of_each, theirs_of_each, strict=True):
            assert_close(x, y, scale)


def is_array(leaf: Any) -> bool:
    return is_per_replica(leaf) or isinstance(leaf, jax.Array)


def is_leaf(leaf: Any) -> bool:
    return is_per_replica(leaf) or isinstance(leaf, replicax.Variable)


def assert_close(a: Any, b: Any, scale: float) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.dtype == jnp.float32:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * scale)
    else:
        np.testing.assert_array_equal(a, b)


def check(program: RandomProgram, replicas: int, split: bool) -> None:
    trial = Trial(program, replicas, split)
    result, variables, error = trial.run(None)
    exact_result, exact_variables, exact_error = trial.run(PER_REPLICA)
    check_errors(program, error, exact_error)
    if error is not None or exact_error is not None:
        return
    check_results(trial, result, exact_result)
    scale = max(float(np.max(np.abs(v))) for v in variables)
    for mine, theirs in zip(variables, exact_variables, strict=True):
        assert_close(mine, theirs, max(1.0, scale))


@pytest.mark.filterwarnings("ignore::replicax.errors.RetraceWarning")  # every example is a new program
@pytest.mark.parametrize(
    ("replicas", "split", "examples"),
    [
        *[(2, False, 6), (3, True, 6)],
        *(
            pytest.param(n, split, 60 // n + 30, marks=pytest.mark.soak)
            for n in (1, 2, 3, 8)
            for split in (False, True)
        ),
    ],
)
def test_both_executors_mean_the_same(replicas: int, split: bool, examples: int) -> None:
    @the_usual(max_examples=int(_HUNT or examples))
    @given(random_programs())
    def agree(program: RandomProgram) -> None:
        check(program, replicas, split)

    agree()
