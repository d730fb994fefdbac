"""The table of variables: synchronization × aggregation, assigned and read inside a replica and from across.

Each variable starts at 10; where replicas differ, replica 0 has 1 and replica 1 has 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Body, Topic

topic = Topic("variables")

KINDS = [(s, a) for s in ("on_write", "on_read") for a in ("none", "sum", "mean", "only_first_replica")]
Kind = tuple[str, str]
Operation = Callable[[Library, Kind], Any]


def _new(d: Library, kind: Kind) -> Any:
    return d.variable(10.0, *kind)


def _state(d: Library, v: Any) -> dict[str, Any]:
    """All that can be seen of a variable from across."""
    return {"copies": [d.to_plain(copy) for copy in d.each(v)], "read": d.attempt(v.read_value)}


def _raised(d: Library, change: Callable[[], Any]) -> Any:
    """The kind of error, or ``None``. It is kept apart, since the copies may have changed all the same."""
    return d.attempt(lambda: (change(), None)[1])


def cross_assign(d: Library, kind: Kind) -> Any:
    with d.strategy.scope():
        v = _new(d, kind)
        return {"raised": _raised(d, lambda: v.assign(6.0)), **_state(d, v)}


def cross_assign_add(d: Library, kind: Kind) -> Any:
    with d.strategy.scope():
        v = _new(d, kind)
        return {"raised": _raised(d, lambda: v.assign_add(6.0)), **_state(d, v)}


def cross_assign_sub(d: Library, kind: Kind) -> Any:
    with d.strategy.scope():
        v = _new(d, kind)
        return {"raised": _raised(d, lambda: v.assign_sub(6.0)), **_state(d, v)}


def _in_replicas(d: Library, kind: Kind, change: Callable[[Any, Any], Any], x: Any) -> Any:
    """The state after each replica has changed the variable by its own ``x``."""

    def step(x: Any) -> None:
        change(v, x)

    with d.strategy.scope():
        v = _new(d, kind)
        d.strategy.run(step, args=(x,))
        return _state(d, v)


def replica_assign(d: Library, kind: Kind) -> Any:
    return _in_replicas(d, kind, lambda v, x: v.assign(x), d.per_replica([1.0, 2.0]))


def replica_assign_add(d: Library, kind: Kind) -> Any:
    return _in_replicas(d, kind, lambda v, x: v.assign_add(x), d.per_replica([1.0, 2.0]))


def replica_assign_sub(d: Library, kind: Kind) -> Any:
    return _in_replicas(d, kind, lambda v, x: v.assign_sub(x), d.per_replica([1.0, 2.0]))


def replica_assign_same(d: Library, kind: Kind) -> Any:
    return _in_replicas(d, kind, lambda v, x: v.assign(x), d.array(3.0))


def replica_read(d: Library, kind: Kind) -> Any:
    with d.strategy.scope():
        v = _new(d, kind)
        return d.each(d.strategy.run(lambda: v.read_value() + 1.0))


def replica_read_own(d: Library, kind: Kind) -> Any:
    """Inside a replica an on-read variable is this replica's own copy, also after it has been assigned."""

    def step(x: Any) -> Any:
        v.assign_add(x)
        return v.read_value() + 0.0

    with d.strategy.scope():
        v = _new(d, kind)
        return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))


OPERATIONS: dict[str, Operation] = {
    "assign from across": cross_assign,
    "assign_add from across": cross_assign_add,
    "assign_sub from across": cross_assign_sub,
    "assign 1 and 2 in replicas": replica_assign,
    "assign_add 1 and 2 in replicas": replica_assign_add,
    "assign_sub 1 and 2 in replicas": replica_assign_sub,
    "assign 3 in all replicas": replica_assign_same,
    "read in replicas": replica_read,
    "add in replicas, and read there": replica_read_own,
}

DIVERGES = (
    "TensorFlow lets the copies of a mirrored variable drift apart without a word. What differs between replicas needs "
    "an aggregation, or to be reduced first: an error before anything runs, which names the variable."
)
CONTRIBUTES = (
    "With aggregation sum each replica contributes what it assigns, also if that is the same for all. TensorFlow does "
    "so for values that are computed alike, and refuses one array that all replicas share."
)
READS_BACK = (
    "TensorFlow sets the copies, and then raises because it reads the variable in order to return it, which has no "
    "aggregation to be read by."
)

DIFFERENCES: dict[tuple[Kind, str], str] = {
    (("on_write", "none"), "assign 1 and 2 in replicas"): DIVERGES,
    (("on_write", "none"), "assign_add 1 and 2 in replicas"): DIVERGES,
    (("on_write", "none"), "assign_sub 1 and 2 in replicas"): DIVERGES,
    (("on_write", "none"), "add in replicas, and read there"): DIVERGES,
    (("on_write", "sum"), "assign 3 in all replicas"): CONTRIBUTES,
    (("on_read", "none"), "assign from across"): READS_BACK,
    (("on_read", "none"), "assign_add from across"): READS_BACK,
    (("on_read", "none"), "assign_sub from across"): READS_BACK,
}


def _body(operation: Operation, kind: Kind) -> Body:
    return lambda d: operation(d, kind)


for kind in KINDS:
    for title, operation in OPERATIONS.items():
        name = f"{', '.join(kind)}: {title}"
        topic.program(name, differs=DIFFERENCES.get((kind, title)))(_body(operation, kind))
