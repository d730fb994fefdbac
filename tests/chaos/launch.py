"""The launch of a run: the launcher's process, and what it has said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos import training
from tests.chaos.faults import Fault, write_faults
from tests.chaos.records import read_records

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0
"""For how many seconds a launch may do nothing that is noted before it counts as hanging."""
GRACE = 60
_LAUNCHER = "import sys; from replicax.cli import main; sys.exit(main())"


def launch(
    folder: Path,
    checkpoints: Path,
    faults: Sequence[Fault],
    *,
    steps: int,
    workers: int,
    devices: int,
    disk_is_real: bool,
    show: Callable[[str], None],
) -> int:
    """Run the training under the launcher, until it has come to its end; returns the launcher's exit code."""
    write_faults(folder / training.FAULTS, faults)
    training.write_data(folder / training.DATA)
    checkpoints.mkdir(exist_ok=True)
    limit = len(faults) + 2  # what nobody has planned comes to an end
    words = ["--workers", workers, "--devices-per-worker", devices, "--max-restarts", limit, "--max-preemptions", limit]
    words += ["--backoff", 0, "--grace", GRACE, "--log-dir", folder / "output", "-m", "tests.chaos.training"]
    removed = ("NPROC", "OMP_NUM_THREADS", "TF_CONFIG")
    environment = {k: v for k, v in os.environ.items() if k not in removed} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        training.FOLDER: str(folder),
        training.CHECKPOINTS: str(checkpoints),
        training.STEPS: str(steps),
        training.DISK: str(int(disk_is_real)),
    }
    with (folder / "launcher.txt").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, "launch", *map(str, words)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    shown, size, since = 0, 0, time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(0.05)
            now = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
            if now != size:
                size, since = now, time.monotonic()
                struck = read_records(folder, "struck")
                for entry in struck[shown:]:
                    show(str(faults[entry["number"]]))
                shown = len(struck)
            if time.monotonic() - since > PATIENCE:
                show(f"nothing has happened for {PATIENCE:g} s: see {folder / 'launcher.txt'}")
                return -1
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # its guard ends the workers
        process.wait()
    return process.returncode


def said(folder: Path) -> dict[int, list[str]]:
    """What the launcher has said in each attempt."""
    found: dict[int, list[str]] = {}
    attempt = 0
    for line in (folder / "output" / "launch.log").read_text().splitlines():
        message = line.partition("] ")[2]
        if match := re.match(r"attempt (\d+): ", message):
            attempt = int(match[1])
        found.setdefault(attempt, []).append(message)
    return found


def seconds_to_end(folder: Path) -> list[float]:
    """How long the others lived after a worker had failed, of each attempt that ended so."""
    text = (folder / "output" / "launch.log").read_text()
    return [float(seconds) for seconds in re.findall(r"all workers have ended, after ([\d.]+) s", text)]
