"""Actors on Ray: objects in other processes.

Calls of an actor's methods copy their arguments, and run one after the other. Parameter servers use Ray through this
file alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicax.system.environment import environment_defaults

TIMEOUT = 120.0
"""How many seconds to wait for an actor that only moves or changes arrays; processes may have to start first."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # send no usage reports
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_enable_worker_prestart": "0",  # start processes only for actors
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_OBJECT_STORE: int | None = None
"""Bytes of the object store of a Ray that is started here; by default Ray chooses."""
_ATTEMPTS = 3
_LOOK = 2.0
_SHUT_DOWN = "Ray has been shut down"
_NEEDED = ("gcs_server", "raylet")


class ActorDiedError(RuntimeError):
    """An actor's process has ended, so a call has no reply. The call may or may not have run."""


class ReplyLostError(ActorDiedError):
    """Dead machines held the result of a call; it can no longer be the argument of another call."""


class NoRoomError(RuntimeError):
    """Ray has no memory for the arguments of a call, or for its result."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """The future result of a call, or the error of a call that could not be made.

    It can be an argument of another call, which then gets the result without a detour through this process. The result
    is kept as long as the reply is, even after its actor has ended.
    """

    reference: Any
    error: Exception | None = None

    def result(self, timeout: float) -> Any:
        """Wait for the result; raises the method's error, one of the classes above, or ``TimeoutError``."""
        import ray

        if self.error is not None:
            raise self.error
        deadline = time.monotonic() + timeout
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                try:
                    return ray.get(self.reference, timeout=min(left, _LOOK))
                except ray.exceptions.GetTimeoutError:
                    _check_ray()
                    if left <= _LOOK:
                        raise TimeoutError from None
        except ray.exceptions.RayError as error:
            raise _as_ours(error) from None

    def when_done(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the reply is there or can't come any more; on any thread."""
        if self.error is not None:
            return then()
        self.reference.future().add_done_callback(lambda _: then())


@dataclasses.dataclass(frozen=True)
class Actor:
    """An object in another process. It can be an argument of another actor's methods."""

    handle: Any

    def call(self, method: str, *args: Any) -> Reply:
        """Call a method; returns at once. Calls from one thread run in their order."""
        for arg in args:
            if isinstance(arg, Reply) and arg.error is not None:
                return arg
        given = [arg.reference if isinstance(arg, Reply) else arg for arg in args]
        return _reply(lambda: getattr(self.handle, method).remote(*given))

    def kill(self) -> None:
        """Kill its process; calls in progress have no reply."""
        import ray

        if ray.is_initialized():
            with contextlib.suppress(Exception):  # it has ended already
                ray.kill(self.handle)


class Actors:
    """Starts actors with Ray, and ends all of them.

    It uses a Ray that is connected already (``ray.init(address=…)``), or named by the environment variable
    ``RAY_ADDRESS``. Otherwise it starts Ray: on loopback, without its dashboard, and without usage reports; and it
    stops it with the actors.

    Raises:
      ImportError: Ray is not installed; the message says how to install it.
      RuntimeError: it could not be started.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            raise ImportError(
                "parameter servers need Ray, which is not installed: pip install 'replicax[ray]'"
            ) from None
        self._ray = ray
        self._actors: list[Actor] = []
        self._is_ours = not ray.is_initialized()
        self._processes: set[Any] = set()
        if self._is_ours:
            _start(ray)

    def start(self, kind: type, *args: Any, env: Mapping[str, str]) -> Actor:
        """Start an actor, ``kind(*args)``, in a process with these environment variables.

        Returns at once; the first call raises an error of the constructor.
        """
        _check_ray()  # otherwise Ray would start another one, with other settings
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        handle: Any = self._ray.remote(kind).options(**options, runtime_env={"env_vars": dict(env)}).remote(*args)
        self._actors.append(Actor(handle))
        self._note_processes()
        return self._actors[-1]

    def store(self, value: Any) -> Reply:
        """Store a value, to be an argument of many calls."""
        return _reply(lambda: self._ray.put(value))

    def check(self) -> None:
        """Raise :class:`ActorDiedError` if Ray itself has ended, so that no reply will come."""
        _check_ray()

    def stop(self) -> None:
        """End all actors that were started here; a second call does nothing."""
        actors, self._actors = self._actors, []
        for actor in actors:
            actor.kill()
        if self._is_ours and self._ray.is_initialized():
            self._note_processes()
            self._ray.shutdown()
            _end(self._processes)  # if Ray's own processes have died, others would run on for minutes

    def _note_processes(self) -> None:
        if self._is_ours:
            of_ray = {info.process.pid for infos in _node().all_processes.values() for info in infos}
            for process in _descendants():
                if process.pid in of_ray:
                    self._processes |= {process, *_descendants(process)}


def all_results(replies: Sequence[Reply], actors: Sequence[str]) -> list[Any]:
    """The results of several calls, in their order; waits for all, even if one fails.

    Errors name the actor of the call, and those of dead actors come first.
    """
    deadline = time.monotonic() + TIMEOUT
    results: list[Any] = []
    dead: list[Exception] = []
    raised: list[Exception] = []
    for name, reply in zip(actors, replies, strict=True):
        try:
            results.append(reply.result(max(0.0, deadline - time.monotonic())))
        except ActorDiedError as error:
            dead.append(type(error)(f"{name} has died: {error}"))
        except TimeoutError:
            dead.append(TimeoutError(f"{name} has not answered within {TIMEOUT:g} seconds"))
        except Exception as error:
            raised.append(error)
    for first in [*dead, *raised]:
        raise first
    return results


def _reply(begin: Callable[[], Any]) -> Reply:
    """The reply of a call that this begins, or of one that could not be made."""
    import ray

    if not ray.is_initialized():  # for instance at the end of the program; Ray would start another one
        return Reply(None, ActorDiedError(_SHUT_DOWN))
    try:
        return Reply(begin())
    except ray.exceptions.RayError as error:  # Ray has ended, or has no memory for the arguments
        return Reply(None, _as_ours(error))


def _check_ray() -> None:
    """Raise if Ray has ended. For a Ray that was started elsewhere only the connection can be checked."""
    import ray

    if not ray.is_initialized():
        raise ActorDiedError(_SHUT_DOWN)
    dead = [f"{kind} (exit code {process.poll()})" for kind, process in _node().dead_processes() if kind in _NEEDED]
    if dead:
        raise ActorDiedError(f"Ray has ended: its process {' and '.join(dead)} is gone")


def _node() -> Any:
    """The part of Ray that this process has started: none, if it has connected to an existing one."""
    return importlib.import_module("ray._private.worker")._global_node


def _as_ours(error: Any) -> Exception:
    """Return what to raise for an error of Ray: the method's own error, or one of the classes above."""
    import ray

    cause: Exception = error
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    text = str(cause).strip()
    why = text.splitlines()[0] if text else type(cause).__name__
    if isinstance(cause, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError):
        return NoRoomError(
            f"Ray has no memory for the arguments or the result: {why}. Keep large arrays in variables, or have "
            "workers read them; return less; free the disk that Ray uses when its memory is full; or start Ray with "
            "more memory before the coordinator: ray.init(object_store_memory=…). Snapshots of all variables are "
            "there, too, and what the program that schedules reads of them"
        )
    if isinstance(cause, ray.exceptions.ObjectLostError):
        return ReplyLostError(why)
    if cause is error or isinstance(cause, ray.exceptions.RayActorError):
        return ActorDiedError(why)
    cause.add_note(f"In another process:\n{error}")
    return cause


# --- the start of Ray, and its processes ----------------------------------------------------------------


def _start(ray: Any) -> None:
    """Connect to the cluster that the environment names, or start one on this machine."""
    # With this variable at 0 Ray listens on loopback only, on all systems; no other setting does that.
    local = {} if os.environ.get("RAY_ADDRESS") else {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with environment_defaults(_QUIET | local), warnings.catch_warnings():
        # Ray starts processes with fork and exec, which JAX warns of.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        if os.environ.get("RAY_ADDRESS"):
            ray.init(configure_logging=False, log_to_driver=False)
            return
        # Ray listens on loopback only. It reads the variable at import, which may have happened already.
        importlib.import_module("ray._private.ray_constants").ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]
        before = _descendants()
        for left in reversed(range(_ATTEMPTS)):
            try:
                ray.init(
                    address="local",  # not an unnamed Ray that `ray start` has started on this machine
                    num_cpus=max(2, os.cpu_count() or 1),  # the number of processes that start at the same time
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE,
                    _node_ip_address="127.0.0.1",
                    configure_logging=False,
                    log_to_driver=False,
                )
                return
            except Exception as error:  # Ray's own time limits are short for a busy machine
                begun = _descendants() - before
                ray.shutdown()
                _end(begun, "ray")  # Ray forgets the processes of a failed start
                if not left:
                    raise RuntimeError(
                        f"Ray could not be started on this machine, in {_ATTEMPTS} attempts: {error}"
                    ) from error


def _descendants(process: Any = None) -> set[Any]:
    """The descendants of a process, by default of this one."""
    import psutil  # Ray brings it

    with contextlib.suppress(psutil.NoSuchProcess):
        return set((process or psutil.Process()).children(recursive=True))
    return set()


def _end(processes: set[Any], named: str = "") -> None:
    """Kill those of the processes that still run, with ``named`` in their command line."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            if named in " ".join(process.cmdline()):
                process.kill()
