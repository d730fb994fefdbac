"""``python -m tests.chaos``: a run that faults strike, a run without any, and a table that compares them."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos import disk, verdict
from tests.chaos.faults import DAMAGES, FILL, SPOTS, Amounts, Fault, alone, faults_of, steps_needed
from tests.chaos.launch import launch, seconds_to_end
from tests.chaos.records import read_records

_DESCRIPTION = (
    "Run a training of several workers under `replicax launch` while faults strike it, and once more without faults. "
    "At the end both must have the same parameters, bit by bit, and every epoch must have had each example once."
)
_HELP = {
    "kills": "how many workers to kill",
    "stops": "how many workers to stop (SIGSTOP), which then hang",
    "preemptions": "how many preemptions (SIGTERM)",
    "damages": "how many checkpoints to damage",
    "fills": "how many times to fill the disk",
}

SHORT = Amounts(kills=1, stops=0, preemptions=1, damages=1, fills=1)


def main() -> int:
    """Run it; the exit status is 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=_DESCRIPTION)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the list of faults (default: 0)")
    parser.add_argument("--only", type=int, metavar="N", help="only fault number N of the list, as `--list` shows it")
    parser.add_argument("--list", action="store_true", help="print the list of faults, and run nothing")
    parser.add_argument("--short", action="store_true", help="a few faults on fewer workers, as in the tests")
    parser.add_argument("--folder", type=Path, help="the folder of the runs, which is kept (default: a temporary one)")
    for field in dataclasses.fields(Amounts):
        parser.add_argument(f"--{field.name}", type=int, help=f"{_HELP[field.name]} (default: {field.default})")
    arguments = parser.parse_args()
    if not arguments.list:
        disk.enter_own_mounts()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the launch is ended, too
    workers, devices = (2, 1) if arguments.short else (3, 2)
    given = {f.name: n for f in dataclasses.fields(Amounts) if (n := getattr(arguments, f.name)) is not None}
    amounts = dataclasses.replace(SHORT if arguments.short else Amounts(), **given)
    faults = faults_of(arguments.seed, amounts, workers)
    console = Console(highlight=False, soft_wrap=True)
    if arguments.list:
        for fault in faults:
            console.print(f"{fault.number:3}  {fault}", markup=False)
        return 0
    if arguments.only is not None:
        faults = alone(faults, arguments.only)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    is_well = _run(folder.resolve(), faults, workers, devices, console)
    if is_well and arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"everything is kept in {folder}", markup=False)
    if not is_well:
        short = " --short" if arguments.short else ""
        more = "".join(f" --{name} {n}" for name, n in given.items())
        console.print(f"to repeat fault N alone: python -m tests.chaos --seed {arguments.seed}{short}{more} --only N")
    return 0 if is_well else 1


def _run(folder: Path, faults: list[Fault], workers: int, devices: int, console: Console) -> bool:
    began = time.monotonic()
    steps = steps_needed(faults)
    struck, reference = folder / "struck", folder / "reference"
    for path in (struck, reference):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    small = struck / "checkpoints"
    is_real = disk.mounted(small)
    how = f"a tmpfs of {disk.SIZE}" if is_real else "an ordinary one, whose being full is simulated (no mount allowed)"
    console.print(f"{workers} workers × {devices} devices, {steps} steps; the disk is {how}", markup=False)

    def show(line: str) -> None:
        console.print(f"{time.monotonic() - began:6.1f} s  {line}", markup=False)

    common = {"steps": steps, "workers": workers, "devices": devices, "show": show}
    code = launch(reference, reference / "checkpoints", [Fault(0)], disk_is_real=False, **common)
    if code:
        console.print(f"the run without faults has ended with code {code}: see {reference / 'launcher.txt'}")
        return False
    show("the run without faults has ended")
    code = launch(struck, small, faults, disk_is_real=is_real, **common)
    show(f"the run with faults has ended with code {code}")
    by_attempt = verdict.problems_of_attempts(struck, faults, workers)
    problems = [f"the launcher has ended with code {code}"] if code else []
    problems += verdict.problems_of_examples(struck, steps, workers * devices)
    problems += verdict.problems_of_result(struck, reference, workers)
    _print_table(console, struck, faults, by_attempt)
    if ended := seconds_to_end(struck):
        median = statistics.median(ended)
        console.print(f"after a fault the others had ended within {max(ended):.2f} s (median {median:.2f} s)")
    for number, texts in sorted(by_attempt.items()):
        what = str(faults[number]) if number < len(faults) else "not in the list"
        for text in texts:
            console.print(f"FAULT {number} ({what}): {text}", markup=False)
    for text in problems:
        console.print(f"FAILED: {text}", markup=False)
    if not by_attempt and not problems:
        console.print(
            f"after {len(faults) - 1} restarts the parameters are bit-identical to those of the run without faults, "
            f"and every epoch has had each example once ({time.monotonic() - began:.0f} s in all)"
        )
    return not by_attempt and not problems


def _print_table(console: Console, folder: Path, faults: list[Fault], by_attempt: dict[int, list[str]]) -> None:
    struck = {entry["number"] for entry in read_records(folder, "struck")}
    restarts = collections.Counter(entry["attempt"] for entry in read_records(folder, "prepared"))
    table = Table("fault", "phase", "planned", "done", "restarts", "result")
    groups: dict[tuple[str, str], list[Fault]] = collections.defaultdict(list)
    for fault in faults:
        if fault.kind:
            groups[fault.kind, "save" if fault.kind == FILL else fault.phase].append(fault)
    order = list(SPOTS)
    for (kind, phase), group in sorted(groups.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        bad = [fault.number for fault in group if fault.number in by_attempt]
        done = [fault for fault in group if fault.number in struck]
        again = sum(restarts[fault.number + 1] for fault in done)
        result = "well" if not bad else f"wrong: {', '.join(map(str, bad))}"
        table.add_row(kind, phase, str(len(group)), str(len(done)), str(again), result)
    damaged = collections.Counter(entry["how"] for entry in read_records(folder, "damaged"))
    for how in DAMAGES:
        group = [fault for fault in faults if fault.damage is not None and fault.damage.how == how]
        if group:
            bad = [fault.number for fault in group if fault.number in by_attempt]
            result = "well" if not bad else f"wrong: {', '.join(map(str, bad))}"
            table.add_row("newest checkpoint", how, str(len(group)), str(damaged[how]), "", result)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
