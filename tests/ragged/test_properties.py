"""Random programs on replicas that differ in size: the joint program means what the program for one size means."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given

import replicax
from replicax.execution.program.marks import Obligation
from tests.programs.random_programs import KINDS, SHAPES, RandomProgram, random_programs, run_program
from tests.programs.test_properties import _HUNT, Trial, assert_close, check_results, is_leaf, the_usual


class RaggedTrial(Trial):
    """The same program, where what is the replica's own comes out of arrays of different sizes."""

    def __init__(self, program: RandomProgram, replicas: int, split: bool) -> None:
        super().__init__(program, replicas, split)
        self.even = self.arguments[len(KINDS) :]
        mirrored = self.arguments[: len(KINDS)]
        own = []
        for value in self.even:
            parts = [np.asarray(v) for v in self.strategy.local_results(value)]
            own.append(
                self.strategy.distribute_values_from_function(
                    lambda ctx, parts=parts: _longer(parts[ctx.replica_id_in_sync_group], ctx.replica_id_in_sync_group)
                )
            )
        self.uneven = (*mirrored, *own)
        self.fell_back = 0

    def run_uneven(self) -> tuple[Any, list[np.ndarray[Any, Any]], Exception | None]:
        for variable, value in zip(self.variables, self.initial, strict=True):
            variable.slot.array = jax.device_put(value, variable.sharding, may_alias=False)

        def step(*arguments: Any) -> Any:
            own = [x[:3] if SHAPES[k] else x[0] for k, x in zip(KINDS, arguments[len(KINDS) :], strict=True)]
            return run_program(self.program, self.variables, *arguments[: len(KINDS)], *own)

        result, error = None, None
        try:
            result = self.strategy.run(step, args=self.uneven)
        except Exception as caught:
            error = caught
        stored = [np.array(v.slot.array) for v in self.variables]
        found = [s if v.is_stacked else np.array(v.from_storage()) for v, s in zip(self.variables, stored, strict=True)]
        return result, found, error


def _longer(value: np.ndarray[Any, Any], replica: int) -> np.ndarray[Any, Any]:
    flat = value.reshape(-1)
    return np.concatenate([flat, np.full(replica % 3, 77, flat.dtype)])


def check(program: RandomProgram, replicas: int, split: bool) -> str:
    trial = RaggedTrial(program, replicas, split)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", replicax.errors.ExecutorWarning)
        # What is certain of a loss depends on the numbers of examples. But all means go over equal numbers here.
        warnings.simplefilter("ignore", replicax.errors.ShareWarning)
        warnings.filterwarnings("error", ".* have different numbers here", replicax.errors.ShareWarning)
        expected, variables, error = trial.run(None)
        found, found_variables, found_error = trial.run_uneven()
    fell_back = [str(w.message) for w in caught if w.category is replicax.errors.ExecutorWarning]
    if error is not None:
        if not fell_back:
            check_errors(trial, error, found_error)
        return "error"
    if found_error is not None:
        raise found_error
    check_results(trial, found, expected)
    if not fell_back:
        leaves = [jax.tree.leaves(x, is_leaf=is_leaf) for x in (expected, found)]
        assert [type(a) for a in leaves[0]] == [type(a) for a in leaves[1]]
    scale = max(float(np.max(np.abs(v))) for v in variables)
    for mine, theirs in zip(variables, found_variables, strict=True):
        assert_close(mine, theirs, max(1.0, scale))
    return fell_back[0] if fell_back else "joined"


def check_errors(trial: RaggedTrial, error: Exception, found: Exception | None) -> None:
    """The joint program has the error of the program for one size; or a deadlock which that one has, too."""
    if isinstance(error, replicax.errors.LocalityError) and isinstance(found, replicax.errors.DeadlockError):
        # Whether replicas of all sizes agree on a value is known only after each size has been looked at for deadlocks.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Obligation, "check", lambda *args: None)
            error = trial.run(None)[2] or error
    assert type(found) is type(error), (error, found)


@pytest.mark.filterwarnings("ignore::replicax.errors.RetraceWarning")  # every example is a new program
@pytest.mark.parametrize(
    ("replicas", "split", "examples"),
    [
        (3, True, 6),
        *(pytest.param(n, split, 40, marks=pytest.mark.soak) for n, split in [(2, False), (3, False), (3, True)]),
    ],
)
def test_joint_programs_mean_what_programs_of_one_size_mean(replicas: int, split: bool, examples: int) -> None:
    found: list[str] = []

    @the_usual(max_examples=int(_HUNT or examples))
    @given(random_programs())
    def agree(program: RandomProgram) -> None:
        found.append(check(program, replicas, split))

    agree()
    assert found.count("joined") >= len(found) / 3
