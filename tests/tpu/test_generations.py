from __future__ import annotations

import pytest

import replicax
from replicax.tpu.generations import GENERATIONS, generation_of, parse_slice, slice_name
from replicax.tpu.topology import Topology


@pytest.mark.parametrize(
    ("name", "shape", "wrap"),
    [
        ("v2", (16, 16, 1), (True, True, False)),
        ("v2", (8, 8, 1), (False, False, False)),
        ("v3", (16, 16, 1), (False, False, False)),
        ("v3", (32, 32, 1), (True, True, False)),
        ("v4", (2, 2, 4), (False, False, False)),
        ("v4", (4, 4, 4), (True, True, True)),
        ("v5e", (16, 16, 1), (True, True, False)),
        ("v5e", (8, 16, 1), (False, True, False)),
        ("v5e", (8, 8, 1), (False, False, False)),
        ("v5p", (16, 16, 24), (True, True, True)),
        ("v6e", (16, 16, 1), (True, True, False)),
        ("tpu7x", (4, 4, 8), (True, True, True)),
        ("tpu7x", (2, 4, 4), (False, False, False)),
    ],
)
def test_wrap_around(name, shape, wrap) -> None:
    [kind] = (one for one in GENERATIONS if one.name == name)
    assert kind.wrap(shape) == wrap


@pytest.mark.parametrize(
    ("sold", "name"),
    [
        ("v2-8", "v2:2x2"),
        ("v3-32", "v3:4x4"),
        ("v4-8", "v4:2x2x1"),
        ("v4-512", "v4:4x8x8"),
        ("v5litepod-1", "v5e:1x1"),
        ("v5litepod-256", "v5e:16x16"),
        ("v5e-16", "v5e:4x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-12288", "v5p:16x16x24"),
        ("v6e-256", "v6e:16x16"),
        ("v5p:4x4x8", "v5p:4x4x8"),
    ],
)
def test_slices_have_the_names_that_they_are_sold_by(sold, name) -> None:
    assert slice_name(sold) == name
    assert parse_slice(sold) == parse_slice(name)
    assert Topology.from_name(sold).name == name
    if sold in ("v2-8", "v5litepod-1"):
        assert replicax.TPUClusterResolver(emulate=sold).topology == Topology.from_name(name)


def test_a_slice_that_is_twisted_has_other_links() -> None:
    assert parse_slice("v4:4x4x8_untwisted") == parse_slice("v4:4x4x8")
    with pytest.raises(ValueError, match="'v4:4x4x8_twisted' is not a TPU slice"):  # hops would be wrong
        parse_slice("v4:4x4x8_twisted")


def test_unknown_devices() -> None:
    assert generation_of("cpu") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "no TPU generation 'v9'; known: v2, v3, v4, v5e, v5p, v6e, tpu7x.*\n.*v5e: 1x1, 2x2"),
        ("v5e", "expected a name such as 'v5e:4x4' .*\n.*Known slices: v2: 2x2"),
        ("v5e:4", "expected a name such as"),
        ("2x2x1x2", "expected a name such as"),
        (4, "4 is not a TPU slice: expected a name such as"),
        ("v5e:4x4x4", "v5e has at most 16x16 chips, not 4x4x4.\nKnown slices: v5e: 1x1"),
        ("v5e:32x2", "v5e has at most 16x16 chips, not 32x2x1"),
        ("v5p:24x24x24", "v5p has at most 8960 chips, not 24x24x24"),
        ("v5p-100", r"'v5p-100' is not a TPU slice: v5p has none of 100 cores. .*v5p-128 \(v5p:4x4x4\)"),
        ("v5litepod-3", r"v5e has none of 3 cores. .*v5litepod-16 \(v5e:4x4\)"),
        ("v9-8", "'v9-8' is not a TPU slice: expected a name such as 'v5e:4x4' or 'v5p:4x4x8', or 'v5p-128'"),
        ("v5e:0x4", "v5e has at most 16x16 chips, not 0x4x1"),
        ("v5e:3x3", "hosts have 2x2x1 chips, and these do not fill 3x3x1 chips"),
    ],
)
def test_names_that_mean_nothing(name, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_slice(name)
