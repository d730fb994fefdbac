"""The code examples of the second generation's document, with nothing changed but ``tf``'s operations."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.compat.documents import documents
from tests.compat.executors import Executor, on_both
from tests.data.files.writing import write_tfrecords

pytestmark = pytest.mark.filterwarnings("ignore::replicax.errors.ExecutorWarning")


def test_each_example_is_here() -> None:
    """Counted in the document: a test each, in its order."""
    [document] = [d for d in documents().values() if not d.is_first_generation]
    assert document.examples == 12


def on_slice(computation_shape: list[int], num_replicas: int) -> replicax.TPUStrategy:
    """The TPU system of the examples, of eight emulated cores."""
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    device_assignment = replicax.DeviceAssignment.build(
        resolver.topology, computation_shape=computation_shape, num_replicas=num_replicas
    )
    return replicax.TPUStrategy(resolver, device_assignment=device_assignment)


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@on_both
def test_assigning_to_a_logical_device(executor: Executor) -> None:
    strategy = on_slice([1, 1, 1, 2], 4)
    inputs = images(8, 3)
    iterator = iter(strategy.experimental_distribute_dataset([inputs]))

    def step_fn(inputs: Any) -> Any:
        output = jnp.add(inputs, inputs)
        # Add operation will be executed on logical device 0.
        return strategy.experimental_assign_to_logical_device(output, 0)

    with executor():
        output = strategy.run(step_fn, args=(next(iterator),))
    np.testing.assert_array_equal(strategy.gather(output, axis=0), 2 * inputs)
    with pytest.raises(ValueError, match="there is no logical device 2"):
        strategy.run(lambda x: strategy.experimental_assign_to_logical_device(x, 2), args=(1.0,))


def write_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """``/a/1.tfr`` to ``/a/4.tfr``, of two numbers each."""
    paths = [folder / f"{i}.tfr" for i in range(1, 5)]
    for i, path in enumerate(paths):
        write_tfrecords(path, [np.float32(10 * i + k).tobytes() for k in range(2)])
    return paths


@on_both
def test_distributing_a_dataset_of_files(executor: Executor, tmp_path: pathlib.Path) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    seen = []

    def train_step(x: Any) -> Any:
        return x.sum()

    # Create a dataset
    dataset = replicax.data.tfrecords(write_files(tmp_path)).map(lambda r: np.frombuffer(r, np.float32)[0]).batch(4)
    # Distribute that dataset
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    with executor():
        # Iterate over the distributed dataset
        for x in dist_dataset:
            # process dataset elements
            seen.append([float(v) for v in strategy.experimental_local_results(strategy.run(train_step, args=(x,)))])
    assert seen == [[1.0, 21.0], [41.0, 61.0]]


@on_both
def test_the_spec_of_a_dataset(executor: Executor, tmp_path: pathlib.Path) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = replicax.data.tfrecords(write_files(tmp_path)).map(lambda r: np.frombuffer(r, np.float32)[0]).batch(4)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    def train_step(inputs: Any) -> Any:
        return inputs.sum()

    # What tf.function(input_signature=[dist_dataset.element_spec]) is for: one program, made before the first element.
    program = strategy.extended.trace(train_step, args=(dist_dataset.element_spec,))
    assert program.localities == (replicax.Locality.PER_REPLICA,)
    with executor():
        results = [strategy.run(train_step, args=(x,)) for x in dist_dataset]
    assert [float(strategy.reduce("sum", r)) for r in results] == [22.0, 102.0]
    assert strategy.extended.trace_count(train_step) == 1


def function_inputs(strategy: replicax.Strategy) -> Any:
    global_batch_size = 4

    def dataset_fn(input_context: replicax.InputContext) -> Any:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = [np.full((batch_size, 1), 1.0, np.float32)] * 4
        return d[input_context.input_pipeline_id :: input_context.num_input_pipelines]

    return strategy.experimental_distribute_datasets_from_function(dataset_fn)


@on_both
def test_datasets_from_a_function(executor: Executor) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    inputs = function_inputs(strategy)
    with executor():
        results = [strategy.run(lambda batch: batch.sum(), args=(batch,)) for batch in inputs]
    assert [[float(v) for v in strategy.experimental_local_results(r)] for r in results] == [[2.0, 2.0]] * 2


@on_both
def test_the_spec_of_an_iterator(executor: Executor) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    # If you want to specify `input_signature` for a `tf.function` you must first create the iterator.
    iterator = iter(function_inputs(strategy))

    def replica_fn_with_signature(inputs: Any) -> Any:
        return inputs.mean()

    strategy.extended.trace(replica_fn_with_signature, args=(iterator.element_spec,))
    with executor():
        for _ in range(2):
            result = strategy.run(replica_fn_with_signature, args=(next(iterator),))
            assert float(strategy.reduce("mean", result)) == 1.0
    assert strategy.extended.trace_count(replica_fn_with_signature) == 1


# --- values from a function -----------------------------------------------------------------------------


def values_of(strategy: replicax.Strategy, value_fn: Any, executor: Executor) -> tuple[Any, ...]:
    """The results of the example, after a step has had them, too."""
    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    with executor():
        back = strategy.run(lambda x: x, args=(distributed_values,))
    local_result = strategy.experimental_local_results(distributed_values)
    assert [np.asarray(v).tolist() for v in strategy.experimental_local_results(back)] == [
        np.asarray(v).tolist() for v in local_result
    ]
    return local_result


@on_both
def test_a_constant_on_each_replica(executor: Executor) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0"])

    def value_fn(ctx: replicax.ValueContext) -> Any:
        return jnp.asarray(1.0)

    local_result = values_of(strategy, value_fn, executor)
    assert isinstance(local_result, tuple)
    assert [float(v) for v in local_result] == [1.0]
    assert local_result[0].dtype == jnp.float32


@on_both
@pytest.mark.parametrize("count", [1, 3])
def test_values_by_the_number_of_the_replica(executor: Executor, count: int) -> None:
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    array_value = np.array([3.0, 2.0, 1.0])

    def value_fn(ctx: replicax.ValueContext) -> Any:
        return array_value[ctx.replica_id_in_sync_group]

    assert [float(v) for v in values_of(strategy, value_fn, executor)] == [3.0, 2.0, 1.0][:count]


@on_both
def test_values_by_the_number_of_replicas(executor: Executor) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0"])

    def value_fn(ctx: replicax.ValueContext) -> Any:
        return ctx.num_replicas_in_sync

    assert [int(v) for v in values_of(strategy, value_fn, executor)] == [1]


@on_both
def test_values_that_are_on_devices(executor: Executor) -> None:
    strategy = replicax.TPUStrategy(replicax.TPUClusterResolver(emulate="2x2x1x2"))
    worker_devices = strategy.extended.worker_devices
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        multiple_values.append(jax.device_put(1.0, worker_devices[i]))

    def value_fn(ctx: replicax.ValueContext) -> Any:
        return multiple_values[ctx.replica_id_in_sync_group]

    local_result = values_of(strategy, value_fn, executor)
    assert [float(v) for v in local_result] == [1.0] * 8
    assert [next(iter(v.devices())) for v in local_result] == list(worker_devices)


@on_both
def test_a_numpy_dataset(executor: Executor) -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(5))
    with executor():
        sums = [strategy.run(lambda x: x.sum(), args=(x,)) for x in dist_dataset]
    assert [float(strategy.reduce("sum", s)) for s in sums] == [5.0, 5.0]


# --- logical devices ------------------------------------------------------------------------------------


@on_both
def test_labels_and_output_on_all_logical_devices(executor: Executor) -> None:
    strategy = on_slice([1, 1, 1, 2], 4)
    x, y = images(4, 2, 2, 1), np.arange(4) % 3
    weights = images(4, 3)
    iterator = iter(strategy.experimental_distribute_dataset([(x, y)]))

    def model(inputs: Any) -> Any:
        return jnp.tanh(inputs.reshape(-1, 4) @ weights)

    def loss_fn(labels: Any, output: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(output), labels[:, None], 1).mean()

    def step_fn(inputs: Any) -> Any:
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 1, 1])
        # model() function will be executed on the logical devices with `inputs` split.
        output = model(images)
        # For loss calculation, all logical devices share the same logits and labels.
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return loss_fn(labels, output)

    with executor():
        loss = strategy.run(step_fn, args=(next(iterator),))
    expected = loss_fn(jnp.asarray(y), model(jnp.asarray(x)))
    np.testing.assert_allclose(strategy.reduce("mean", loss), expected, rtol=1e-5)


@on_both
def test_inputs_split_over_eight_logical_devices(executor: Executor) -> None:
    strategy = on_slice([2, 2, 2], 1)
    x = images(1, 2, 4, 1)
    iterator = iter(strategy.experimental_distribute_dataset([x]))

    def model(inputs: Any) -> Any:
        return jnp.tanh(inputs).sum((1, 2))

    def step_fn(inputs: Any) -> Any:
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 4, 1])
        return model(inputs)

    with executor():
        np.testing.assert_allclose(strategy.run(step_fn, args=(next(iterator),)), model(x), rtol=1e-5)
    for wrong in ([1, 2, 4], [1, 2, 2, 1], [8, 1, 1, 1]):  # the rank, the product, a size that does not divide
        with pytest.raises(ValueError, match="partition_dimensions"):
            strategy.run(lambda x, w=tuple(wrong): strategy.experimental_split_to_logical_devices(x, w), args=(x,))
