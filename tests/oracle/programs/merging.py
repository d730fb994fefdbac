"""``merge_call``: from inside a replica across, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.oracle.library import Library
from tests.oracle.program import Topic
from tests.oracle.reasons import BRANCH, BRANCH_PER_REPLICA

topic = Topic("merge_call")


class Pair(NamedTuple):
    """A structure."""

    left: Any
    right: Any


def _run(d: Library, merge_fn: Any, components: list[Any] | None = None) -> Any:
    """What each replica gets from a ``merge_call`` with its component."""
    x = d.per_replica(components or [1.0, 2.0])
    return d.each(d.strategy.run(lambda x: d.context.merge_call(merge_fn, args=(x,)), args=(x,)))


@topic.program("arguments differ between replicas, and can be reduced")
def reduces(d: Library) -> Any:
    return _run(d, lambda strategy, x: strategy.reduce("sum", x, axis=None))


@topic.program("the argument returned: each replica has its own again")
def returns_argument(d: Library) -> Any:
    return _run(d, lambda strategy, x: x)


@topic.program("each replica sees all components")
def all_components(d: Library) -> Any:
    return _run(d, lambda strategy, x: list(strategy.experimental_local_results(x)))


@topic.program("a nest of arguments")
def nested_arguments(d: Library) -> Any:
    def merge(strategy: Any, tree: Any, scale: float) -> Any:
        total = strategy.reduce("sum", tree["a"], axis=None)
        first, second = strategy.experimental_local_results(tree["b"][1])
        return total * scale + first - second

    def step(x: Any) -> Any:
        return d.context.merge_call(merge, args=({"a": x, "b": [x, x * 10.0]}, 100.0))

    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("arguments by name")
def by_name(d: Library) -> Any:
    def merge(strategy: Any, *, x: Any) -> Any:
        return strategy.reduce("mean", x, axis=None)

    def step(x: Any) -> Any:
        return d.context.merge_call(merge, kwargs={"x": x})

    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("a nest returned")
def nested_result(d: Library) -> Any:
    return _run(d, lambda strategy, x: Pair({"mine": x}, (strategy.reduce("sum", x, axis=None), None, "text")))


@topic.program("its context: across replicas, with this strategy")
def its_context(d: Library) -> Any:
    def merge(strategy: Any) -> Any:
        return (
            d.distribute.in_cross_replica_context(),
            d.context is None,
            strategy is d.strategy,
            d.distribute.get_strategy() is d.strategy,
        )

    return d.each(d.strategy.run(lambda: d.context.merge_call(merge)))


@topic.program("the same context afterwards")
def context_afterwards(d: Library) -> Any:
    def step() -> Any:
        before = d.context
        d.context.merge_call(lambda strategy: None)
        return d.context is before

    return d.each(d.strategy.run(step))


@topic.program("two in a row")
def two_in_a_row(d: Library) -> Any:
    def step(x: Any) -> Any:
        x = x - d.context.merge_call(lambda s, x: s.reduce("mean", x, axis=None), args=(x,))
        return d.context.merge_call(lambda s, x: s.reduce("sum", x, axis=None), args=(x * x,))

    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 4.0]),)))


@topic.program(
    "in it, a step is run",
    differs=(
        "A step is one program, in the middle of which no other can start. What that step would do can be done by "
        "the step itself."
    ),
)
def runs_inside(d: Library) -> Any:
    return _run(d, lambda strategy, x: strategy.run(lambda x: x + 1.0, args=(x,)))


@topic.program("in it, a mirrored variable is assigned the reduced value")
def assigns(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0)

    def merge(strategy: Any, x: Any) -> None:
        v.assign(strategy.reduce("sum", x, axis=None))

    d.strategy.run(lambda x: d.context.merge_call(merge, args=(x,)), args=(d.per_replica([1.0, 2.0]),))
    return d.each(v)


@topic.program("in it, on-read variables are read")
def reads_on_read(d: Library) -> Any:
    with d.strategy.scope():
        variables = [d.variable(10.0, "on_read", a) for a in ("sum", "mean", "only_first_replica")]

    def step(x: Any) -> Any:
        for v in variables:
            v.assign(x)
        return d.context.merge_call(lambda strategy: [v.read_value() + 0.0 for v in variables])

    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("in it, on-read variables are assigned")
def assigns_on_read(d: Library) -> Any:
    with d.strategy.scope():
        variables = [d.variable(10.0, "on_read", a) for a in ("sum", "mean", "only_first_replica")]

    def merge(strategy: Any) -> None:
        for v in variables:
            v.assign(6.0)

    d.strategy.run(lambda: d.context.merge_call(merge))
    return [d.each(v) for v in variables]


@topic.program("a variable among the arguments arrives as itself")
def variable_argument(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0)
    return d.each(d.strategy.run(lambda: d.context.merge_call(lambda strategy, w: w is v, args=(v,))))


@topic.program("in it, a variable is updated")
def updates(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0)

    def merge(strategy: Any, x: Any) -> None:
        total = strategy.extended.reduce_to(d.distribute.ReduceOp.SUM, x, v)
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(total,))

    d.strategy.run(lambda x: d.context.merge_call(merge, args=(x,)), args=(d.per_replica([1.0, 2.0]),))
    return d.each(v)


@topic.program("in it, an error is raised")
def raises(d: Library) -> Any:
    def merge(strategy: Any, x: Any) -> None:
        raise IndexError("from inside")

    return _run(d, merge)


@topic.program("on one replica only", differs=BRANCH, executors_differ=BRANCH_PER_REPLICA)
def one_replica_only(d: Library) -> Any:
    def step(x: Any) -> Any:
        return d.context.merge_call(lambda strategy, x: x, args=(x,)) if x > 1.5 else x

    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("in the default context, outside every scope")
def default_context(d: Library) -> Any:
    return d.context.merge_call(
        lambda strategy, x: [d.distribute.in_cross_replica_context(), x + 1.0], args=(d.array(1.0),)
    )


@topic.program("of a context that is no longer current")
def stale_context(d: Library) -> Any:
    kept: list[Any] = []
    d.strategy.run(lambda: kept.append(d.context))
    return kept[0].merge_call(lambda strategy: 1)


@topic.program("merge_call inside merge_fn")
def nested(d: Library) -> Any:
    def step(x: Any) -> Any:
        context = d.context
        return context.merge_call(lambda strategy: context.merge_call(lambda strategy: 1))

    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("with one replica values are bare", replicas=1)
def one_replica(d: Library) -> Any:
    def step(x: Any) -> Any:
        return d.context.merge_call(lambda s, x: [s.reduce("sum", x, axis=None), x * 2.0], args=(x,))

    return d.strategy.run(step, args=(d.array(3.0),))
