"""``all_reduce`` and ``all_gather`` inside a replica, and the gradients through them."""

from __future__ import annotations

from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic
from tests.oracle.reasons import BRANCH, BRANCH_PER_REPLICA, NEGATIVE_AXIS

topic = Topic("collectives")

SHARED = (
    "Each replica contributes its value, so n replicas that share an array sum it n times. TensorFlow returns it once, "
    "because it takes the same Python object for a value that has been reduced."
)


def _run(d: Library, step: Any, components: list[Any]) -> Any:
    return d.each(d.strategy.run(step, args=(d.per_replica(components),)))


@topic.program("all_reduce: sum and mean")
def all_reduce(d: Library) -> Any:
    return _run(d, lambda x: [d.context.all_reduce(op, x) for op in ("sum", "mean")], [[1.0, 2.0], [3.0, 6.0]])


@topic.program("all_reduce: sum and mean on three replicas", replicas=3)
def all_reduce_three(d: Library) -> Any:
    return _run(d, lambda x: [d.context.all_reduce(op, x) for op in ("sum", "mean")], [1.0, 2.0, 6.0])


@topic.program("all_reduce: with one replica", replicas=1)
def all_reduce_one(d: Library) -> Any:
    return d.strategy.run(
        lambda x: [d.context.all_reduce(op, x) for op in ("sum", "mean")], args=(d.array([1.0, 2.0]),)
    )


@topic.program("all_reduce: a nest")
def all_reduce_nest(d: Library) -> Any:
    components = [{"a": 1.0, "b": (2.0, [3.0])}, {"a": 10.0, "b": (20.0, [30.0])}]
    return _run(d, lambda x: d.context.all_reduce("sum", x), components)


@topic.program("all_reduce: a list")
def all_reduce_list(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_reduce("sum", [x, x * 2.0]), [1.0, 2.0])


@topic.program("all_reduce: the sum of integers")
def all_reduce_integers(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_reduce("sum", x), [1, 2])


@topic.program("all_reduce: the mean of integers")
def all_reduce_mean_of_integers(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_reduce("mean", x), [1, 2])


@topic.program("all_reduce: a value that every replica computes alike")
def all_reduce_same(d: Library) -> Any:
    return d.each(d.strategy.run(lambda: d.context.all_reduce("sum", d.array(3.0) * 2.0)))


@topic.program("all_reduce: one array that all replicas share", differs=SHARED)
def all_reduce_shared(d: Library) -> Any:
    shared = d.array(3.0)
    return d.each(d.strategy.run(lambda: d.context.all_reduce("sum", shared)))


@topic.program("all_reduce: one array that is an argument of all replicas", differs=SHARED)
def all_reduce_argument(d: Library) -> Any:
    return d.each(d.strategy.run(lambda x: d.context.all_reduce("sum", x), args=(d.array(3.0),)))


@topic.program(
    "all_reduce: a Python number",
    differs="A number is an array without dims, and each replica contributes it. TensorFlow crashes.",
)
def all_reduce_number(d: Library) -> Any:
    return d.each(d.strategy.run(lambda: d.context.all_reduce("sum", 5.0)))


@topic.program("all_reduce: the value of a mirrored variable")
def all_reduce_variable(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(3.0)
    return d.each(d.strategy.run(lambda: d.context.all_reduce("sum", v.read_value() * 1.0)))


@topic.program("all_reduce: components of different shapes")
def all_reduce_uneven(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_reduce("sum", x), [[1.0, 2.0], [3.0]])


@topic.program("all_reduce: an unknown op")
def all_reduce_unknown(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_reduce("max", x), [1.0, 2.0])


@topic.program("all_reduce: the gradient of its sum")
def gradient_of_sum(d: Library) -> Any:
    def step(x: Any) -> Any:
        return d.derivative(lambda x: d.context.all_reduce("sum", x * x), x)

    return _run(d, step, [1.0, 2.0])


@topic.program("all_reduce: the gradient of its mean")
def gradient_of_mean(d: Library) -> Any:
    def step(x: Any) -> Any:
        return d.derivative(lambda x: d.context.all_reduce("mean", x * x), x)

    return _run(d, step, [1.0, 2.0])


@topic.program("all_reduce: the gradient of a loss of its own on each replica")
def gradient_of_own_loss(d: Library) -> Any:
    def step(x: Any) -> Any:
        return d.derivative(lambda x: x * d.context.all_reduce("sum", x), x)

    return _run(d, step, [1.0, 2.0])


@topic.program("all_gather along axis 0")
def all_gather(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_gather(x, axis=0), [[1.0, 2.0], [3.0, 6.0]])


@topic.program("all_gather along axis 1")
def all_gather_axis_1(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_gather(x, axis=1), [[[1.0], [2.0]], [[3.0], [6.0]]])


@topic.program("all_gather along axis -1", differs=NEGATIVE_AXIS)
def all_gather_negative_axis(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_gather(x, axis=-1), [[[1.0], [2.0]], [[3.0], [6.0]]])


@topic.program("all_gather a nest")
def all_gather_nest(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_gather(x, axis=0), [{"a": [1.0]}, {"a": [2.0]}])


@topic.program("all_gather uneven sizes")
def all_gather_uneven(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_gather(x, axis=0), [[1.0, 2.0, 3.0], [4.0]])


@topic.program("all_gather scalars")
def all_gather_scalars(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_gather(x, axis=0), [1.0, 2.0])


@topic.program("all_gather: an axis out of range", own_process=True)
def all_gather_out_of_range(d: Library) -> Any:
    return _run(d, lambda x: d.context.all_gather(x, axis=2), [[1.0], [2.0]])


@topic.program("all_gather: its gradient")
def gradient_of_all_gather(d: Library) -> Any:
    def step(x: Any) -> Any:
        weights = d.array([1.0, 10.0, 100.0, 1000.0])
        return d.derivative(lambda x: d.total(d.context.all_gather(x, axis=0) * weights), x)

    return _run(d, step, [[1.0, 2.0], [3.0, 6.0]])


@topic.program("all_gather: its gradient where sizes are uneven")
def gradient_of_uneven_all_gather(d: Library) -> Any:
    def step(x: Any) -> Any:
        weights = d.array([1.0, 10.0, 100.0])
        return d.derivative(lambda x: d.total(d.context.all_gather(x, axis=0) * weights), x)

    return _run(d, step, [[1.0, 2.0], [3.0]])


@topic.program("a collective on one replica only", differs=BRANCH, executors_differ=BRANCH_PER_REPLICA)
def one_replica_only(d: Library) -> Any:
    def step(x: Any) -> Any:
        return d.context.all_reduce("sum", x) if x > 1.5 else x

    return _run(d, step, [1.0, 2.0])


@topic.program("a collective on one replica only, and a good step after it")
def after_one_replica_only(d: Library) -> Any:
    def step(x: Any) -> Any:
        return d.context.all_reduce("sum", x) if x > 1.5 else x

    x = d.per_replica([1.0, 2.0])
    bad = d.attempt(lambda: d.strategy.run(step, args=(x,)))
    good = d.each(d.strategy.run(lambda x: d.context.all_reduce("sum", x), args=(x,)))
    return ["error" in bad, good]
