"""Actors on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicax.parameter_server.engine import local_processes
from replicax.parameter_server.engine.actors import ActorDiedError, NoRoomError, Reply, ReplyLostError

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # send no usage reports
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_enable_worker_prestart": "0",  # start processes only for actors
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With this variable at 0 Ray listens on loopback only, on all systems; no other setting does that."""
_OBJECT_STORE: int | None = None
"""Bytes of the object store of a Ray that is started here; by default Ray chooses."""
_ATTEMPTS = 3
_LOOK = 2.0
_SHUT_DOWN = "Ray has been shut down"
_NEEDED = ("gcs_server", "raylet")


class RayActors:
    """Starts actors with Ray: on the cluster that this process is connected to, or else on this machine.

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
        self._actors: list[Any] = []
        self._is_ours = not ray.is_initialized()
        self._processes: set[local_processes.Process] = set()
        if self._is_ours:
            _start(ray)

    def start(self, kind: type, *args: Any, env: Mapping[str, str]) -> RayActor:
        _check_ray()  # otherwise Ray would start another one, with other settings
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        options["max_concurrency"] = getattr(kind, "calls_at_once", 1)
        options["runtime_env"] = {"env_vars": dict(env)}
        handle: Any = self._ray.remote(kind).options(**options).remote(*args)
        self._actors.append(handle)
        self._note_processes()
        return RayActor(handle)

    def check(self) -> None:
        _check_ray()

    def stop(self) -> None:
        actors, self._actors = self._actors, []
        if not self._ray.is_initialized():
            return
        for handle in actors:
            with contextlib.suppress(Exception):  # it has ended already
                self._ray.kill(handle)
        if self._is_ours:
            self._note_processes()
            self._ray.shutdown()
            local_processes.end(self._processes)  # if Ray's own processes have died, others would run on for minutes

    def _note_processes(self) -> None:
        if self._is_ours:
            of_ray = {info.process.pid for infos in _node().all_processes.values() for info in infos}
            self._processes |= local_processes.of(of_ray)


@dataclasses.dataclass(frozen=True)
class RayActor:
    """See :class:`replicax.parameter_server.engine.actors.Actor`."""

    handle: Any

    def call(self, method: str, *args: Any) -> Reply:
        import ray

        if any(isinstance(arg, _NoReply) for arg in args):
            return next(arg for arg in args if isinstance(arg, _NoReply))
        if not ray.is_initialized():  # for instance at the end of the program; Ray would start another one
            return _NoReply(ActorDiedError(_SHUT_DOWN))
        references = (arg.reference if isinstance(arg, RayReply) else arg for arg in args)
        try:
            return RayReply(getattr(self.handle, method).remote(*references))
        except ray.exceptions.RayError as error:  # Ray has ended, or has no memory for the arguments
            return _NoReply(_as_ours(error) or ActorDiedError(_first_line(error)))

    def kill(self) -> None:
        import ray

        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self.handle)


@dataclasses.dataclass(frozen=True)
class _NoReply:
    """The reply of a call that could not be made."""

    why: Exception

    def result(self, timeout: float) -> Any:
        raise self.why

    def when_done(self, then: Callable[[], None]) -> None:
        then()


@dataclasses.dataclass(frozen=True)
class RayReply:
    """See :class:`replicax.parameter_server.engine.actors.Reply`."""

    reference: Any

    def result(self, timeout: float) -> Any:
        import ray

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
        except ray.exceptions.RayTaskError as error:
            raise _as_ours(error) or _cause_of(error) from None
        except ray.exceptions.RayError as error:
            ours = _as_ours(error)
            raise ours if isinstance(ours, NoRoomError) else ActorDiedError(_first_line(error)) from None

    def when_done(self, then: Callable[[], None]) -> None:
        self.reference.future().add_done_callback(lambda _: then())


def _check_ray() -> None:
    """Raise if Ray has ended. For a Ray that was started elsewhere only the connection can be checked.

    Raises:
      ActorDiedError: it has ended; names the process.
    """
    import ray

    if not ray.is_initialized():
        raise ActorDiedError(_SHUT_DOWN)
    dead = [f"{kind} (exit code {process.poll()})" for kind, process in _node().dead_processes() if kind in _NEEDED]
    if dead:
        raise ActorDiedError(f"Ray has ended: its process {' and '.join(dead)} is gone")


def _node() -> Any:
    """The part of Ray that this process has started: none, if it has connected to an existing one."""
    return importlib.import_module("ray._private.worker")._global_node


def _as_ours(error: Any) -> Exception | None:
    """The error for the arguments or the result of a call; ``None`` for other errors."""
    import ray

    while isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    why = _first_line(error)
    if isinstance(error, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError):
        return NoRoomError(
            f"Ray has no memory for the arguments or the result: {why}. Keep large arrays in variables, or have "
            "workers read them; return less; free the disk that Ray uses when its memory is full; or start Ray with "
            "more memory before the coordinator: ray.init(object_store_memory=…). Snapshots of all variables are "
            "there, too, and what the program that schedules reads of them"
        )
    if isinstance(error, ray.exceptions.ObjectLostError):
        return ReplyLostError(why)
    return ActorDiedError(why) if isinstance(error, ray.exceptions.RayActorError) else None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _cause_of(error: Any) -> BaseException:
    """The error as raised in the other process."""
    cause: BaseException = error.cause
    cause.add_note(f"In another process:\n{error}")
    return cause


def _start(ray: Any) -> None:
    """Connect to the cluster that the environment names, or start one on this machine.

    Raises:
      RuntimeError: it could not be started; says why.
    """
    local = {} if os.environ.get("RAY_ADDRESS") else {_LOOPBACK: "0"}
    with _environment(_QUIET | local), warnings.catch_warnings():
        # Ray starts processes with fork and exec, which JAX warns of.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        if os.environ.get("RAY_ADDRESS"):
            ray.init(configure_logging=False, log_to_driver=False)
            return
        _use_loopback()
        before = local_processes.of({os.getpid()})
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
                begun = local_processes.named(local_processes.of({os.getpid()}) - before, "ray")
                ray.shutdown()
                local_processes.end(begun)  # Ray forgets the processes of a failed start
                if not left:
                    raise RuntimeError(
                        f"Ray could not be started on this machine, in {_ATTEMPTS} attempts: {error}"
                    ) from error


def _use_loopback() -> None:
    """Make Ray listen on loopback only. It reads the variable at import, which may have happened already."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = False


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables unless the user has set them."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
