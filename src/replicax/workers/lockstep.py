"""Lockstep: all workers do the same things in the same order, and find out at once where they do not.

Workers run the same Python, each on its own. Wherever one needs something of the others, all exchange messages: to
create a variable, to begin a new program, to communicate in the per-replica executor. Each says what it does; a worker
that does something else, has raised an error or does not come is named on every worker, and no worker waits for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import DeadlockError, WorkerError, line_of
from replicax.workers import heartbeat
from replicax.workers.codec import declared, dumps, error_as_data, error_from_data, loads
from replicax.workers.exchange import DEFAULT_TIMEOUT, Cancelled, Elsewhere, Series, Workers
from replicax.workers.heartbeat_page import Phase
from replicax.workers.launch_log import LaunchLog


class Lockstep:
    """Exchanges of the workers of a strategy about one topic, in one order, with a timeout in seconds.

    >>> from replicax.workers.exchange import Alone
    >>> Lockstep(Alone()).exchange("counts its rows", 5)
    [5]
    """

    def __init__(self, workers: Workers, name: str = "lockstep", timeout: float | None = DEFAULT_TIMEOUT) -> None:
        self.workers = workers
        self.several = workers.count > 1
        self.timeout = math.inf if timeout is None else timeout
        self.launches = LaunchLog()
        if workers.liveness is not None:
            workers.liveness.launches[name] = self.launches
        self._name = name
        self._series = Series(workers, name, self.timeout)
        self._told: BaseException | None = None
        self._calls = 0
        self._watched = itertools.count()

    def exchange(self, doing: str, item: Any, detail: str = "", timeout: float | None = None) -> list[Any]:
        """Send ``item``, and get the items of all workers, in their order.

        Args:
          doing: what this worker does (``"creates a variable"``); all must do the same.
          item: an object that can be sent (see :mod:`replicax.workers.codec`), possibly with arrays of this worker.
          detail: added to the message if the workers do not do the same.
          timeout: how many seconds to wait for the others, if less than the default; ``math.inf``: while they live.

        Raises:
          DeadlockError: workers do something else, don't come in time, or have run different programs before; names
            them.
          WorkerError: another worker has failed, ended or died.
          Exception: the error that another worker raised in a step, with a note that says where; a ``WorkerError``
            with its text, if its class is not known here.
        """
        if not self.several:
            return [item]
        try:
            return self._exchange(_Message(doing, detail, item, self._launched()), timeout)
        except BaseException as error:
            self._told = error
            raise

    def from_chief(self, doing: str, item: Any) -> Any:
        """The chief's item, which all workers get; see :meth:`exchange`."""
        return self.exchange(doing, item)[0]

    def _exchange(self, message: _Message, timeout: float | None) -> list[Any]:
        if timeout != math.inf:
            timeout = self.timeout if timeout is None else min(timeout, self.timeout)
        liveness = self.workers.liveness

        def is_cancelled() -> bool:
            if liveness is not None and (messages := liveness.elsewhere(self._name, message.shown())):
                raise Elsewhere(messages)
            return False

        if liveness is not None:
            liveness.takes_part()
        try:
            with heartbeat.phase(Phase.RENDEZVOUS):
                said: list[_Message] = [loads(m) for m in self._series.exchange(dumps(message), timeout, is_cancelled)]
        except TimeoutError as error:
            raise DeadlockError(f"worker {self.workers.index} {message.shown()}, and {error}") from None
        for worker, theirs in enumerate(said):
            if theirs.failure is not None:
                raise theirs.failure.error(worker)
        if len({m.doing for m in said}) > 1:
            places = "; ".join(f"worker {w} {m.shown()}" for w, m in enumerate(said))
            raise DeadlockError(
                f"the workers do not do the same: {places}. All workers must run the same program, with the same "
                "steps, variables and datasets in the same order."
            )
        if len({m.launched[:2] for m in said}) > 1:
            ran = "; ".join(
                f"worker {w} has run {m.launched[0]} programs, the last of them {m.launched[2]!r}"
                for w, m in enumerate(said)
            )
            raise DeadlockError(
                f"the workers have not run the same programs: {ran}; and now worker {self.workers.index} "
                f"{message.shown()}. All workers must run the same steps in the same order."
            )
        return [m.item for m in said]

    def _launched(self) -> tuple[int, int, str]:
        return self.launches.count, self.launches.digest, self.launches.last

    def series(self, topic: str) -> Series:
        """A series of exchanges about ``topic``, which other threads may make; it has the same timeout."""
        return Series(self.workers, topic, self.timeout)

    def is_to_compare(self) -> bool:
        """Count a call of a compiled step; whether its number, the same on all workers, is a power of two."""
        self._calls += 1
        return self._calls & (self._calls - 1) == 0

    def next_watched(self) -> int:
        """The number of a call whose collectives have a timeout."""
        return next(self._watched)

    def check(self) -> None:
        """Raise if other workers are known not to come; unlike :meth:`check_launch`, not for those that ended."""
        if self.workers.liveness is not None:
            self.workers.liveness.check()

    def check_launch(self) -> None:
        """Raise, before a program is launched, if other workers are known not to launch it.

        After a program has failed here, wait until it has failed on all workers: others may still be in it.

        Raises:
          WorkerError: one has failed, or has ended.
          DeadlockError: one runs other programs.
        """
        if self.workers.liveness is not None:
            self.workers.liveness.check_launch(self._name)
        if self.launches.failure is not None:
            self.exchange("runs a step after one that has failed", None, f"({self.launches.failure.splitlines()[0]})")

    def explain(self, error: BaseException, doing: str) -> None:
        """Raise the cause of ``error``, raised while ``doing`` something, if that is the end of another worker.

        Raises:
          WorkerError: another worker has failed, ended or died.
        """
        liveness = self.workers.liveness
        if liveness is None or not isinstance(error, Exception) or isinstance(error, WorkerError | DeadlockError):
            return
        explained = liveness.explained(error, doing)
        if explained is not error:
            for note in getattr(error, "__notes__", ()):
                explained.add_note(note)
            raise explained from error

    @contextlib.contextmanager
    def explaining(self, doing: str) -> Iterator[None]:
        """Do the same for errors raised in a ``with`` block, such as one that waits for the devices."""
        try:
            yield
        except Exception as error:
            self.explain(error, doing)
            raise

    def fail(self, error: BaseException, who: str) -> None:
        """Tell the others, which will call :meth:`exchange`, that this worker has raised ``error``; does not wait.

        ``who`` says where, such as ``"replica 3 of 4"``. Does nothing if the others have raised this error, too.
        """
        if not self.several or error is self._told:
            return
        self._told = error
        # They come later; or the service has gone, and they learn of that themselves.
        with contextlib.suppress(Cancelled, jax.errors.JaxRuntimeError):
            self._series.exchange(
                dumps(_Message("fails", "", None, self._launched(), _Failure.of(error, who))), is_cancelled=lambda: True
            )

    @contextlib.contextmanager
    def failing_together(self, who: str) -> Iterator[None]:
        """Tell the others of an error that is raised in a ``with`` block, after which, or in which, all exchange."""
        try:
            yield
        except BaseException as error:
            self.fail(error, who)
            raise

    def leaving_nans(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which JAX does not look for NaNs; :meth:`end_together` does after it.

        JAX would look for the operation by running the program again, operation by operation: it names none in what is
        mapped over devices, can't do that if they have several axes, and would wait for other workers for ever.
        """
        settings = contextlib.ExitStack()
        if _special_values():
            settings.enter_context(jax.debug_nans(False))
            settings.enter_context(jax.debug_infs(False))
        return settings

    def end_together(self, what: str, error: BaseException | None, results: Any) -> None:
        """Raise ``error``, or else that of another worker: all come here at the end of ``what``, with or without one.

        It waits for the others however long ``what`` takes them. NaNs or infinities in this worker's ``results`` are
        errors, too, if JAX is to look for them.
        """
        special_values = _special_values()
        if error is None and special_values:
            arrays = [x for x in jax.tree_util.tree_leaves(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
            shards = [shard.data for array in arrays for shard in array.addressable_shards]
            for name, is_special in special_values.items():
                if any(is_special(x).any() for x in shards):
                    alone = ". One worker tells its operation." if self.several else ""
                    error = FloatingPointError(f"invalid value ({name}) encountered in {what}{alone}")
        if error is not None:
            self._told = None  # it may be an object that was raised before
            self.fail(error, what)
            raise error
        self.exchange(f"ends {what}", None, "(with jax.debug_nans)" if special_values else "", math.inf)

    def is_known(self, error: BaseException) -> bool:
        """Return whether all workers know of ``error``."""
        return error is self._told

    def everywhere(self, error: BaseException) -> BaseException:
        """``error``, marked as one that every worker is about to raise, so that none reports it."""
        self._told = error
        return error

    def agree(self, doing: str, item: Any) -> tuple[Any, int] | None:
        """The chief's item and the first worker whose item differs from it; ``None`` if all are equal."""
        items = self.exchange(doing, item)
        return next(((items[0], w) for w, theirs in enumerate(items) if theirs != items[0]), None)


def _special_values() -> dict[str, Any]:
    """The values for which JAX is to look, by name: each with what finds them."""
    config: Any = jax.config  # whose settings mypy does not know
    tests = {"nan": (config.jax_debug_nans, np.isnan), "inf": (config.jax_debug_infs, np.isinf)}
    return {name: test for name, (is_wanted, test) in tests.items() if is_wanted}


@declared
@dataclasses.dataclass(frozen=True)
class _Failure:
    """An error, encoded for other workers."""

    who: str
    line: str
    name: str
    text: str
    arguments: bytes | None

    @classmethod
    def of(cls, error: BaseException, who: str) -> _Failure:
        return cls(who, line_of(error), *error_as_data(error))

    def error(self, worker: int) -> BaseException:
        error = error_from_data(self.name, self.text, self.arguments)
        error.add_note(f"(raised by {self.who} on worker {worker}, at {self.line})")
        return error


@declared
@dataclasses.dataclass(frozen=True)
class _Message:
    doing: str
    detail: str
    item: Any
    launched: tuple[int, int, str]
    failure: _Failure | None = None

    def shown(self) -> str:
        return f"{self.doing} {self.detail}".rstrip()
