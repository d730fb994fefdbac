"""Programs whose logical devices talk to each other compile for 64 H100s, a replica on each host."""

from __future__ import annotations

import pytest

import replicax
from examples import experts, fine_tune, ring_attention
from tests.gpu.described import devices, needs_compiler
from tests.gpu.golden import check
from tests.programs.programs import third_party

pytestmark = [needs_compiler, pytest.mark.soak]


def planned(parts: int, length: int) -> replicax.planning.Plan:
    strategy = replicax.MirroredStrategy(devices("h100:8x8"), num_logical_devices=parts)
    step, args = ring_attention.plan(strategy, length=length, width=128, heads=2, layers=1, letters=256)
    return replicax.plan(strategy, step, args)


@third_party
def test_long_sequences() -> None:
    plans = {parts: planned(parts, 4096) for parts in (2, 4, 8)}
    check("example ring_attention", plans[8].collectives)
    around = [c for c in plans[8].collectives if c.kind == "collective-permute"]
    assert {(c.participants, c.way) for c in around} == {(8, "NVLink")}
    assert sum(c.count for c in around) == 7 + 7 + 1  # keys and values; these and their gradients; gradients, home
    used = [plans[parts].memory.temporaries for parts in (2, 4, 8)]
    assert used[1] < 0.55 * used[0]
    assert used[2] < 0.55 * used[1]


@third_party
def test_fine_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    small = fine_tune.Config("llama", 1024, 256, 2, 4, 2, 512, 1e-5, False, dtype="bfloat16")
    monkeypatch.setitem(fine_tune.SIZES, "8b", small)
    strategy = replicax.ShardedStrategy(devices("h100:1x8"), num_logical_devices=2)
    plan = replicax.plan(strategy, *fine_tune.plan(strategy, length=256))
    check("example fine_tune", plan.collectives)
    # Of the gradients only those of adapters are summed over the replicas: all together less than one weight.
    [summed] = [c for c in plan.collectives if c.kind == "reduce-scatter" and c.participants == 4]
    assert summed.bytes * 4 < 256 * 512 * 2


@third_party
def test_experts() -> None:
    strategy = replicax.MirroredStrategy(devices("h100:8x8"), num_logical_devices=8)
    size = {"length": 512, "width": 128, "heads": 2, "layers": 1, "experts": 16, "hidden": 256, "letters": 256}
    plan = replicax.plan(strategy, *experts.plan(strategy, **size))
    check("example experts", plan.collectives)
    sends = [c for c in plan.collectives if c.kind == "all-to-all"]
    assert {(c.participants, c.way) for c in sends} == {(8, "NVLink")}
    assert sum(c.count for c in sends) == 4  # to the experts and back, and so do the gradients
