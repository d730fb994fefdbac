"""Values with a component for each replica: making them, taking them apart, and the structures around them."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("values and nests")


class Pair(NamedTuple):
    """A structure."""

    left: Any
    right: Any


@topic.program("distribute_values_from_function: what the function is told", replicas=3)
def value_context(d: Library) -> Any:
    x = d.strategy.experimental_distribute_values_from_function(
        lambda ctx: d.array(float(10 * ctx.num_replicas_in_sync + ctx.replica_id_in_sync_group))
    )
    return d.each(x)


@topic.program("distribute_values_from_function: with one replica, too, it wraps", replicas=1)
def wraps_one(d: Library) -> Any:
    return d.per_replica([1.0])


@topic.program("distribute_values_from_function: a nest")
def makes_nest(d: Library) -> Any:
    return d.per_replica([{"a": 1.0, "b": (2.0, [3.0])}, {"a": 4.0, "b": (5.0, [6.0])}])


@topic.program("distribute_values_from_function: a namedtuple")
def makes_namedtuple(d: Library) -> Any:
    return d.per_replica([Pair(1.0, (2.0,)), Pair(3.0, (4.0,))])


@topic.program("distribute_values_from_function: Python numbers")
def makes_numbers(d: Library) -> Any:
    x = d.strategy.experimental_distribute_values_from_function(lambda ctx: float(ctx.replica_id_in_sync_group))
    return d.each(x)


@topic.program(
    "distribute_values_from_function: structures differ",
    differs="Both refuse it; Replicax says what differs, with a ValueError, where TensorFlow fails an assertion.",
)
def structures_differ(d: Library) -> Any:
    return d.per_replica([{"a": 1.0}, {"b": 1.0}])


@topic.program("distribute_values_from_function: the same array for every replica")
def makes_same(d: Library) -> Any:
    x = d.array(1.0)
    return d.strategy.experimental_distribute_values_from_function(lambda ctx: x)


@topic.program("local_results of a per-replica value")
def local_results(d: Library) -> Any:
    return d.strategy.experimental_local_results(d.per_replica([1.0, 2.0]))


@topic.program("local_results of a nest: a nest for each replica")
def local_results_of_nest(d: Library) -> Any:
    x = d.per_replica([{"a": 1.0, "b": (2.0, [3.0])}, {"a": 4.0, "b": (5.0, [6.0])}])
    return d.strategy.experimental_local_results(x)


@topic.program("local_results of a nest with plain leaves: they are repeated")
def local_results_with_plain(d: Library) -> Any:
    x = [d.per_replica([1.0, 2.0]), 7, "text", None]
    return d.strategy.experimental_local_results(x)


@topic.program("local_results of a plain array")
def local_results_of_array(d: Library) -> Any:
    return d.strategy.experimental_local_results(d.array([1.0, 2.0]))


@topic.program("local_results of Python objects")
def local_results_of_objects(d: Library) -> Any:
    return [d.strategy.experimental_local_results(x) for x in (1, "text", None, [1, 2], (1,), {"a": 1})]


@topic.program("local_results of a plain array with one replica", replicas=1)
def local_results_of_one(d: Library) -> Any:
    return d.strategy.experimental_local_results(d.array(1.0))


@topic.program("local_results of a mirrored variable")
def local_results_of_variable(d: Library) -> Any:
    with d.strategy.scope():
        return d.strategy.experimental_local_results(d.variable(1.0))


@topic.program("a list through run")
def through_list(d: Library) -> Any:
    return d.strategy.run(lambda x: [x, x * 2.0], args=(d.per_replica([1.0, 2.0]),))


@topic.program("a tuple through run")
def through_tuple(d: Library) -> Any:
    return d.strategy.run(lambda x: (x[1], x[0]), args=(d.per_replica([(1.0, 2.0), (3.0, 4.0)]),))


@topic.program("a namedtuple through run")
def through_namedtuple(d: Library) -> Any:
    return d.strategy.run(lambda p: Pair(p.right, p.left), args=(d.per_replica([Pair(1.0, 2.0), Pair(3.0, 4.0)]),))


@topic.program("a dict through run")
def through_dict(d: Library) -> Any:
    return d.strategy.run(lambda x: {"b": x["a"], "a": x["b"]}, args=(d.per_replica([{"a": 1.0, "b": 2.0}] * 2),))


@topic.program("None inside structures through run")
def through_none(d: Library) -> Any:
    x = d.per_replica([1.0, 2.0])
    return d.strategy.run(lambda t: {"x": t["x"], "none": t["none"], "new": (None,)}, args=({"x": x, "none": None},))


@topic.program("empty structures through run")
def through_empty(d: Library) -> Any:
    return d.strategy.run(lambda t: {"args": t, "list": [], "tuple": (), "dict": {}}, args=([],))


@topic.program("deep nests through run")
def through_deep(d: Library) -> Any:
    x = d.per_replica([[1.0, 2.0], [3.0, 4.0]])
    return d.strategy.run(lambda t: [t[0]["a"][1], {"b": Pair(t[0]["a"][0], 1)}], args=([{"a": (x, x)}],))


@topic.program("values: a per-replica value's components")
def values(d: Library) -> Any:
    return d.per_replica([1.0, 2.0]).values


@topic.program("a per-replica value is no array: it can't be added to")
def no_array(d: Library) -> Any:
    return d.per_replica([1.0, 2.0]) + 1.0


@topic.program(
    "a per-replica value has no truth",
    differs="It holds one value for each replica, and none of them is its truth. In TensorFlow it is always true.",
)
def no_truth(d: Library) -> Any:
    return bool(d.per_replica([0.0, 1.0]))
