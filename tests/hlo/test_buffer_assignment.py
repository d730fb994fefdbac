from __future__ import annotations

from replicax.hlo.buffer_assignment import Value, allocations
from replicax.hlo.instructions import parse
from replicax.planning.memory import largest, memory_of, temporaries_of

LAYOUT = """\
BufferAssignment:
allocation 0: size 4096, page 0, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <1 x @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
allocation 1: size 8192, color 1, page 0, preallocated-temp:
 value: <2 near @1> (size=8192,offset=0): f32[2048]{0:T(1024)S(1)}
allocation 2: size 512, page 0, thread-local:
 value: <3 p @0> (size=512,offset=0): f32[]{:T(128)}
allocation 3: size 64, page 0, output shape is |(f32[16], f32[1024])|, maybe-live-out:
 value: <4 t{} @0> (size=64,offset=0): (f32[16]{0}, f32[1024]{0})
allocation 4: size 20480, page 0, preallocated-temp:
 value: <5 a @0> (size=16384,offset=0): f32[4096]{0:T(1024)}
 value: <6 b{1} @0> (size=8192,offset=4096): f32[2048]{0:T(1024)}
 value: <7 c @0> (size=4096,offset=16384): f32[1024]{0:T(1024)}
 value: <8 start{} @0> (size=512,offset=12288): (f32[1024]{0}, f32[1024]{0})
"""
PROGRAM = """\
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0:T(1024)} parameter(0)
  %a = f32[4096]{0:T(1024)} pad(%x), padding=0_3072, metadata={op_name="jit(f)/shard_map/pad"}
  %c = f32[1024]{0:T(1024)} slice(%a), slice={[0:1024]}
  ROOT %y = f32[1024]{0:T(1024)} add(%x, %c)
}
"""


def test_allocations_of_main_memory() -> None:
    found = allocations(LAYOUT)
    assert [a.size for a in found] == [4096, 64, 20480]
    assert [(a.is_argument, a.is_output, a.is_temporary) for a in found] == [
        (True, True, False),
        (False, True, False),
        (False, False, True),
    ]
    assert found[2].values[1] == Value("b", "f32[2048]{0:T(1024)}", 8192, 4096)
    assert len(found[2].values) == 3  # tables of tuples are no arrays
    assert allocations("") == []


def test_memory() -> None:
    memory = memory_of(allocations(LAYOUT), code=100, capacity=30_000, buffers=())
    assert (memory.arguments, memory.outputs, memory.aliased, memory.temporaries) == (4096, 4160, 4096, 20480)
    assert memory.total == 4096 + 64 + 20480 + 100
    assert memory.fits
    assert memory_of(allocations(LAYOUT), 100, 20_000, ()).fits is False
    assert memory_of(allocations(LAYOUT), 100, None, ()).fits is None


def test_temporaries_that_are_there_at_the_same_time() -> None:
    found = list(temporaries_of(allocations(LAYOUT), parse(PROGRAM)))
    # b lies where a lies: they take turns.
    assert [(b.name, b.type, b.bytes) for b in found] == [
        ("pad", "float32[4096]", 16384),
        ("slice", "float32[1024]", 4096),
    ]


def test_alike_buffers_count_together() -> None:
    [pad, cut] = temporaries_of(allocations(LAYOUT), parse(PROGRAM))
    ranked = largest([cut, pad, cut, cut, cut, cut], 2)
    assert [(b.name, b.count) for b in ranked] == [("slice", 5), ("pad", 1)]
