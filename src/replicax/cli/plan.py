"""``replicax plan``: what a step would need on devices that need not be there."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from replicax.cli.command_line import NOT_WRITTEN, CommandError, positive_int, why_not_writable, written
from replicax.errors import shortened

if TYPE_CHECKING:
    import replicax

_PROG = "replicax plan"
_EPILOG = """\
The function gets a strategy, makes the model in its scope, and returns the step and an element_spec: the pytree that
the step takes, with a jax.ShapeDtypeStruct of one replica's shape for each array. For example:

    def plan(strategy):
        with strategy.scope():
            w = replicax.Variable(lambda: jnp.zeros((784, 10)), name="w")
        return (lambda x: x @ w), jax.ShapeDtypeStruct((32, 784), "float32")

If it has further arguments, as in def plan(strategy, size="7b", batch=4), --with gives them: --with size=70b --with
batch=2. What Python reads as a number, True, False, None, a list or a string is that; anything else is text.

Exit status: 0 if the step fits, or if it is not known how much memory there is; 1 if it does not fit, or can't be
traced or compiled; 2 if the input was wrong, and nothing was compiled; 3 if a file could not be written after all.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the command to ``argparse``."""
    parser = subparsers.add_parser(
        "plan",
        help="compile a step for TPUs that are not there: memory, collectives, predicted speed",
        description="Compile a step ahead of time, and report whether it fits, what it costs, every collective, and "
        "how it should scale. With --topology it is compiled for a TPU slice, by the compiler in libtpu; no TPU is "
        "needed. Without, for emulated CPU devices.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        metavar="SCRIPT_OR_MODULE[:FUNCTION]",
        help="a function in a file or module; by default the function named plan",
    )
    parser.add_argument("--topology", metavar="NAME", help="a TPU slice, such as v5e:4x4 or v5p:16x16x24")
    parser.add_argument(
        "--slices", type=positive_int, metavar="N", help="how many such slices, joined by a data-center network"
    )
    parser.add_argument(
        "--network",
        type=_positive_float,
        metavar="GB/S",
        help="what a chip can send to other slices, in 10^9 bytes per second (default: what the chip table has)",
    )
    parser.add_argument(
        "--logical", type=_shape, metavar="XxYxZxC", help="the cores of one replica, such as 1x2x2x1 (default: one)"
    )
    parser.add_argument(
        "--strategy",
        choices=("mirrored", "sharded"),
        default="mirrored",
        help="whether each replica has all variables, or a piece of each (default: mirrored)",
    )
    parser.add_argument(
        "--replicas", type=positive_int, metavar="N", help="emulated CPU devices, without --topology (default: 8)"
    )
    parser.add_argument(
        "--with",
        dest="keywords",
        type=_keyword,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the function, such as size=70b; as often as you like",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page with pictures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, 1 if the step does not fit or can't be compiled, or 3 if a file can't be written."""
    _check(args)
    function = _with_keywords(_load(args.target), args)
    strategy = _make_strategy(args)
    chip = _chip(args)

    import replicax

    try:
        planned = function(strategy)
        if not isinstance(planned, tuple) or len(planned) != 2 or not callable(planned[0]):
            raise _error(
                f"{args.target} must return (step, element_spec), the step and what it takes; got "
                f"{shortened(repr(planned))}"
            )
        found = replicax.plan(strategy, *planned, chip=chip)
    except CommandError:
        raise
    except (Exception, SystemExit) as error:  # the user's code, or what it may not do
        where = _last_line(error)
        print(f"{_PROG}: {args.target}{where}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    found.print()
    failures = []
    for path, write in ((args.html, found.write_html), (args.json, lambda path: path.write_text(found.to_json()))):
        if path is None:
            continue
        if (failure := written(path, write)) is None:
            print(f"Written: {path}")
        else:
            failures.append(failure)
            print(f"{_PROG}: {failure}", file=sys.stderr)
    if found.fits is False:
        print(f"{_PROG}: {found.step} {found.verdict}", file=sys.stderr)
    return NOT_WRITTEN if failures else 1 if found.fits is False else 0


# --- before anything runs -------------------------------------------------------------------------------


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}", text):
        raise argparse.ArgumentTypeError(f"must be cores along x, y, z and on a chip, such as 1x2x2x1, got {text!r}")
    return tuple(int(size) for size in text.split("x"))


def _keyword(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, such as size=70b, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _with_keywords(function: Callable[..., Any], args: argparse.Namespace) -> Callable[[Any], Any]:
    """The function with the arguments that ``--with`` gives it."""
    names = [name for name, _ in args.keywords]
    keywords = dict(args.keywords)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _error(f"--with gives an argument twice: {', '.join(twice)}")
    if keywords:
        try:
            inspect.signature(function).bind(None, **keywords)
        except TypeError as error:
            raise _error(f"--with: {args.target} does not take these arguments: {error}") from error
    return functools.partial(function, **keywords)


def _positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return number


def _chip(args: argparse.Namespace) -> replicax.Chip | None:
    """The chip of the table, with the network that was asked for."""
    if (args.slices or 1) == 1:
        return None
    from replicax.planning.chip_specs import CHIPS
    from replicax.tpu.generations import parse_slice

    chip = CHIPS[parse_slice(args.topology)[0].name]
    if args.network is not None:
        return dataclasses.replace(chip, network=args.network * 1e9)
    if not chip.network:
        raise _error(f"it is not known what a {chip.name} chip can send to other slices: give it, as --network GB/S")
    return chip


def _check(args: argparse.Namespace) -> None:
    if args.topology is not None and args.replicas is not None:
        raise _error("--replicas is for emulated CPU devices; with --topology the slice says how many there are")
    if args.topology is None and args.logical is not None:
        raise _error("--logical needs --topology, which has the cores")
    if args.topology is None and args.slices is not None:
        raise _error("--slices needs --topology, which says what each slice is")
    if args.network is not None and (args.slices or 1) == 1:
        raise _error("--network is what goes between slices: it needs --slices 2 or more")
    if args.logical is not None and args.strategy == "sharded":
        raise _error("--logical and --strategy sharded can't go together: a sharded replica has one device")
    for option, path in (("--html", args.html), ("--json", args.json)):
        if path is not None and (why := why_not_writable(path)) is not None:
            raise _error(f"{option} {path}: can't be written ({why})")
    if args.html is not None and args.html == args.json:
        raise _error(f"--html and --json are both {args.html}, and the second would overwrite the first")


def _load(target: str) -> Callable[[Any], Any]:
    place, colon, name = target.rpartition(":") if ":" in target else (target, "", "plan")
    if not place or not name.isidentifier():
        raise _error(f"{target!r}: expected SCRIPT_OR_MODULE:FUNCTION, such as examples/digits.py:plan")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    except CommandError:
        raise
    except SystemExit as error:
        raise _error(
            f"{place} ended the program while it was imported (sys.exit({error.code!r})): put what is to run only when "
            "it is the main program under if __name__ == '__main__'"
        ) from error
    except Exception as error:
        raise _error(f"{place} can't be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise _error(f"{place} has no function {name!r}{'' if colon else ' (name another: FILE:FUNCTION)'}")
    found: Callable[[Any], Any] = function
    return found


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise _error(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # as if it were run
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _make_strategy(args: argparse.Namespace) -> replicax.Strategy:
    import jax

    import replicax

    if args.topology is None:
        try:
            replicax.use_cpu_devices(args.replicas or 8)
        except RuntimeError as error:
            raise _error(str(error)) from error
        return replicax.ShardedStrategy() if args.strategy == "sharded" else replicax.MirroredStrategy()
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # what is computed along the way needs no accelerator
    try:
        resolver = replicax.TPUClusterResolver(topology=args.topology, slices=args.slices)
        if args.strategy == "sharded":
            return replicax.ShardedStrategy(list(resolver.devices.flat))
        assignment = None
        if args.logical is not None:
            assignment = replicax.DeviceAssignment.build(resolver.topology, args.logical, num_replicas=None)
        return replicax.TPUStrategy(resolver, assignment)
    except (RuntimeError, ValueError) as error:
        raise _error(" ".join(str(error).split())) from error


def _last_line(error: BaseException) -> str:
    """Where in the user's code it happened."""
    here = Path(__file__).parents[1]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(here)]
    frames = [f for f in frames if "site-packages" not in f.filename]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _error(message: str) -> CommandError:
    return CommandError(f"{_PROG}: error: {message}")
