from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import example, given, strategies as st

from replicax.tpu.torus import Torus, points, ring_order

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
WRAPS = st.tuples(st.booleans(), st.booleans(), st.booleans())


def distances(torus: Torus, start: tuple[int, int, int]) -> dict[tuple[int, ...], int]:
    """How far each chip is from ``start``, going from link to link."""
    neighbours: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for a, b in torus.links().tolist():
        neighbours.setdefault(tuple(a), []).append(tuple(b))
        neighbours.setdefault(tuple(b), []).append(tuple(a))
    found: dict[tuple[int, ...], int] = {start: 0}
    queue = deque([start])
    while queue:
        chip = queue.popleft()
        for other in neighbours.get(chip, []):
            if other not in found:
                found[other] = found[chip] + 1
                queue.append(other)
    return found


@given(SHAPES, WRAPS)
def test_hops_are_the_shortest_way_along_the_links(shape, wrap) -> None:
    torus = Torus(shape, wrap)
    chips = points(shape)
    start = tuple(s // 3 for s in shape)
    found = distances(torus, start)
    assert len(found) == len(chips)
    assert [found[tuple(chip)] for chip in chips.tolist()] == torus.hops(start, chips).tolist()


# --- a way through all points ---------------------------------------------------------------------------

LARGER = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))


@given(LARGER, WRAPS)
@example((3, 3, 3), (False, False, False))
@example((3, 3, 3), (False, True, False))
@example((5, 1, 1), (True, False, False))
@example((2, 1, 1), (True, True, True))
def test_each_point_once_and_each_beside_the_last(shape, wrap) -> None:
    order = ring_order(shape, wrap)
    torus = Torus(shape, wrap)
    assert order[0].tolist() == [0, 0, 0]
    assert sorted(map(tuple, order.tolist())) == list(np.ndindex(*shape))
    assert (torus.hops(order[1:], order[:-1]) == 1).all()
    n = len(order)
    possible = any(torus.wrap) or (n % 2 == 0 and sum(s > 1 for s in shape) > 1) or n <= 2
    if possible:
        assert torus.hops(order[-1], order[0]) == (n > 1)
