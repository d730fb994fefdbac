"""``gather``: from across, one after the other."""

from __future__ import annotations

from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic
from tests.oracle.reasons import NEGATIVE_AXIS

topic = Topic("gathering")


def _pair(d: Library) -> Any:
    return d.per_replica([[1.0, 2.0], [3.0, 6.0]])


@topic.program("gather along axis 0")
def gather(d: Library) -> Any:
    return d.strategy.gather(_pair(d), axis=0)


@topic.program("gather along axis 1")
def gather_axis_1(d: Library) -> Any:
    return d.strategy.gather(d.per_replica([[[1.0], [2.0]], [[3.0], [4.0]]]), axis=1)


@topic.program("gather along axis -1", differs=NEGATIVE_AXIS)
def gather_negative_axis(d: Library) -> Any:
    return d.strategy.gather(d.per_replica([[[1.0], [2.0]], [[3.0], [4.0]]]), axis=-1)


@topic.program("gather uneven sizes")
def gather_uneven(d: Library) -> Any:
    return d.strategy.gather(d.per_replica([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0]]), axis=0)


@topic.program("gather integers of three replicas", replicas=3)
def gather_integers(d: Library) -> Any:
    return d.strategy.gather(d.per_replica([[1], [2, 3], [4]]), axis=0)


@topic.program("gather scalars")
def gather_scalars(d: Library) -> Any:
    return d.strategy.gather(d.per_replica([1.0, 2.0]), axis=0)


@topic.program(
    "gather a nest",
    differs="A nest is gathered leaf by leaf. TensorFlow returns the first replica's pieces, and says nothing.",
)
def gather_nest(d: Library) -> Any:
    return d.strategy.gather(d.per_replica([{"a": [1.0], "b": [2.0]}, {"a": [3.0], "b": [4.0]}]), axis=0)


@topic.program(
    "gather a plain array",
    differs=(
        "There is nothing to gather in a value that all replicas share, and once or n times can't be told, as with "
        "a sum."
    ),
)
def gather_plain(d: Library) -> Any:
    return d.strategy.gather(d.array([1.0, 2.0]), axis=0)


@topic.program("gather with one replica", replicas=1)
def gather_one_replica(d: Library) -> Any:
    return d.strategy.gather(d.array([1.0, 2.0]), axis=0)


@topic.program("gather inside a replica")
def gather_inside(d: Library) -> Any:
    return d.strategy.run(lambda x: d.strategy.gather(x, axis=0), args=(_pair(d),))


@topic.program("gather pieces that do not fit together", own_process=True)
def gather_misfits(d: Library) -> Any:
    return d.strategy.gather(d.per_replica([[[1.0, 2.0]], [[1.0, 2.0, 3.0]]]), axis=0)


@topic.program(
    "a gather after one that failed",
    differs="An error leaves nothing behind. In TensorFlow every later collective of the process fails too.",
    own_process=True,
)
def gather_after_failure(d: Library) -> Any:
    bad = d.per_replica([[[1.0, 2.0]], [[1.0, 2.0, 3.0]]])
    return [
        "error" in d.attempt(lambda: d.strategy.gather(bad, axis=0)),
        d.attempt(lambda: d.strategy.gather(_pair(d), axis=0)),
    ]
