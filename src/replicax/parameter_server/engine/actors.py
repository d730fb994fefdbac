"""Actors: the one small interface between parameter servers and the engine that runs processes.

An *actor* is an object in a process of its own. Its methods are called from elsewhere, with copies of their arguments,
one after the other as a rule, and each call has a *reply*. Nothing else of the engine is used; Ray's side is in
:mod:`replicax.parameter_server.engine.ray_actors`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class ActorDiedError(RuntimeError):
    """The process of an actor has ended, so that a call has no reply. It may have been run, or not."""


class ReplyLostError(ActorDiedError):
    """What a call has returned was kept by machines that have died; no call can have it as an argument any more."""


class NoRoomError(RuntimeError):
    """The engine has no memory for the arguments of a call, or for its result."""


class Reply(Protocol):
    """What a call of an actor's method will return.

    It can be an argument of another call, which then gets the result, without a detour through this process. The result
    is kept as long as the reply is, also when its actor has ended.
    """

    def result(self, timeout: float) -> Any:
        """Wait for it.

        Raises:
          ActorDiedError: the actor's process has ended, or one whose reply was an argument.
          NoRoomError: the call was not made, or what it has returned is nowhere.
          ReplyLostError: an argument was a reply that is lost, and so the call was not made.
          TimeoutError: it has not come within ``timeout`` seconds.
          Exception: what the method raised.
        """

    def when_done(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the reply is there, or can't come any more; on whichever thread."""


class Actor(Protocol):
    """An object in a process of its own. It can be an argument of another actor's methods."""

    def call(self, method: str, *args: Any) -> Reply:
        """Call a method. Calls from one thread are run in their order."""

    def kill(self) -> None:
        """End its process; calls in progress have no reply."""


class Actors(Protocol):
    """Starts actors, and ends them all."""

    def start(self, kind: type, *args: Any, env: Mapping[str, str]) -> Actor:
        """A new actor, ``kind(*args)``, in a process with these environment variables.

        Its methods are called one after the other, or, if the class has an attribute ``calls_at_once``, as many at the
        same time, on as many threads.

        Returns at once: an error of the constructor is one of the first call.
        """

    def check(self) -> None:
        """Raise if the engine itself has ended, so that nothing comes any more.

        Raises:
          ActorDiedError: says what of it has ended.
        """

    def stop(self) -> None:
        """End all actors that were started here; a second call does nothing."""


TIMEOUT = 120.0
"""How many seconds to wait for an actor that only has to move or change arrays; processes may have to start first."""


def all_results(replies: Sequence[Reply], whom: Callable[[int], str], timeout: float = TIMEOUT) -> list[Any]:
    """The results of several calls, in their order.

    Args:
      replies: of the calls.
      whom: names the actor of the call with this number, for messages.
      timeout: how many seconds to wait for all of them.

    Raises:
      ActorDiedError, ReplyLostError, TimeoutError: with the name of the actor.
    """
    deadline = time.monotonic() + timeout
    found = []
    for number, reply in enumerate(replies):
        try:
            found.append(reply.result(max(0.0, deadline - time.monotonic())))
        except ActorDiedError as error:
            raise type(error)(f"{whom(number)} has died: {error}") from None
        except TimeoutError:
            raise TimeoutError(f"{whom(number)} has not answered within {timeout:g} seconds") from None
    return found
