"""What elements are: their specs, batches that do not divide, and bad input."""

from __future__ import annotations

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax import InputOptions
from tests.sources import Slow

# --- specs ----------------------------------------------------------------------------------------------


def test_the_spec_of_what_a_replica_gets(pair) -> None:
    batches = [{"x": np.zeros((6, 3)), "y": [np.zeros(6, np.int64)]}]
    dataset = pair.distribute_dataset(batches)
    assert (
        dataset.element_spec
        == iter(dataset).element_spec
        == {
            "x": jax.ShapeDtypeStruct((3, 3), jnp.float32),
            "y": [jax.ShapeDtypeStruct((3,), jnp.int32)],
        }
    )


def test_the_spec_of_batches_that_a_map_has_made_smaller(pair) -> None:
    batches = grain.MapDataset.source(np.arange(16.0)).batch(8).map(lambda batch: batch[:4])
    dataset = pair.distribute_dataset(batches, InputOptions(partial_batch="pad"))
    assert dataset.element_spec.shape == (2,)
    assert [[len(part) for part in pair.local_results(batch)] for batch in dataset] == [[2, 2], [2, 2]]


def test_the_spec_of_per_replica_batches(pair) -> None:
    dataset = pair.distribute_datasets_from_function(lambda context: [np.zeros((3, 2))] * 4)
    assert dataset.element_spec.shape == (3, 2)


def test_the_spec_is_enough_to_compile_the_step(strategy) -> None:
    dataset = strategy.distribute_dataset([{"x": np.ones((8, 3))}] * 3)

    def step(batch):
        return replicax.compute_average_loss(batch["x"].sum(-1))

    program = strategy.extended.trace(step, args=(dataset.element_spec,))
    assert program.compiled().memory_analysis() is not None
    rows_per_replica = [strategy.run(step, args=(batch,)) for batch in dataset]
    assert strategy.extended.trace_count(step) == 1
    assert strategy.extended.trace(step, args=(next(iter(dataset)),)) is program
    assert float(strategy.reduce("sum", rows_per_replica[0])) == 3.0


def test_a_dataset_says_at_once_how_it_can_be_resumed(pair) -> None:
    assert repr(pair.distribute_dataset([np.zeros(4)])) == (
        "DistributedDataset(a list of batches; policy DATA; resume with any number of workers and replicas, and other "
        "batch sizes)"
    )
    own = pair.distribute_datasets_from_function(lambda context: [np.zeros(2)] * 4)
    assert "policy OFF; resume with as many workers: each has a dataset of its own" in repr(own)
    assert "replica 1 gets whole batches, in turn" in str(own.plan())


def test_cardinality(pair) -> None:
    examples = pair.make_numpy_dataset(np.zeros(10))
    whole, filtered = examples.batch(4), examples.batch(4).filter(lambda x: x[0] > 0)
    for dataset, count, words in ((whole, 3, "3 batches of 4"), (filtered, None, "batches of 4")):
        found = pair.distribute_dataset(dataset)
        assert (found.cardinality, found.plan().source.rpartition(", ")[2]) == (count, words)
    assert pair.distribute_dataset([np.zeros(4)] * 5).cardinality == 5
    assert pair.distribute_dataset(Slow()).cardinality is None
    assert pair.distribute_dataset([np.zeros(4)] * 5, InputOptions(partial_batch="drop")).cardinality is None
    assert pair.distribute_datasets_from_function(lambda context: [np.zeros(4)] * 4).cardinality is None


# --- partial batches ------------------------------------------------------------------------------------


def test_full_batches_that_do_not_divide_are_one_program(pair) -> None:
    seen = []

    def step(x):
        seen.append(x.shape)
        return replicax.compute_average_loss(x)

    examples = pair.make_numpy_dataset(np.arange(13.0))
    rows_per_replica = [
        float(pair.reduce("sum", pair.run(step, args=(batch,))))
        for batch in pair.distribute_dataset(examples.batch(5), InputOptions(partial_batch="drop"))
    ]
    assert rows_per_replica == [2.0, 7.0]
    assert seen == [(3,), (2,)]


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        ([np.zeros(4)], TypeError, r"element 1 has another structure than the first"),
        (
            {"x": np.zeros(4), "y": np.zeros(2)},
            ValueError,
            r"same dim 0.*, got {\"element 1\['x'\]\": 4, \"element 1\['y'\]\": 2}.* stack one for each replica",
        ),
        (
            {"x": np.zeros(4, np.int32)},
            TypeError,
            r"element 1\['x'\] is int32\[4\], but was float64 of rank 1 in the first",
        ),
        ({"x": np.zeros((4, 1))}, TypeError, r"element 1\['x'\] is float64\[4, 1\], but was float64 of rank 1"),
        (
            {"x": np.array(["a", "b"])},
            TypeError,
            r"element 1\['x'\] is an array of dtype <U1, which is not an array of numbers",
        ),
    ],
)
def test_elements_that_change(pair, second, error, message) -> None:
    names = second if isinstance(second, dict) else ["x"]
    first = {name: np.zeros(4) for name in names}
    iterator = iter(pair.distribute_dataset([first, second]))
    next(iterator)
    with pytest.raises(error, match=message):
        next(iterator)


@pytest.mark.parametrize(
    "dataset",
    [
        [],
        np.zeros((0, 4)),
        grain.MapDataset.range(0),
        grain.MapDataset.range(3).batch(4, drop_remainder=True),
    ],
)
def test_empty_datasets(pair, dataset) -> None:
    with pytest.raises(ValueError, match="distribute_dataset: the dataset, .*, is empty"):
        pair.distribute_dataset(dataset)


def test_datasets_that_turn_out_empty(pair) -> None:
    nothing = grain.MapDataset.range(9).to_iter_dataset().filter(lambda x: x > 9).batch(4)
    dataset = pair.distribute_dataset(nothing)
    for look, message in ((lambda: next(iter(dataset)), "gave no element"), (lambda: dataset.element_spec, "is empty")):
        with pytest.raises(ValueError, match=f"the dataset, a Grain BatchIterDataset, {message}"):
            look()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"auto_shard_policy": "files"}, "auto_shard_policy must be one of 'auto', 'file', 'data', 'off'"),
        ({"partial_batch": 3}, "partial_batch must be one of 'exact', 'pad', 'drop' or a PartialBatch, got 3"),
        ({"prefetch": -1}, r"prefetch must be an int of at least 0 \(0 for none\), got -1"),
    ],
)
def test_options_that_are_wrong(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        InputOptions(**kwargs)


def test_input_contexts() -> None:
    context = replicax.InputContext(2, 1, 4)
    assert context.get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match=r"a global batch of 9 does not divide over 4 replicas \(9 = 4 × 2 \+ 1\)"):
        context.get_per_replica_batch_size(9)
    for size in (-8, 8.0, None):
        with pytest.raises(ValueError, match=f"get_per_replica_batch_size: .* an int of at least 1, got {size}"):
            context.get_per_replica_batch_size(size)
    with pytest.raises(ValueError, match="input_pipeline_id must be an int of at least 0 and below"):
        replicax.InputContext(2, 2, 4)
    with pytest.raises(ValueError, match="num_input_pipelines must be an int of at least 1, got 0"):
        replicax.InputContext(0, 0, 4)
    with pytest.raises(ValueError, match="replica_id_in_sync_group must be an int of at least 0 .*, got -1"):
        replicax.data.ValueContext(-1, 2)


def test_what_is_no_dataset_function(pair) -> None:
    with pytest.raises(TypeError, match="dataset_fn must be a function of an InputContext, got 3"):
        pair.distribute_datasets_from_function(3)


def test_rows_that_differ_in_shape_between_replicas(pair) -> None:
    """One compiled program (no warning says otherwise), and each replica gets its own."""
    batches = [np.full((2, 3), 1.0), np.full((2, 5), 10.0), np.full((1, 4), 1.0), np.full((3, 1), 10.0)]
    dataset = pair.distribute_datasets_from_function(lambda context: batches)
    elements = list(dataset)
    assert [[x.shape for x in pair.local_results(element)] for element in elements] == [
        [(2, 3), (2, 5)],
        [(1, 4), (3, 1)],
    ]
    sums = [float(pair.reduce("sum", pair.run(jnp.sum, (element,)))) for element in elements]
    assert sums == [6 + 100, 4 + 30]
