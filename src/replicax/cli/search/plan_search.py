"""Runs a search: determines the choices, plans the cases, and prints the result."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicax.cli.command_line import NOT_WRITTEN, InputError, written
from replicax.cli.search.case_processes import outcomes
from replicax.cli.search.choices import OPTIONS, SearchCase, cases_of, declared, default_choices, parsed
from replicax.cli.search.ranking import CaseOutcome, as_data, print_ranking
from replicax.system.environment import usable_cores
from replicax.system.quantities import counted

if TYPE_CHECKING:
    from rich.console import Console

_PROG = "replicax plan"
_DEADLINE = 1800.0
_MEASURE = "import sys; from replicax.planning.calibration import write_measured; write_measured(*sys.argv[1:])"


def search(
    args: argparse.Namespace,
    module: Any,
    check: Callable[[dict[str, Any]], None],
    checks: Mapping[str, Callable[[str], object]],
) -> int:
    """Run ``replicax plan --search``; returns 0, 1 if no case fits, 3 if a file can't be written, 130 if interrupted.

    The user's ``module`` may offer choices. ``check`` raises unless the function takes arguments of these names, and
    ``checks`` have a function for each option that may be varied, which raises for an invalid value.
    """
    cases = cases_of(_choices(args, module, checks))
    check(dict.fromkeys(name for name, _ in cases[0].values if name not in OPTIONS))
    console = _console(goes_on=args.json is not None)
    deadline = args.deadline or _DEADLINE
    jobs = min(args.jobs or usable_cores(), len(cases))
    with (
        _terminated_as_interrupted(),
        tempfile.TemporaryDirectory(prefix="replicax-search-", ignore_cleanup_errors=True) as name,
    ):
        folder = Path(name)
        chip = args.chip
        if chip is None and args.topology is None:
            chip = _measured(folder / "chip.json", args.replicas or 8, console)
        common = _common(args)
        hidden = [] if chip is None else ["--chip", str(chip)]

        def arguments(case: SearchCase) -> list[str]:
            return [*common, *case.arguments(), *hidden]

        cases_in_words = counted(len(cases), "case")
        console.print(f"{cases_in_words}, {jobs} at once, each for at most {deadline:g} s", style="bold")
        found = outcomes(cases, arguments, jobs, deadline, folder)
        results, is_interrupted = _followed_outcomes(found, len(cases), console)
    rows = sorted(results, key=lambda row: row.key)
    unfinished = [case for case in cases if case not in {row.case for row in rows}]
    given = [] if args.chip is None else ["--chip", str(args.chip)]
    commands = {}
    for row in rows:
        batch = [] if args.batch is not None or row.examples is None else ["--batch", str(row.examples)]
        commands[row.case] = shlex.join(["replicax", "plan", *common, *row.case.arguments(), *batch, *given])
    failure = None
    if args.json is not None:
        text = json.dumps(as_data(rows, commands, unfinished), indent=2)
        failure = written(args.json, lambda path: path.write_text(text))
    if rows:
        print_ranking(rows, console)
    if is_interrupted:
        console.print(f"interrupted: {len(unfinished)} of {len(cases)} cases are not known", style="yellow")
    best = rows[0] if rows and rows[0].state == "fits" else None
    if best is not None:
        console.print("The first alone, with all its tables:", style="bold")
        console.print(commands[best.case], soft_wrap=True, markup=False)
    if args.json is not None:
        print(f"Written: {args.json}" if failure is None else f"{_PROG}: {failure}")
    if is_interrupted:
        return 130
    if best is None:
        print(f"{_PROG}: none of {cases_in_words} fits", file=sys.stderr)
    return NOT_WRITTEN if failure else 1 if best is None else 0


# --- what is varied -------------------------------------------------------------------------------------


def _choices(
    args: argparse.Namespace, module: Any, checks: Mapping[str, Callable[[str], object]]
) -> dict[str, list[str]]:
    """The choices of the command line, then those of the program, then those that fit any program."""
    chosen = parsed(args.search)
    fixed = {name for name in OPTIONS if getattr(args, name) is not None} | {name for name, *_ in args.keywords}
    if twice := sorted(fixed & set(chosen)):
        raise InputError(f"{twice[0]} is given, and --search varies it: leave out one of the two")
    choices = default_choices(*_replicas_and_slices(args)) | declared(module) | chosen
    choices = {name: values for name, values in choices.items() if name not in fixed}
    if not choices:
        raise InputError("--search has nothing to vary: all choices are given")
    for name, check in checks.items():
        for value in choices.get(name, ()):
            try:
                check(value)
            except argparse.ArgumentTypeError as error:
                raise InputError(f"--search {name}={value}: {error}") from error
    return choices


def _replicas_and_slices(args: argparse.Namespace) -> tuple[int, int]:
    """The number of replicas with one microbatch, and of slices."""
    from replicax.planning.strategy_spec import devices_and_slices

    devices, slices = args.replicas or 8, 1
    if args.topology is not None:
        devices, slices = devices_and_slices(args.topology, args.slices)
    cores = args.logical or 1
    return devices // (cores if isinstance(cores, int) else math.prod(cores)), slices


def _common(args: argparse.Namespace) -> list[str]:
    """The arguments that all cases have in common."""
    words = [args.target]
    options = ("topology", "slices", "network", "replicas", "logical", "strategy", "microbatches", "batch")
    for name in options:
        value = getattr(args, name)
        if isinstance(value, tuple):
            value = "x".join(map(str, value))
        words += [] if value is None else [f"--{name}", str(value)]
    for *_, text in args.keywords:
        words += ["--with", text]
    return words


def _measured(path: Path, devices: int, console: Console) -> Path:
    """Measure what emulated devices can do on this machine; returns the file."""
    console.print(f"measuring what each of {devices} emulated devices can do here", style="dim")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path), str(devices)], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason"]
        raise InputError(f"the emulated devices can't be measured: {last[0]}")
    return path


# --- on the way -----------------------------------------------------------------------------------------


def _console(goes_on: bool) -> Console:
    """Standard output; if it is closed, as by ``| head``, the command exits, or goes on to write its file."""
    from rich.console import Console

    class GoingOn(Console):
        def on_broken_pipe(self) -> None:
            with contextlib.suppress(SystemExit):
                super().on_broken_pipe()

    kind = GoingOn if goes_on else Console
    return kind(highlight=False, width=None if sys.stdout.isatty() else 160)


def _followed_outcomes(found: Generator[CaseOutcome], total: int, console: Console) -> tuple[list[CaseOutcome], bool]:
    """Return all results, and whether the user interrupted.

    Each result gets a line as it comes, above a progress bar on a terminal.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.completed} of {task.total} cases"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=total)
    known: list[CaseOutcome] = []
    with contextlib.closing(found), bar:
        try:
            for outcome in found:
                known.append(outcome)
                console.print(f"{len(known)} of {total}  {outcome.in_a_line}", markup=False, soft_wrap=True)
                bar.advance(task)
        except KeyboardInterrupt:
            return known, True
    return known, False


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: print the results so far, and leave no process behind."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not in the main thread, as in a test
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
