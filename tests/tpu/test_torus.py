from __future__ import annotations

from collections import deque

import numpy as np
import pytest
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


@given(SHAPES, WRAPS)
def test_links_join_neighbours_once(shape, wrap) -> None:
    torus = Torus(shape, wrap)
    links = torus.links()
    assert (torus.hops(links[:, 0], links[:, 1]) == 1).all()
    assert len({frozenset(map(tuple, link)) for link in links.tolist()}) == len(links)
    total = np.prod(shape)
    expected = sum(total // s * (s if w and s > 2 else s - 1) for s, w in zip(shape, wrap, strict=True))
    assert len(links) == expected


@pytest.mark.parametrize("size", [1, 2])
def test_up_to_two_chips_do_not_wrap_around(size: int) -> None:
    assert Torus((size, 3, 4), (True, True, False)) == Torus((size, 3, 4), (False, True, False))


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


@pytest.mark.parametrize("dims", [1, 2, 4])
def test_any_number_of_dims(dims: int) -> None:
    order = ring_order((2,) * dims, (False,) * dims)
    assert (np.abs(order - np.roll(order, -1, axis=0)).sum(1) == 1).all()
