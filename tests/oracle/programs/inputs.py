"""``distribute_dataset``: global batches, divided over the replicas."""

from __future__ import annotations

from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("input")


def _distributed(d: Library, examples: Any, batch: int) -> Any:
    return d.strategy.experimental_distribute_dataset(d.dataset(d.arrays(examples), batch))


@topic.program("each batch is divided in order")
def divided(d: Library) -> Any:
    return [d.each(x) for x in _distributed(d, [float(i) for i in range(8)], 4)]


@topic.program("four replicas", replicas=4)
def four_replicas(d: Library) -> Any:
    return [d.each(x) for x in _distributed(d, [[float(i), -float(i)] for i in range(8)], 8)]


@topic.program("one replica has bare arrays", replicas=1)
def one_replica(d: Library) -> Any:
    return list(_distributed(d, [float(i) for i in range(4)], 2))


@topic.program("a nest of arrays")
def nest(d: Library) -> Any:
    examples = {"x": [[1.0], [2.0], [3.0], [4.0]], "y": [1, 2, 3, 4]}
    return [d.each(batch) for batch in _distributed(d, examples, 2)]


@topic.program("a pair of arrays, into a step")
def into_a_step(d: Library) -> Any:
    pairs = ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0])
    batches = _distributed(d, pairs, 4)
    step: Any = lambda batch: d.total(batch[0] * batch[1])  # noqa: E731
    return [d.each(d.strategy.run(step, args=(batch,))) for batch in batches]


@topic.program("gone through twice, it starts again")
def twice(d: Library) -> Any:
    batches = _distributed(d, [1.0, 2.0, 3.0, 4.0], 2)
    return [[d.to_plain(d.each(x)) for x in batches] for _ in range(2)]


@topic.program("an epoch of batches, summed up")
def summed(d: Library) -> Any:
    batches = _distributed(d, [float(i) for i in range(8)], 4)
    return [d.strategy.reduce("mean", x, axis=0) for x in batches]


@topic.program("five examples for four replicas", replicas=4)
def ceil_fill(d: Library) -> Any:
    return [d.each(x) for x in _distributed(d, [float(i) for i in range(5)], 5)]


@topic.program("one example for four replicas", replicas=4)
def one_for_four(d: Library) -> Any:
    return [d.each(x) for x in _distributed(d, [[1.0, 2.0]], 4)]


@topic.program("a last batch of six, of fourteen in batches of eight")
def last_of_fourteen(d: Library) -> Any:
    return [d.each(x) for x in _distributed(d, [float(i) for i in range(14)], 8)]


@topic.program("the mean over a last batch of three")
def mean_of_the_last(d: Library) -> Any:
    return [d.strategy.reduce("mean", x, axis=0) for x in _distributed(d, [float(i) for i in range(7)], 4)]


@topic.program("a step on a batch that does not divide", replicas=4)
def step_on_uneven(d: Library) -> Any:
    batches = _distributed(d, [float(i) for i in range(5)], 5)
    return [d.each(d.strategy.run(lambda x: d.total(x), args=(x,))) for x in batches]


def _of_function(d: Library, examples: Any, per_replica: int) -> Any:
    make: Any = lambda context: d.dataset(d.arrays(examples), per_replica)  # noqa: E731
    return d.strategy.distribute_datasets_from_function(make)


@topic.program("datasets from a function: each replica gets a whole batch")
def from_function(d: Library) -> Any:
    return [d.each(x) for x in _of_function(d, [float(i) for i in range(8)], 2)]


@topic.program("datasets from a function: nothing left for the second replica")
def from_function_uneven(d: Library) -> Any:
    return [d.each(x) for x in _of_function(d, [float(i) for i in range(6)], 2)]


@topic.program("datasets from a function: what it is told")
def input_context(d: Library) -> Any:
    told = []

    def make(context: Any) -> Any:
        told.append(
            [
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
                context.get_per_replica_batch_size(8),
            ]
        )
        return d.dataset(d.arrays([1.0, 2.0]), 1)

    d.strategy.distribute_datasets_from_function(make)
    return told


@topic.program("datasets from a function: a global batch that does not divide")
def input_context_uneven(d: Library) -> Any:
    return d.attempt(lambda: d.distribute.InputContext(1, 0, 2).get_per_replica_batch_size(3))


@topic.program(
    "the next element, taken inside a step",
    differs="Both refuse it; what is called in the wrong place is a ContextError, which is a RuntimeError.",
)
def next_in_a_step(d: Library) -> Any:
    iterator = iter(_distributed(d, [1.0, 2.0, 3.0, 4.0], 2))
    return d.each(d.strategy.run(lambda: next(iterator)))


@topic.program("after the last element")
def after_the_last(d: Library) -> Any:
    iterator = iter(_distributed(d, [1.0, 2.0], 2))
    next(iterator)
    return d.attempt(lambda: next(iterator))


@topic.program(
    "distributed inside a replica",
    differs="Input is divided across replicas, and not inside one. TensorFlow lets each replica divide it again.",
)
def inside_a_replica(d: Library) -> Any:
    dataset = d.dataset(d.array([1.0, 2.0]), 2)
    return d.strategy.run(lambda: (d.strategy.experimental_distribute_dataset(dataset), None)[1])
