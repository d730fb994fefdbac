"""Signals as something to wait for, beside the workers' output: each arrives as a byte in a pipe."""

from __future__ import annotations

import os
import select
import signal
import time

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESIZING = {signal.SIGUSR1: -1, signal.SIGUSR2: 1}


class SignalInbox:
    """The signals that this process gets from now on, in their order.

    Those that whoever started it has it ignore (``nohup``, a shell that runs it in the background) stay ignored. Those
    that it got blocked are let through, to the workers, too: it is an oversight of whoever started it, as a blocked
    signal would be waited for in vain.

    Args:
      is_elastic: whether SIGUSR1 and SIGUSR2 change the number of workers; otherwise they are left as they are.
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
        """What becomes readable when a signal has come."""
        return self._reading

    def read(self) -> list[signal.Signals]:
        """The signals that have come since the last call."""
        try:
            return [signal.Signals(number) for number in os.read(self._reading, 4096)]
        except BlockingIOError:
            return []

    def wait_for_stop(self, seconds: float) -> signal.Signals | None:
        """Wait, unless a signal comes that ends the launch."""
        deadline = time.monotonic() + seconds
        while True:
            for signum in self.read():
                if signum in STOPPING:
                    return signum
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            select.select([self._reading], [], [], left)
