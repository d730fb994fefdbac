"""``strategy.extended``: the lower level of the contract."""

from __future__ import annotations

from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("extended")


def _one_two(d: Library) -> Any:
    return d.per_replica([1.0, 2.0])


def _made(d: Library, synchronization: str = "auto", aggregation: str = "none") -> Any:
    with d.strategy.scope():
        return d.variable(10.0, synchronization, aggregation)


def _everywhere(d: Library, value: Any) -> Any:
    """The one value that lies on all devices: some of them wrap it, and then every copy must be the same."""
    copies = [d.to_plain(v) for v in d.each(value)]
    return copies[0] if all(copy == copies[0] for copy in copies) else copies


@topic.program("reduce_to a variable's devices")
def reduce_to_variable(d: Library) -> Any:
    v, x, ops = _made(d), _one_two(d), d.distribute.ReduceOp
    with d.strategy.scope():
        return [_everywhere(d, d.strategy.extended.reduce_to(op, x, v)) for op in (ops.SUM, ops.MEAN)]


@topic.program("reduce_to a device")
def reduce_to_device(d: Library) -> Any:
    return _everywhere(d, d.strategy.extended.reduce_to(d.distribute.ReduceOp.SUM, _one_two(d), "cpu:0"))


@topic.program("reduce_to where the value is")
def reduce_to_itself(d: Library) -> Any:
    x = _one_two(d)
    return _everywhere(d, d.strategy.extended.reduce_to(d.distribute.ReduceOp.SUM, x, x))


@topic.program("reduce_to: names of ops")
def reduce_to_named(d: Library) -> Any:
    return _everywhere(d, d.strategy.extended.reduce_to("sum", _one_two(d), _made(d)))


@topic.program("reduce_to: the mean of a plain value")
def reduce_to_plain_mean(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0)
        return _everywhere(d, d.strategy.extended.reduce_to(d.distribute.ReduceOp.MEAN, d.array(5.0), v))


@topic.program("reduce_to: the sum of a plain value")
def reduce_to_plain_sum(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0)
        return _everywhere(d, d.strategy.extended.reduce_to(d.distribute.ReduceOp.SUM, d.array(5.0), v))


@topic.program(
    "reduce_to: the sum of a Python 0",
    differs="What all replicas share can't be summed, and the error says so. TensorFlow crashes.",
)
def reduce_to_zero(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0)
        return _everywhere(d, d.strategy.extended.reduce_to(d.distribute.ReduceOp.SUM, 0, v))


@topic.program("reduce_to inside a replica")
def reduce_to_in_replica(d: Library) -> Any:
    v, ops = _made(d), d.distribute.ReduceOp
    step: Any = lambda x: d.strategy.extended.reduce_to(ops.SUM, x, v)  # noqa: E731
    return d.each(d.strategy.run(step, args=(_one_two(d),)))


@topic.program("batch_reduce_to: several at once, in order")
def batch_reduce_to(d: Library) -> Any:
    v, w, ops = _made(d), _made(d), d.distribute.ReduceOp
    pairs = [(_one_two(d), v), (d.per_replica([[1.0, 2.0], [3.0, 4.0]]), w)]
    with d.strategy.scope():
        results = [d.strategy.extended.batch_reduce_to(op, pairs) for op in (ops.SUM, ops.MEAN)]
        return [[_everywhere(d, value) for value in result] for result in results]


@topic.program("batch_reduce_to: nothing", differs="Of nothing there are no results. TensorFlow crashes.")
def batch_reduce_to_nothing(d: Library) -> Any:
    with d.strategy.scope():
        return list(d.strategy.extended.batch_reduce_to(d.distribute.ReduceOp.SUM, []))


@topic.program("broadcast_to a variable's devices")
def broadcast_to(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0)
        return d.each(d.strategy.extended.broadcast_to(d.array(5.0), v))


@topic.program("update: every copy is changed")
def update(d: Library) -> Any:
    v = _made(d)
    with d.strategy.scope():
        d.strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(d.array(2.0),))
        return d.each(v)


@topic.program("update: arguments by name")
def update_by_name(d: Library) -> Any:
    v = _made(d)
    with d.strategy.scope():
        d.strategy.extended.update(v, lambda v, *, x: v.assign_sub(x), kwargs={"x": 2.0})
        return d.each(v)


@topic.program("update, group=False: a result for each device")
def update_ungrouped(d: Library) -> Any:
    v = _made(d)
    with d.strategy.scope():
        results = d.strategy.extended.update(v, lambda v, x: x * 2.0, args=(d.array(2.0),), group=False)
        return [d.to_plain(r) for r in results]


@topic.program("update: the argument has been reduced to the variable")
def update_reduced(d: Library) -> Any:
    v = _made(d)
    with d.strategy.scope():
        total = d.strategy.extended.reduce_to(d.distribute.ReduceOp.SUM, _one_two(d), v)
        d.strategy.extended.update(v, lambda v, x: v.assign_sub(x), args=(total,))
        return d.each(v)


@topic.program(
    "update: the argument differs between replicas",
    differs=(
        "The copies of a mirrored variable would drift apart: reduce the argument first. TensorFlow gives each copy "
        "its own."
    ),
)
def update_per_replica(d: Library) -> Any:
    v = _made(d)
    with d.strategy.scope():
        d.strategy.extended.update(v, lambda v, x: v.assign(x), args=(_one_two(d),))
        return d.each(v)


@topic.program(
    "update inside a replica",
    differs=(
        "update changes all copies alike, and belongs across replicas: reach it by merge_call, or assign inside the "
        "step. TensorFlow lets each replica update its own copy."
    ),
)
def update_in_replica(d: Library) -> Any:
    v = _made(d)
    d.strategy.run(lambda: (d.strategy.extended.update(v, lambda v: v.assign(1.0)), None)[1])
    return d.each(v)


@topic.program(
    "update of what is no variable",
    differs="Both refuse it; Replicax says what it got, with a TypeError, where TensorFlow fails an assertion.",
)
def update_no_variable(d: Library) -> Any:
    with d.strategy.scope():
        return d.strategy.extended.update(1.0, lambda v: v)


@topic.program("update_non_slot on non_slot_devices")
def update_non_slot(d: Library) -> Any:
    v, counter = _made(d), _made(d)
    with d.strategy.scope():
        devices = d.strategy.extended.non_slot_devices([v])
        results = d.strategy.extended.update_non_slot(devices, lambda x: x * 2.0, args=(d.array(3.0),), group=False)
        return [len(devices), [d.to_plain(r) for r in results], d.each(counter)]


@topic.program("non_slot_devices are the devices of the variables")
def non_slot_devices(d: Library) -> Any:
    v = _made(d)
    return tuple(d.strategy.extended.non_slot_devices([v])) == tuple(d.strategy.extended.parameter_devices)


@topic.program("how many devices work and hold variables", replicas=3)
def devices(d: Library) -> Any:
    return [len(d.strategy.extended.worker_devices), len(d.strategy.extended.parameter_devices)]


@topic.program("colocate_vars_with a variable")
def colocate(d: Library) -> Any:
    v = _made(d)
    with d.strategy.scope(), d.strategy.extended.colocate_vars_with(v):
        w = d.variable(3.0)
    return [d.each(w), d.strategy.extended.variable_created_in_scope(w)]


@topic.program(
    "colocate_vars_with another strategy's variable",
    differs="Both refuse it; all that belongs to another strategy is a ContextError, which is a RuntimeError.",
)
def colocate_other(d: Library) -> Any:
    with d.new_strategy(2).scope():
        v = d.variable(1.0)
    with d.strategy.scope(), d.strategy.extended.colocate_vars_with(v):
        return d.each(d.variable(3.0))


@topic.program("variable_created_in_scope")
def created_in_scope(d: Library) -> Any:
    ours = _made(d)
    with d.new_strategy(2).scope():
        theirs = d.variable(1.0)
    outside = d.variable(1.0)
    return [d.strategy.extended.variable_created_in_scope(v) for v in (ours, theirs, outside)]


@topic.program("read_var of a mirrored variable")
def read_var(d: Library) -> Any:
    v = _made(d)
    with d.strategy.scope():
        return d.strategy.extended.read_var(v)


@topic.program("read_var of on-read variables")
def read_var_on_read(d: Library) -> Any:
    variables = [_made(d, "on_read", aggregation) for aggregation in ("sum", "mean", "only_first_replica")]

    def step(x: Any) -> None:
        for v in variables:
            v.assign(x)

    d.strategy.run(step, args=(_one_two(d),))
    with d.strategy.scope():
        return [d.strategy.extended.read_var(v) for v in variables]


@topic.program("should_init, should_checkpoint, should_save_summary, between_graph")
def should(d: Library) -> Any:
    e = d.strategy.extended
    return [e.experimental_should_init, e.should_checkpoint, e.should_save_summary, e.experimental_between_graph]


@topic.program(
    "value_container of a component",
    differs="A component knows the value that it belongs to. In TensorFlow only variables do.",
)
def value_container(d: Library) -> Any:
    x = _one_two(d)
    component = d.strategy.experimental_local_results(x)[1]
    return d.strategy.extended.value_container(component) is x


@topic.program(
    "value_container of a variable's copy",
    differs="The copies of a variable are arrays, which are the variable's value and not part of it.",
)
def value_container_of_copy(d: Library) -> Any:
    v = _made(d)
    copy = d.strategy.experimental_local_results(v)[1]
    return d.strategy.extended.value_container(copy) is v


@topic.program("value_container of a plain array")
def value_container_of_plain(d: Library) -> Any:
    x = d.array(1.0)
    return d.strategy.extended.value_container(x) is x


@topic.program("call_for_each_replica is run")
def call_for_each_replica(d: Library) -> Any:
    with d.strategy.scope():
        return d.each(d.strategy.extended.call_for_each_replica(lambda x: x * 2.0, args=(_one_two(d),)))
