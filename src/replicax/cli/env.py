"""``replicax env``: prints versions, the platform, devices and variables, to paste into an issue."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replicax.cli.command_line import seconds

if TYPE_CHECKING:
    from replicax.cli.diagnosis.findings import Finding

_TIMEOUT = 20.0
_TOPICS = ("devices", "GPUs", "NVLink", "peer access", "NCCL", "GPU memory", "MIG", "cores", "memory")
"""The topics of the findings to show."""
_WIDTH = 12  # of the names
_EPILOG = """\
Read it before you paste it: variables such as TF_CONFIG may name your machines. `replicax doctor` checks more
(collectives, disk, network), and says what to change.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the command to ``argparse``."""
    parser = subparsers.add_parser(
        "env",
        help="print what to paste into an issue: versions, platform, devices, variables",
        description="Print the versions of Replicax, Python and the packages, the platform, the devices that JAX "
        "finds, and the environment variables that matter, as plain text to paste into an issue.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=_TIMEOUT,
        metavar="SECONDS",
        help=f"how long the devices may take to answer (default: {_TIMEOUT:g})",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, even if a check fails."""
    from replicax.cli.diagnosis.check_runner import run_checks
    from replicax.cli.doctor import machine_checks

    report = _report(run_checks(machine_checks(), args.timeout))
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0


def _report(findings: Sequence[Finding]) -> dict[str, Any]:
    """The facts by name: texts, lists of texts, or dictionaries of them."""
    from replicax import __version__
    from replicax.cli.diagnosis.findings import State

    shown: dict[str, list[str]] = {}
    for finding in findings:
        if finding.topic in _TOPICS and finding.state is State.OK:
            shown.setdefault(finding.topic, []).append(finding.what)
    return {
        "replicax": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        **shown,
        "environment": next((f.data["variables"] for f in findings if "variables" in f.data), {}),
        "problems": [f"{f.topic}: {f.what}" for f in findings if f.state is not State.OK],
    }


def _text(report: dict[str, Any]) -> str:
    lines = []
    for name, value in report.items():
        if isinstance(value, dict):
            joint = "=" if name == "environment" else " "
            value = [f"{key}{joint}{each}" for key, each in value.items()]
        for i, each in enumerate([value] if isinstance(value, str) else value or ["none"]):
            lines.append(f"{f'{name}:' if not i else '':<{_WIDTH}} {each}")
    return "\n".join(lines)


def _packages() -> dict[str, str]:
    """The versions of the installed packages that Replicax, its extras and JAX use; JAX's first."""
    from replicax.cli.diagnosis.installed_packages import requirements_of, version_of

    needed = [*requirements_of("replicax"), *requirements_of("jax")]
    names = {"jax", "jaxlib", "libtpu"} | {r.name.lower() for r in needed if "dev" not in str(r.marker)} - {"replicax"}
    metadata = [d.metadata for d in importlib.metadata.distributions()]  # empty in a folder that pip has left
    versions = {
        name: version_of(name) or "?"
        for name in {found["Name"].lower() for found in metadata if "Name" in found}
        if name in names or re.match(r"jax-(cuda|rocm)\d+-|nvidia-(cublas|cudnn|nccl|cuda-runtime)\b", name)
    }
    return dict(sorted(versions.items(), key=lambda pair: (not pair[0].startswith("jax"), pair[0])))
