"""Distributed datasets: elements for all replicas, one pass after the other."""

from __future__ import annotations

import copy
import reprlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from replicax import _jax, context
from replicax.data import states
from replicax.data.batches.pass_reader import PassReader
from replicax.data.options import InputOptions
from replicax.data.plan import InputPlan, how_to_resume, planned
from replicax.data.workers import InputContext, InputWorkers
from replicax.errors import ContextError, cant_be_pickled
from replicax.name_hints import NameHints
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.data.pipeline import InputPipeline
    from replicax.data.reading.batches import State


class DistributedDataset:
    """A re-iterable of pytrees with ``PerReplica`` leaves; see ``Strategy.distribute_dataset``.

    Each iteration is a new pass, from the start.

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
        workers: InputWorkers,
        method: str,
        dataset_fn: Callable[[InputContext], Any] | None = None,
        examples: bool = False,
    ) -> None:
        from replicax.data.pipeline import InputPipeline  # loads Grain

        dataset = dataset if dataset_fn is None else dataset_fn(workers.context)
        if isinstance(dataset, DistributedDataset):
            raise TypeError(
                f"{method} takes a dataset whose batches are not distributed yet, got {dataset!r}: iterate over that "
                "one, or pass the dataset that it was made of"
            )
        self._pipeline = InputPipeline(dataset, options, workers, method, dataset_fn is not None, examples)

    def __repr__(self) -> str:
        pipeline = self._pipeline
        kind, policy = pipeline.source.kind, pipeline.sharding.policy.name
        return f"DistributedDataset({kind}; policy {policy}; resume {how_to_resume(pipeline)})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise cant_be_pickled("a DistributedDataset", "distribute the dataset itself in the other process")

    def __iter__(self) -> DistributedIterator:
        """Start a new pass."""
        return DistributedIterator(self._pipeline)

    @property
    def element_spec(self) -> Any:
        """The pytree of ``jax.ShapeDtypeStruct`` of one replica's part of a full batch; see ``extended.trace``.

        With ``partial_batch="pad"`` they also say that there may be padding, so that the traced program allows for it.
        The first access reads a batch.
        """
        return self._pipeline.element_spec

    @property
    def cardinality(self) -> int | None:
        """The number of elements of a pass; ``None`` if it is unknown without reading, or infinite."""
        return self._pipeline.cardinality

    def plan(self) -> InputPlan:
        """Print and return what each worker and replica will read, and why.

        >>> import replicax, numpy as np
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> examples = strategy.make_numpy_dataset(np.arange(10.0))
        >>> plan = strategy.distribute_dataset(examples.batch(4)).plan()
        policy   DATA (AUTO: the source does not consist of files)
        source   a Grain BatchMapDataset, 3 batches of 4
        partial  exact: each replica gets what there is
        resume   with any number of workers and replicas, and other batch sizes
        worker 0 reads all batches
          replica 0 gets rows 0 to 1 of each batch
          replica 1 gets rows 2 to 3 of each batch
        """
        plan = planned(self._pipeline)
        print(plan)
        return plan


class DistributedIterator(Iterator[Any], NameHints):
    """One pass over a :class:`DistributedDataset`.

    Threads read elements and put them on the devices, ``InputOptions.prefetch`` of them ahead. Closing or dropping the
    iterator ends the threads and frees what they have read; it is a context manager, too.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> iterator = iter(strategy.distribute_dataset([np.zeros(4), np.zeros(6)]))
    >>> next(iterator), iterator.get_next()
    (PerReplica(float32[2], 2 replicas: [0. 0.], [0. 0.]), PerReplica(float32[3], 2 replicas: [0. 0. 0.], [0. 0. 0.]))
    """

    def __init__(self, pipeline: InputPipeline) -> None:
        self._pipeline = pipeline
        self._begin(pipeline.fresh(), 0)

    def _begin(self, streams: list[State], position: int, batch: int | None = None) -> None:
        pipeline = self._pipeline
        elements = pipeline.opened(streams, position, batch)
        self._reader = PassReader(elements, pipeline.options.prefetch, pipeline.workers.owner)
        self._streams = streams
        # Also at the end of the process: a thread that is still in JAX then crashes the process.
        self._end = weakref.finalize(self, self._reader.end)

    def _begin_again(self) -> None:
        """Begin a new pass, at the first element."""
        self.close()
        self._begin(self._pipeline.fresh(), 0)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise cant_be_pickled(
            "a DistributedIterator",
            "keep its place, iterator.get_state(), for set_state of another, or save it with replicax.Checkpoint",
        )

    @property
    def element_spec(self) -> Any:
        """One replica's part of a full batch; see :attr:`DistributedDataset.element_spec`."""
        return self._pipeline.element_spec

    def __next__(self) -> Any:
        """The next element.

        Raises:
          StopIteration: there is none.
          ContextError: called inside a step.
          ValueError, TypeError: an array has no dim 0, is not an array of numbers, or is of another kind than before.
          Exception: whatever the dataset raised, with its traceback.
        """
        try:
            if context.in_step():
                raise ContextError(
                    "next(iterator) was called inside a step, where it would run once, while tracing: take the element "
                    "outside and pass it to strategy.run(step, args=(element,))"
                )
            return self._reader.next()
        except BaseException as error:
            _jax.hide_frames(error)  # as hiding_frames does, without a wrapper
            raise

    get_next = __next__

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ValueError("the iterator has been closed: iter(dataset) makes another one")

    def close(self) -> None:
        """End the threads, and free what they have read. May be called several times, and by any thread.

        A thread that is waiting for a slow source ends as soon as the source returns; ``close`` waits for it for at
        most a second.
        """
        self._end()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- saving and restoring ---------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """The place of the pass: after the element that ``next`` returned last. Plain data that JSON can hold.

        Where each worker reads its own stream, all workers have to call this together, and get the same state.

        Raises:
          ValueError: a second pass over the source could differ; the message says why.
        """
        if self._pipeline.source.unrepeatable:
            raise ValueError(f"the place in this dataset can't be saved: {self._pipeline.source.unrepeatable}")
        self._check_open()
        return states.saved(self._pipeline, self._streams, self._reader.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to the place of another iterator, which may be on another number of workers or replicas.

        No example of the pass is lost or repeated.

        Args:
          state: from :meth:`get_state`, of a dataset of the same examples; batches may have another size.

        Raises:
          ValueError: this is not a state, this dataset can't continue from it, or another worker sets a different one;
            the message says why. The iterator is unchanged.
          DeadlockError: another worker sets none.
        """
        ended = self._end
        states.check_same_state(self._pipeline, state)
        try:
            self._begin(*states.resumed(self._pipeline, copy.deepcopy(state)))  # Grain changes states in place
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            shown = reprlib.repr(state)
            raise ValueError(f"set_state takes what get_state of a DistributedIterator gave, got {shown}") from error
        ended()


def reader_of(iterator: Any, replicas: Replicas) -> PassReader:
    """The reader of ``iterator``, if it is for ``replicas``.

    Raises:
      TypeError: it is not an iterator of a distributed dataset.
      ValueError: another strategy has distributed its dataset, or it is closed.
    """
    if not isinstance(iterator, DistributedIterator):
        hint = "the dataset itself: pass iter(dataset)" if isinstance(iterator, DistributedDataset) else repr(iterator)
        raise TypeError(
            "strategy.run_steps(fn, iterator, steps): iterator must be one of a dataset of this strategy, "
            f"iter(strategy.distribute_dataset(…)), got {hint}"
        )
    if iterator._pipeline.workers.owner is not replicas:
        raise ValueError(
            "strategy.run_steps(fn, iterator, steps): the iterator's dataset was distributed by another strategy, "
            "whose replicas have the elements: distribute the dataset with this one"
        )
    iterator._check_open()
    return iterator._reader
