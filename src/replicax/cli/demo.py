"""``replicax demo``: the main job, on real data.

Trains the network of ``examples/digits.py`` with a strategy, trains it again on one device, and shows that both
learned the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from replicax.cli.command_line import CommandError, positive_int, seed
from replicax.cli.output import NOT_WRITTEN, why_not_writable, written

if TYPE_CHECKING:
    import rich.console

    import replicax
    from replicax.cli.example import Training

_PROG = "replicax demo"
_REPLICAS = 8
_CURVES, _PLACEMENT = "training.png", "replicas.png"
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
    example = _load_example()
    replicas = _check_replicas(args, example)
    _check_out(args.out)
    strategy = _make_strategy(args.strategy, replicas)

    import jax
    import rich.console

    import replicax
    from replicax.cli import demo_checks, pictures

    epochs = args.epochs or example.EPOCHS
    by_default = epochs == example.EPOCHS
    data = example.load_data()
    name = _count(replicas, "replica")
    title = f"Handwritten digits: {name} on {_devices_in_words(strategy)}"

    console = rich.console.Console(highlight=False)
    console.print(f"[bold]{title}[/]")
    one_device = replicax.OneDeviceStrategy(strategy.extended.worker_devices[0])
    # Some accelerators multiply float32 with fewer bits by default; then rounding would hide what we compare.
    with jax.default_matmul_precision("float32"):
        ours = _train(console, name, example, strategy, data, args.seed, epochs)
        reference = _train(console, "one device", example, one_device, data, args.seed, epochs)

    curves, placement = args.out / _CURVES, args.out / _PLACEMENT
    target = demo_checks.MIN_ACCURACY if by_default else None
    trainings = {name: ours, "one device": reference}
    images, _ = example.global_batches(strategy, data[0], args.seed, epochs)[0]
    failures = [
        written(curves, lambda path: pictures.draw_training(path, trainings, title=title, target=target)),
        written(placement, lambda path: pictures.draw_replicas(path, strategy, images, ours, title=title)),
    ]

    rows = demo_checks.compare(ours, reference, by_default=by_default)
    console.print(demo_checks.table("The same training, twice", name, rows))
    drawn = [str(path) for path, why in zip((curves, placement), failures, strict=True) if why is None]
    if drawn:
        console.print(f"Pictures: {', '.join(drawn)}", soft_wrap=True, markup=False)
    for failure in filter(None, failures):
        print(f"{_PROG}: {failure}", file=sys.stderr)
    missed = [row for row in rows if not row.met]
    for row in missed:
        print(f"{_PROG}: target missed: {row.what}: {row.shown}, should be {row.target}", file=sys.stderr)
    return NOT_WRITTEN if any(failures) else 1 if missed else 0


# --- before anything runs -------------------------------------------------------------------------------


def _load_example() -> ModuleType:
    if importlib.util.find_spec("sklearn") is None:
        raise _error("scikit-learn, which has the digits, is not installed: pip install scikit-learn")
    from replicax.cli.example import load_example

    try:
        return load_example("digits")
    except FileNotFoundError as error:
        raise _error(f"{error}; install Replicax anew, or run it from a checkout") from error


def _check_replicas(args: argparse.Namespace, example: ModuleType) -> int:
    if args.strategy == "one_device" and args.replicas not in (None, 1):
        raise _error(f"--strategy one_device has 1 replica, got --replicas {args.replicas}; leave one of them out")
    batch: int = example.BATCH
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    replicas: int | None = args.replicas
    if replicas is None and args.strategy == "one_device":
        replicas = 1
    if replicas is None:
        limit = _REPLICAS if _is_emulated() else len(_local_devices())
        replicas = max(n for n in divisors if n <= limit)
    if replicas not in divisors:
        possible = ", ".join(map(str, divisors))
        raise _error(
            f"--replicas {replicas}: a global batch of {batch} does not divide over {replicas} replicas; "
            f"choose one of {possible}"
        )
    return replicas


def _check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _error(f"--out {out}: can't write there ({error.strerror or error})") from error
    for picture in (out / _CURVES, out / _PLACEMENT):
        if (why := why_not_writable(picture)) is not None:
            raise _error(f"--out {out}: {picture} can't be written ({why})")


def _make_strategy(name: str, replicas: int) -> replicax.Strategy:
    import replicax

    if _is_emulated():
        try:
            replicax.use_cpu_devices(replicas)
        except RuntimeError as error:
            raise _error(str(error)) from error
    devices = _local_devices()
    if len(devices) < replicas:
        platform = os.environ.get("JAX_PLATFORMS", "")
        raise _error(
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
    except (RuntimeError, AssertionError) as error:  # JAX asserts where the platform has no devices
        reason = " ".join(str(error).split()) or "JAX has no such device here"
        raise _error(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: {reason}") from error


def _error(message: str) -> CommandError:
    return CommandError(f"{_PROG}: error: {message}")


# --- the job --------------------------------------------------------------------------------------------


def _train(
    console: rich.console.Console,
    label: str,
    example: ModuleType,
    strategy: replicax.Strategy,
    data: tuple[Any, Any],
    seed: int,
    epochs: int,
) -> Training:
    """Train with a progress bar; where the output is no terminal, with one line when it is done."""
    from rich import progress

    from replicax.cli.demo_checks import EARLY_STEP
    from replicax.cli.example import Progress, train

    columns = [
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=max(10, min(40, console.width - 70))),
        progress.TextColumn("{task.fields[status]}"),
    ]
    total = epochs * (len(data[0][0]) // example.BATCH)
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total, status="compiling")

        def report(now: Progress) -> None:
            status = f"epoch {now.epoch}/{epochs}"
            if now.loss is not None:
                status += f"  loss {now.loss:.3f}  test {now.accuracy:.2%}  {now.examples_per_second:,.0f} examples/s"
            bar.update(task, completed=now.step, status=status)

        result = train(example, strategy, data, seed=seed, epochs=epochs, early_step=EARLY_STEP, report=report)
    if not console.is_terminal:
        console.print(f"{label}: {_count(epochs, 'epoch')} in {result.seconds:.1f} s")
    return result


def _devices_in_words(strategy: replicax.Strategy) -> str:
    devices = strategy.extended.worker_devices
    return _count(len(devices), "emulated CPU device" if _is_emulated() else f"{devices[0].device_kind} device")


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"
