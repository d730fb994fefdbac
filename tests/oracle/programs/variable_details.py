"""Variables beyond the table: how they are made, what they refuse, what they act like."""

from __future__ import annotations

from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("variables in detail")

SPLIT = (
    "TensorFlow gives each copy of a mirrored variable another value, even if there is an aggregation. A mirrored "
    "variable never diverges silently: reduce the value first."
)


@topic.program("the defaults: is it trainable?")
def defaults(d: Library) -> Any:
    with d.strategy.scope():
        return [d.variable(1.0).trainable, d.variable(1.0, "on_read", "sum").trainable]


@topic.program("trainable=False is kept")
def not_trainable(d: Library) -> Any:
    with d.strategy.scope():
        return d.variable(1.0, trainable=False).trainable


@topic.program(
    "a trainable on-read variable is refused",
    differs="The copies of an on-read variable differ, and gradients would drive them further apart.",
)
def trainable_on_read(d: Library) -> Any:
    with d.strategy.scope():
        return d.variable(1.0, "on_read", "sum", trainable=True)


@topic.program("the initial value is a function")
def initial_function(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(lambda: d.array([1.0, 2.0]))
        return [v.read_value(), d.each(v)]


@topic.program("its shape and dtype")
def shape_and_dtype(d: Library) -> Any:
    with d.strategy.scope():
        variables = [d.variable([[1.0, 2.0]]), d.variable(3), d.variable(True)]
        return [[list(v.shape), getattr(v.dtype, "name", None)] for v in variables]


@topic.program("an integer on-write variable with mean, assigned 1 and 2 in replicas")
def integer_mean_assigned(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10, "on_write", "mean")
    d.strategy.run(lambda x: (v.assign(x), None)[1], args=(d.per_replica([1, 2]),))
    with d.strategy.scope():
        return v.read_value()


@topic.program("an integer on-read variable with mean is made")
def integer_mean_on_read(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10, "on_read", "mean")
    d.strategy.run(lambda x: (v.assign(x), None)[1], args=(d.per_replica([1, 2]),))
    with d.strategy.scope():
        return v.read_value()


@topic.program("an integer on-write variable with sum")
def integer_sum(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10, "on_write", "sum")
        d.strategy.run(lambda x: (v.assign_add(x), None)[1], args=(d.per_replica([1, 2]),))
        return [v.read_value(), d.each(v)]


@topic.program(
    "an integer on-read sum variable, 7 assigned from across to 2 replicas",
    differs="What was assigned is what is read: replica 0 gets the remainder, which TensorFlow loses.",
)
def integer_share(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(0, "on_read", "sum")
        v.assign(7)
        return [v.read_value(), d.each(v)]


@topic.program("an on-write variable is assigned a per-replica value from across", differs=SPLIT)
def cross_assign_per_replica(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0)
        v.assign(d.per_replica([1.0, 2.0]))
        return d.each(v)


@topic.program("an on-write sum variable is assigned a per-replica value from across", differs=SPLIT)
def cross_assign_per_replica_sum(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0, "on_write", "sum")
        v.assign(d.per_replica([1.0, 2.0]))
        return d.each(v)


@topic.program("the initial value is per replica")
def initial_per_replica(d: Library) -> Any:
    with d.strategy.scope():
        return d.each(d.variable(d.per_replica([1.0, 2.0])))


@topic.program("a value of another shape is assigned")
def assign_other_shape(d: Library) -> Any:
    with d.strategy.scope():
        return d.variable([1.0, 2.0]).assign([1.0, 2.0, 3.0])


@topic.program("a float is assigned to an integer variable", differs="Both refuse it; a wrong dtype is a TypeError.")
def assign_float_to_integer(d: Library) -> Any:
    with d.strategy.scope():
        return d.variable(1).assign(d.array(1.5))


@topic.program("a failed assignment changes nothing")
def failed_assignment(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable([1.0, 2.0])
        return [d.attempt(lambda: v.assign([1.0, 2.0, 3.0])), d.each(v)]


@topic.program("operators")
def operators(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable([1.0, 2.0, 4.0])
        return [v + 1.0, 1.0 - v, v * v, v / 2.0, -v, v**2.0, v[1:], v > 1.5]


@topic.program("operators in replicas, with a variable of each kind")
def operators_in_replicas(d: Library) -> Any:
    with d.strategy.scope():
        v, w = d.variable([1.0, 2.0]), d.variable(3.0, "on_read", "sum")
        return d.each(d.strategy.run(lambda x: v * x + w, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("outside the scope a variable is read and assigned as in it")
def outside_the_scope(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(10.0, "on_write", "mean")
    v.assign(6.0)
    v.assign_add(1.0)
    return [v.read_value(), d.each(v)]


@topic.program("outside the scope an on-read sum variable is read")
def on_read_outside_the_scope(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(0.0, "on_read", "sum")
    d.strategy.run(lambda x: (v.assign(x), None)[1], args=(d.per_replica([1.0, 2.0]),))
    return v.read_value()


@topic.program("assigned twice in a step")
def assigned_twice(d: Library) -> Any:
    def step(x: Any) -> Any:
        v.assign_add(x)
        v.assign(v.read_value() * 2.0)
        return v.read_value() + 0.0

    with d.strategy.scope():
        v = d.variable(10.0, "on_write", "mean")
        return [d.each(d.strategy.run(step, args=(d.per_replica([1.0, 3.0]),))), d.each(v)]


@topic.program("made inside a step, which runs twice")
def made_in_a_step(d: Library) -> Any:
    made: list[Any] = []

    def step() -> Any:
        if not made:
            made.append(d.variable(1.0))
        return made[0].assign_add(1.0).read_value() + 0.0

    return [d.each(d.strategy.run(step)) for _ in range(2)]


@topic.program(
    "made anew by each run of a step",
    differs=(
        "The Python of a step runs once, so it makes its variables once, as in a tf.function. TensorFlow, running "
        "eagerly, makes a new one each time."
    ),
)
def made_anew(d: Library) -> Any:
    def step() -> Any:
        return d.variable(1.0).assign_add(1.0).read_value() + 0.0

    return [d.each(d.strategy.run(step)) for _ in range(2)]


@topic.program("three replicas: mean, sum and the first", replicas=3)
def three_replicas(d: Library) -> Any:
    def step(x: Any) -> None:
        for v in variables:
            v.assign(x)

    with d.strategy.scope():
        kinds = [(s, a) for s in ("on_write", "on_read") for a in ("sum", "mean", "only_first_replica")]
        variables = [d.variable(10.0, *kind) for kind in kinds]
        d.strategy.run(step, args=(d.per_replica([1.0, 2.0, 6.0]),))
        return [[v.read_value(), d.each(v)] for v in variables]


@topic.program("one replica: every kind is an ordinary variable", replicas=1)
def one_replica(d: Library) -> Any:
    def step(x: Any) -> None:
        for v in variables:
            v.assign_add(x)

    with d.strategy.scope():
        kinds = [(s, a) for s in ("on_write", "on_read") for a in ("sum", "mean", "only_first_replica")]
        variables = [d.variable(10.0, "on_write", "none"), *(d.variable(10.0, *kind) for kind in kinds)]
        d.strategy.run(step, args=(d.array(1.0),))
        return [[v.read_value(), d.each(v)] for v in variables]


@topic.program(
    "one replica: an on-read variable without aggregation is read",
    replicas=1,
    differs="A single copy is a single value, which can be read. TensorFlow asks for an aggregation all the same.",
)
def one_replica_on_read(d: Library) -> Any:
    with d.strategy.scope():
        return d.variable(10.0, "on_read", "none").read_value()
