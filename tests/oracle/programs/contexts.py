"""Where we are: the default context, scopes, replicas; and what is refused where."""

from __future__ import annotations

import copy
from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("contexts")

ACROSS_ONLY = (
    "What looks at all replicas is an error inside one, with the way across in its message. TensorFlow lets it pass, "
    "and each replica does it for all."
)


def _where(d: Library) -> dict[str, Any]:
    """Everything that can be asked about where we are."""
    context = d.context
    return {
        "has_strategy": d.distribute.has_strategy(),
        "ours": d.distribute.get_strategy() is d.strategy,
        "cross": d.distribute.in_cross_replica_context(),
        "replicas": d.distribute.get_strategy().num_replicas_in_sync,
        "context": context is not None,
        "of the context": None if context is None else [context.num_replicas_in_sync, context.strategy is d.strategy],
    }


@topic.program("outside everything")
def outside(d: Library) -> Any:
    return [_where(d), int(d.context.replica_id_in_sync_group)]


@topic.program("inside a scope")
def inside_scope(d: Library) -> Any:
    with d.strategy.scope():
        return _where(d)


@topic.program("inside a scope of one replica", replicas=1)
def inside_scope_of_one(d: Library) -> Any:
    with d.strategy.scope():
        return _where(d)


@topic.program("after a scope")
def after_scope(d: Library) -> Any:
    with d.strategy.scope():
        pass
    return _where(d)


@topic.program("inside a replica")
def inside_replica(d: Library) -> Any:
    return d.each(d.strategy.run(lambda: _where(d)))


@topic.program("inside a replica of one", replicas=1)
def inside_replica_of_one(d: Library) -> Any:
    return d.strategy.run(lambda: _where(d))


@topic.program("scope gives the strategy")
def scope_gives(d: Library) -> Any:
    with d.strategy.scope() as s:
        return s is d.strategy


@topic.program("num_replicas_in_sync", replicas=3)
def num_replicas(d: Library) -> Any:
    return d.strategy.num_replicas_in_sync


@topic.program("the numbers of the replicas", replicas=4)
def replica_ids(d: Library) -> Any:
    return d.each(d.strategy.run(lambda: d.context.replica_id_in_sync_group + 0))


@topic.program("the number of the only replica", replicas=1)
def only_replica_id(d: Library) -> Any:
    return d.strategy.run(lambda: d.context.replica_id_in_sync_group + 0)


@topic.program("the same scope twice")
def same_scope_twice(d: Library) -> Any:
    with d.strategy.scope(), d.strategy.scope():
        return _where(d)


@topic.program("another strategy's scope inside a scope")
def other_scope(d: Library) -> Any:
    other = d.new_strategy(2)
    with d.strategy.scope(), other.scope():
        return "entered"


@topic.program("a scope inside a replica")
def scope_in_replica(d: Library) -> Any:
    def step() -> Any:
        with d.strategy.scope():
            return _where(d)

    return d.each(d.strategy.run(step))


@topic.program("another strategy's scope inside a replica")
def other_scope_in_replica(d: Library) -> Any:
    other = d.new_strategy(2)

    def step() -> Any:
        with other.scope():
            return "entered"

    return d.each(d.strategy.run(step))


@topic.program(
    "scopes left in the wrong order",
    differs=(
        "The order of scopes is checked always. TensorFlow counts how often its scope was entered again, and looks "
        "no further."
    ),
    own_process=True,
)
def wrong_order(d: Library) -> Any:
    first, second = d.strategy.scope(), d.strategy.scope()
    first.__enter__()
    second.__enter__()
    left_first = d.attempt(lambda: (first.__exit__(None, None, None), None)[1])
    left_second = d.attempt(lambda: (second.__exit__(None, None, None), None)[1])
    return [left_first, left_second]


@topic.program("after an error in a scope")
def error_in_scope(d: Library) -> Any:
    try:
        with d.strategy.scope():
            raise KeyError("from inside")
    except KeyError:
        return _where(d)


@topic.program("after an error in a replica")
def error_in_replica(d: Library) -> Any:
    def step() -> Any:
        raise KeyError("from inside")

    return [d.attempt(lambda: d.strategy.run(step)), _where(d)]


@topic.program(
    "an error on one replica only",
    differs=(
        "A compiled step has one Python run for all replicas, so one replica alone can't raise: its branch is refused."
    ),
    executors_differ="In the per-replica executor one replica can raise, and its error comes out as it is.",
)
def error_on_one_replica(d: Library) -> Any:
    def step(x: Any) -> Any:
        if x > 1.5:
            raise KeyError("from inside")
        return x

    return d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),))


@topic.program("run inside run")
def run_inside_run(d: Library) -> Any:
    return d.strategy.run(lambda: d.strategy.run(lambda: 1))


@topic.program("run inside another strategy's scope")
def run_in_other_scope(d: Library) -> Any:
    other = d.new_strategy(2)
    with other.scope():
        return d.each(d.strategy.run(lambda: d.array(1.0) * 2.0))


@topic.program("run inside another strategy's run")
def run_in_other_run(d: Library) -> Any:
    other = d.new_strategy(2)
    return other.run(lambda: d.strategy.run(lambda: 1))


@topic.program("local_results inside a replica", differs=ACROSS_ONLY)
def local_results_in_replica(d: Library) -> Any:
    return d.strategy.run(lambda x: d.strategy.experimental_local_results(x), args=(d.per_replica([1.0, 2.0]),))


@topic.program("distribute_values_from_function inside a replica", differs=ACROSS_ONLY)
def values_in_replica(d: Library) -> Any:
    return d.strategy.run(lambda: d.per_replica([1.0, 2.0]))


@topic.program(
    "apply_gradients in a scope, across replicas",
    differs="Gradients are a replica's, and the error says so. TensorFlow's optimizer fails on a missing context.",
)
def apply_gradients_across(d: Library) -> Any:
    with d.strategy.scope():
        v, optimizer = d.variable(1.0), d.optimizer("sgd")
        optimizer.apply_gradients([(d.array(1.0), v)])
        return d.each(v)


@topic.program("a variable of another strategy in a replica")
def other_variable(d: Library) -> Any:
    with d.new_strategy(2).scope():
        v = d.variable(1.0)
    return d.each(d.strategy.run(lambda: v.read_value() + 1.0))


@topic.program("a variable made in another strategy's scope, assigned in a replica")
def other_variable_assigned(d: Library) -> Any:
    with d.new_strategy(2).scope():
        v = d.variable(1.0, "on_write", "mean")
    d.strategy.run(lambda: (v.assign(2.0), None)[1])
    return d.each(v)


@topic.program(
    "a variable made outside every scope, read in a replica",
    differs=(
        "A variable lives on the devices of the strategy that it was made under. TensorFlow lets a step read a "
        "variable of one device, and copies it to the others each time."
    ),
)
def outside_variable(d: Library) -> Any:
    v = d.variable(1.0)
    return d.each(d.strategy.run(lambda: v.read_value() + 1.0))


@topic.program("set_strategy outside every scope", own_process=True)
def set_strategy(d: Library) -> Any:
    d.set_strategy(d.strategy)
    inside = _where(d)
    d.set_strategy(None)
    return [inside, _where(d)]


@topic.program("set_strategy inside a scope", own_process=True)
def set_strategy_in_scope(d: Library) -> Any:
    with d.strategy.scope():
        d.set_strategy(d.strategy)


@topic.program("set_strategy inside a replica", own_process=True)
def set_strategy_in_replica(d: Library) -> Any:
    return d.strategy.run(lambda: d.set_strategy(d.strategy))


@topic.program("another strategy's scope after set_strategy", own_process=True)
def scope_after_set_strategy(d: Library) -> Any:
    d.set_strategy(d.strategy)
    with d.new_strategy(2).scope():
        return "entered"


@topic.program("the default strategy: run and local_results")
def default_strategy(d: Library) -> Any:
    default = d.distribute.get_strategy()
    x = default.run(lambda x: x + 1.0, args=(d.array(1.0),))
    return [x, default.experimental_local_results(x), default.num_replicas_in_sync]


@topic.program("a strategy is copied")
def copied(d: Library) -> Any:
    return copy.copy(d.strategy) is d.strategy


@topic.program("a strategy is copied deeply")
def copied_deeply(d: Library) -> Any:
    other = copy.deepcopy(d.strategy)
    return [other is d.strategy, other.num_replicas_in_sync]
