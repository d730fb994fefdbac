"""What one command can tell on a machine with GPUs or TPUs: is it right, how fast is it, and were the plans true?

    python benchmarks/accelerator.py [--quick] [--minutes 20] [--out DIR]

Needs JAX for the accelerator and the installed package, and Flax for the rows of NNX; nothing for development. In at
most 20 minutes, each part in a process of its own: checks against plain JAX; ``run``, ``run_steps`` and NNX beside the
same by hand (an MLP, a CNN, and a transformer of 124 million parameters in bfloat16), on one device and on all; the
plan's prediction beside the measured step, and the memory it predicts beside the measured peak; sums over all devices
beside the links' bandwidth; the per-replica executor; a save, and a run that goes on from it. Writes JSON, a Markdown
table and a picture, also after Ctrl-C, with what there is. The exit status is 1 if a check failed or a part did not
end.

Without an accelerator it rehearses with small models on emulated CPU devices (``--devices``), and labels all files as a
rehearsal.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MARK = "@@"
"""Begins the lines that a part's process prints for this one."""
LEAST = 15.0
"""A part that would have less than so many seconds is left out."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that is measured in a process of its own.

    Attributes:
      name: of the function, its model and so on, as words.
      limit: after how many seconds it is ended.
      many: whether it needs several devices.
    """

    name: str
    limit: float
    many: bool = False


def parts(count: int, has_memory: bool) -> Iterator[Part]:
    """What is measured, the most telling first."""
    numbers = sorted({1, count})
    yield Part("checks", 240)
    yield Part("sums", 120, many=True)
    for model, limit in (("transformer", 360), ("mlp", 120), ("cnn", 150)):
        for number in reversed(numbers):
            yield Part(f"training {model} {number}", limit)
    yield Part("exact", 90)
    yield Part("save", 90)
    yield Part("resume", 90)
    for model in ("transformer", "cnn", "mlp") if has_memory else ():
        for number in reversed(numbers):
            for side in ("replicax", "hand"):
                yield Part(f"memory {model} {number} {side}", 120)


# --- in the process of a part ---------------------------------------------------------------------------------


def run_here(name: str, size: str, seconds: float, emulated: int, folder: Path) -> None:
    """Run a part, and print each of its results as a line."""
    import replicax

    if emulated:
        replicax.use_cpu_devices(emulated)
    import jax

    for result in _results(name.split(), size, seconds, folder, jax.local_devices()):
        print(MARK + json.dumps(result), flush=True)


def _results(words: list[str], size: str, seconds: float, folder: Path, devices: list[Any]) -> Iterator[Any]:
    if words[0] == "look":
        yield _look(devices)
        return
    from _accelerator import problems

    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    sizes = problems.sizes_for(size, limit)
    if words[0] == "checks":
        from _accelerator.checks import checks

        yield from checks()
    elif words[0] == "sums":
        from _accelerator.sums import all_reduce

        yield from all_reduce(2**21 if size == "small" else min(2**30, (limit or 2**34) // 16), seconds / 8)
    elif words[0] in ("training", "memory"):
        from _accelerator import training

        if words[0] == "training":
            yield from training.training(words[1], sizes, int(words[2]), seconds)
        else:
            yield from training.memory(words[1], sizes, int(words[2]), words[3])
    else:
        from _accelerator import runs

        if words[0] == "exact":
            yield from runs.exact_executor(sizes)
        else:
            yield from (runs.save if words[0] == "save" else runs.resume)(sizes, folder)


def _look(devices: list[Any]) -> dict[str, Any]:
    """The devices, and the packages that figures depend on."""
    import _measure

    statistics = devices[0].memory_stats() or {}
    return {
        "table": "device",
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "memory": statistics.get("bytes_limit"),
        "has_peak": "peak_bytes_in_use" in statistics,
        "software": str(devices[0].client.platform_version).splitlines(),
        "machine": _measure.machine(),
    }


# --- all parts ------------------------------------------------------------------------------------------------


class Session:
    """The parts one after the other, by a deadline; what they have found, which is written after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[str, Any] = {"interrupted": False, "parts": []}
        self._began = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="replicax-accelerator-"))
        self._emulated = 0

    def run(self) -> None:
        """Run all; Ctrl-C and SIGTERM end the part that runs, and no other one starts."""
        try:
            self._run()
        except KeyboardInterrupt:
            self.found["interrupted"] = True
        finally:
            self.found["seconds"] = time.monotonic() - self._began
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            self._emulated = self.options.devices
        self._part(Part("look", 120))
        device = self.found.get("device")
        if device is None:
            return
        if device["platform"] == "cpu" and not self._emulated:  # JAX finds no accelerator
            self._emulated = self.options.devices
            self._part(Part("look", 120))
            device = self.found["device"]
        self.found["device"] |= {"emulated": bool(self._emulated)}
        self.found["size"] = self.options.size or ("small" if self._emulated else "full")
        print(f"{device['count']} × {device['kind']}, models: {self.found['size']}")
        for part in parts(device["count"], device["has_peak"]):
            if self.options.only and not self.options.only.search(part.name):
                continue
            if part.many and device["count"] == 1:
                self._note(part, "left out", 0.0, "there is one device")
            else:
                self._part(part)
            write(self.found, self.options.out)

    def _part(self, part: Part) -> None:
        left = 60 * self.options.minutes - (time.monotonic() - self._began)
        if left < LEAST:
            self._note(part, "left out", 0.0, f"the {self.options.minutes:g} minutes are over")
            return
        limit, start = min(part.limit, left), time.monotonic()
        print(f"{time.monotonic() - self._began:6.0f} s  {part.name}", flush=True)
        command = [sys.executable, str(HERE / "accelerator.py"), "--part", part.name, "--folder", str(self._folder)]
        command += ["--size", self.found.get("size", "small"), "--seconds", str(self.options.seconds)]
        command += ["--emulated", str(self._emulated)]
        log = self._folder / "stderr"
        with log.open("wb") as errors:
            # A session of its own: Ctrl-C is for this process, which ends that one and writes what there is.
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                env=self._environment(),
                start_new_session=True,
            )
            lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
            reader.start()
            try:
                ended = self._collect(process, lines, start + limit)
            except KeyboardInterrupt:
                self._note(part, "interrupted", time.monotonic() - start)
                raise
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    with contextlib.suppress(subprocess.TimeoutExpired):  # inside of a driver it may not even die
                        process.wait(timeout=5)
                reader.join(timeout=5)
        took = time.monotonic() - start
        if ended is None:
            self._note(part, "ended", took, f"did not end within {limit:.0f} s")
        elif ended:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            self._note(part, "failed", took, f"exit code {ended}: " + " ".join(lines[-3:])[-600:])
        else:
            self._note(part, "done", took)

    def _collect(
        self, process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes | None], deadline: float
    ) -> int | None:
        """Take a part's results until it ends; its exit code, or ``None`` if it has not ended by the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=left)
            except queue.Empty:
                return None
            if line is None:
                try:
                    return process.wait(timeout=max(1.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return None
            if line.startswith(MARK.encode()):
                self._take(json.loads(line[len(MARK) :]))
        return None

    def _take(self, result: dict[str, Any]) -> None:
        table = result.pop("table")
        if table == "device":
            self.found[table] = result
        else:
            self.found.setdefault(table, []).append(result)

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self._emulated:
            environment["JAX_PLATFORMS"] = "cpu"
        else:
            # The processes that measure memory take the programs that those before them have compiled, so that what
            # the compiler tries out on the device is not in the peak.
            environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(self._folder / "programs"))
            environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        return environment

    def _note(self, part: Part, state: str, seconds: float, words: str = "") -> None:
        self.found["parts"].append({"name": part.name, "state": state, "seconds": round(seconds, 1), "words": words})
        if state != "done":
            print(f"          {part.name}: {state}: {words}", flush=True)


def _read(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    """Pass on what a process prints, and ``None`` at the end."""
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def write(found: dict[str, Any], folder: Path) -> Path:
    """Write the JSON, whole or not at all; returns its path, which has the devices' name."""
    device = found["device"]
    kind = f"emulated {device['kind']}" if device["emulated"] else device["kind"]
    name = re.sub(r"[^a-z0-9]+", "-", f"{kind}-x{device['count']}".lower()).strip("-")
    path = folder / f"accelerator-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found, indent=2) + "\n")
    new.replace(path)
    return path


def failures(found: dict[str, Any]) -> list[str]:
    """What has failed, in words."""
    bad = [f"check {row['name']}" for row in found.get("checks", ()) if not row["passed"]]
    bad += ["the per-replica executor" for row in found.get("exact", ()) if not row["passed"]]
    bad += [f"{row['step']}: other bits" for row in found.get("checkpoint", ()) if not row["same_bits"]]
    return bad + [
        f"part {row['name']}: {row['state']}" for row in found["parts"] if row["state"] in ("failed", "ended")
    ]


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r} ({error})") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the measuring time for each pair, and noisier")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long all of it may take (default: 20)")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="for the files (default: benchmarks/results)"
    )
    parser.add_argument(
        "--only", type=_regex, metavar="REGEX", help="only the parts whose names match, such as 'checks|training mlp'"
    )
    parser.add_argument("--devices", type=int, default=4, help="emulated ones, if there is no accelerator (default: 4)")
    parser.add_argument("--size", choices=("full", "small"), help="of the models (default: small if emulated)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--emulated", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_here(options.part, options.size, options.seconds, options.emulated, options.folder)
        return 0
    if options.minutes <= 0 or options.devices < 1:
        parser.error("--minutes must be above 0, and --devices at least 1")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:  # rather now than after 20 minutes
        parser.error(f"--out {options.out}: can't be written ({error.strerror})")
    options.seconds = 2.0 if options.quick else 6.0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as at the end of a job's time
    session = Session(options)
    session.run()
    found = session.found
    if "device" not in found:
        print("no device answered: see replicax doctor")
        return 1
    from _accelerator import picture, report

    path = write(found, options.out)
    path.with_suffix(".md").write_text(report.markdown(found, path.with_suffix(".png").name))
    picture.draw(found, path.with_suffix(".png"))
    print(report.markdown(found, path.with_suffix(".png").name))
    print(f"written to {path}, .md and .png, after {found['seconds']:.0f} s")
    for words in failures(found):
        print(f"FAILED: {words}")
    return 130 if found["interrupted"] else int(bool(failures(found)))


if __name__ == "__main__":
    sys.exit(main())
