"""Real launches for tests: a launcher process, what it prints, and whatever is left of it."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable

from replicax.launcher.orphans import end_marked, marked
from replicax.launcher.worker_environment import MARK

ROOT = pathlib.Path(__file__).parents[2]
# A launcher goes on ignoring what it is started with ignored, as by nohup. Tests may be started so; launches are not.
PROGRAM = """
import signal, sys
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
from replicax.cli import main
sys.exit(main())
"""
COMMAND = [sys.executable, "-c", PROGRAM, "launch"]
PATIENCE = 120.0


class Launch:
    """A launcher that runs; its output goes to files.

    Args:
      folder: where it runs, and its logs are.
      words: its arguments.
      script: the worker's program, ``train.py`` in the folder.
      stdout: for its standard output and error, instead of files.
      variables: of its environment, beside those of this process.
    """

    def __init__(
        self, folder: pathlib.Path, *words: str, script: str | None = None, stdout: int | None = None, **variables: str
    ) -> None:
        self.folder = folder
        if script is not None:
            (folder / "train.py").write_text(textwrap.dedent(script))
        self.code: int | None = None
        # As if the launch ran inside another one, whose mark all of its processes have, too.
        self.mark = uuid.uuid4().hex
        removed = ("NPROC", "OMP_NUM_THREADS", "TF_CONFIG", "COLUMNS")
        environment = {k: v for k, v in os.environ.items() if k not in removed}
        environment |= {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu", MARK: self.mark, **variables}
        number = len(list(folder.glob("stdout*")))
        self._paths = {name: folder / f"{name}{number}" for name in ("stdout", "stderr")}
        with self._paths["stdout"].open("wb") as out, self._paths["stderr"].open("wb") as err:
            self.process = subprocess.Popen(
                [*COMMAND, *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err if stdout is None else stdout,
                start_new_session=True,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        end_marked(self.mark)

    @property
    def stdout(self) -> str:
        return self._paths["stdout"].read_text()

    @property
    def stderr(self) -> str:
        return self._paths["stderr"].read_text()

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        try:
            self.code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launch has not ended:\n{self.stdout}\n{self.stderr}") from None
        return self.code

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until so many times ``text`` has been printed."""
        self.wait_until(lambda: (self.stdout + self.stderr).count(text) >= count)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so, while the launch runs."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.01)

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def left(self) -> list[str]:
        """The processes of the launch that are still there, the launcher's own included."""
        return [pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in marked(self.mark)]

    def nothing_is_left(self, within: float = 30.0) -> bool:
        """Whether all of its processes end soon."""
        deadline = time.monotonic() + within
        while marked(self.mark):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def launched(folder: pathlib.Path, *words: str, script: str | None = None, **variables: str) -> Launch:
    """A launch that has ended."""
    with Launch(folder, *words, script=script, **variables) as launch:
        launch.wait()
        assert launch.nothing_is_left(), launch.left()
    return launch


def said(launch: Launch) -> list[str]:
    """What the launcher itself has said."""
    return [line.removeprefix("[launch] ") for line in launch.stderr.splitlines() if line.startswith("[launch] ")]
