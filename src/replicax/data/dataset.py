"""Distributed datasets: elements for all replicas, one pass after the other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from replicax import context
from replicax.data.feed import Feed
from replicax.data.input_context import InputContext
from replicax.data.options import AutoShardPolicy, InputOptions, PartialBatch
from replicax.data.plan import InputPlan, planned
from replicax.data.sharing import Sharing, sharing_of
from replicax.data.sources import as_source
from replicax.errors import ContextError
from replicax.topology.workers import Series

if TYPE_CHECKING:
    from replicax.data.elements import Division, Elements
    from replicax.data.reading import State
    from replicax.data.rows import Rows

_FORMAT = 1


class DistributedDataset:
    """A re-iterable of pytrees with ``PerReplica`` leaves; see ``Strategy.distribute_dataset``.

    Each iteration is a pass of its own, from the start.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> dataset = strategy.distribute_dataset([np.zeros((4, 3))])
    >>> next(iter(dataset))
    PerReplica(float32[2,3], 2 replicas)
    >>> dataset.element_spec
    ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """

    def __init__(
        self,
        dataset: Any,
        options: InputOptions,
        feed: Feed,
        method: str,
        dataset_fn: Callable[[InputContext], Any] | None = None,
    ) -> None:
        from replicax.data.reading import reading_of  # loads Grain

        self._feed = feed
        self._options = options
        self._whole = dataset_fn is not None  # each batch is one replica's
        source = as_source(dataset if dataset_fn is None else dataset_fn(feed.context), method)
        self._source = source
        self._reading = reading_of(source)
        if self._whole:
            self._sharing = Sharing(AutoShardPolicy.OFF, "each worker has a dataset of its own")
        else:
            assert isinstance(options.auto_shard_policy, AutoShardPolicy)
            self._sharing = sharing_of(self._reading, options.auto_shard_policy, feed.workers.count)
        if self._reading.length == 0:
            raise ValueError(f"{method}: the dataset, {source.kind}, is empty. {_WHY_EMPTY}")
        self._passes = itertools.count()
        self._spec: Any = None
        self._batch: int | None = self._reading.batch_size
        self._agreed = False

    def __iter__(self) -> DistributedIterator:
        """Start anew."""
        return DistributedIterator(self)

    @property
    def element_spec(self) -> Any:
        """The pytree of ``jax.ShapeDtypeStruct`` of what a replica gets of a full batch; see ``extended.trace``.

        The first batch is read for it, once.
        """
        if self._spec is None:
            self._look()
        return self._spec

    @property
    def cardinality(self) -> int | None:
        """How many elements a pass has; ``None`` if that can't be told without going through it."""
        return self._reading.length if self._sharing.shared and not self._drops else None

    def plan(self) -> InputPlan:
        """Print, and return, what each worker and replica will read, and why.

        >>> import replicax, numpy as np
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> examples = strategy.make_numpy_dataset(np.arange(10.0))
        >>> plan = strategy.distribute_dataset(examples.batch(4)).plan()
        policy   DATA (AUTO: the source is no files that workers could share)
        source   a Grain BatchMapDataset, 3 batches of 4
        partial  exact: each replica gets what there is
        resume   with any number of workers and replicas, and other batch sizes
        worker 0 reads all batches
          replica 0 gets rows 0 to 1 of each batch
          replica 1 gets rows 2 to 3 of each batch
        """
        if self._batch is None:
            self._look()
        plan = planned(self._source, self._reading, self._sharing, self._options, self._feed, self._batch, self._whole)
        print(plan)
        return plan

    # --- what iterators need ----------------------------------------------------------------------------

    @property
    def _drops(self) -> bool:
        """Whether what is no full batch is left out."""
        drops = self._reading.drops_remainder and not self._sharing.shared
        return drops or self._options.partial_batch is PartialBatch.DROP

    def _look(self) -> None:
        """Read one batch, to see what it is like."""
        first = self._first_batch()
        if first is None:
            raise ValueError(f"the dataset, {self._source.kind}, is empty. {_WHY_EMPTY}")
        tree, rows = first
        if self._batch is None:
            self._batch = rows.size
        share = self._batch if self._whole else self._feed.rows_of_replicas(self._batch, self._sharing.shared)[0]
        leaves = [
            jax.ShapeDtypeStruct((share, *shape), jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in rows.kinds()
        ]
        self._spec = jax.tree_util.tree_unflatten(tree, leaves)

    def _first_batch(self) -> tuple[Any, Rows] | None:
        """The structure and the rows of this worker's first batch, if there is one."""
        from replicax.data.rows import Checker

        batches = self._reading.opened(self._reading.fresh(None, None))
        try:
            batch = next(batches, None)
        finally:
            batches.close()
        if batch is None:
            return None
        checker = Checker(self._feed.replicas)
        rows = checker.rows(batch, "element 0")
        return checker.tree, rows

    def _rows_of_streams(self) -> list[int | None]:
        """The sizes of the batches that are to be read by each stream; ``None``: as they come."""
        workers = self._feed.workers.count
        if self._sharing.shared:
            return [None]
        if self._whole or workers == 1:
            return [None] * workers
        if not self._agreed:
            self._agree()
        assert self._batch is not None
        rows = self._feed.rows_of_workers(self._batch)
        if not all(rows):
            raise ValueError(
                f"a batch of {self._batch} is too small for {workers} workers that read batches of their own: there is "
                f"nothing for worker {rows.index(0)}. Use larger batches, or auto_shard_policy='data'."
            )
        return list(rows)

    def _agree(self) -> None:
        """Have one size of a full batch on all workers, which read datasets of their own."""
        seen = self._batch
        first = self._first_batch() if seen is None else None
        mine = json.dumps([seen, 0 if first is None else first[1].size]).encode()
        news = [json.loads(x) for x in Series(self._feed.workers, f"{self._feed.name}, batch size").exchange(mine)]
        sizes = {batch for batch, _ in news if batch is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"the workers' datasets have global batches of different sizes: {[batch for batch, _ in news]}"
            )
        largest = max(rows for _, rows in news)
        if not sizes and not largest:
            raise ValueError(f"the dataset, {self._source.kind}, is empty. {_WHY_EMPTY}")
        self._batch = sizes.pop() if sizes else max(largest, self._feed.workers.count)
        self._agreed = True

    def _fresh(self) -> list[State]:
        return self._sharing.fresh(self._reading, self._rows_of_streams())

    def _opened(self, streams: list[State], position: int, batch: int | None) -> Elements:
        """The elements from where the streams have come; ``batch`` is the size of a full batch, if nothing else is."""
        from replicax.data.elements import Elements

        feed = self._feed
        shared = self._sharing.shared
        own = (feed.replicas, feed.mine) if shared and feed.workers.count > 1 else None
        batches = self._reading.opened(streams[0 if shared else feed.workers.index], own)
        return Elements(batches, self._division(batch), feed.placer(), position)

    def _division(self, batch: int | None) -> Division:
        from replicax.data.elements import Division

        feed = self._feed
        partial = self._options.partial_batch
        assert isinstance(partial, PartialBatch)
        exchange = None
        if self._whole or not (self._sharing.shared or feed.workers.count == 1):
            exchange = Series(feed.workers, f"{feed.name}, pass {next(self._passes)}, element")
        rows = None
        batch = batch if self._batch is None or self._whole else self._batch
        if batch is not None:
            shared = self._sharing.shared
            rows = (batch,) * feed.replicas if self._whole else feed.rows_of_replicas(batch, shared)
        return Division(
            replicas=feed.replicas,
            mine=feed.mine,
            partial=PartialBatch.DROP if self._drops else partial,
            exchange=exchange,
            whole=self._whole,
            rows=rows,
        )


_WHY_EMPTY = "(drop_remainder=True leaves nothing of fewer examples than a batch; a filter may let nothing through.)"


class DistributedIterator(Iterator[Any]):
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
        from grain import experimental

        self._streams = streams
        self._elements = self._dataset._opened(streams, position, batch)
        self._is_fresh = not position
        self._iterator: Any = self._elements
        if depth := self._dataset._options.prefetch:
            self._iterator = experimental.ThreadPrefetchDatasetIterator(self._elements, depth)
        self._closed = False

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
        if self._closed:
            raise ValueError("the iterator has been closed: iter(dataset) makes another one")
        try:
            element = next(self._iterator)
        except StopIteration:
            if self._is_fresh:
                raise ValueError(f"the dataset, {self._dataset._source.kind}, gave no element. {_WHY_EMPTY}") from None
            raise
        self._is_fresh = False
        return element

    get_next = __next__

    def close(self) -> None:
        """End the threads, and free what was read ahead. May be called again."""
        self._closed = True
        elements, iterator = self._elements, self._iterator
        elements.closing = True
        iterator.close()
        elements.close()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_iterator" in self.__dict__:
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
        native = self._iterator.get_state()
        streams = self._streams
        if dataset._sharing.shared:
            streams = [{**streams[0], "native": native["batches"]}]
        else:
            mine = {**streams[dataset._feed.workers.index], "native": native["batches"]}
            number = next(dataset._passes)
            everyone = Series(dataset._feed.workers, f"{dataset._feed.name}, state {number}")
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
          ValueError: this is no state, or none that this dataset can go on from; the message says why. The iterator is
            as it was.
        """
        try:
            streams, position = self._adapted(state["streams"], state["policy"]), int(state["position"])
            batch = state["batch"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"set_state takes what get_state of a DistributedIterator gave, got {state!r}") from error
        self.close()
        self._begin(streams, position, batch)

    def _adapted(self, streams: list[State], policy: str) -> list[State]:
        dataset = self._dataset
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
