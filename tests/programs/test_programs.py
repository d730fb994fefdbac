"""Ordinary model code runs unchanged inside a replica: the programs of ``programs_*.py`` against plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest

import replicax
from tests.conftest import shared_strategy, strategy_of
from tests.programs import (  # noqa: F401
    programs_collectives,
    programs_derivatives,
    programs_libraries,
    programs_loops,
    programs_models,
    programs_nnx,
    programs_numerics,
    programs_optax,
    programs_random,
    programs_variables,
)
from tests.programs.programs import PROGRAMS, Program, bundles, components, third_party
from tests.soaking import soak_except

T = replicax.Locality.PER_REPLICA

pytestmark = pytest.mark.filterwarnings(
    "ignore::replicax.errors.LocalityWarning"
)  # one program draws from a constant key


class Counted:
    """A function that knows how often it has been called."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.fn(*args)


def arguments(which: Program, strategy: replicax.Strategy) -> tuple[Any, ...]:
    """A program's arguments for all replicas."""
    x = strategy.distribute_values_from_function(lambda ctx: which.data(ctx.replica_id_in_sync_group))
    shared = which.shared()
    if which.variables:
        with strategy.scope():
            shared = jax.tree.map(replicax.Variable, shared)
    return x, *shared


def assert_same(found: Any, expected: Any, what: str) -> None:
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    found, expected = np.asarray(bits(found)), np.asarray(bits(expected))
    if found.dtype == jnp.bfloat16 or found.dtype == np.float16:
        found, expected = found.astype(np.float32), expected.astype(np.float32)
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2, err_msg=what)
    elif np.issubdtype(found.dtype, np.inexact):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6, err_msg=what)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=what)


def copies(leaf: Any, replicas: int) -> list[Any]:
    """What each replica's device holds of a result."""
    if is_per_replica(leaf):
        return components(leaf)
    shards = sorted(leaf.addressable_shards, key=lambda s: s.device.id)
    return [shards[i * len(shards) // replicas].data for i in range(replicas)]


def is_per_replica(leaf: Any) -> bool:
    return isinstance(leaf, replicax.PerReplica)


def bits(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def check(which: Program, localities: tuple[Any, ...], result: Any, expected: list[Any]) -> None:
    """Every replica's copy of each leaf of ``result`` is what plain JAX computes for that replica."""
    replicas = len(expected)
    with_paths, tree = jax.tree.flatten_with_path(result, is_leaf=is_per_replica)
    flat = [jax.tree.leaves(e) for e in expected]
    assert tree == jax.tree.structure(expected[0])
    assert "".join(locality.value for locality in localities) == which.localities
    for i, ((path, leaf), locality) in enumerate(zip(with_paths, localities, strict=True)):
        assert is_per_replica(leaf) == (locality is T and replicas > 1)
        held = copies(leaf, replicas)
        assert len(held) == replicas
        for replica in range(replicas):
            assert_same(held[replica], flat[replica][i], f"{jax.tree_util.keystr(path)} on replica {replica}")


# Programs with parameters run on split ones, too, in test_split_variables.py; `make soak` runs all of them here.
HAVE_PARAMETERS = [p for p in PROGRAMS if p.shared is not tuple and not p.variables]
OF_LIBRARIES = [p for p in PROGRAMS if p.theme == "libraries"]
QUICK = {"linear_systems", "batch_normalisation_of_equinox_in_both_modes"}
BUNDLES = bundles([p for p in PROGRAMS if p not in HAVE_PARAMETERS and p not in OF_LIBRARIES], 8)
MORE_BUNDLES = bundles(HAVE_PARAMETERS, 8)


@pytest.mark.covering(1)
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("which", BUNDLES, ids=lambda p: p.name)
def test_programs_are_what_plain_jax_computes(which: Program, replicas: int) -> None:
    compare(which, replicas)
    differ_as_they_say(which)


@pytest.mark.parametrize("replicas", soak_except([1, 2, 4], 2))
@pytest.mark.parametrize(
    "which", soak_except(OF_LIBRARIES, *(p for p in OF_LIBRARIES if p.name in QUICK)), ids=lambda p: p.name
)
@third_party
def test_programs_of_libraries_that_compare_types(which: Program, replicas: int) -> None:
    compare(which, replicas)
    differ_as_they_say(which)


@third_party
def test_what_a_library_solves_with_is_reduced_by_one_replica_too() -> None:
    def step(x: jax.Array) -> jax.Array:
        context = replicax.get_replica_context()
        operator = lineax.FunctionLinearOperator(
            lambda v: context.all_reduce("sum", x @ v) + v, jax.ShapeDtypeStruct((2,), x.dtype)
        )
        return lineax.linear_solve(operator, jnp.ones(2), lineax.LU()).value

    for replicas in (1, 2):
        strategy = strategy_of(replicas)
        x = strategy.distribute_values_from_function(lambda ctx: np.full((2, 2), 0.5, np.float32))
        assert strategy.extended.trace(step, (x,)).localities == (replicax.Locality.MIRRORED,)
        np.testing.assert_allclose(strategy.run(step, args=(x,)), np.full(2, 1 / (1 + replicas)), rtol=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("which", MORE_BUNDLES, ids=lambda p: p.name)
def test_programs_with_parameters(which: Program, replicas: int) -> None:
    compare(which, replicas)
    differ_as_they_say(which)


def differ_as_they_say(which: Program) -> None:
    """The localities that a program expects are no mere bounds: what may differ between replicas does."""
    flat = [jax.tree.leaves(e) for e in which.reference(4)]
    for i, locality in enumerate(which.localities if which.differ else ""):
        first, *others = (np.asarray(bits(leaves[i])) for leaves in flat)
        agree = all(np.array_equal(first, other) for other in others)
        assert agree == (locality == "M"), f"leaf {i}"


@pytest.mark.soak
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("which", BUNDLES + MORE_BUNDLES, ids=lambda p: p.name)
def test_programs_on_replicas_that_share_devices(which: Program, devices: int) -> None:
    compare(which, 4, devices)


@pytest.mark.soak
@pytest.mark.parametrize("which", BUNDLES + MORE_BUNDLES, ids=lambda p: p.name)
def test_programs_on_one_replica(which: Program) -> None:
    compare(which, 1)


def compare(which: Program, replicas: int, devices: int | None = None) -> None:
    strategy = strategy_of(replicas) if devices is None else shared_strategy(replicas, devices)
    step, args = Counted(which.step), arguments(which, strategy)
    localities = strategy.extended.trace(step, args).localities
    expected = which.reference(replicas)
    for _ in range(2):
        check(which, localities, strategy.run(step, args), expected)
    assert step.calls == 1


# --- gradients with respect to variables ----------------------------------------------------------------

# JAX itself does not differentiate these: integers and keys, callbacks, loops that stop when they like.
_NO_GRADIENT = {"variables_that_are_keys_and_counters", "variables_in_callbacks", "variables_in_branches_and_loops"}
DIFFERENTIABLE = [p for p in PROGRAMS if p.variables and p.name not in _NO_GRADIENT]


@pytest.mark.parametrize(
    "which",
    soak_except(DIFFERENTIABLE, *(p for p in DIFFERENTIABLE if "scan" in p.name or "rules" in p.name)),
    ids=lambda p: p.name,
)
def test_gradients_with_respect_to_variables(which: Program, pair: replicax.MirroredStrategy) -> None:
    def loss(x: Any, *shared: Any) -> Any:
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(which.step(x, *shared)))

    def step(x: Any, *variables: Any) -> Any:
        value, gradients = replicax.value_and_grad(lambda: loss(x, *variables), variables)()
        return value, gradients, replicax.get_replica_context().all_reduce("sum", gradients)

    plain = jax.jit(jax.value_and_grad(lambda shared, x: loss(x, *shared)))
    expected = [plain(which.shared(), which.data(i)) for i in range(2)]
    total = jax.tree.map(jnp.add, expected[0][1], expected[1][1])
    counted, args = Counted(step), arguments(which, pair)
    value, gradients, summed = pair.run(counted, args)
    assert counted.calls == 1
    for replica, (v, g) in enumerate(expected):
        here = jax.tree.map(lambda leaf, r=replica: copies(leaf, 2)[r], (value, gradients), is_leaf=is_per_replica)
        jax.tree.map(lambda a, b: assert_same(a, b, which.name), here, (v, g))
        jax.tree.map(lambda a, b, r=replica: assert_same(copies(a, 2)[r], b, which.name), summed, total)


# --- what happens besides the results -------------------------------------------------------------------


def test_a_jitted_helper_that_lives_on_reads_what_was_assigned(pair: replicax.MirroredStrategy) -> None:
    with pair.scope():
        v = replicax.Variable(1.0)
    helper = jax.jit(lambda x: x * v)

    def step(x: Any) -> Any:
        before = helper(x)
        v.assign(v + 1.0)
        _, (gradient,) = replicax.value_and_grad(lambda: helper(x) ** 2, [v])()
        return before, helper(x), gradient

    x = pair.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    for value in (1.0, 2.0):
        results = pair.run(step, (x,))
        for replica, own in enumerate([1.0, 2.0]):
            found = [float(copies(leaf, 2)[replica]) for leaf in results]
            assert found == [value * own, (value + 1) * own, 2 * (value + 1) * own**2]


def test_the_host_is_called_once_by_each_replica(strategy: replicax.MirroredStrategy) -> None:
    seen: list[tuple[str, float]] = []

    def note(what: str) -> Callable[[Any], None]:
        return lambda v: seen.append((what, float(v)))

    def step(x: Any, shared: Any) -> Any:
        jax.debug.callback(note("own"), x)
        jax.debug.callback(note("shared"), shared)
        jax.lax.fori_loop(0, 2, lambda i, c: (jax.debug.callback(note("loop"), c + x), c + 1.0)[1], 0.0)
        jax.lax.cond(x > 1, lambda: jax.debug.callback(note("large"), x), lambda: None)
        return x

    n = strategy.num_replicas_in_sync
    x = strategy.distribute_values_from_function(lambda ctx: float(ctx.replica_id_in_sync_group))
    strategy.run(step, (x, 10.0))
    jax.effects_barrier()
    own = [float(i) for i in range(n)]
    expected = [("own", i) for i in own] + [("shared", 10.0)] * n + [("large", i) for i in own if i > 1]
    assert sorted(seen) == sorted(expected + [("loop", i + turn) for i in own for turn in (0, 1)])
