"""Assembly: the joint program of replicas of different sizes, while it is traced.

See :mod:`replicax.ragged.joint_program`, which says what is in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax import _jax, collectives
from replicax.devices.mesh import REPLICA_AXIS
from replicax.execution.program.collective_operations import ragged_gather_p, ragged_part_p
from replicax.execution.replica_values import largest_of
from replicax.execution.tracing.arguments import CantJoinError
from replicax.ragged.straight_line import Straight, StraightOperation
from replicax.ragged.value_numbering import ValueNumbering

Joint = tuple[int, ...]
"""One value of the joint program: what it is in each of the programs."""


class Assembly:
    """Puts the joint program together."""

    def __init__(
        self,
        lines: Sequence[Straight],  # the program of each size
        size_of: tuple[int, ...],  # the number of each replica's size
        numbers: ValueNumbering,  # the numbering of all values
        given: Set[int],  # the values that come from outside
        ragged: Mapping[int, Joint],  # for each input with room for all sizes, what each size has there
    ) -> None:
        self.lines, self.size_of, self.numbers, self.given, self.ragged = lines, size_of, numbers, given, ragged
        self.sizes = range(len(lines))
        common = set.intersection(*(set(line.made) for line in lines))
        # The operation that makes each value that all sizes have in common.
        self.made_by = {v: o for v, o in lines[0].made.items() if v in common}
        self.segments = [self._segments(line) for line in lines]

    def is_own(self, value: int) -> bool:
        """Return whether only some sizes have a value."""
        return value not in self.made_by and value not in self.given and value not in self.numbers.literals

    def _segments(self, line: Straight) -> list[list[StraightOperation]]:
        """The operations of one size only, before each collective and at the end."""
        segments: list[list[StraightOperation]] = [[]]
        for operation in line.operations:
            if operation.is_collective:
                segments.append([])
            elif not self.is_common(operation):
                segments[-1].append(operation)
        return segments

    def _last_uses(self, k: int) -> dict[int, int]:
        """The last segment that needs each value of a size."""
        last: dict[int, int] = {}
        for number, (segment, wanted) in enumerate(zip(self.segments[k], self.wanted, strict=True)):
            last.update((v, number) for o in segment for v in o.operands)
            last.update((joint[k], number) for joint in wanted)
        return last

    def is_common(self, operation: StraightOperation) -> bool:
        return bool(operation.results) and all(v in self.made_by for v in operation.results)

    def run(self, outputs: Sequence[Joint], inputs: dict[int, Any]) -> list[Any]:
        """The values of the outputs, from those of the inputs. All sizes must have the same collectives."""
        collectives = list(zip(*(line.collectives for line in self.lines), strict=True))
        # The operands of each collective, and the outputs at the end.
        self.wanted: list[list[Joint]] = [
            *(list(zip(*(o.operands for o in operations), strict=True)) for operations in collectives),
            list(outputs),
        ]
        self.last_use = [self._last_uses(k) for k in self.sizes]
        self.values = dict(inputs)
        self.joint: dict[Joint, Any] = {}
        self.carried: dict[tuple[int, int], Any] = {}  # by size and number
        for whole, joint in self.ragged.items():
            self.carried.update(((k, value), inputs[whole]) for k, value in enumerate(joint))
        for number, collective in enumerate(collectives):
            self.segment(number)
            operands = [self.value_of(joint) for joint in self.wanted[number]]
            results = self.meet(collective[0].equation, operands)
            for k, operation in zip(self.sizes, collective, strict=True):
                if self.is_common(operation):
                    self.values.update(zip(operation.results, results, strict=True))
                else:
                    self.carried.update(((k, v), x) for v, x in zip(operation.results, results, strict=True))
        self.segment(len(collectives))
        return [self.value_of(joint) for joint in outputs]

    def value_of(self, joint: Joint) -> Any:
        if joint in self.joint:
            return self.joint[joint]
        self.compute(joint[:1])
        return self.array(joint[0])

    def array(self, value: int) -> Any:
        literals = self.numbers.literals
        return literals[value] if value in literals else self.values[value]

    def compute(self, values: Iterable[int]) -> None:
        """Compute those of the values common to all sizes that these need."""
        missing: dict[int, StraightOperation] = {}
        stack = list(values)
        while stack:
            value = stack.pop()
            if value in self.values or value in missing or value not in self.made_by:
                continue
            operation = self.made_by[value]
            missing.update(dict.fromkeys(operation.results, operation))
            stack += operation.operands
        done = set()
        for value in sorted(missing):  # a result has a greater number than its operands
            operation = missing[value]
            if operation.results not in done:
                done.add(operation.results)
                results = _jax.bind(operation.equation, [self.array(v) for v in operation.operands])
                self.values.update(zip(operation.results, results, strict=True))

    # --- between collectives ----------------------------------------------------------------------------

    def segment(self, number: int) -> None:
        """Let each replica do what its size does before a collective, or at the end."""
        own_operations = [self.segments[k][number] for k in self.sizes]
        mixed = [j for j in dict.fromkeys(self.wanted[number]) if self.is_mixed(j) and j not in self.joint]
        if not mixed and not any(own_operations):
            return
        living = [self.living(k, number) for k in self.sizes]
        slots = self.slots(living)
        outputs: list[list[int | None]] = [
            [*(joint[k] for joint in mixed), *(slot[k] for slot, _ in slots)] for k in self.sizes
        ]
        shapes = [self.shape_of(joint) for joint in mixed] + [shape for _, shape in slots]
        needs = [self.needs(own_operations[k], outputs[k]) for k in self.sizes]
        common = sorted({v for k in self.sizes for v in needs[k] if (k, v) not in self.carried})
        self.compute(common)
        carried = list(dict.fromkeys((k, v) for k in self.sizes for v in needs[k] if (k, v) in self.carried))
        places = {id(self.carried[c]): self.carried[c] for c in carried}
        position = {key: i for i, key in enumerate(places)}

        def branch(k: int) -> Callable[..., list[Any]]:
            def run(common_values: list[Any], arrays: list[Any]) -> list[Any]:
                env = dict(zip(common, common_values, strict=True))
                for size, v in carried:
                    if size == k:
                        array = arrays[position[id(self.carried[size, v])]]
                        env[v] = _taken(array, self.numbers.avals[v].shape)

                def read(v: int) -> Any:
                    return self.numbers.literals[v] if v in self.numbers.literals else env[v]

                for operation in own_operations[k]:
                    results = _jax.bind(operation.equation, [read(v) for v in operation.operands])
                    env.update(zip(operation.results, results, strict=True))
                return [
                    jnp.zeros(shape.shape, shape.dtype) if v is None else _with_room(read(v), shape)
                    for v, shape in zip(outputs[k], shapes, strict=True)
                ]

            return run

        results = lax.switch(
            self.size_here(), [branch(k) for k in self.sizes], [self.array(v) for v in common], list(places.values())
        )
        for joint, array in zip(mixed, results, strict=False):
            self.joint[joint] = array
        for (slot, _), array in zip(slots, results[len(mixed) :], strict=True):
            self.carried.update(((k, v), array) for k, v in enumerate(slot) if v is not None)

    def size_here(self) -> Any:
        """The number of this replica's size."""
        sizes = jnp.asarray(np.array(self.size_of, np.int32))
        return lax.dynamic_index_in_dim(sizes, lax.axis_index(REPLICA_AXIS), keepdims=False)

    def is_mixed(self, joint: Joint) -> bool:
        return len(set(joint)) > 1 or self.is_own(joint[0])

    def needs(self, operations: Sequence[StraightOperation], outputs: Sequence[int | None]) -> list[int]:
        """The values that a segment takes from outside."""
        made = {v for o in operations for v in o.results}
        used = dict.fromkeys([*(v for o in operations for v in o.operands), *(v for v in outputs if v is not None)])
        return [v for v in used if v not in made and v not in self.numbers.literals]

    def living(self, k: int, number: int) -> list[int]:
        """The values that a size makes in a segment, and needs in a later one."""
        made = [v for o in self.segments[k][number] for v in o.results]
        return [v for v in made if self.last_use[k].get(v, -1) > number]

    def slots(self, living: Sequence[list[int]]) -> list[tuple[tuple[int | None, ...], jax.ShapeDtypeStruct]]:
        """Slots for the values that later segments need: what each size has there, and the shape with room for all."""
        avals = self.numbers.avals
        dtypes = dict.fromkeys(avals[v].dtype for values in living for v in values)
        slots = []
        for dtype in dtypes:
            columns = [[v for v in values if avals[v].dtype == dtype] for values in living]
            for slot in itertools.zip_longest(*columns):
                slots.append((slot, self._room([avals[v].shape for v in slot if v is not None], dtype)))
        return slots

    def shape_of(self, joint: Joint) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a joint value, with room for all sizes."""
        avals = [self.numbers.avals[v] for v in joint]
        if len({(a.dtype, len(a.shape)) for a in avals}) > 1:
            kinds = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in avals)
            raise CantJoinError(f"replicas of different sizes have {kinds} for one value")
        return self._room([a.shape for a in avals], avals[0].dtype)

    def _room(self, shapes: Sequence[tuple[int, ...]], dtype: Any) -> jax.ShapeDtypeStruct:
        if len(set(shapes)) == 1:
            return jax.ShapeDtypeStruct(shapes[0], dtype)
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise CantJoinError(f"as many values of dtype {dtype} as there are examples go on after a collective")
        if len(set(map(len, shapes))) == 1:
            return jax.ShapeDtypeStruct(largest_of(shapes), dtype)
        return jax.ShapeDtypeStruct((max(int(np.prod(shape)) for shape in shapes),), dtype)

    # --- collectives ------------------------------------------------------------------------------------

    def meet(self, equation: Any, operands: list[Any]) -> list[Any]:
        """The results of a collective of all replicas."""
        if equation.primitive is ragged_gather_p:
            return [gathered(operands[0], **equation.params)]
        if equation.primitive is ragged_part_p:
            return [part_of_sum(operands[0], **equation.params)]
        return _jax.bind(equation, operands)


def _with_room(value: Any, wanted: jax.ShapeDtypeStruct) -> Any:
    """``value`` at the start of an array of the wanted shape, strongly typed."""
    value = lax.convert_element_type(jnp.asarray(value), wanted.dtype)
    if value.shape == wanted.shape:
        return value
    if value.ndim != len(wanted.shape):
        value = value.reshape(-1)
    config = [(0, n - m, 0) for n, m in zip(wanted.shape, value.shape, strict=True)]
    return lax.pad(value, np.zeros((), wanted.dtype), config)


def _taken(array: Any, shape: tuple[int, ...]) -> Any:
    """The value that :func:`_with_room` has put into ``array``."""
    if array.shape == shape:
        return array
    if array.ndim != len(shape):
        return lax.slice(array, (0,), (int(np.prod(shape)),)).reshape(shape)
    return lax.slice(array, (0,) * len(shape), shape)


# --- collectives of arrays with room for the largest --------------------------------------------------


def gathered(array: Any, *, axis: int, sizes: Sequence[int], options: Any, **_: Any) -> Any:
    """The result of ``ragged_gather``, from arrays with room for the largest."""
    everyone = collectives.all_gather(array[None], 0, options)
    parts = [lax.slice_in_dim(everyone[i], 0, size, axis=axis) for i, size in enumerate(sizes)]
    return jnp.concatenate(parts, axis)


def part_of_sum(array: Any, *, axis: int, sizes: Sequence[int], options: Any, **_: Any) -> Any:
    """The result of ``ragged_part``, with room for the largest."""
    [total] = collectives.sum_over_replicas([array], options)
    starts = jnp.asarray(np.cumsum([0, *sizes[:-1]]).astype(np.int32))
    mine = lax.dynamic_index_in_dim(starts, lax.axis_index(REPLICA_AXIS), keepdims=False)
    config = [(0, max(sizes) if i == axis else 0, 0) for i in range(array.ndim)]
    return lax.dynamic_slice_in_dim(lax.pad(total, np.zeros((), total.dtype), config), mine, max(sizes), axis)
