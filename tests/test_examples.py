"""The examples compute what a single device would."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import replicax
from examples import pipeline, spatial, transformer
from tests.programs.programs import third_party


def on_slice(computation_shape: list[int], num_replicas: int) -> replicax.TPUStrategy:
    """A strategy on the eight cores of an emulated slice."""
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    assignment = replicax.DeviceAssignment.build(
        resolver.topology, computation_shape=computation_shape, num_replicas=num_replicas
    )
    return replicax.TPUStrategy(resolver, assignment)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.soak  # the language model of tests/examples is model parallel, too
@third_party
def test_a_transformer_data_and_model_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "LAYERS", 1)  # to compile in half the time
    with jax.numpy_rank_promotion("allow"):
        losses, variables = transformer.train(on_slice([1, 1, 1, 2], 4), parts=2, steps=3)
        expected, plain = transformer.train(replicax.OneDeviceStrategy("cpu:0"), parts=1, steps=3)
    assert_close(losses, expected)
    for ours, theirs in zip(variables, plain, strict=True):
        assert_close(ours.numpy(), theirs.numpy())
        [part] = {s.data.size for s in ours.value.addressable_shards}
        assert part == ours.size // 2


@third_party
def test_a_spatially_split_convolution() -> None:
    losses, kernels, program = spatial.train(on_slice([2, 1, 1, 2], 2), spatial.QUARTERS, steps=2)
    expected, plain, _ = spatial.train(replicax.OneDeviceStrategy("cpu:0"), [1, 1, 1, 1], steps=2)
    assert_close(losses, expected)
    for ours, theirs in zip(kernels, plain, strict=True):
        assert_close(ours.numpy(), theirs.numpy())
    kinds = {c.kind for c in program.collectives()}
    assert kinds == {"collective-permute", "all-reduce"}  # no image is gathered anywhere


@pytest.mark.soak  # tests/pipeline has smaller ones
@third_party
def test_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LAYERS", 1)
    monkeypatch.setattr(pipeline, "MICROBATCHES", 2)
    losses, stages, program = pipeline.train(pipeline.make_strategy(), 4)
    monkeypatch.setattr(pipeline, "STAGES", 1)
    monkeypatch.setattr(pipeline, "LAYERS", 2)
    expected, [plain], _ = pipeline.train(replicax.OneDeviceStrategy("cpu:0"), 4)
    assert_close(losses, expected)
    for ours, theirs in zip([w for stage in stages for w in stage], plain, strict=True):
        assert_close(ours.numpy(), theirs.numpy())
    assert [d.variables for d in program.placement().devices] == [4, 3]  # a weight and two slots; and Adam's count
