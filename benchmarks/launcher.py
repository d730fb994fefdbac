"""How long the launcher takes: to start a worker, and to end all workers when one has been killed.

    python benchmarks/launcher.py

Workers are plain Python processes without JAX, so that what is measured is the launcher's own time. Each number is the
median of several launches, beside a Python process that does the same without a launcher.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

LAUNCH = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())", "launch"]
FIRST_LINE = "import time; print(time.time(), flush=True)"
WAIT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


def seconds_to_first_line(command):
    """From the start of a process until a worker's first line, and until the process has ended."""
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1]) - start, time.time() - start


def seconds_to_end(command, workers):
    """From the kill of one of the workers until the last of the others has ended."""
    launch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(launch.stdout.readline().split()[-1]) for _ in range(workers)]
    start = time.time()
    os.kill(pids[-1], signal.SIGKILL)
    while any(is_alive(pid) for pid in pids):
        time.sleep(0.001)
    took = time.time() - start
    launch.stdout.read()
    launch.wait()
    return took


def is_alive(pid):
    try:
        return not re.search(r"^State:\s+Z", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first, wait = pathlib.Path(folder, "first.py"), pathlib.Path(folder, "wait.py")
        first.write_text(FIRST_LINE)
        wait.write_text(WAIT)
        common = ["--log-dir", folder, "--max-restarts", "0"]
        launch = [*LAUNCH, "--workers", "1", *common, str(first)]
        timings = {"python": [], "launch": [], "JAX": []}
        for _ in range(args.repeats):  # one after the other, so that all see the same machine
            timings["python"].append(seconds_to_first_line([sys.executable, str(first)]))
            timings["launch"].append(seconds_to_first_line(launch))
            timings["JAX"].append(seconds_to_first_line([sys.executable, "-c", "import jax; " + FIRST_LINE]))
        for name, what in (
            ("python", "python script.py"),
            ("launch", "replicax launch --workers 1 script.py"),
            ("JAX", "python, with `import jax`"),
        ):
            until_line, until_end = (statistics.median(t[i] for t in timings[name]) for i in (0, 1))
            print(f"{what:38} first line after {until_line:5.2f} s, ended after {until_end:5.2f} s")
        launch = [*LAUNCH, "--workers", str(args.workers), *common, str(wait)]
        for what, more in (("end at SIGTERM", []), ("ignore SIGTERM", ["deaf"])):
            took = [seconds_to_end([*launch, *more], args.workers) for _ in range(args.repeats)]
            print(
                f"one of {args.workers} workers is killed, and the others {what}: all have ended after "
                f"{statistics.median(took):.2f} s, at most {max(took):.2f} s"
            )


if __name__ == "__main__":
    main()
