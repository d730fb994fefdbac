"""Memory by the compiler's own layout, and the largest buffers in it."""

from __future__ import annotations

import dataclasses
import sys

from replicax.hlo.buffer_assignment import allocations
from replicax.hlo.instructions import parse
from replicax.planning.memory import compiled_buffers, largest, memory_of
from tests.hlo.hlo_texts import LAYOUT

PROGRAM = """\
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0:T(1024)} parameter(0)
  %a = f32[4096]{0:T(1024)} pad(%x), padding=0_3072, metadata={op_name="jit(f)/shard_map/concatenate"}
  %c = f32[1024]{0:T(1024)} slice(%a), slice={[0:1024]}
  ROOT %y = f32[1024]{0:T(1024)} add(%x, %c)
}
"""


def test_memory() -> None:
    memory = memory_of(allocations(LAYOUT), code=100, buffers=())
    assert (memory.arguments, memory.outputs, memory.aliased, memory.temporaries) == (4096, 4160, 4096, 20480)
    assert memory.total == 4096 + 64 + 20480 + 100
    capacities = (memory.total, memory.total - 1, None)
    assert [dataclasses.replace(memory, capacity=size).fits for size in capacities] == [True, False, None]


def test_temporaries_that_are_there_at_the_same_time() -> None:
    [pad, cut] = compiled_buffers(allocations(LAYOUT), parse(PROGRAM))  # b lies where a lies: they take turns
    assert (pad.name, pad.type, pad.bytes) == ("concatenate", "float32[4096]", 16384)
    assert (cut.name, cut.type, cut.bytes) == ("slice", "float32[1024]", 4096)
    ranked = largest([cut, pad, cut, cut, cut, cut], 2)  # alike ones count together
    assert [(b.name, b.count) for b in ranked] == [("slice", 5), ("concatenate", 1)]


def test_only_the_largest_temporaries_are_told_apart() -> None:
    [piece] = [allocation for allocation in allocations(LAYOUT) if allocation.is_temporary]
    values = [dataclasses.replace(piece.values[0], size=size, offset=1000 * size) for size in range(300)]
    found = list(compiled_buffers([dataclasses.replace(piece, values=tuple(values))], parse(PROGRAM)))
    assert [buffer.bytes for buffer in found] == list(range(299, 99, -1))


def test_what_a_loop_puts_together_has_the_line_of_the_loop() -> None:
    """Of such an instruction the compiler knows only who has asked for the plan: here, this test."""
    here = sys._getframe().f_lineno
    program = f"""
%body (p: (s32[], f32[4096])) -> (s32[], f32[4096]) {{
  %p = (s32[], f32[4096]) parameter(0)
  %a = f32[4096] negate(%p#1), metadata={{source_file="{__file__}" source_line={here + 12}}}
  %c = f32[1024] slice(%a), slice={{[0:1024]}}, metadata={{source_file="/home/me/model.py" source_line=9}}
  ROOT %t = (s32[], f32[4096]) tuple(%p#0, %a)
}}
ENTRY %main (x: (s32[], f32[4096])) -> (s32[], f32[4096]) {{
  %x = (s32[], f32[4096]) parameter(0)
  ROOT %w = (s32[], f32[4096]) while(%x), body=%body, metadata={{source_file="/home/me/model.py" source_line=7}}
}}"""
    assert [b.where for b in compiled_buffers(allocations(LAYOUT), parse(program))] == ["model.py:7", "model.py:9"]
