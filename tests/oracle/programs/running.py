"""``run``: arguments and results."""

from __future__ import annotations

from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic
from tests.oracle.reasons import BRANCH, BRANCH_PER_REPLICA

topic = Topic("run")


@topic.program("each replica gets its component")
def components(d: Library) -> Any:
    return d.each(d.strategy.run(lambda x: x * 10.0, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("arguments by name")
def by_name(d: Library) -> Any:
    step: Any = lambda x, y: x * y  # noqa: E731
    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),), kwargs={"y": d.per_replica([3.0, 4.0])}))


@topic.program("an array is every replica's argument")
def shared_array(d: Library) -> Any:
    x = d.per_replica([1.0, 2.0])
    return d.each(d.strategy.run(lambda x, y: x + y, args=(x, d.array(10.0))))


@topic.program("a Python number is every replica's argument")
def shared_number(d: Library) -> Any:
    return d.each(d.strategy.run(lambda x, n: x * n, args=(d.per_replica([1.0, 2.0]), 3.0)))


@topic.program("text, bools and None pass through")
def objects(d: Library) -> Any:
    def step(text: str, flag: bool, nothing: None) -> Any:
        return {"text": text + "!", "flag": not flag, "nothing": nothing}

    return d.each(d.strategy.run(step, args=("text", True, None)))


@topic.program("a Python number is returned")
def returns_number(d: Library) -> Any:
    return d.each(d.strategy.run(lambda: 3))


@topic.program("nothing is returned")
def returns_nothing(d: Library) -> Any:
    return d.strategy.run(lambda: None)


@topic.program("a variable is returned")
def returns_variable(d: Library) -> Any:
    with d.strategy.scope():
        v = d.variable(1.0)
        return d.strategy.run(lambda: v) is v


@topic.program(
    "what is the same on every replica is returned",
    differs="What is the same on every replica is one array, and needs no wrapper. TensorFlow wraps n copies of it.",
)
def returns_mirrored(d: Library) -> Any:
    return d.strategy.run(lambda: d.array(1.0) * 2.0)


@topic.program("an array from outside is returned")
def returns_outside(d: Library) -> Any:
    x = d.array(1.0)
    return d.strategy.run(lambda: x)


@topic.program("what differs is returned")
def returns_different(d: Library) -> Any:
    return d.strategy.run(lambda x: x, args=(d.per_replica([1.0, 2.0]),))


@topic.program("a bare array with one replica", replicas=1)
def returns_bare(d: Library) -> Any:
    return d.strategy.run(lambda x: {"x": x * 2.0}, args=(d.array([1.0, 2.0]),))


@topic.program("a per-replica value of one replica as an argument", replicas=1)
def one_component(d: Library) -> Any:
    return d.strategy.run(lambda x: x * 2.0, args=(d.per_replica([3.0]),))


@topic.program("results go into the next run")
def chained(d: Library) -> Any:
    x = d.per_replica([1.0, 2.0])
    for _ in range(3):
        x = d.strategy.run(lambda x: x * 2.0, args=(x,))
    return d.each(x)


@topic.program("components of different shapes")
def ragged(d: Library) -> Any:
    return d.each(d.strategy.run(lambda x: d.total(x), args=(d.per_replica([[1.0, 2.0], [3.0]]),)))


@topic.program("inside and outside the scope alike")
def inside_scope(d: Library) -> Any:
    x = d.per_replica([1.0, 2.0])
    outside = d.each(d.strategy.run(lambda x: x + 1.0, args=(x,)))
    with d.strategy.scope():
        return [outside, d.each(d.strategy.run(lambda x: x + 1.0, args=(x,)))]


@topic.program(
    "a value of a strategy with more replicas as an argument",
    differs="Four components do not fit two replicas. TensorFlow drops two of them without a word.",
)
def too_many_components(d: Library) -> Any:
    wider = type(d)(4)
    return d.each(d.strategy.run(lambda x: x, args=(wider.per_replica([1.0, 2.0, 3.0, 4.0]),)))


@topic.program("replicas return different structures", differs=BRANCH, executors_differ=BRANCH_PER_REPLICA)
def different_structures(d: Library) -> Any:
    def step(x: Any) -> Any:
        return (x,) if x > 1.5 else [x]

    return d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),))


@topic.program("replicas branch in Python by their own values", differs=BRANCH, executors_differ=BRANCH_PER_REPLICA)
def branches(d: Library) -> Any:
    def step(x: Any) -> Any:
        return x * 10.0 if x > 1.5 else x

    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("an argument that is no array arrives as it is")
def any_object(d: Library) -> Any:
    marker = object()
    return d.each(d.strategy.run(lambda x: x is marker, args=(marker,)))
