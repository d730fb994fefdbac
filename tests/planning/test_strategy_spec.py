"""What a search varies: strategies as values, the batch that they share, and estimates for devices that share a CPU."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.extended.described_arguments import PaddedShapeDtypeStruct
from replicax.planning import calibration
from replicax.planning.calibration import measured_chip
from replicax.planning.chip_specs import Chip
from replicax.planning.global_batch import examples_of, with_examples
from replicax.planning.network import HOP
from replicax.planning.planner import variables_alone
from replicax.planning.strategy_spec import block_of, devices_and_slices, strategy_of


@pytest.mark.parametrize(
    ("values", "replicas", "logical", "kept"),
    [
        ({}, 8, 1, 1),
        ({"variables": "sharded"}, 8, 1, 8),
        ({"variables": "groups:2", "microbatches": 2}, 16, 1, 2),
        ({"variables": "sharded", "logical": 2}, 4, 2, 4),
        ({"variables": "groups:2", "logical": (2, 2, 1, 1), "microbatches": 3}, 6, 4, 2),
    ],
)
def test_the_same_answer_everywhere(values, replicas: int, logical: int, kept: int) -> None:
    strategy = strategy_of(devices=8, **values)
    assert (strategy.num_replicas_in_sync, strategy.extended.num_logical_devices) == (replicas, logical)
    data = np.arange(48 * 4, dtype=np.float32).reshape(48, 4)
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.ones((1024, 4)), name="w")
    assert strategy.local_results(w)[0].shape == (1024 // kept, 4)

    def step(x):
        w.assign_add(jnp.tile(replicax.get_replica_context().all_reduce("sum", x.sum(0)), (1024, 1)))

    for batch in strategy.distribute_dataset([data]):
        strategy.run(step, args=(batch,))
    np.testing.assert_allclose(w.numpy(), np.tile(1 + data.sum(0), (1024, 1)))


def test_the_replicas_of_all_slices_count() -> None:
    strategy = strategy_of(topology="v5e:2x2", slices=2, variables="sharded", microbatches=3)
    assert strategy.num_replicas_in_sync == 3 * 2 * 4
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.ones((1024, 4)), name="w")
    assert w.sharding.shard_shape(w.shape) == (1024 // 8, 4)
    with pytest.raises(ValueError, match="slices are of TPUs; the hosts of GPUs are part of the topology"):
        strategy_of(topology="h100:2x8", slices=2)


@pytest.mark.parametrize("text", ["split", "groups", "groups:0", "groups:x", "groups:2:2", "", None])
def test_how_variables_lie_is_one_of_three(text) -> None:
    with pytest.raises(ValueError, match=r"must be mirrored, sharded or groups:N, such as groups:8, got "):
        strategy_of(variables=text)


@pytest.mark.parametrize("cores", range(1, 65))
def test_blocks_divide_the_mesh(cores: int) -> None:
    mesh = (4, 4, 8, 2)
    fits = {n for x in (1, 2, 4) for y in (1, 2, 4) for z in (1, 2, 4, 8) for c in (1, 2) if (n := x * y * z * c)}
    if cores in fits:
        block = block_of(cores, mesh)
        assert np.prod(block) == cores
        assert all(size % part == 0 for size, part in zip(mesh, block, strict=True))
    else:
        with pytest.raises(ValueError, match=rf"no block of {cores} cores divides 4x4x8x2 cores"):
            block_of(cores, mesh)


def test_the_batch_of_an_element() -> None:
    element = {"x": jax.ShapeDtypeStruct((6, 3), "float32"), "n": jax.ShapeDtypeStruct((), "int32"), "k": 7}
    assert examples_of(element) == 6
    assert with_examples(element, 2) == {**element, "x": jax.ShapeDtypeStruct((2, 3), "float32")}
    assert with_examples(None, 2) is None
    padded = with_examples(PaddedShapeDtypeStruct((6, 3), "float32"), 2)
    assert (type(padded), padded.shape) == (PaddedShapeDtypeStruct, (2, 3))
    assert examples_of(3.0) is None
    with pytest.raises(ValueError, match="it has 5, 6 of them"):
        with_examples((element, jax.ShapeDtypeStruct((5,), "float32")), 2)


@pytest.mark.parametrize("number", [0, -1, 0.5])
def test_a_batch_that_can_not_be(number) -> None:
    with pytest.raises(ValueError, match=r"a replica would have .* examples of the batch"):
        with_examples(jax.ShapeDtypeStruct((6, 3), "float32"), number)


@pytest.mark.parametrize(("variables", "pieces"), [("mirrored", 1), ("sharded", 8), ("groups:4", 4)])
def test_what_variables_alone_need(variables: str, pieces: int) -> None:
    strategy = strategy_of(devices=8, variables=variables)
    with strategy.scope():
        w, v, unused = (replicax.Variable(lambda: jnp.zeros((64, 64)), name=name) for name in ("w", "v", "unused"))
    step, element = (lambda x: (x @ w @ v).sum()), jax.ShapeDtypeStruct((32, 64), "float32")
    chip = Chip("card", flops=1.0, memory=100.0, bandwidth=1.0)
    assert variables_alone(strategy, step, element, chip=chip) == (2 * 64 * 64 * 4 // pieces, 100)
    assert variables_alone(strategy, step, element)[1] is None
    assert unused.shape == (64, 64)


@pytest.mark.parametrize(("dtype", "needed"), [("bool", 15), ("int4", 8), ("uint2", 4)])
def test_two_numbers_of_four_bits_take_a_byte(dtype: str, needed: int) -> None:
    strategy = replicax.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((3, 5), dtype), name="w")
    assert variables_alone(strategy, lambda: w.value)[0] == needed
    plan = replicax.plan(strategy, lambda: w.value)
    assert plan.memory.arguments == needed
    assert [b.bytes for b in plan.memory.buffers] == [needed, needed]


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_measured_chip_estimates_a_step(devices: int) -> None:
    chip = measured_chip(jax.devices()[:devices])
    assert all(getattr(chip, name) > 0 for name in ("flops", "bandwidth", "arithmetic", "launch", "memory"))
    assert (chip.link > 0) == (devices > 1)
    assert chip.sources == (f"measured on this machine, with all {devices} device(s) busy",)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert chip.memory == machine / devices  # which they share
    assert 1e-3 < chip.flops / chip.arithmetic < 1e3  # measured, perhaps beside other work
    with pytest.raises(ValueError, match="expected at least one device, got none"):
        measured_chip([])


def test_what_was_measured_is_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program that is measured takes a time of its own, so a mix-up would show."""
    idle, product, copy, numbers, small, products, collective, summing, sending = (n * 1e-3 for n in range(1, 10))
    times = {
        (1, 1): idle,
        ((256, 256), 16): product,
        (2**20, 4): copy,
        (2**14, 64): numbers,
        ((4, 4), 64): small,
        (1, 32): summing,
        (2**18, 4): sending,
    }

    def seconds(mesh: object, body: object, shape: object, iterations: int) -> float:
        found = times.get((shape, iterations))
        return found if found is not None else collective if body is calibration._products_and_collective else products

    monkeypatch.setattr(calibration, "_seconds", seconds)
    devices = 4
    chip = measured_chip(jax.devices()[:devices])
    plan = replicax.plan(
        replicax.MirroredStrategy([f"cpu:{i}" for i in range(devices)]),
        lambda x: (replicax.get_replica_context().all_reduce("sum", x["sum"]), x["x"] @ x["x"]),
        {"sum": jax.ShapeDtypeStruct((2**18,), "float32"), "x": jax.ShapeDtypeStruct((256, 256), "float32")},
        chip=chip,
    )
    assert plan.estimate.compute == pytest.approx(product - idle / 16)
    hops = 2 * devices / 2 * HOP
    assert plan.estimate.communication == pytest.approx(collective - products + sending - summing + hops)
    assert 2 * 4 * 2**20 / chip.bandwidth == pytest.approx(copy - idle / 4)  # read and written
    assert 17 * 2**14 / chip.arithmetic == pytest.approx(numbers - idle / 64)  # 17 operations for each number
    assert chip.launch == pytest.approx(small / 16)  # of 16 products
    assert plan.estimate.launches == (plan.cost.launches - 1) * chip.launch > 0  # the sum is measured as a whole


@pytest.mark.parametrize(
    ("name", "devices", "domains"),
    [("h100:16x8", 128, 16), ("gb200:4x4", 16, 1), ("gb200:36x4", 144, 2), ("tpu7x:2x2x1", 8, 1), ("v5p:2x2x1", 4, 1)],
)
def test_a_few_hosts_of_a_domain_are_one(name: str, devices: int, domains: int) -> None:
    assert devices_and_slices(name) == (devices, domains)
