"""Handles in the coordinator's program for objects on workers: future results, datasets, iterators."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, NoReturn

from replicax.errors import ContextError
from replicax.parameter_server.definitions import Definitions


class RemoteValue:
    """The future result of a scheduled function; :meth:`ClusterCoordinator.schedule` returns it.

    Not created by users. It can be an argument, or part of one, of a function that is scheduled later; that function
    then waits for it, and gets the value as :meth:`fetch` returns it.

    >>> import replicax
    >>> strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=1)
    >>> with replicax.ClusterCoordinator(strategy) as coordinator:
    ...     six = coordinator.schedule(lambda: 6)
    ...     coordinator.schedule(lambda x: 7 * x, args=(six,)).fetch()
    42
    """

    def __init__(self, name: str, number: int, owner: Any) -> None:
        self.reference = "value", number
        self.number = number
        self._owner = owner
        self.name = name
        self._future: Future[Any] = Future()

    def fetch(self, timeout_seconds: float | None = None) -> Any:
        """Wait for the function, and return its result: arrays as NumPy arrays.

        If the replicas of a worker have different values, it is a tuple with an array for each of them.

        Args:
          timeout_seconds: how long to wait; ``None`` for ever.

        Raises:
          WorkerError: the function has failed, or was cancelled because another one has.
          TimeoutError: the time has passed.
        """
        if not self.is_finished and wait([self._future], timeout_seconds).not_done:
            raise TimeoutError(f"{self.name} has not been finished within {timeout_seconds:g} seconds")
        return self._future.result()

    get = fetch

    def check_owner(self, dispatcher: Any) -> None:
        """Raise if functions of this dispatcher can't use it."""
        if self._owner is not dispatcher:
            raise ValueError(
                f"{self!r} is the result of another coordinator's function, which can't be waited for here: pass its "
                "value, from fetch()"
            )
        if self.is_finished:
            self._future.result()  # raises its error

    @property
    def is_finished(self) -> bool:
        """Return whether :meth:`fetch` returns at once."""
        return self._future.done()

    def _finish(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self.is_finished:
            self._future.set_exception(error) if error is not None else self._future.set_result(value)

    def __repr__(self) -> str:
        state = "not finished" if not self.is_finished else "failed" if self._future.exception() else "finished"
        return f"RemoteValue({self.name}: {state})"


class PerWorkerDataset:
    """A dataset on each worker; :meth:`ClusterCoordinator.create_per_worker_dataset` returns it.

    Not created by users. ``iter`` makes an iterator on each worker, to be passed to scheduled functions.
    """

    def __init__(self, pickled_fn: bytes, uses: Sequence[Any], definitions: Definitions) -> None:
        self.reference = definitions.define_new("dataset", self, pickled_fn)
        self._uses = uses  # keeps them alive: each worker makes the dataset when it needs it
        self._definitions = definitions

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self, self._definitions)


class PerWorkerIterator:
    """An iterator on each worker. In a scheduled function it is the worker's own, and ``next`` returns an element.

    Not created by users. A worker that replaces a dead one starts from the beginning.
    """

    def __init__(self, dataset: PerWorkerDataset, definitions: Definitions) -> None:
        self._dataset = dataset  # keeps it alive
        self.reference = definitions.define_new("iterator", self, dataset.reference[1])

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise ContextError(
            "next was called on a per-worker iterator outside of a scheduled function: its elements are on the "
            "workers. Pass the iterator to coordinator.schedule, and call next there."
        )
