from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replicax.tpu.ring_order import ring_order
from replicax.tpu.torus import Torus

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
WRAPS = st.tuples(st.booleans(), st.booleans(), st.booleans())


@given(SIZES, WRAPS)
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
