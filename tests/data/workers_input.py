"""What each of several real workers does in test_workers.py."""

from __future__ import annotations

import itertools
import threading
import warnings
from unittest import mock

import grain
import jax
import numpy as np

import replicax
from replicax import InputOptions
from replicax.data.batches.agreed_batches import MOST_AHEAD
from replicax.workers.exchange import DistributedWorkers
from tests.sources import Stream, wait_until


def number(record):
    return {"id": np.int32(int(record)), "x": np.full(2, float(record), np.float32)}


def sources(files, batch, size):
    """By name, what makes a dataset of the numbers below ``size``, in global batches."""
    rows = [number(i) for i in range(size)]

    def generate():
        for i in range(0, size, batch):
            yield jax.tree.map(lambda *leaves: np.stack(leaves), *rows[i : i + batch])

    return {
        "numbered": lambda: grain.MapDataset.source(rows).seed(3).shuffle().batch(batch),
        "iterated": lambda: grain.MapDataset.source(rows).to_iter_dataset().batch(batch),
        "generator": lambda: generate,
        "files": lambda: replicax.data.text_lines(files).map(number).batch(batch),
    }


def local_ids(strategy, element) -> list[int]:
    """The examples that this worker's replicas have, without padding."""
    return [int(x) for value in strategy.local_results(element["id"]) for x in np.asarray(value)]


def epochs(files, size, batch, cases):
    """For each source, policy and mode of ``cases``: this worker's examples; means of steps; how many were traced.

    Each mean is computed in several ways: by losses, a metric, and a reduction in the step and outside.
    """
    strategy = replicax.MultiWorkerMirroredStrategy()
    with strategy.scope():
        metric = replicax.Mean()
    results = {}
    made = sources(files, batch, size)
    for name, policy, partial in cases:
        options = InputOptions(auto_shard_policy=policy, partial_batch=partial)
        ids, means = [], []

        def step(x):
            x = x[:, 0]
            metric.update(x)
            inside = replicax.get_replica_context().merge_call(lambda s, v: s.reduce("mean", v, axis=0), args=(x,))
            return replicax.compute_average_loss(x), inside, x * 1

        before = strategy.extended.trace_count(step)
        for element in strategy.distribute_dataset(made[name](), options):
            ids += local_ids(strategy, element)
            metric.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", replicax.errors.ExecutorWarning)
                share, inside, values = strategy.run(step, args=(element["x"],))
            outside = strategy.reduce("mean", values, axis=0)
            means.append([float(x) for x in (strategy.reduce("sum", share), inside, outside, metric.result())])
        results[name, policy, partial] = ids, means, strategy.extended.trace_count(step) - before
    return results


def from_function(size, batch):
    """This worker's examples, of datasets that each worker makes for itself; and what they were told."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    contexts = []

    def make(context):
        contexts.append(context)
        mine = range(context.input_pipeline_id, size, context.num_input_pipelines)
        rows = [number(i) for i in mine]
        return grain.MapDataset.source(rows).batch(context.get_per_replica_batch_size(batch))

    ids = [i for element in strategy.distribute_datasets_from_function(make) for i in local_ids(strategy, element)]
    return contexts, ids


def interrupted(files, batch, size, steps):
    """The state after some steps of each source, and this worker's examples until then."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    results = {}
    for name, make in sources(files, batch, size).items():
        with iter(strategy.distribute_dataset(make())) as iterator:
            ids = [i for element in itertools.islice(iterator, steps) for i in local_ids(strategy, element)]
            results[name] = iterator.get_state(), ids
    return results


def continued(files, batch, size, states):
    """The rest of each source, from a state on."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    results = {}
    for name, make in sources(files, batch, size).items():
        with iter(strategy.distribute_dataset(make())) as iterator:
            iterator.set_state(states[name])
            results[name] = [i for element in iterator for i in local_ids(strategy, element)]
    return results


def padded_on_both_executors():
    """Of a padded batch, once compiled and once not: its mean, its examples, and those that this worker has.

    And its mean as the last one of several steps.
    """
    strategy = replicax.MultiWorkerMirroredStrategy()
    batches = [np.arange(8.0, dtype=np.float32), np.arange(5.0, dtype=np.float32)]
    dataset = strategy.distribute_dataset(batches, InputOptions(partial_batch="pad"))
    [_, element] = dataset
    results = []
    for executor in ("compiled", "per_replica"):
        options = replicax.RunOptions(executor=executor)
        values = strategy.run(lambda x: x * 2, args=(element,), options=options)
        share = strategy.run(replicax.compute_average_loss, args=(values,), options=options)
        own = [np.asarray(v).tolist() for v in strategy.local_results(values)]
        whole = np.asarray(strategy.gather(values, axis=0)).tolist()
        results.append((float(strategy.reduce("sum", share)), whole, own))

    def step(ctx, x):
        ctx.set_last_step_output("mean", replicax.compute_average_loss(x), "sum")

    with iter(dataset) as iterator:
        outputs = strategy.run_steps(step, iterator, 2).last_step_outputs
    return results, float(outputs["mean"])


def values_of_two_structures():
    """The error for values that have another structure on each worker."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    try:
        strategy.distribute_values_from_function(lambda ctx: {f"w{strategy.extended.workers.index}": 1.0})
    except ValueError as error:
        return str(error)


def agreed(prefetch, count):
    """Of streams of so many elements and fewer: sizes of what this worker got, and how many exchanges there were.

    And what it is told of a stream whose third element can't be read.
    """
    strategy = replicax.MultiWorkerMirroredStrategy()
    index, workers = strategy.extended.workers.index, strategy.num_replicas_in_sync
    options = InputOptions(prefetch=prefetch)
    exchange, topics = DistributedWorkers.exchange, []

    def counted(self, topic, *others):
        topics.append(topic)
        return exchange(self, topic, *others)

    def dataset(stream):
        return strategy.distribute_datasets_from_function(lambda context: stream, options)

    batch = np.zeros(4, np.float32)
    stream = Stream([batch] * (count - index))
    sizes = []

    def is_read_ahead() -> bool:
        return stream.made == min(count - index, len(sizes) + prefetch + MOST_AHEAD)

    with mock.patch.object(DistributedWorkers, "exchange", counted):
        for element in dataset(stream):
            sizes += [len(np.asarray(value)) for value in strategy.local_results(element)]
            if prefetch:
                wait_until(is_read_ahead)
    exchanges = sum(", element/" in topic for topic in topics)
    third = OSError("disk on fire") if index == workers - 1 else batch
    try:
        for _ in dataset(Stream([batch, batch, third])):
            pass
    except Exception as error:
        return sizes, exchanges, f"{type(error).__name__}: {error}"


def everything(files, size, batch, cases):
    """All of it, in one launch."""
    return {
        "epochs": epochs(files, size, batch, cases),
        "padded": padded_on_both_executors(),
        "structures": values_of_two_structures(),
        "from_function": from_function(size, 8),
        "interrupted": interrupted(files, batch, size, 2),
    }


def left_early(files):
    """Stop reading after an element, which the other worker may do at another moment."""
    strategy = replicax.MultiWorkerMirroredStrategy()
    iterator = iter(strategy.distribute_dataset(sources(files, 4, 0)["files"]()))
    next(iterator)
    iterator.close()  # although the other worker may not come to the next element any more
    return threading.active_count()
