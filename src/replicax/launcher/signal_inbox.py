"""Makes signals readable like the workers' output: each arrives as a byte in a pipe."""

from __future__ import annotations

import os
import select
import signal
import time

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESIZING = {signal.SIGUSR1: -1, signal.SIGUSR2: 1}


class SignalInbox:
    """The signals that this process receives from now on, in their order.

    Signals that the parent process had ignored (``nohup``, a shell that runs the launcher in the background) stay
    ignored. Signals that it had blocked are unblocked, in the workers, too: blocking them was an oversight, and they
    would never arrive. Unless the launch ``is_elastic``, SIGUSR1 and SIGUSR2 keep their meaning.
    """

    def __init__(self, is_elastic: bool) -> None:
        self._reading, writing = os.pipe()
        for end in (self._reading, writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        awaited = (*STOPPING, signal.SIGCHLD, *(RESIZING if is_elastic else ()))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        for signum in awaited:
            if signum == signal.SIGCHLD or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda signum, frame: None)

    def fileno(self) -> int:
        """A file descriptor that becomes readable when a signal arrives."""
        return self._reading

    def read(self) -> list[signal.Signals]:
        """The signals that have arrived since the last call."""
        try:
            return [signal.Signals(number) for number in os.read(self._reading, 4096)]
        except BlockingIOError:
            return []

    def wait_for_stop(self, seconds: float) -> signal.Signals | None:
        """Wait for ``seconds``, or until a signal comes that ends the launch; returns that."""
        deadline = time.monotonic() + seconds
        while True:
            for signum in self.read():
                if signum in STOPPING:
                    return signum
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            select.select([self._reading], [], [], left)
