from __future__ import annotations

from replicax.hlo.buffer_assignment import Value, allocations
from tests.hlo.hlo_texts import LAYOUT


def test_allocations_of_main_memory() -> None:
    found = list(allocations(LAYOUT))
    assert [a.size for a in found] == [4096, 64, 20480]
    assert [(a.is_argument, a.is_output, a.is_temporary) for a in found] == [
        (True, True, False),
        (False, True, False),
        (False, False, True),
    ]
    assert found[2].values[1] == Value("b", "f32[2048]{0:T(1024)}", 8192, 4096)
    assert len(found[2].values) == 3  # tables of tuples are no arrays
    assert list(allocations("")) == []
