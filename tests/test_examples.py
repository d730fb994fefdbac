"""The examples compute what a single device would; and those of the original documents run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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


# --- the documents' own ---------------------------------------------------------------------------------


@pytest.mark.parametrize("computation_shape", [[2, 2, 1, 2], [2, 2, 2]], ids=str)
def test_inputs_split_over_eight_logical_devices(computation_shape: list[int]) -> None:
    strategy = on_slice(computation_shape, 1)
    images = np.random.default_rng(0).normal(size=(4, 16, 32, 3)).astype(np.float32)
    iterator = iter(strategy.distribute_dataset([images]))

    def model(inputs: Any) -> Any:
        return jnp.tanh(inputs).sum((1, 2))

    def step_fn(inputs: Any) -> Any:
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 4, 1])
        return model(inputs)

    assert_close(strategy.run(step_fn, args=(next(iterator),)), model(images))


def test_logits_and_labels_on_all_logical_devices() -> None:
    strategy = on_slice([1, 1, 2], 4)
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(8, 4, 4, 1)).astype(np.float32), rng.integers(3, size=8)
    weights = rng.normal(size=(16, 3)).astype(np.float32)
    iterator = iter(strategy.distribute_dataset([(images, labels)]))

    def loss_fn(images: Any, labels: Any, replicate: Any) -> Any:
        output = replicate(jnp.tanh(images.reshape(-1, 16) @ weights))
        return -jnp.take_along_axis(jax.nn.log_softmax(output), replicate(labels)[:, None], 1).mean()

    def step_fn(inputs: Any) -> Any:
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 1, 1])
        return loss_fn(images, labels, strategy.experimental_replicate_to_logical_devices)

    loss = strategy.reduce("mean", strategy.run(step_fn, args=(next(iterator),)))
    assert_close(loss, loss_fn(jnp.asarray(images), jnp.asarray(labels), lambda x: x))
