"""Exchange: the processes that run one program together exchange bytes.

XLA runs the collectives over arrays. Everything else that workers tell each other (which point each has reached, what a
step's Python returned, how many rows are left to read) goes through the coordination service that
``jax.distributed.initialize`` starts: a small key-value store in process 0. An exchange takes as long as a few small
steps, and megabytes take seconds, so steps never compute on what is exchanged.
"""

from __future__ import annotations

import itertools
import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from replicax import _jax
from replicax.errors import DeadlockError, WorkerError
from replicax.workers.liveness import Liveness, liveness_of

DEFAULT_TIMEOUT = 300.0
"""How many seconds workers wait for each other by default."""

_PIECE = 32 * 1024 * 1024  # far below the 2 GiB that one message may have
_PATIENCE = 0.2  # seconds between two looks of a wait at Ctrl-C, and at whether it was cancelled
_COUNT = struct.Struct("<q")


class Cancelled(RuntimeError):  # noqa: N818
    """The caller cancelled an exchange."""


class Elsewhere(Exception):  # noqa: N818
    """Workers wait in programs that need the caller of an exchange; the argument has a message for each of them."""


def never() -> bool:
    """Return ``False``: the default of exchanges that can't be cancelled."""
    return False


class Workers(Protocol):
    """The processes that run one program together, seen from one of them."""

    index: int  # which one this is, from 0; worker 0 is the *chief*
    count: int  # how many there are
    liveness: Liveness | None  # watches their processes; ``None`` where they can't end one by one

    def exchange(
        self, topic: str, data: bytes, timeout: float = DEFAULT_TIMEOUT, is_cancelled: Callable[[], bool] = never
    ) -> list[bytes]:
        """Send ``data``, and get what every worker sent; an all-gather of bytes.

        May be called from any thread, and from several at once for different topics.

        Args:
          topic: what this is about. Every worker must call this with it, once: number a topic that comes again.
          data: what this worker sends. The sizes may differ.
          timeout: how many seconds to wait for the others.
          is_cancelled: called now and then while waiting; if it returns true, the wait ends.

        Returns:
          What all workers sent, in their order.

        Raises:
          TimeoutError: some workers did not call it in time; names the topic and these workers. They get an error, too,
            when they call it: an exchange takes place for all workers or for none.
          WorkerError: another worker has failed, or the one that this one waits for has ended its program.
          Cancelled: ``is_cancelled`` returned true.
          DeadlockError: it raised :class:`Elsewhere`, with a worker that this one waits for.
        """


class Alone:
    """A single process.

    >>> Alone().exchange("greeting", b"hello")
    [b'hello']
    """

    index = 0
    count = 1
    liveness: Liveness | None = None

    def exchange(
        self, topic: str, data: bytes, timeout: float = DEFAULT_TIMEOUT, is_cancelled: Callable[[], bool] = never
    ) -> list[bytes]:
        return [data]


class DistributedWorkers:
    """The processes of ``jax.distributed``; see :class:`Workers`.

    ``name`` is a prefix of every topic, to keep it apart from those of others. The last worker that has read an
    exchange removes it from the service. Raises a RuntimeError if ``jax.distributed.initialize`` has not been called.
    """

    def __init__(self, name: str) -> None:
        client = _jax.coordination_client()
        if client is None:
            raise RuntimeError("jax.distributed.initialize has not been called")
        self._client: Any = client
        self._name = name
        self.index, self.count = _jax.process_index_and_count()
        self._liveness = liveness_of(client, self.index, self.count)
        self.liveness: Liveness | None = self._liveness

    def exchange(
        self, topic: str, data: bytes, timeout: float = DEFAULT_TIMEOUT, is_cancelled: Callable[[], bool] = never
    ) -> list[bytes]:
        where = f"{self._name}/{topic}"
        deadline = time.monotonic() + timeout
        pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
        for number, piece in enumerate(pieces):
            self._client.key_value_set_bytes(f"{where}/{self.index}/{number}", piece)
        # Last: it tells the others that the rest is there.
        self._client.key_value_set_bytes(f"{where}/{self.index}/count", _COUNT.pack(len(pieces)))
        counts = {self.index: len(pieces)}
        for worker in range(self.count):
            if worker == self.index:
                continue
            count = self._get(worker, where, deadline, is_cancelled)
            if count is None:
                problem = absent(topic, timeout, self._missing(where), self.count)
                if self._verdict(where, f"worker {self.index} gave up: {problem}") is not None:
                    raise TimeoutError(problem)
                deadline = math.inf  # it came at the last moment, and others have seen it
                count = self._present(f"{where}/{worker}/count")
            [counts[worker]] = _COUNT.unpack(count)
        gave_up = self._verdict(where, None)
        if gave_up is not None:
            raise TimeoutError(f"{topic}: worker {self.index} came too late, when {gave_up}")
        everyone = [
            data if w == self.index else b"".join(self._present(f"{where}/{w}/{i}") for i in range(counts[w]))
            for w in range(self.count)
        ]
        if self._client.key_value_increment(f"{where}/read", 1) == self.count:
            self._client.key_value_delete(where)  # and all below
        return everyone

    def _verdict(self, where: str, gave_up: str | None) -> str | None:
        """Return ``None`` if the exchange takes place, else why a worker gave up; the first to write decides."""
        verdict = _jax.set_unless_set(self._client, f"{where}/verdict", (gave_up or "").encode())
        return verdict.decode() or None

    def _get(self, worker: int, where: str, deadline: float, is_cancelled: Callable[[], bool]) -> bytes | None:
        """The number of pieces that ``worker`` sends to ``where``, or ``None`` if it does not do so in time."""
        while True:
            ahead: dict[int, str] = {}
            try:
                if is_cancelled():
                    raise Cancelled
            except Elsewhere as error:
                ahead = error.args[0]
            problem: Exception | None = self._liveness.error_of_wait(worker)
            left = deadline - time.monotonic()
            try:
                value = _jax.wait_for_key(self._client, f"{where}/{worker}/count", max(0.001, min(left, _PATIENCE)))
                if ahead and value is None:  # a worker that fails sends that, and goes on without the others
                    messages = [ahead[w] for w in self._missing(where) if w in ahead]
                    problem = DeadlockError(messages[0]) if messages else problem
            except jax.errors.JaxRuntimeError as error:
                self._liveness.check()
                raise WorkerError(
                    f"the coordination service in worker 0 can't be reached, while worker {self.index} waits for "
                    f"worker {worker}: {error}"
                ) from error
            if value is None and problem is not None:  # a worker may send a value before it ends or goes on
                raise problem
            if value is not None or left <= 0:
                return value

    def _present(self, key: str) -> bytes:
        return self._client.key_value_try_get_bytes(key)

    def _missing(self, where: str) -> list[int]:
        there = {key for key, _ in self._client.key_value_dir_get_bytes(where)}
        return [w for w in range(self.count) if f"{where}/{w}/count" not in there]


class Series:
    """A series of numbered exchanges of workers about one topic.

    >>> steps = Series(Alone(), "steps")
    >>> steps.exchange(b"first"), steps.exchange(b"second")
    ([b'first'], [b'second'])
    """

    def __init__(self, workers: Workers, name: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.workers = workers
        self._name = name
        self._timeout = timeout
        self._numbers = itertools.count()

    def exchange(
        self,
        data: bytes,
        timeout: float | None = None,
        is_cancelled: Callable[[], bool] = never,
        number: int | None = None,
    ) -> list[bytes]:
        """Make the next exchange; see :meth:`Workers.exchange`.

        Exchanges are counted, unless the caller gives each its ``number``, which must be larger than the last one's.
        """
        timeout = self._timeout if timeout is None else timeout
        number = next(self._numbers) if number is None else number
        return self.workers.exchange(f"{self._name}/{number}", data, timeout, is_cancelled)


def absent(topic: str, timeout: float, missing: Sequence[int], count: int) -> str:
    """The message of an exchange that workers missed."""
    who = ", ".join(f"worker {w}" for w in missing) or "some workers"
    return (
        f"{topic}: waited {timeout:g} s for {who} of {count}, who did not come. All workers must run the same program; "
        "see whether one has stopped, has raised an error, or has taken another branch."
    )
