"""Actors that are threads of one process: what is said between them is pickled, as if they were not."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ray import cloudpickle

import replicax
from replicax.parameter_server import coordinator as coordinator_module
from replicax.parameter_server.actors import ActorDiedError, ReplyLostError


class ThreadActors:
    """See :class:`replicax.parameter_server.actors.Actors`."""

    def __init__(self) -> None:
        self.actors: list[ThreadActor] = []
        self.has_ended = False

    def start(self, kind: type, *args: Any, env: Mapping[str, str]) -> ThreadActor:
        actor = ThreadActor(kind, args, env)
        self.actors.append(actor)
        return actor

    def store(self, value: Any) -> ThreadReply:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(value)
        return ThreadReply(future)

    def check(self) -> None:
        if self.has_ended:
            raise ActorDiedError("the engine has ended")

    def stop(self) -> None:
        for actor in self.actors:
            actor.kill()
            actor.executor.shutdown(wait=True, cancel_futures=True)
            actor.object = None
            _all.pop(id(actor), None)

    def of(self, kind: str) -> list[ThreadActor]:
        """Those of a class that are alive."""
        return [actor for actor in self.actors if actor.kind.__name__ == kind and not actor.is_dead]


class ThreadActor:
    """An object whose methods run on a thread of its own."""

    def __init__(self, kind: type, args: tuple[Any, ...], env: Mapping[str, str]) -> None:
        self.kind = kind
        self.args = args
        self.env = env
        self.executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=kind.__name__)
        self.object: Any = None
        self.is_dead = False
        self.before: Callable[[str, tuple[Any, ...]], None] = lambda method, args: None
        self.after: Callable[[str, tuple[Any, ...]], None] = lambda method, args: None

    def __reduce__(self) -> Any:
        return _found, (id(self),)

    def call(self, method: str, *args: Any) -> ThreadReply:
        _all[id(self)] = self
        try:
            sent = cloudpickle.dumps([arg.kept() if isinstance(arg, ThreadReply) else arg for arg in args])
            if self.is_dead:
                raise ActorDiedError("it was killed")
        except ActorDiedError as error:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_exception(error)
            return ThreadReply(future)
        return ThreadReply(self.executor.submit(self._called, method, sent))

    def _called(self, method: str, sent: bytes) -> Any:
        if self.object is None:
            self.object = self.kind(*self.args)
        args = cloudpickle.loads(sent)
        self.before(method, args)
        if self.is_dead:
            raise ActorDiedError("it was killed")
        result = cloudpickle.dumps(getattr(self.object, method)(*args))
        self.after(method, args)
        if self.is_dead:
            raise ActorDiedError("it was killed")
        return cloudpickle.loads(result)

    def kill(self) -> None:
        self.is_dead = True


class ThreadReply:
    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self.future = future
        self.is_lost = False

    def kept(self) -> Any:
        """What another call gets that has this as an argument."""
        if self.is_lost:
            raise ReplyLostError("all copies are lost")
        return self.future.result()

    def result(self, timeout: float) -> Any:
        return self.future.result(timeout)

    def when_done(self, then: Callable[[], None]) -> None:
        self.future.add_done_callback(lambda _: then())


_all: dict[int, ThreadActor] = {}


def _found(number: int) -> ThreadActor:
    return _all[number]


@contextlib.contextmanager
def coordinator_of(strategy: replicax.ParameterServerStrategy) -> Iterator[tuple[Any, ThreadActors]]:
    """A coordinator whose servers and workers are threads, and those."""
    actors = ThreadActors()
    usual = coordinator_module._make_actors
    coordinator_module._make_actors = lambda: actors
    try:
        coordinator = replicax.ClusterCoordinator(strategy)
    finally:
        coordinator_module._make_actors = usual
    with coordinator:
        yield coordinator, actors


def wait_until_ready(coordinator: Any) -> None:
    """Until all workers have started, so that each next one that is free gets the next function."""
    while not all(worker.is_ready for worker in coordinator._cluster.dispatcher._workers):
        time.sleep(0.001)
