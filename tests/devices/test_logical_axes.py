from __future__ import annotations

import itertools
import math

import pytest
from jax.sharding import PartitionSpec as P

from replicax.devices.logical_axes import over_replicas, parted, spec_of
from replicax.devices.mesh import logical_axes


@pytest.mark.parametrize("count", [1, 2, 6, 8, 12, 30])
def test_every_factorisation_is_a_way_to_share_out_whole_axes(count) -> None:
    axes = logical_axes(count)
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    for parts in itertools.product(divisors, repeat=3):
        if math.prod(parts) == count:
            found = parted([60 * p for p in parts], parts, count, "x")
            assert [math.prod(axes[a] for a in dim) for dim in found] == list(parts)
            assert sorted(a for dim in found for a in dim) == sorted(axes)  # each once


@pytest.mark.parametrize(
    ("shape", "parts", "message"),
    [
        ((4, 4), [8], r"x has 2 dims, but partition_dimensions \[8\] has 1 entries"),
        ((), [8], r"x has 0 dims, but partition_dimensions \[8\] has 1 entries"),
        ((8, 8), [2, 2], r"x: partition_dimensions \[2, 2\] makes 4 parts, but a replica has 8 logical device\(s\)"),
        ((8, 8), [1, 1], r"x: partition_dimensions \[1, 1\] makes 1 parts, but a replica has 8 logical device"),
        ((8, 6), [2, 4], r"x: dim 1 of size 6 does not divide into 4 parts \(6 = 4 × 1 \+ 2\)"),
        ((8, 8), [-2, -4], r"x: partition_dimensions must be a list of positive ints, .* got \[-2, -4\]"),
        ((8, 8), [0, 8], "a list of positive ints"),
        ((8, 8), [2.0, 4], "a list of positive ints"),
        ((8, 8), [[2], [4]], "a list of positive ints"),
        ((8, 8), [True, 8], "a list of positive ints"),
        ((8,), 8, "a list of positive ints, one for each dim, got 8"),
    ],
)
def test_what_does_not_fit(shape, parts, message) -> None:
    with pytest.raises(ValueError, match=message):
        parted(shape, parts, 8, "x")


def test_specs() -> None:
    assert spec_of(()) == spec_of(((), ())) == P()
    assert spec_of(((), ("logical0", "logical1"), ())) == P(None, ("logical0", "logical1"))
    assert spec_of(((), ("logical0",)), replica_dim=0) == P("replica", "logical0")
    assert spec_of((), replica_dim=2) == P(None, None, "replica")
    assert over_replicas(P("replica", "logical0")) == P("replica")
    assert over_replicas(P(("replica", "logical0"), None)) == P("replica")
    assert over_replicas(P("logical0", None)) == P()
