"""The memory that a step needs on one device, and its largest buffers."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from replicax.execution.compiled.replicate import Executable
from replicax.hlo.buffer_assignment import Allocation, Value
from replicax.hlo.collective_instructions import plain_name
from replicax.hlo.instructions import Module
from replicax.pipeline.flat_program import bytes_of
from replicax.planning.timeline.user_lines import SourceLines

_KINDS = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
_ENOUGH = 200  # of the largest buffers in one allocation


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Arrays that are alike.

    Attributes:
      kind: ``"variable"``, ``"argument"``, ``"constant"`` (an array that the step closed over, or a function compiled
        inside of it), ``"output"``, or ``"temporary"``, which lives while the step runs.
      name: the name of the variable or argument; of a temporary the operation, in JAX's words.
      type: dtype and shape, of the part that is on one device.
      bytes: the bytes of one of them; of a temporary with padding.
      count: how many there are.
      where: the line of the user's program that a temporary comes from, if that is known.
    """

    kind: str
    name: str
    type: str
    bytes: int
    count: int = 1
    where: str = ""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of main memory that a step needs on one device.

    Attributes:
      arguments: what lies there before the step: variables, the batch, arrays that the step closed over.
      outputs: what it leaves.
      aliased: how much of the outputs takes the place of arguments, and so no memory: variables that are updated.
      temporaries: what it needs in between, as the compiler has laid it out.
      code: the program with its constants; where that is not known, its constants.
      capacity: what programs may use of the device's memory; ``None`` if that is not known.
      buffers: the largest ones. Temporaries need not all be alive at the same time.
      peak: the total by kind, when memory is fullest: see ``replicax.planning.timeline.peak``. Empty for a pipeline.
      host: what it keeps in the host's memory, for each device; it is no part of the total.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    capacity: int | None = None
    buffers: tuple[Buffer, ...] = ()
    peak: dict[str, int] = dataclasses.field(default_factory=dict)
    host: int = 0

    @property
    def total(self) -> int:
        """The peak: all that has to be in memory at the same time."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def fits(self) -> bool | None:
        """Return whether the total is at most the capacity; ``None`` if that is not known."""
        return None if self.capacity is None else self.total <= self.capacity


def memory_of(allocations: Iterable[Allocation], code: int, buffers: Iterable[Buffer]) -> Memory:
    """The memory of a step, by its compiler's own layout; the device's capacity is still unknown."""
    allocations = list(allocations)
    return Memory(
        arguments=sum(a.size for a in allocations if a.is_argument),
        outputs=sum(a.size for a in allocations if a.is_output),
        aliased=sum(a.size for a in allocations if a.is_argument and a.is_output),
        temporaries=sum(a.size for a in allocations if a.is_temporary),
        code=code,
        buffers=tuple(buffers),
    )


# --- the largest buffers --------------------------------------------------------------------------------


def inputs_and_outputs(executable: Executable, argument_names: Sequence[str]) -> Iterator[Buffer]:
    """Yield what is in memory before and after the step."""
    donated, _, arguments, constants = inputs = executable.inputs()
    yield from read_variables(executable)
    for name, array in zip(argument_names, arguments, strict=True):
        yield buffer_of("argument", name, array)
    for array in constants:
        yield buffer_of("constant", "closed over", array)
    uses = executable.program.uses
    written, results = executable.call.eval_shape(*inputs)
    for slot, array in zip(executable.written[len(donated) :], written[len(donated) :], strict=True):
        yield buffer_of("variable", uses[slot].name, array)
    for array in results:
        yield buffer_of("output", "returned", array)


def read_variables(executable: Executable) -> Iterator[Buffer]:
    """The variables that a step reads: those that it writes as well, whose memory it is given, come first."""
    uses = executable.program.uses
    donated, kept, _, _ = executable.inputs()
    for slot, array in zip((*executable.donated, *executable.kept), (*donated, *kept), strict=True):
        yield buffer_of("variable", uses[slot].name, array)


def compiled_buffers(allocations: Iterable[Allocation], module: Module) -> Iterator[Buffer]:
    """The temporaries and constants of a compiled step; of those that share a place, the largest."""
    lines = SourceLines(module)
    for allocation in allocations:
        kind = "temporary" if allocation.is_temporary else "constant" if allocation.is_constant else ""
        taken: list[Value] = []
        for value in sorted(allocation.values, key=lambda v: -v.size) if kind else ():
            if not value.size:
                break
            if any(value.offset < v.offset + v.size and v.offset < value.offset + value.size for v in taken):
                continue
            taken.append(value)
            if len(taken) >= _ENOUGH:
                break
        for value in taken:
            instruction = module.instructions.get(value.instruction)
            name = "" if instruction is None else plain_name(instruction.op_name) or instruction.opcode
            where = "" if instruction is None else lines.of(instruction)
            yield Buffer(kind, name, _in_numpys_words(value.type), value.size, 1, where)


def largest(buffers: Iterable[Buffer], count: int) -> list[Buffer]:
    """The largest of ``buffers``, by what those that are alike take together; alike ones as one."""
    alike = collections.Counter(buffers)
    joined = [dataclasses.replace(b, count=n) for b, n in alike.items()]
    return sorted(joined, key=lambda b: (-b.bytes * b.count, b.kind, b.name))[:count]


def buffer_of(kind: str, name: str, array: Any) -> Buffer:
    """The part of an array that is on one device."""
    shape = ",".join(map(str, _shape_on_device(array)))
    return Buffer(kind, name, f"{getattr(array.dtype, 'name', array.dtype)}[{shape}]", bytes_on_device(array))


def bytes_on_device(array: Any) -> int:
    """The bytes of the part of an array that is on one device."""
    return bytes_of(jax.ShapeDtypeStruct(_shape_on_device(array), array.dtype))


def _shape_on_device(array: Any) -> tuple[int, ...]:
    sharding = getattr(array, "sharding", None)
    return tuple(array.shape) if sharding is None else tuple(sharding.shard_shape(array.shape))


def _in_numpys_words(type_: str) -> str:
    """The compiler's name of a type, in NumPy's words.

    >>> _in_numpys_words("bf16[2,3]{1,0}"), _in_numpys_words("pred[]")
    ('bfloat16[2,3]', 'bool[]')
    """
    text = type_.partition("{")[0].replace("pred[", "bool[")
    return re.sub(r"^(bf|f|s|u|c)(?=\d)", lambda kind: _KINDS[kind[1]], text)
