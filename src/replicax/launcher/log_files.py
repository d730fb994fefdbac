"""Log files of the workers' output, ``DIR/attempt-0/worker-1.log``, and of the launcher's own, ``DIR/launch.log``.

A worker's file has its standard output and standard error in the order in which they came. Existing files are appended
to, so a launch that a scheduler restarts keeps its earlier output. Only the owner can read new files and folders,
because programs may print secrets.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from replicax.launcher import LaunchError
from replicax.launcher.console import Console, Stream

LONGEST_LINE = 1 << 16
"""How many bytes of a line are kept while it is not whole."""
_ROOM = 1 << 16
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


def check_log_folder(folder: Path) -> None:
    """Create the folder, and check that files can be written in it; raises a LaunchError if they can't."""
    probe = folder / f".probe-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        try:
            with probe.open("wb") as file:  # only writing detects a full disk
                file.write(b"\0" * _ROOM)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except FileExistsError as error:
        raise LaunchError(f"--log-dir {folder}: there is a file of that name; name a folder") from error
    except OSError as error:
        raise LaunchError(
            f"--log-dir {folder}: nothing can be written there ({error.strerror or error}); name another folder"
        ) from error


class LogFile:
    """A file to append output to. If that fails, as on a full disk, it warns once, and the launch goes on."""

    def __init__(self, path: Path, console: Console) -> None:
        self.path = path
        self._console = console
        self._file: BinaryIO | None = None
        with self._trying():
            path.parent.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _FILE_MODE)
            self._file = os.fdopen(number, "ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append to the file."""
        with self._trying():
            while self._file is not None and data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                self.close()
            self._file = None
            self._console.say(
                f"{self.path} can't be written any more ({error.strerror or error}); the launch goes on without it"
            )


class WorkerOutput:
    """The output of one worker: goes into its file as it comes, and onto the console line by line.

    Lines stay whole in the file, too, unless their end takes long to come.
    """

    def __init__(self, worker: int, file: LogFile, console: Console) -> None:
        self.worker, self.file = worker, file
        self._console = console
        self._open: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}  # the unfinished lines
        self._kept: dict[Stream, int] = {"stdout": 0, "stderr": 0}  # how many bytes of them are in the file
        self._cut: set[Stream] = set()  # those whose line was too long, and has no end in the file yet

    def add(self, stream: Stream, piece: bytes) -> None:
        """Add a piece of a stream, which ends anywhere."""
        whole, end, left = (self._open[stream] + piece).rpartition(b"\n")
        kept = self._kept[stream]
        if end:
            self.file.write((whole + end)[kept:])
            kept = 0
            self._cut.discard(stream)
            for line in whole.split(b"\n"):
                self._console.line(self.worker, stream, line)
        if len(left) > LONGEST_LINE:
            self.file.write(left[kept:])
            left = left[max(0, left.rfind(b"\r")) :]  # drop what the line has drawn over
            if len(left) > LONGEST_LINE:
                self._console.line(self.worker, stream, left)
                left = b""
                self._cut.add(stream)
            kept = len(left)
        self._open[stream], self._kept[stream] = left, kept
        if b"\r" in left:  # a progress bar; other lines are about to get their ends
            self._console.unfinished(self.worker, stream, left)

    def keep_unfinished(self) -> None:
        """Show and store unfinished lines: their ends may take long to come."""
        for stream, line in self._open.items():
            if len(line) > self._kept[stream]:
                self.file.write(line[self._kept[stream] :])
                self._kept[stream] = len(line)
                self._console.unfinished(self.worker, stream, line)

    def close(self) -> None:
        """Write what is left, after the end of the worker."""
        for stream, line in self._open.items():
            if line or stream in self._cut:
                self.file.write(line[self._kept[stream] :] + b"\n")
            if line:
                self._console.line(self.worker, stream, line)
        self.file.close()
