"""Saved states of a pass: their content, and whether a dataset can continue from them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from replicax import _jax
from replicax.data.options import AutoShardPolicy
from replicax.data.reading.remaining_parts import check_count

if TYPE_CHECKING:
    from replicax.data.pipeline import InputPipeline
    from replicax.data.reading.batches import State

_FORMAT = 1


def saved(pipeline: InputPipeline, streams: list[State], native: dict[str, Any]) -> dict[str, Any]:
    """The state of a pass.

    ``streams`` are the states of all streams when the pass was opened, ``native`` the place that this worker has
    reached since.
    """
    rows = native["rows"]
    return {
        "format": _FORMAT,
        "policy": pipeline.sharding.policy.value,
        "position": native["position"],
        "batch": None if rows is None else max(rows) if pipeline.whole else sum(rows),
        "streams": pipeline.everyones_streams(streams, native["batches"]),
    }


def check_same_state(pipeline: InputPipeline, state: Any) -> None:
    """Raise unless all workers set the same state."""
    lockstep = pipeline.workers.lockstep
    if not lockstep.several:
        return
    digest = _jax.digested(json.dumps(state, sort_keys=True, default=repr).encode())
    differing = lockstep.agree("sets the state of a dataset's iterator", digest)
    if differing is not None:
        raise ValueError(
            f"set_state: worker {differing[1]} sets another state than worker 0, so examples would be lost or come "
            "twice: all workers must go on from the same state, the one that get_state gave on all of them"
        )


def resumed(pipeline: InputPipeline, state: dict[str, Any]) -> tuple[list[State], int, int | None]:
    """The arguments of :meth:`InputPipeline.opened` to continue from ``state``: streams, position, and size of a batch.

    Raises:
      ValueError: the dataset can't continue from it.
      KeyError, TypeError, IndexError, AttributeError: it is not a state.
    """
    if state["format"] != _FORMAT:
        raise KeyError("format")
    position, batch = state["position"], state["batch"]
    streams = _adapted_streams(pipeline, state["streams"], state["policy"], position)
    if batch is not None:
        check_count(batch, "the batch of the state", least=1)
    return streams, position, batch


def _adapted_streams(pipeline: InputPipeline, streams: list[State], policy: str, position: int) -> list[State]:
    _check_same_dataset(pipeline, streams, policy)
    reading, workers = pipeline.reading, pipeline.workers.count
    most = None if policy == "off" else reading.most_elements(streams)  # there the others' datasets are unknown
    check_count(position, "the position of the state", most)
    rows = [stream["rows"] for stream in pipeline.fresh()]
    now = pipeline.sharding.policy.value
    if policy == now and [stream["rows"] for stream in streams] == rows:
        return streams
    was = f"{len(streams)} worker(s)" if policy != "data" else "all workers"
    if "off" in (policy, now):
        why = "each worker's dataset is its own, so others can't go on with it"
    else:
        try:
            return reading.regrouped(streams, rows)
        except ValueError as error:
            why = str(error)
    raise ValueError(
        f"this is the state of {was} with batches of {[stream['rows'] for stream in streams]}, policy {policy}; "
        f"here are {workers} worker(s), batches of {rows}, policy {now}: {why}"
    )


def _check_same_dataset(pipeline: InputPipeline, streams: list[State], policy: str) -> None:
    policies = [p.value for p in AutoShardPolicy if p is not AutoShardPolicy.AUTO]
    if policy not in policies or not streams or (policy == "data" and len(streams) > 1):
        raise KeyError("policy")
    reading = pipeline.reading
    for worker, stream in enumerate(streams):
        if policy == "off" and worker != pipeline.workers.index:
            continue  # each worker has a dataset of its own
        of, here = stream["of"], reading.known_by
        if of.keys() != here.keys() or any(
            value != here[key] and None not in (value, here[key]) for key, value in of.items()
        ):
            raise ValueError(
                f"this is the state of another dataset: the saved one is known by {of}, this one by {here}"
            )
        files = {file for part in stream["parts"] or () for file in part["files"] or ()}
        if unknown := sorted(files.difference(reading.path_of)):
            raise ValueError(f"this is the state of another dataset: this one has no file {unknown[0]!r}")
        if stream["rows"] is not None:
            check_count(stream["rows"], "the rows of a batch in the state", least=1)
        reading.check(stream)
