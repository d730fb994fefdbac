"""Actors: the interface between parameter servers and the engine that runs processes.

An *actor* is an object in another process. Calls of its methods copy their arguments, run one after the other as a
rule, and each has a *reply*. Nothing else of the engine is used; :mod:`replicax.parameter_server.engine.ray_actors`
implements the interface with Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class ActorDiedError(RuntimeError):
    """An actor's process has ended, so a call has no reply. The call may or may not have run."""


class ReplyLostError(ActorDiedError):
    """Dead machines held the result of a call; it can no longer be the argument of another call."""


class NoRoomError(RuntimeError):
    """The engine has no memory for the arguments of a call, or for its result."""


class Reply(Protocol):
    """The future result of a call.

    It can be an argument of another call, which then gets the result directly, without a detour through this process.
    The result is kept as long as the reply is, even after its actor has ended.
    """

    def result(self, timeout: float) -> Any:
        """Wait for the result.

        Raises:
          ActorDiedError: the actor's process has ended, or one whose reply was an argument.
          NoRoomError: there was no memory for the call or its result.
          ReplyLostError: an argument was a lost reply, so the call was not made.
          TimeoutError: the result has not come within ``timeout`` seconds.
          Exception: raised by the method.
        """

    def when_done(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the reply is there or can't come any more; on any thread."""


class Actor(Protocol):
    """An object in another process. It can be an argument of another actor's methods."""

    def call(self, method: str, *args: Any) -> Reply:
        """Call a method. Calls from one thread run in their order."""

    def kill(self) -> None:
        """Kill its process; calls in progress have no reply."""


class Actors(Protocol):
    """Starts actors, and ends all of them."""

    def start(self, kind: type, *args: Any, env: Mapping[str, str]) -> Actor:
        """Start an actor, ``kind(*args)``, in a process with these environment variables.

        Its methods run one at a time, or, if the class has an attribute ``calls_at_once``, as many at the same time,
        each on its own thread.

        Returns at once; the first call raises an error of the constructor.
        """

    def check(self) -> None:
        """Raise if the engine itself has ended, so that no reply will come.

        Raises:
          ActorDiedError: names the part that has ended.
        """

    def stop(self) -> None:
        """End all actors that were started here; a second call does nothing."""


TIMEOUT = 120.0
"""How many seconds to wait for an actor that only moves or changes arrays; processes may have to start first."""


def all_results(replies: Sequence[Reply], whom: Callable[[int], str], timeout: float = TIMEOUT) -> list[Any]:
    """The results of several calls, in their order.

    Args:
      replies: of the calls.
      whom: returns the name of the actor of the call with this number, for messages.
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
