"""One pass over a distributed dataset, which can be left and gone on with."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from replicax import context
from replicax.data.elements.pass_reader import PassReader
from replicax.data.input_options import AutoShardPolicy
from replicax.data.reading.saved_counts import check_count
from replicax.errors import ContextError
from replicax.old_names import Renamed

if TYPE_CHECKING:
    from replicax.data.dataset import DistributedDataset
    from replicax.data.reading.batches import State

_FORMAT = 1

WHY_EMPTY = (
    "(partial_batch='drop' and drop_remainder=True leave nothing of fewer examples than a batch; a filter may let "
    "nothing through.)"
)


class DistributedIterator(Iterator[Any], Renamed):
    """One pass over a :class:`DistributedDataset`.

    Elements are read and put on the devices in the background, ``InputOptions.prefetch`` of them ahead. Closing the
    iterator, or dropping it, ends the threads and frees what was read ahead; it is a context manager, too.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> iterator = iter(strategy.distribute_dataset([np.zeros(4), np.zeros(6)]))
    >>> next(iterator), iterator.get_next()
    (PerReplica(float32[2], 2 replicas), PerReplica(float32[3], 2 replicas))
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._begin(dataset._fresh(), 0)

    def _begin(self, streams: list[State], position: int, batch: int | None = None) -> None:
        elements = self._dataset._opened(streams, position, batch)
        running = PassReader(elements, self._dataset._options.prefetch, self._dataset._feed.owner)
        self._streams = streams
        self._is_fresh = not position
        self._running = running
        # Also at the end of the process: a thread that is then still in JAX takes the process down.
        self._end = weakref.finalize(self, running.end)

    @property
    def element_spec(self) -> Any:
        """What a replica gets of a full batch; see :attr:`DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def __next__(self) -> Any:
        """The next element.

        Raises:
          StopIteration: there is none.
          ContextError: called inside a step.
          ValueError, TypeError: an array has no dim 0, is no array of numbers, or is of another kind than before.
          Exception: whatever the dataset raised, with its traceback.
        """
        if context.in_step():
            raise ContextError(
                "next(iterator) was called inside a step, where it would run once, while tracing: take the element "
                "outside and pass it to strategy.run(step, args=(element,))"
            )
        return self._given(lambda running: running.next())

    get_next = __next__

    def _given(self, ask: Callable[[PassReader], Any]) -> Any:
        self._check_open()
        try:
            given = ask(self._running)
        except StopIteration:
            if self._is_fresh:
                raise ValueError(f"the dataset, {self._dataset._source.kind}, gave no element. {WHY_EMPTY}") from None
            raise
        self._is_fresh = False
        return given

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ValueError("the iterator has been closed: iter(dataset) makes another one")

    def close(self) -> None:
        """End the threads, and free what was read ahead. May be called again, and by any thread.

        A thread that is waiting for a slow source ends as soon as that lets it; nobody waits for it longer than a
        second.
        """
        self._end()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- saving and restoring ---------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Where the pass is: after the element that ``next`` gave last. Plain data, as goes into JSON.

        Where workers read streams of their own, all of them have to call this together, and get the same.

        Raises:
          ValueError: a second pass over the source could go another way; the message says why.
        """
        dataset = self._dataset
        if dataset._source.unrepeatable:
            raise ValueError(f"the place in this dataset can't be saved: {dataset._source.unrepeatable}")
        self._check_open()
        native = self._running.get_state()
        streams = self._streams
        if dataset._sharing.shared:
            streams = [{**streams[0], "native": native["batches"]}]
        else:
            mine = {**streams[dataset._feed.workers.index], "native": native["batches"]}
            number = next(dataset._passes)
            everyone = dataset._feed.lockstep.series(f"{dataset._feed.name}, state {number}")
            streams = [json.loads(state) for state in everyone.exchange(json.dumps(mine).encode())]
        policy = dataset._sharing.policy.value
        rows = native["rows"]
        return {
            "format": _FORMAT,
            "policy": policy,
            "position": native["position"],
            "batch": None if rows is None else max(rows) if dataset._whole else sum(rows),
            "streams": streams,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where another iterator was, be it on another number of workers or replicas.

        No example of the pass is lost or repeated.

        Args:
          state: what :meth:`get_state` gave, of a dataset that differs in nothing but its batch size.

        Raises:
          ValueError: this is no state, or none that this dataset can go on from, or another worker sets another; the
            message says why. The iterator is as it was.
          DeadlockError: another worker sets none.
        """
        ended = self._end
        self._check_same_state(state)
        try:
            if state["format"] != _FORMAT:
                raise KeyError("format")
            position, batch = state["position"], state["batch"]
            streams = self._adapted(state["streams"], state["policy"], position)
            if batch is not None:
                check_count(batch, "the batch of the state", least=1)
            self._begin(streams, position, batch)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"set_state takes what get_state of a DistributedIterator gave, got {state!r}") from error
        ended()

    def _check_same_state(self, state: Any) -> None:
        lockstep = self._dataset._feed.lockstep
        if not lockstep.several:
            return
        digest = hashlib.blake2b(json.dumps(state, sort_keys=True, default=repr).encode(), digest_size=16).digest()
        differing = lockstep.agree("sets the state of a dataset's iterator", digest)
        if differing is not None:
            raise ValueError(
                f"set_state: worker {differing[1]} sets another state than worker 0, so examples would be lost or come "
                "twice: all workers must go on from the same state, the one that get_state gave on all of them"
            )

    def _adapted(self, streams: list[State], policy: str, position: int) -> list[State]:
        dataset = self._dataset
        self._check_same_dataset(streams, policy)
        is_own = policy == "off" and dataset._feed.workers.count > 1  # nobody knows the other workers' datasets
        check_count(position, "the position of the state", None if is_own else dataset._reading.most_elements(streams))
        wanted = dataset._fresh()
        rows = [stream["rows"] for stream in wanted]
        now = dataset._sharing.policy.value
        if policy == now and len(streams) == len(rows) and [stream["rows"] for stream in streams] == rows:
            return streams
        was = f"{len(streams)} worker(s)" if policy != "data" else "all workers"
        if "off" in (policy, now):
            why = "each worker's dataset is its own, so others can't go on with it"
        else:
            try:
                return dataset._reading.regrouped(streams, rows)
            except ValueError as error:
                why = str(error)
        raise ValueError(
            f"this is the state of {was} with batches of {[stream['rows'] for stream in streams]}, policy {policy}; "
            f"here are {dataset._feed.workers.count} worker(s), batches of {rows}, policy {now}: {why}"
        )

    def _check_same_dataset(self, streams: list[State], policy: str) -> None:
        dataset = self._dataset
        policies = [p.value for p in AutoShardPolicy if p is not AutoShardPolicy.AUTO]
        if policy not in policies or not streams or (policy == "data" and len(streams) > 1):
            raise KeyError("policy")
        reading = dataset._reading
        for worker, stream in enumerate(streams):
            if policy == "off" and worker != dataset._feed.workers.index:
                continue  # each worker's dataset is its own
            if stream["of"] != reading.known_by:
                raise ValueError(
                    f"this is the state of another dataset: of that one is known {stream['of']}, of this one "
                    f"{reading.known_by}"
                )
            files = {file for part in stream["parts"] or () for file in part["files"] or ()}
            if unknown := sorted(files.difference(reading.files or ())):
                raise ValueError(f"this is the state of another dataset: this one has no file {unknown[0]!r}")
            if stream["rows"] is not None:
                check_count(stream["rows"], "the rows of a batch in the state", least=1)
            reading.check(stream)
