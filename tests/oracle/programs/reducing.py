"""``reduce``: from across, over the replicas and along an axis."""

from __future__ import annotations

from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("reducing")

SUM_OF_SHARED = "Whether what all replicas share counts once or n times can't be told, so summing it is an error. "


def _pair(d: Library) -> Any:
    return d.per_replica([[1.0, 2.0], [3.0, 6.0]])


def _uneven(d: Library) -> Any:
    return d.per_replica([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0]])


@topic.program("sum and mean across replicas")
def across(d: Library) -> Any:
    return [d.strategy.reduce(op, _pair(d), axis=None) for op in ("sum", "mean")]


@topic.program("sum and mean along axis 0 too")
def along_axis(d: Library) -> Any:
    return [d.strategy.reduce(op, _pair(d), axis=0) for op in ("sum", "mean")]


@topic.program("of what run returns")
def of_results(d: Library) -> Any:
    x = d.strategy.run(lambda x: x * x, args=(_pair(d),))
    return [d.strategy.reduce("sum", x, axis=None), d.strategy.reduce("mean", x, axis=0)]


@topic.program("names of the ops in any case")
def any_case(d: Library) -> Any:
    return [d.strategy.reduce(op, _pair(d), axis=None) for op in ("SUM", "Sum", "MEAN", "mean")]


@topic.program("an unknown op")
def unknown_op(d: Library) -> Any:
    return d.strategy.reduce("max", _pair(d), axis=None)


@topic.program("a negative axis")
def negative_axis(d: Library) -> Any:
    x = d.per_replica([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]])
    return [d.strategy.reduce(op, x, axis=-1) for op in ("sum", "mean")]


@topic.program("several axes")
def several_axes(d: Library) -> Any:
    x = d.per_replica([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]])
    return [d.strategy.reduce(op, x, axis=(0, 1)) for op in ("sum", "mean")]


@topic.program("an axis out of range")
def axis_out_of_range(d: Library) -> Any:
    return d.strategy.reduce("sum", _pair(d), axis=3)


@topic.program("an axis out of range, mean")
def axis_out_of_range_mean(d: Library) -> Any:
    return d.strategy.reduce("mean", _pair(d), axis=3)


@topic.program("uneven sizes along axis 0: 4 and 2 examples are divided by 6")
def uneven(d: Library) -> Any:
    return [d.strategy.reduce(op, _uneven(d), axis=0) for op in ("sum", "mean")]


@topic.program("uneven sizes without an axis")
def uneven_without_axis(d: Library) -> Any:
    return d.strategy.reduce("sum", _uneven(d), axis=None)


@topic.program("one replica has an empty batch: sum")
def empty_sum(d: Library) -> Any:
    empty = d.to_float(d.array([0.0]))[:0]
    x = d.strategy.experimental_distribute_values_from_function(
        lambda ctx: d.array([1.0, 2.0]) if ctx.replica_id_in_sync_group == 0 else empty
    )
    return d.strategy.reduce("sum", x, axis=0)


@topic.program("one replica has an empty batch: mean")
def empty_mean(d: Library) -> Any:
    empty = d.to_float(d.array([0.0]))[:0]
    x = d.strategy.experimental_distribute_values_from_function(
        lambda ctx: d.array([1.0, 2.0]) if ctx.replica_id_in_sync_group == 0 else empty
    )
    return d.strategy.reduce("mean", x, axis=0)


@topic.program("the mean of integers")
def integer_mean(d: Library) -> Any:
    return d.strategy.reduce("mean", d.per_replica([1, 2]), axis=None)


@topic.program("the mean of integers along an axis")
def integer_mean_along_axis(d: Library) -> Any:
    return d.strategy.reduce("mean", d.per_replica([[1, 2], [3, 5]]), axis=0)


@topic.program("the sum of integers")
def integer_sum(d: Library) -> Any:
    return d.strategy.reduce("sum", d.per_replica([[1, 2], [3, 5]]), axis=0)


@topic.program("the mean of a plain value")
def plain_mean(d: Library) -> Any:
    return d.strategy.reduce("mean", d.array(5.0), axis=None)


@topic.program("the mean of a plain array along axis 0")
def plain_mean_along_axis(d: Library) -> Any:
    return d.strategy.reduce("mean", d.array([1.0, 2.0, 6.0]), axis=0)


@topic.program("the sum of a plain value")
def plain_sum(d: Library) -> Any:
    return d.strategy.reduce("sum", d.array(5.0), axis=None)


@topic.program("the sum of a Python 0", differs=SUM_OF_SHARED + "TensorFlow crashes.")
def python_zero_sum(d: Library) -> Any:
    return d.strategy.reduce("sum", 0, axis=None)


@topic.program(
    "the mean of a Python 0", differs="The mean of a value that all replicas share is that value. TensorFlow crashes."
)
def python_zero_mean(d: Library) -> Any:
    return d.strategy.reduce("mean", 0, axis=None)


@topic.program("one replica: a plain value is its own sum and mean", replicas=1)
def one_replica(d: Library) -> Any:
    x = d.array([1.0, 2.0])
    return [d.strategy.reduce(op, x, axis=axis) for op in ("sum", "mean") for axis in (None, 0)]


@topic.program("four replicas", replicas=4)
def four_replicas(d: Library) -> Any:
    x = d.per_replica([[1.0], [2.0], [3.0], [6.0]])
    return [d.strategy.reduce(op, x, axis=axis) for op in ("sum", "mean") for axis in (None, 0)]


@topic.program("a nest")
def nest(d: Library) -> Any:
    x = d.per_replica([{"a": 1.0, "b": (2.0, [3.0])}, {"a": 10.0, "b": (20.0, [30.0])}])
    return d.strategy.reduce("sum", x, axis=None)


@topic.program(
    "a nest along an axis",
    differs="A nest is reduced leaf by leaf, with an axis as without. TensorFlow can't with an axis.",
)
def nest_along_axis(d: Library) -> Any:
    x = d.per_replica([{"a": [1.0, 2.0]}, {"a": [10.0, 20.0]}])
    return d.strategy.reduce("mean", x, axis=0)


@topic.program("inside a replica")
def inside(d: Library) -> Any:
    return d.strategy.run(lambda x: d.strategy.reduce("sum", x, axis=None), args=(_pair(d),))


@topic.program("of an on-read variable")
def of_on_read_variable(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(0.0, "on_read", "none")
        d.strategy.run(lambda x: (v.assign(x), None)[1], args=(d.per_replica([1.0, 2.0]),))
        return [d.strategy.reduce(op, v, axis=None) for op in ("sum", "mean")]


@topic.program("the mean of a mirrored variable")
def mean_of_mirrored_variable(d: Library) -> Any:
    with d.strategy.scope():
        return d.strategy.reduce("mean", d.variable(3.0), axis=None)


@topic.program("the sum of a mirrored variable", differs=SUM_OF_SHARED + "TensorFlow fails an assertion.")
def sum_of_mirrored_variable(d: Library) -> Any:
    with d.strategy.scope():
        return d.strategy.reduce("sum", d.variable(3.0), axis=None)


@topic.program(
    "the sum of one result that all replicas computed alike",
    differs=SUM_OF_SHARED + "What all replicas compute alike is one value in Replicax, and n in TensorFlow.",
)
def sum_of_mirrored_result(d: Library) -> Any:
    x = d.strategy.run(lambda: d.array(3.0) * 2.0)
    return d.strategy.reduce("sum", x, axis=None)


@topic.program("the sum of bools", differs="Bools are counted, as jnp.sum does. TensorFlow has no sum of them.")
def sum_of_bools(d: Library) -> Any:
    return d.strategy.reduce("sum", d.per_replica([True, True]), axis=None)


@topic.program("the default strategy: a plain value is its own sum and mean")
def default_strategy(d: Library) -> Any:
    default = d.distribute.get_strategy()
    return [default.reduce(op, d.array([1.0, 2.0]), axis=None) for op in ("sum", "mean")]
