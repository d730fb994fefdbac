"""Distributed datasets: elements for all replicas, one pass after the other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from replicax.data.autoshard import Sharing, sharing_of
from replicax.data.elements.announcements import Announcement, check_read
from replicax.data.feed import Feed
from replicax.data.input_context import InputContext
from replicax.data.input_options import AutoShardPolicy, InputOptions, PartialBatch
from replicax.data.input_plan import InputPlan, how_to_resume, planned
from replicax.data.iterator import WHY_EMPTY, DistributedIterator
from replicax.data.reading.sources import as_source
from replicax.execution.array_specs import PaddedShapeDtypeStruct
from replicax.old_names import Renamed

if TYPE_CHECKING:
    from replicax.data.elements.batch_rows import BatchRows
    from replicax.data.elements.elements import Division, Elements
    from replicax.data.reading.batches import State


class DistributedDataset(Renamed):
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
        from replicax.data.dataset_agreement import check_same_dataset  # loads Grain
        from replicax.data.reading.batches import reading_of

        self._feed = feed
        self._options = options
        self._whole = dataset_fn is not None  # each batch is one replica's
        source = as_source(dataset if dataset_fn is None else dataset_fn(feed.context), method)
        self._source = source
        self._reading = reading_of(source)
        policy = options.auto_shard_policy
        assert isinstance(policy, AutoShardPolicy)
        if not self._whole and policy is not AutoShardPolicy.OFF:
            check_same_dataset(source, self._reading, policy.value, feed.lockstep, method)
        if self._whole:
            self._sharing = Sharing(AutoShardPolicy.OFF, "each worker has a dataset of its own")
        else:
            self._sharing = sharing_of(self._reading, policy, feed)
        if self._reading.length == 0:
            raise ValueError(f"{method}: the dataset, {source.kind}, is empty. {WHY_EMPTY}")
        self._passes = itertools.count()
        self._spec: Any = None
        self._batch: int | None = self._reading.batch_size  # rows of a full one
        self._examples: int | None = None  # that a full batch is made of, where workers have agreed on it

    def __repr__(self) -> str:
        resume = how_to_resume(self._source, self._reading, self._sharing)
        return f"DistributedDataset({self._source.kind}; policy {self._sharing.policy.name}; resume {resume})"

    def __iter__(self) -> DistributedIterator:
        """Start anew."""
        return DistributedIterator(self)

    @property
    def element_spec(self) -> Any:
        """The pytree of ``jax.ShapeDtypeStruct`` of what a replica gets of a full batch; see ``extended.trace``.

        With ``partial_batch="pad"`` they say that there may be padding, too, so that the traced program allows for it.
        The first batch is read for it, once.
        """
        if self._spec is None:
            self._look()
        return self._spec

    @property
    def cardinality(self) -> int | None:
        """How many elements a pass has; ``None`` if that can't be told without reading it, or if there is no end."""
        is_one_stream = self._sharing.shared or (self._feed.workers.count == 1 and not self._whole)
        return self._reading.length if is_one_stream and not self._drops else None

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
            raise ValueError(f"the dataset, {self._source.kind}, is empty. {WHY_EMPTY}")
        tree, rows = first
        if self._batch is None:
            self._batch = rows.size
        share = self._batch if self._whole else max(self._feed.rows_of_replicas(self._batch, self._sharing.shared))
        pads = self._options.partial_batch is PartialBatch.PAD
        kind: type[Any] = PaddedShapeDtypeStruct if pads else jax.ShapeDtypeStruct
        leaves = [kind((share, *shape), jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in rows.kinds()]
        self._spec = jax.tree_util.tree_unflatten(tree, leaves)

    def _first_batch(self) -> tuple[Any, BatchRows] | None:
        """The structure and the rows of this worker's first batch, if there is one."""
        from replicax.data.elements.batch_rows import Checker
        from replicax.data.reading.batches import READ_NOTHING_AHEAD

        batches = self._reading.opened(self._reading.fresh(None, None), ahead=READ_NOTHING_AHEAD)
        try:
            batch = next(batches)
        except StopIteration:
            return None
        finally:
            batches.close()
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
        if self._examples is None:
            self._examples = self._agreed()
        rows = self._feed.rows_of_workers(self._examples)
        if not all(rows):
            raise ValueError(
                f"a batch of {self._examples} is too small for {workers} workers that read batches of their own: there "
                f"is nothing for worker {rows.index(0)}. Use larger batches, or auto_shard_policy='data'."
            )
        return list(rows)

    def _agreed(self) -> int:
        """The size of a full batch, one for all workers, which read datasets of their own."""
        examples, rows, error = self._reading.examples, 0, None
        if examples is None:
            try:
                first = self._first_batch()
                rows = 0 if first is None else first[1].size
            except Exception as e:  # the others would wait
                error = e
        why = None if error is None else Announcement.of_error(error).error
        series = self._feed.lockstep.series(f"{self._feed.name}, batch size")
        told = [json.loads(mine) for mine in series.exchange(json.dumps([examples, rows, why]).encode())]
        if error is not None:
            raise error
        check_read([Announcement(error=why) for _, _, why in told], "element 0")
        found = [examples for examples, _, _ in told]
        sizes = {examples for examples in found if examples is not None}
        if len(sizes) > 1:
            raise ValueError(f"the workers' datasets have global batches of different sizes: {found}")
        largest = max(rows for _, rows, _ in told)
        if not sizes and not largest:
            raise ValueError(f"the dataset, {self._source.kind}, is empty. {WHY_EMPTY}")
        if sizes:
            return int(sizes.pop())
        self._batch = largest if all(self._feed.rows_of_workers(largest)) else self._feed.replicas
        return self._batch

    def _fresh(self) -> list[State]:
        return self._sharing.fresh(self._reading, self._rows_of_streams())

    def _opened(self, streams: list[State], position: int, batch: int | None) -> Elements:
        """The elements from where the streams have come; ``batch`` is the size of a full batch, if nothing else is."""
        from replicax.data.elements.elements import Elements

        feed = self._feed
        shared = self._sharing.shared
        own = (feed.replicas, feed.mine) if shared and feed.workers.count > 1 else None
        batches = self._reading.opened(streams[0 if shared else feed.workers.index], own)
        return Elements(batches, self._division(batch), feed.placer(), position)

    def _division(self, batch: int | None) -> Division:
        from replicax.data.elements.elements import Division

        feed = self._feed
        partial = self._options.partial_batch
        assert isinstance(partial, PartialBatch)
        exchange, shared = None, self._sharing.shared
        # Where all go through one stream, and its length was compared beforehand, there is nothing more to agree on.
        if (self._whole or feed.workers.count > 1) and not (shared and self._reading.length is not None):
            exchange = feed.lockstep.series(f"{feed.name}, pass {next(self._passes)}, element")
        partial = PartialBatch.DROP if self._drops else partial
        if self._batch is None and batch is not None and exchange is None and partial is not PartialBatch.EXACT:
            self._look()  # what is left of a batch may come first, and the state may be of batches of another size
        rows = None
        batch = batch if self._batch is None or self._whole else self._batch
        if batch is not None:
            rows = (batch,) * feed.replicas if self._whole else feed.rows_of_replicas(batch, shared)
        return Division(
            replicas=feed.replicas,
            mine=feed.mine,
            partial=partial,
            exchange=exchange,
            shared=shared,
            whole=self._whole,
            rows=rows,
            new=self._reading.gives_new_arrays,
        )
