"""The check that all workers are about to run the same step, with the same arguments.

A compiled step in which one worker takes part and another does not would wait for ever, and a plain value that differs
between workers would make mirrored variables differ, unseen. To compare at every call would cost more than a small
step does, so it is done when a program is new, and later at every per-replica call and at the calls whose
number is a power of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.errors import LocalityError
from replicax.execution.program.program import Program
from replicax.execution.replica_values import ARRAYS
from replicax.execution.tracing.arguments import path_of
from replicax.execution.tracing.stateful_arguments import StatefulArgument
from replicax.pytrees import is_leaf, registered
from replicax.user_functions import function_name
from replicax.values import PerReplica
from replicax.variables.variable import Variable
from replicax.workers.digests import digest, outputs_of
from replicax.workers.lockstep import Lockstep


def check_same_step(
    lockstep: Lockstep,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    how: str,
    program: Program | None = None,
) -> None:
    """Raise unless all workers are about to run the same step with the same plain arguments, which computes the same.

    Messages say ``how`` it runs; ``program`` is that of a compiled step. A DeadlockError says that workers run another
    step, or none, a ValueError that arguments are of another kind, and a LocalityError that plain values differ between
    workers, also those that the step has captured.
    """
    if not lockstep.several:
        return
    name = function_name(fn)
    leaves, tree = jax.tree_util.tree_flatten(registered((tuple(args), dict(kwargs or {}))), is_leaf=is_leaf)
    computed = [] if program is None else outputs_of(program)
    description = str(tree), [_describe(leaf) for leaf in leaves], [_digest_of(leaf) for leaf in leaves], computed
    theirs = lockstep.exchange(f"runs the step {name!r} {how}", description)
    first = theirs[0]
    for worker, (structure, descriptions, digests, computed) in enumerate(theirs):
        if structure != first[0]:
            raise ValueError(
                f"{name}: the arguments differ in structure: worker 0 has {first[0]}, worker {worker} has {structure}"
            )
        for position, on_first, on_worker in _differences(first[1], descriptions):
            raise ValueError(
                f"{name}: {path_of(tree, position)} is {on_first} on worker 0, and {on_worker} on worker {worker}. All "
                "workers must run the same step with the same plain values; what differs is for "
                "strategy.distribute_values_from_function or a distributed dataset."
            )
        for position, _, _ in _differences(first[2], digests):
            raise LocalityError(
                f"{name}: {path_of(tree, position)} is a plain value, which all workers must have alike, but worker "
                f"{worker} has another than worker 0. What differs is for strategy.distribute_values_from_function or "
                "a distributed dataset."
            )
        for on_first, on_worker in itertools.zip_longest(first[3], computed, fillvalue=("nothing", None)):
            if on_first != on_worker:
                where = "otherwise than on" if on_first[0] == on_worker[0] else f"where {on_first[0]} is computed on"
                raise LocalityError(
                    f"{name}: {on_worker[0]} is computed on worker {worker} {where} worker 0. What a step captures, "
                    "and the order of what it does, must be the same on all workers: draw random numbers from one "
                    "seed, read no clock, and sort sets."
                )


def _differences(here: Sequence[Any], there: Sequence[Any]) -> Iterator[tuple[int, Any, Any]]:
    return ((i, a, b) for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)


def _describe(leaf: Any) -> str:
    """An argument in words that are the same on all workers."""
    if isinstance(leaf, Variable):
        return f"variable number {leaf.number}"
    if isinstance(leaf, StatefulArgument):
        return repr(leaf)
    if isinstance(leaf, PerReplica):
        return "a PerReplica value"  # in which workers may differ
    if isinstance(leaf, bool | str | bytes | None):
        return f"the Python value {leaf!r}"
    if isinstance(leaf, ARRAYS):
        return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"
    return f"a {type(leaf).__name__}"


def _digest_of(leaf: Any) -> Any:
    if not isinstance(leaf, ARRAYS):
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return None  # all workers have computed it
    return digest(leaf)
