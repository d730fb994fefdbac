"""``replicax doctor``: checks this machine and its cluster, and reports what is wrong."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicax.cli.command_line import importing, seconds
from replicax.system.process_age import process_age

if TYPE_CHECKING:
    from replicax.cli.diagnosis.check_runner import Check
    from replicax.cli.diagnosis.findings import Finding

_TOTAL = 9.0
"""Seconds for the whole command, including the start of Python and the import of JAX."""
_LEAST = 5.0
"""Seconds that the checks have at least, however long that took."""
_EPILOG = """\
The command changes nothing and starts no worker: a process of its own asks for the devices, and each host of the
cluster gets a connection that is closed again. Each problem comes with what to do.

Exit status: 0 if all is well or there are only warnings; 1 if something is wrong; 2 if an argument was.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the command to ``argparse``."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and its cluster: versions, devices, memory, network",
        description="Check versions, devices, memory, disk, environment variables, and the cluster that a strategy "
        "would find. Report what is there and what is wrong, on one screen and in less than ten seconds.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="DIR", help="where checkpoints would go (default: here)"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help=f"how long each check may take, all at the same time (default: {_TOTAL:g} for the whole command)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, or 1 if something is wrong."""
    with importing():
        from replicax.cli.diagnosis.check_runner import run_checks
        from replicax.cli.diagnosis.findings import State

        checks = [*machine_checks(args.directory), _cluster_check()]

    began = time.monotonic()
    limit = max(_LEAST, _TOTAL - process_age()) if args.timeout is None else args.timeout
    findings = run_checks(checks, limit)
    took = time.monotonic() - began
    is_well = all(finding.state is not State.WRONG for finding in findings)
    if args.json:
        report = {"well": is_well, "seconds": round(took, 2), "findings": [f.as_dict() for f in findings]}
        print(json.dumps(report, indent=2))
    else:
        _print(findings, took)
    return 0 if is_well else 1


def machine_checks(directory: Path | None = None) -> list[Check]:
    """The checks of this machine alone, in the order of their findings."""
    from replicax.cli.diagnosis import (
        device_check,
        environment_variables,
        host_machine,
        installed_packages,
        nvidia_gpus,
    )
    from replicax.cli.diagnosis.check_runner import Check

    disk = [] if directory is None else [Check("disk", lambda seconds: host_machine.look_at_disk(directory))]
    return [
        Check("software", installed_packages.check),
        Check("devices", device_check.check),
        Check("GPUs", nvidia_gpus.check),
        Check("machine", host_machine.check),
        *disk,
        Check("environment", environment_variables.check),
    ]


def _cluster_check() -> Check:
    """The check of the cluster, which alone imports JAX in this process."""
    from replicax.cli.diagnosis.check_runner import Check
    from replicax.cli.diagnosis.findings import wrong

    try:
        from replicax.cli.diagnosis import reachability
    except Exception as error:
        what = f"can't be looked at, as JAX can't be imported: {' '.join(str(error).split())}"
        finding = wrong("cluster", what, "make JAX work first: see devices")
        return Check("cluster", lambda seconds: [finding])
    return Check("cluster", reachability.check)


def _print(findings: Sequence[Finding], took: float) -> None:
    import rich.console
    from rich.table import Table
    from rich.text import Text

    from replicax.cli.diagnosis.findings import State

    marks = {State.OK: ("✓", "green"), State.WARNING: ("!", "yellow"), State.WRONG: ("✗", "red")}
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last = None
    for finding in findings:
        mark, style = marks[finding.state]
        what = Text(finding.what)
        if finding.to_do:
            what.append(f"\n→ {finding.to_do}", style)
        table.add_row(Text(mark, f"bold {style}"), "" if finding.topic == last else finding.topic, what)
        last = finding.topic
    console = rich.console.Console(highlight=False)
    console.print(table)
    counts = {state: sum(finding.state is state for finding in findings) for state in State}
    verdict = ", ".join(
        f"{count} {word}"
        for state, word in ((State.WRONG, "wrong"), (State.WARNING, "to look at"))
        if (count := counts[state])
    )
    console.print(f"\n{verdict or 'All is well'} ({took:.1f} s)")
