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
from replicax.launcher.console import LONGEST_LINE, Console, OutputLines, Stream

_ROOM = 1 << 16
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


def check_log_folder(folder: Path) -> None:
    """Create the folder, and check that files can be written in it.

    Raises:
      LaunchError: they can't.
    """
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
        self._lines: dict[Stream, OutputLines] = {"stdout": OutputLines(), "stderr": OutputLines()}
        self._left: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}  # of unfinished lines, not in the file yet
        self._is_begun: dict[Stream, bool] = {"stdout": False, "stderr": False}  # whether the file's line is unfinished

    def add(self, stream: Stream, piece: bytes) -> None:
        """Add a piece of a stream."""
        whole, end, left = (self._left[stream] + piece).rpartition(b"\n")
        if end:
            self.file.write(whole + end)
            self._is_begun[stream] = False
        self._left[stream] = left
        if len(left) > LONGEST_LINE:
            self._keep_left(stream)
        lines = self._lines[stream]
        for line in lines.add(piece):
            self._console.line(self.worker, stream, line)
        if b"\r" in lines.unfinished:  # a progress bar; other lines are about to get their ends
            self._console.unfinished(self.worker, stream, lines.unfinished)

    def keep_unfinished(self) -> None:
        """Show and store unfinished lines: their ends may take long to come."""
        for stream, left in self._left.items():
            if left:
                self._keep_left(stream)
                self._console.unfinished(self.worker, stream, self._lines[stream].unfinished)

    def close(self) -> None:
        """Write what is left, after the end of the worker."""
        for stream, lines in self._lines.items():
            if self._left[stream] or self._is_begun[stream]:
                self.file.write(self._left[stream] + b"\n")
            for line in lines.close():
                self._console.line(self.worker, stream, line)
        self.file.close()

    def _keep_left(self, stream: Stream) -> None:
        self.file.write(self._left[stream])
        self._left[stream], self._is_begun[stream] = b"", True
