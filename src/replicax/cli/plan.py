"""``replicax plan``: predicts what a step needs, on devices that need not exist."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicax.cli.command_line import (
    NOT_WRITTEN,
    InputError,
    importing,
    is_unread,
    positive_float,
    positive_int,
    why_not_writable,
    written,
)
from replicax.cli.search.case_processes import end_with_search
from replicax.cli.user_function import check_keywords, last_line, load, once
from replicax.errors import shortened
from replicax.system.driver_lines import without_driver_lines
from replicax.system.json_files import read_json
from replicax.system.packages import PICTURES, check_installed

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
batch=2. A value is a Python literal (a number, True, False, None, a list or a quoted string); anything else is text.

--search plans many cases, each in a process of its own, and prints them in the order of predicted step time. It varies
the options --strategy, --logical and --microbatches, and arguments of the function: --search
strategy=mirrored,groups:8 microbatches=1,2 remat=none,layers. For what you leave out it takes the choices of the
program's module, in a dict such as SEARCH = {"remat": ["none", "layers"]}, and then the defaults: mirrored, sharded or
in groups, and 1, 2 or 4 microbatches. It does not vary what an option or --with sets. All cases have the same batch:
that of the function's element_spec for one replica, on each device; or that of --batch.

Exit status: 0 if the step fits, or the devices' memory is unknown; 1 if it does not fit, or can't be traced or
compiled; 2 if an argument was wrong, and nothing was compiled; 3 if a file could not be written at the end.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the command to ``argparse``."""
    parser = subparsers.add_parser(
        "plan",
        help="compile a step for GPUs or TPUs that are not there: memory, collectives, predicted speed",
        description="Compile a step ahead of time, and report whether it fits, what it costs, its collectives, and "
        "how it should scale. With --topology the step is compiled for NVIDIA GPUs, by XLA's compiler for them "
        "(replicax[gpu-plan]), or for a TPU slice, by the compiler in libtpu (replicax[tpu]). No GPU or TPU is "
        "needed. Without --topology it is compiled for emulated CPU devices.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "target",
        metavar="SCRIPT_OR_MODULE[:FUNCTION]",
        help="a function in a file or module; by default the function named plan",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="GPUs, as hosts x GPUs of each, such as h100:16x8, or as clouds sell them: a3-megagpu-8g:16; or a TPU "
        "slice, such as v5e:4x4 or v5p:16x16x24, or as Google sells it: v5p-128",
    )
    parser.add_argument(
        "--slices", type=positive_int, metavar="N", help="how many such TPU slices, joined by a data-center network"
    )
    parser.add_argument(
        "--network",
        type=positive_float,
        metavar="GB/S",
        help="what a chip can send to other slices, or a GPU to other hosts, in 10^9 bytes per second (default: what "
        "the chip table has)",
    )
    parser.add_argument(
        "--logical",
        type=_logical,
        metavar="XxYxZxC",
        help="the GPUs or cores of one replica: their number, or for TPUs a block, such as 1x2x2x1 (default: one)",
    )
    parser.add_argument(
        "--strategy",
        type=_variables,
        metavar="{mirrored,sharded,groups:N}",
        help="whether each replica has all variables, a piece of each, or a piece of each within groups of N replicas "
        "(default: mirrored)",
    )
    parser.add_argument(
        "--microbatches",
        type=positive_int,
        metavar="K",
        help="cut the batch of each replica into K, which run one after the other: K replicas for each (default: 1)",
    )
    parser.add_argument(
        "--batch",
        type=positive_int,
        metavar="N",
        help="the examples of a step, on all replicas together (default: what the function's element_spec has)",
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
    parser.add_argument(
        "--chip", type=Path, metavar="FILE", help="figures to estimate with: a JSON object with the fields of a Chip"
    )
    parser.add_argument(
        "--search",
        nargs="*",
        metavar="NAME=VALUES",
        help="plan all combinations of some choices, such as microbatches=1,2,4 remat=none,layers, and rank them",
    )
    parser.add_argument("--jobs", type=positive_int, metavar="N", help="of a search: cases at once (default: cores)")
    parser.add_argument(
        "--deadline",
        type=positive_float,
        metavar="S",
        help="of a search: how many seconds a case may take (default: 1800)",
    )
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)  # a process of a search: where to write
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page with pictures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, 1 if the step does not fit or can't be compiled, or 3 if a file can't be written."""
    if args.case is not None:
        end_with_search()
    with without_driver_lines(), importing():
        _check(args)
        import jax  # noqa: F401  # loads the code for GPUs, if it is installed
    module, loaded = load(args.target)
    keywords = once([(name, value) for name, value, _ in args.keywords])
    if args.search is not None:
        return _search(args, module, loaded, keywords)
    check_keywords(loaded, keywords, args.target)
    function: Callable[[replicax.Strategy], Any] = functools.partial(loaded, **keywords)
    strategy = _make_strategy(args)
    chip = _chip(args, strategy)

    import replicax

    try:
        planned = function(strategy)
        if not isinstance(planned, tuple) or len(planned) != 2 or not callable(planned[0]):
            raise InputError(
                f"{args.target} must return (step, element_spec), the step and what it takes; got "
                f"{shortened(repr(planned))}"
            )
        step, element = planned[0], _with_batch(planned[1], strategy, args)
        if args.case is not None and (pruned := _pruned_report(strategy, step, element, chip)) is not None:
            args.case.write_text(json.dumps(pruned))
            return 1
        found = replicax.plan(strategy, step, element, chip=chip)
    except (Exception, SystemExit) as error:  # raised by the user's code
        if isinstance(error, InputError) or is_unread(error):
            raise
        print(f"{_PROG}: {args.target}{last_line(error)}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.case is not None:
        args.case.write_text(found.to_json())
        return 0
    writers = ((args.html, found.write_html), (args.json, lambda path: path.write_text(found.to_json())))
    failures = {path: written(path, write) for path, write in writers if path is not None}
    found.print()  # after the files, which are written even if standard output is closed
    for path, failure in failures.items():
        if failure is None:
            print(f"Written: {path}")
        else:
            print(f"{_PROG}: {failure}", file=sys.stderr)
    if found.fits is False:
        print(f"{_PROG}: {found.step} {found.verdict}", file=sys.stderr)
    return NOT_WRITTEN if any(failures.values()) else 1 if found.fits is False else 0


# --- a search, and its cases ----------------------------------------------------------------------------


def _search(args: argparse.Namespace, module: Any, function: Callable[..., Any], keywords: dict[str, Any]) -> int:
    from replicax.cli.search.choices import OPTIONS
    from replicax.cli.search.plan_search import search

    if args.html is not None:
        raise InputError("--html is the page of one plan: use the command that the search prints")
    strategy = None
    if args.topology is not None:
        given = {**vars(args), **dict.fromkeys(OPTIONS)}
        strategy = _make_strategy(argparse.Namespace(**given))
    _chip(args, strategy)  # like the line above, it raises an error that would fail every case

    def check(varied: dict[str, Any]) -> None:
        check_keywords(function, {**keywords, **varied}, args.target, varied)

    checks = {"strategy": _variables, "logical": _logical, "microbatches": positive_int}
    return search(args, module, check, checks)


def _pruned_report(
    strategy: replicax.Strategy, step: Any, element: Any, chip: replicax.planning.Chip | None
) -> dict[str, Any] | None:
    """The report of a case whose variables alone do not fit, so that it need not be compiled."""
    from replicax.planning.global_batch import examples_together
    from replicax.planning.planner import variables_alone

    needed, capacity = variables_alone(strategy, step, element, chip=chip)
    if capacity is None or needed <= capacity:
        return None
    replicas = strategy.num_replicas_in_sync
    return {
        "fits": False,
        "is_pruned": True,
        "memory": {"total": needed, "capacity": capacity},
        "examples": examples_together(element, replicas),
        "replicas": replicas,
    }


def _with_batch(element: Any, strategy: replicax.Strategy, args: argparse.Namespace) -> Any:
    """The element of a replica, for steps with the requested batch."""
    from replicax.planning.global_batch import examples_of, with_examples

    replicas, parts = strategy.num_replicas_in_sync, args.microbatches or 1
    if args.batch is None and parts == 1 and (args.case is None or strategy.extended.num_logical_devices == 1):
        return element
    try:
        given = examples_of(element)
        if given is None:
            if args.batch is None:
                return element
            raise ValueError(
                f"--batch {args.batch}: the element_spec of {args.target} has no jax.ShapeDtypeStruct with a dim of "
                "examples, so its batch can't be changed"
            )
        spread = strategy.extended.num_logical_devices if args.case is not None else 1  # each device has a part
        rows = Fraction(given * spread, parts) if args.batch is None else Fraction(args.batch, replicas)
        return with_examples(element, rows)
    except ValueError as error:
        raise InputError(str(error)) from error


# --- before anything runs -------------------------------------------------------------------------------


def _logical(text: str) -> tuple[int, ...] | int:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}|[1-9]\d*", text):
        raise argparse.ArgumentTypeError(
            f"must be cores along x, y, z and on a chip, such as 1x2x2x1, or their number, got {text!r}"
        )
    return tuple(int(size) for size in text.split("x")) if "x" in text else int(text)


def _variables(text: str) -> str:
    with without_driver_lines():
        from replicax.planning.strategy_spec import check_variables

    try:
        return check_variables(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _keyword(text: str) -> tuple[str, Any, str]:
    """The name, the value, and the text of both."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, such as size=70b, got {text!r}")
    try:
        return name, ast.literal_eval(value), text
    except (ValueError, SyntaxError):
        return name, value, text


def _chip(args: argparse.Namespace, strategy: replicax.Strategy | None) -> replicax.planning.Chip | None:
    """The chip from a file or the table, with the requested network; ``None``: the plan's default."""
    from replicax.planning.chip_specs import Chip, chip_of

    if args.chip is not None:
        try:
            chip = Chip(**read_json(args.chip))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"--chip {args.chip}: expected a JSON object with the fields of replicax.planning.Chip: {error}"
            ) from error
    elif strategy is None or (found := chip_of(strategy.extended.logical_devices.flat[0].device_kind)) is None:
        return None
    else:
        chip = found
    if args.network is not None:
        return dataclasses.replace(chip, network=args.network * 1e9)
    if _slices(args) > 1 and not chip.network:
        raise InputError(
            f"it is not known what a {chip.name} chip can send to other slices or hosts: give it, as --network GB/S"
        )
    return chip


def _check(args: argparse.Namespace) -> None:
    if args.topology is not None and args.replicas is not None:
        raise InputError("--replicas is for emulated CPU devices; with --topology the slice says how many there are")
    if args.topology is None and args.slices is not None:
        raise InputError("--slices needs --topology, which says what each slice is")
    if args.network is not None and _slices(args) == 1:
        raise InputError(
            "--network is what goes between slices or hosts: it needs --slices 2 or more, or GPUs of several hosts"
        )
    for option in ("jobs", "deadline"):
        if args.search is None and getattr(args, option) is not None:
            raise InputError(f"--{option} is about the cases of a search: it needs --search")
    for option, path in (("--html", args.html), ("--json", args.json)):
        if path is not None and (why := why_not_writable(path)) is not None:
            raise InputError(f"{option} {path}: can't be written ({why})")
    if args.html is not None:
        try:
            check_installed("--html", *PICTURES)
        except ImportError as error:
            raise InputError(str(error)) from None
    if args.html is not None and args.html == args.json:
        raise InputError(f"--html and --json are both {args.html}, and the second would overwrite the first")


def _slices(args: argparse.Namespace) -> int:
    from replicax.planning.strategy_spec import devices_and_slices

    if args.topology is None:
        return 1
    try:
        return devices_and_slices(args.topology, args.slices)[1]
    except ValueError as error:
        raise InputError(" ".join(str(error).split())) from error


def _make_strategy(args: argparse.Namespace) -> replicax.Strategy:
    import jax

    from replicax.planning.strategy_spec import strategy_of

    if args.topology is not None and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # computations along the way need no accelerator
    try:
        return strategy_of(
            topology=args.topology,
            slices=args.slices,
            devices=args.replicas,
            variables=args.strategy or "mirrored",
            logical=args.logical,
            microbatches=args.microbatches or 1,
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(" ".join(str(error).split())) from error
