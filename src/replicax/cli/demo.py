"""``replicax demo``: the main job, on real data.

Runs ``examples/digits_demo.py``, which trains a network with a strategy and again on one device, and makes the report
and the pictures. This file has the arguments, the devices, and the exit status.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from replicax.cli.command_line import NOT_WRITTEN, InputError, importing, positive_int, seed, why_not_writable, written
from replicax.system.packages import check_installed

if TYPE_CHECKING:
    import replicax

_PROG = "replicax demo"
_EXAMPLES = "replicax_examples"  # the package name of the folder, wherever it is
_REPLICAS = 8
_STRATEGIES = ("mirrored", "sharded", "one_device")


def add_parser(subparsers: Any) -> None:
    """Describe the command to ``argparse``."""
    parser = subparsers.add_parser(
        "demo",
        help="train on handwritten digits, on many replicas and on one, and compare",
        description="Train a small network on the handwritten digits of scikit-learn, once with a strategy and once "
        "on one device; draw the training and the replicas, and print a table that compares them.",
        epilog="Devices are emulated on the CPU, unless the environment variable JAX_PLATFORMS names another platform.",
    )
    parser.add_argument("--replicas", type=positive_int, metavar="N", help=f"how many replicas (default: {_REPLICAS})")
    parser.add_argument("--strategy", choices=_STRATEGIES, default="mirrored", help="default: mirrored")
    parser.add_argument(
        "--epochs", type=positive_int, metavar="N", help="passes over the training examples (default: the example's)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of all random numbers (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for the pictures (default: out)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, 1 if a target was missed, or 3 if a picture can't be written."""
    example = load_example()
    replicas = _check_replicas(args, example.digits.BATCH)
    pictures = {picture: args.out / picture for picture in example.PICTURES}
    _check_out(args.out, list(pictures.values()))
    strategy = _make_strategy(args.strategy, replicas)

    import rich.console

    console = rich.console.Console(highlight=False)
    report = example.run(strategy, console, args.seed, args.epochs)
    failures = {path: written(path, functools.partial(report.draw, name)) for name, path in pictures.items()}
    console.print(report.table())
    drawn = [str(path) for path, failure in failures.items() if failure is None]
    if drawn:
        console.print(f"Pictures: {', '.join(drawn)}", soft_wrap=True, markup=False)
    refused = [failure for failure in failures.values() if failure is not None]
    missed = report.missed()
    for problem in (*refused, *(f"target missed: {target}" for target in missed)):
        print(f"{_PROG}: {problem}", file=sys.stderr)
    return NOT_WRITTEN if refused else 1 if missed else 0


# --- before anything runs -------------------------------------------------------------------------------


def load_example() -> ModuleType:
    """The module ``examples/digits_demo.py``, as it was installed or as it stands in the checkout."""
    for needed in ("sklearn", "matplotlib"):  # the digits, and the pictures
        try:
            check_installed("the demo", needed, "demo")
        except ImportError as error:
            raise InputError(str(error)) from None
    import replicax

    package = Path(replicax.__file__).parent
    places = [folder / "digits_demo.py" for folder in (package / "_examples", package.parents[1] / "examples")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise InputError(
            f"the example is in neither {places[0]} nor {places[1]}; install Replicax anew, or run it from a checkout"
        )
    # A package, so that the example imports the files beside it, and not others of the same names.
    examples = sys.modules.setdefault(_EXAMPLES, ModuleType(_EXAMPLES))
    examples.__path__ = [str(path.parent)]
    with importing():
        return importlib.import_module(f"{_EXAMPLES}.{path.stem}")


def _check_replicas(args: argparse.Namespace, batch: int) -> int:
    if args.strategy == "one_device" and args.replicas not in (None, 1):
        raise InputError(f"--strategy one_device has 1 replica, got --replicas {args.replicas}; leave one of them out")
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    replicas: int | None = args.replicas
    if replicas is None:
        limit = 1 if args.strategy == "one_device" else _REPLICAS if _is_emulated() else len(_local_devices())
        replicas = max(n for n in divisors if n <= limit)
    if replicas not in divisors:
        possible = ", ".join(map(str, divisors))
        raise InputError(
            f"--replicas {replicas}: a global batch of {batch} does not divide over {replicas} replicas; "
            f"choose one of {possible}"
        )
    return replicas


def _check_out(out: Path, pictures: list[Path]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(f"--out {out}: can't write there ({error.strerror or error})") from error
    for picture in pictures:
        if (why := why_not_writable(picture)) is not None:
            raise InputError(f"--out {out}: {picture} can't be written ({why})")


def _make_strategy(name: str, replicas: int) -> replicax.Strategy:
    import replicax

    if _is_emulated():
        try:
            replicax.use_cpu_devices(replicas)
        except RuntimeError as error:
            raise InputError(str(error)) from error
    devices = _local_devices()
    if len(devices) < replicas:
        platform = os.environ.get("JAX_PLATFORMS", "")
        raise InputError(
            f"--replicas {replicas}: each replica needs a device of its own, and there are {len(devices)} "
            f"({devices[0].platform}); without JAX_PLATFORMS={platform} they would be emulated"
        )
    if name == "one_device":
        return replicax.OneDeviceStrategy(devices[0])
    kind = replicax.ShardedStrategy if name == "sharded" else replicax.MirroredStrategy
    return kind(devices[:replicas])


def _is_emulated() -> bool:
    return os.environ.get("JAX_PLATFORMS", "") in ("", "cpu")


def _local_devices() -> list[Any]:
    import jax

    try:
        return jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX fails an assertion if the platform has no devices
        reason = " ".join(str(error).split()) or "JAX has no such device here"
        raise InputError(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: {reason}") from error
