"""The console: shows the workers' output line by line, each line with its worker.

A whole line is shown at once. On a terminal the console also shows a line that is not whole yet, or that its worker
redraws (a progress bar, with carriage returns), below the others until it is whole; if several workers have such a
line, it shows one of them. Without a terminal it shows only the final state of such a line.
"""

from __future__ import annotations

import collections
import os
import re
import time
from typing import Literal

Stream = Literal["stdout", "stderr"]
TAIL = 20
"""How many of a worker's last lines are shown again if it has failed."""
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_STALE = 2.0
"""After how many seconds without change an unfinished line gives way to another worker's."""
_CLEAR = b"\r\x1b[K"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FILE_NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}


def as_drawn(line: bytes) -> bytes:
    """The final state of a line, without its end: the text after its last redraw."""
    return next((part for part in reversed(line.rstrip(b"\r\n").split(b"\r")) if part), b"")


class Console:
    """The launcher's standard output and standard error, for so many ``workers`` at most; shows those of ``shown``."""

    def __init__(self, workers: int, shown: frozenset[int] | None) -> None:
        self._digits = len(str(workers - 1))
        self._shown = shown
        self._is_terminal = {stream: os.isatty(number) for stream, number in _FILE_NUMBERS.items()}
        self._is_coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._closed: set[Stream] = set()
        self._drawn = b""  # the unfinished line that is shown below the others
        self._drawn_of: tuple[int, Stream] | None = None  # the worker and stream of it
        self._drawn_at = 0.0
        self._tails: dict[int, collections.deque[bytes]] = {}

    @property
    def columns(self) -> int | None:
        """The width of a worker's line; ``None`` without a terminal."""
        if not any(self._is_terminal.values()):
            return None
        return max(20, self._width() - self._digits - 4)

    def line(self, worker: int, stream: Stream, line: bytes) -> None:
        """Show a whole line of a worker."""
        drawn = as_drawn(line)
        self._tails.setdefault(worker, collections.deque(maxlen=TAIL)).append(drawn)
        if self._shows(worker):
            if self._drawn_of == (worker, stream):  # the unfinished line is whole now
                self._drawn_of = None
            self._write(stream, self._prefix(worker, stream) + drawn)

    def unfinished(self, worker: int, stream: Stream, line: bytes) -> None:
        """Show a worker's unfinished line, on a terminal."""
        if not (self._is_terminal[stream] and self._shows(worker) and (drawn := as_drawn(line))):
            return
        now = time.monotonic()
        if self._drawn_of is None or worker <= self._drawn_of[0] or now - self._drawn_at > _STALE:
            self._drawn_of, self._drawn_at = (worker, stream), now
            self._drawn = _cut_line(self._prefix(worker, stream) + drawn, self._width() - 1)
            self._emit(stream, _CLEAR + self._drawn)

    def say(self, message: str) -> None:
        """Show a message of the launcher."""
        self._write("stderr", self._coloured_text("[launch]", 1, "stderr") + b" " + message.encode(errors="replace"))

    def show_tail(self, worker: int) -> None:
        """Show the last lines of a worker again."""
        for line in self._tails.get(worker, ()):
            self._write("stderr", self._prefix(worker, "stderr") + b"| " + line)

    def forget_tails(self) -> None:
        """Forget the last lines of all workers: new processes follow."""
        self._tails.clear()

    def _shows(self, worker: int) -> bool:
        return self._shown is None or worker in self._shown

    def _prefix(self, worker: int, stream: Stream) -> bytes:
        return self._coloured_text(f"[{worker:>{self._digits}}]", _COLOURS[worker % len(_COLOURS)], stream) + b" "

    def _coloured_text(self, text: str, colour: int, stream: Stream) -> bytes:
        if self._is_terminal[stream] and self._is_coloured:
            text = f"\x1b[{colour}m{text}\x1b[0m"
        return text.encode()

    def _write(self, stream: Stream, line: bytes) -> None:
        if not self._drawn or not self._is_terminal[stream]:
            self._emit(stream, line + b"\n")
            return
        if self._drawn_of is None:
            self._drawn = b""
        self._emit(stream, _CLEAR + line + b"\n" + self._drawn)

    def _width(self) -> int:
        for number in _FILE_NUMBERS.values():
            try:
                return os.get_terminal_size(number).columns or 80
            except OSError:
                continue
        return 80

    def _emit(self, stream: Stream, data: bytes) -> None:
        if stream in self._closed:
            return
        try:
            while data:
                data = data[os.write(_FILE_NUMBERS[stream], data) :]
        except OSError:  # the reader has ended, as in `| head`; the files have everything
            self._closed.add(stream)


def _cut_line(line: bytes, width: int) -> bytes:
    """Shorten a line to ``width`` columns; colours don't count."""
    text = line.decode(errors="replace")
    if len(_ESCAPE.sub("", text)) <= width:
        return line
    kept, room, at = [], width, 0
    while room > 0 and at < len(text):
        escape = _ESCAPE.match(text, at)
        piece = escape[0] if escape else text[at]
        kept.append(piece)
        at += len(piece)
        room -= 0 if escape else 1
    return ("".join(kept) + "\x1b[0m").encode()
