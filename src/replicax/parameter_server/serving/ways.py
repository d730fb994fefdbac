"""The way of a worker to one server: by a line and by shared memory where both are on one machine, or by the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
from typing import Any

import numpy as np

from replicax.parameter_server.engine.actors import TIMEOUT, Actor, Reply
from replicax.parameter_server.serving.lines import ServerLine
from replicax.parameter_server.serving.pushes import Pulled
from replicax.parameter_server.serving.shard_server import BY_LINE
from replicax.parameter_server.serving.shared_memory import Lending, LentBlocks, SharedBlocks, this_machine
from replicax.parameter_server.serving.shared_values import SharedPart


class Way:
    """See the module's docstring. The server is asked once, before the first call that may have a line.

    Args:
      actor: the server.
      shares: whether there may be a line, and shared memory. That is for who pulls and pushes all the time.

    Attributes:
      reads: whether this process can have the server's memory, as far as it knows.
    """

    def __init__(self, actor: Actor, shares: bool) -> None:
        self._actor = actor
        self._has_met = not shares
        self._meeting = threading.Lock()
        self._line: ServerLine | None = None
        self._blocks: SharedBlocks | None = None
        self._lent = LentBlocks()
        self.reads = shares

    def call(self, method: str, *args: Any) -> Reply:
        """See :meth:`replicax.parameter_server.engine.actors.Actor.call`."""
        if method in BY_LINE:
            self._meet()
            if self._line is not None:
                return self._line.call(method, *args)
        return self._actor.call(method, *args)

    def lend(self, room: int) -> tuple[Lending, np.ndarray] | None:
        """Memory of this many bytes that the server can open; ``None`` if there is none."""
        self._meet()
        return None if self._blocks is None else self._blocks.lend(room)

    def read(self, pulled: Pulled) -> Pulled:
        """What the server has said, with arrays in the place of parts that are to be read where they are.

        Raises:
          OSError: this process can't have that memory, or the server has died.
        """
        try:
            values = {
                number: (version, part.read(self._lent.memory(part.use)) if isinstance(part, SharedPart) else part)
                for number, (version, part) in pulled.values.items()
            }
        except OSError:
            self.reads = False  # or each answer would leave the server with memory that it must take for used
            raise
        return dataclasses.replace(pulled, values=values)

    def _meet(self) -> None:
        with self._meeting:
            if self._has_met:
                return
            blocks = SharedBlocks()
            use, _ = blocks.lend(1) or (None, None)
            try:
                address, can_open = self._actor.call("meet", this_machine(), os.getpid(), use).result(TIMEOUT)
            except Exception:  # whatever it is, the next call will see it, too
                return
            self._has_met = True
            self._blocks = blocks if can_open else None
            with contextlib.suppress(OSError, EOFError, multiprocessing.AuthenticationError):
                self._line = ServerLine(address) if address is not None else None
