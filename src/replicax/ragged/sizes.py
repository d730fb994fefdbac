"""Ragged steps: those whose arguments differ in size between replicas, such as a last partial batch.

The step is captured once for each size. The capture of one size may ask for the sizes of the others' arrays, which are
known only when these have been captured: until then it gets a guess, and it is repeated if the guess was wrong. The
programs of all sizes are then joined into one (:mod:`replicax.ragged.joint_program`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from replicax.collectives import check_other_dims, checked_axes
from replicax.communication import CommunicationOptions
from replicax.devices.mesh import REPLICA_AXIS
from replicax.execution.program.collective_operations import ragged_gather_p
from replicax.execution.program.program import Program
from replicax.execution.tracing.arguments import Arguments, CantJoinError
from replicax.execution.tracing.capture import capture, checked_programs, state_of_this_thread
from replicax.execution.tracing.communicator import SpmdCommunicator
from replicax.execution.tracing.step_errors import where
from replicax.hlo.executed import executed
from replicax.hlo.instructions import parse
from replicax.ragged.joint_program import joined
from replicax.variables.store import Creations
from replicax.workers.replicas import Replicas

_ROUNDS = 6


def check_arms(text: str) -> None:
    """Raise if a compiled program in which each size goes its own way would wait for ever.

    Where values are split over a replica's logical devices, the compiler exchanges parts of them. Most collectives are
    among the devices of one replica, which all take the same arm of a branch. In a permute all devices take part, also
    those that take another arm.
    """
    if any(e.in_arm and e.instruction.opcode.startswith("collective-permute") for e in executed(parse(text))):
        raise CantJoinError(
            "its values are split over logical devices in such a way that the compiler exchanges parts of them among "
            "all devices, where those of one size do not wait for the others"
        )


def capture_ragged(replicas: Replicas, fn: Callable[..., Any], arguments: Arguments, creations: Creations) -> Program:
    """Trace ``fn`` for each size of its arguments, as one program for all replicas, or raise a CantJoinError."""
    of_replicas = arguments.of_replicas(replicas.num_replicas)
    sizes = list(dict.fromkeys(tuple(aval.shape for aval, _ in traced) for traced in of_replicas))
    size_of = tuple(sizes.index(tuple(aval.shape for aval, _ in traced)) for traced in of_replicas)
    questions = _Questions(size_of, sizes)

    def captured_size(number: int) -> Program | Exception:
        traced = of_replicas[size_of.index(number)]
        asking = RaggedCommunicator(questions, number, replicas.communication_options)
        put_back, rebuild, created = state_of_this_thread(), arguments.rebuild(), creations.for_replica()
        try:
            return capture(replicas, fn, traced, rebuild, created, arguments.paths, communicator=asking)
        except Exception as error:  # which may come from a wrong guess
            put_back()
            note = _NO_ROWS.format(where(error, fn))
            if any(0 in aval.shape for aval, _ in traced) and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            return error

    captured = [captured_size(number) for number in range(len(sizes))]
    rounds = 1
    while wrong := questions.guessed_wrong():
        if rounds == _ROUNDS:
            raise CantJoinError("the sizes that it gathers depend on each other")
        for number in wrong:
            captured[number] = captured_size(number)
        rounds += 1
    programs: list[Program] = []
    for program in captured:
        if isinstance(program, Exception):
            raise program
        programs.append(program)
    programs = checked_programs(programs, replicas, fn, arguments.paths)
    questions.check_alike()
    if any(program.is_placed for program in programs):
        raise CantJoinError("it assigns values to logical devices")
    return joined(programs, size_of, replicas)


_NO_ROWS = (
    "(raised for the replicas that get no example of this batch, whose arrays have 0 rows, in {}. Write it so that it "
    "works with 0 rows: jnp.max(x, initial=-jnp.inf) in place of jnp.max(x), x.reshape(len(x), 128) in place of "
    "x.reshape(len(x), -1). Or have small batches padded: strategy.distribute_dataset(dataset, "
    "replicax.InputOptions(partial_batch='pad')), or 'drop')"
)


@dataclasses.dataclass
class _Asked:
    what: str
    offer: Any
    answers: tuple[Any, ...]


class _Questions:
    """The questions that replicas have about each other's sizes, in the order in which they ask.

    Each replica has one of the ``sizes``, of which each is the shapes of the arguments.
    """

    def __init__(self, size_of: tuple[int, ...], sizes: Sequence[tuple[tuple[int, ...], ...]]) -> None:
        self._size_of = size_of
        self._asked: list[list[_Asked]] = [[] for _ in sizes]
        # For each size and each other one, the number that the other would have in place of a number.
        self._counterparts = [[_counterparts(mine, theirs) for theirs in sizes] for mine in sizes]

    def begin(self, number: int) -> None:
        """Begin to capture the step for this size."""
        self._asked[number] = []

    def ask(self, number: int, what: str, offer: Any, dim: int = 0) -> tuple[Any, ...]:
        """The offers of all replicas, where those of one size have made this ``offer``."""
        position = len(self._asked[number])
        by_size = [
            offer if i == number else self._expected(number, i, position, what, offer, dim)
            for i in range(len(self._asked))
        ]
        answers = tuple(by_size[i] for i in self._size_of)
        self._asked[number].append(_Asked(what, offer, answers))
        return answers

    def count(self, number: int) -> int:
        """How many questions this size has asked; it numbers a gather and its transpose, alike for all sizes."""
        return len(self._asked[number])

    def _expected(self, number: int, other: int, position: int, what: str, offer: Any, dim: int) -> Any:
        asked = self._asked[other]
        if position < len(asked) and asked[position].what == what:
            return asked[position].offer
        table = self._counterparts[number][other]
        if isinstance(offer, int):
            return table.get(offer, offer)
        return tuple(table.get(n, n) if i == dim else n for i, n in enumerate(offer))

    def guessed_wrong(self) -> list[int]:
        """The sizes that have been captured with answers that the others did not give."""
        wrong = []
        for number, asked in enumerate(self._asked):
            for position, question in enumerate(asked):
                known = [self._asked[i][position] if position < len(self._asked[i]) else None for i in self._size_of]
                if any(k is not None and k.offer != a for k, a in zip(known, question.answers, strict=True)):
                    wrong.append(number)
                    break
        return wrong

    def check_alike(self) -> None:
        """Raise unless all have asked the same."""
        if len({tuple(a.what for a in asked) for asked in self._asked}) > 1:
            raise CantJoinError("replicas of different sizes do not come to the same collectives")


def _counterparts(mine: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """For each number in the shapes of one size's arguments, the first one that another size has in its place."""
    pairs = [(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True) if a != b]
    return dict(reversed(pairs))


class RaggedCommunicator(SpmdCommunicator):
    """The communicator of a replica of one of the sizes; see :class:`replicax.collectives.Communicator`."""

    def __init__(self, questions: _Questions, number: int, options: CommunicationOptions | None) -> None:
        super().__init__(None, options)
        self._questions = questions
        self._number = number
        questions.begin(number)

    def add_up(self, count: int) -> int:
        return sum(self._questions.ask(self._number, "add up", count))

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        array = jnp.asarray(array)
        [axis] = checked_axes(axis, array.shape, "all_gather")
        shapes = self._shapes("all_gather", array, axis)
        if len(set(shapes)) == 1:
            return super().all_gather(array, axis, options)
        return self._gathered(array, axis, shapes, options)

    def from_first(self, array: Any) -> Any:
        array = jnp.asarray(array)
        shapes = self._shapes("the first replica's value", array)
        if len(set(shapes)) == 1:
            return super().from_first(array)
        return self._gathered(array, 0, shapes)[: shapes[0][0]]

    def components(self, value: Any) -> Sequence[Any]:
        array = jnp.asarray(value)
        shapes = self._shapes("local_results", array)
        if len(set(shapes)) == 1:
            return super().components(array)
        flat = tuple((math.prod(shape),) for shape in shapes)
        whole = self._gathered(array.reshape(-1), 0, flat)
        ends = [sum(n for (n,) in flat[: i + 1]) for i in range(len(flat))]
        return [whole[end - n : end].reshape(shape) for end, (n,), shape in zip(ends, flat, shapes, strict=True)]

    def _shapes(self, what: str, array: Any, dim: int = 0) -> tuple[tuple[int, ...], ...]:
        """The shapes of every replica's array, which probably differ in ``dim`` only."""
        return self._questions.ask(self._number, what, tuple(array.shape), dim)

    def _gathered(
        self, array: Any, axis: int, shapes: Sequence[tuple[int, ...]], options: CommunicationOptions | None = None
    ) -> Any:
        check_other_dims(shapes, axis, "all_gather: the replicas' arrays")
        sizes = tuple(shape[axis] for shape in shapes)
        number = self._questions.count(self._number)
        options = self._noted(options)
        return ragged_gather_p.bind(array, axis=axis, sizes=sizes, number=number, options=options, axes=(REPLICA_AXIS,))
