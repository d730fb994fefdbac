"""Steps beside hand-written ``jit(shard_map)``, both compiled for eight H100s that are not there.

    python benchmarks/gpu_steps.py                    # about ten minutes on two quiet cores
    python benchmarks/gpu_steps.py cnn --rounds 1     # one of them, and the table with the others from the last run

The three models of ``make peers`` and a transformer of 16 layers. Prints, and writes to ``results/gpu_steps.json``: the
kernels and the temporaries of each step's program, and how long XLA's compiler takes for both, in turn, in fresh
processes. Ratios are medians of those of the rounds. The bar is on the time of processors, which other work on the
machine hardly changes. Nothing runs on a GPU. Needs ``replicax[gpu-plan]``. Exits with 1 if a bar is missed. ``make
gpu`` checks kernels and temporaries. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import _transformer
import jax
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax
from benchmarks.peers import problems
from benchmarks.peers.libraries import jax_models
from replicax.hlo.instructions import parse
from replicax.planning import planner
from replicax.planning.cost import cost_of

KERNELS, TEMPORARIES, COMPILING = 1.02, 1.02, 1.10
"""The largest ratios that pass."""
TOPOLOGY = "h100:8"
LAYERS = 16
MODELS = (*problems.MAKERS, f"transformer of {LAYERS} layers")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What to train, without values.

    Attributes:
      params: the parameters, as shapes and dtypes.
      batch: the GLOBAL batch: arrays of examples.
      losses: a function of the parameters and examples: the loss of each.
      tx: the optimizer.
    """

    params: dict[str, jax.ShapeDtypeStruct]
    batch: tuple[jax.ShapeDtypeStruct, ...]
    losses: Callable[..., Any]
    tx: optax.GradientTransformation


def problem(name: str) -> Problem:
    """The problem of one of ``MODELS``."""
    if name in problems.MAKERS:
        peer = problems.problem(name)
        batch = jax.tree.map(_shape, (peer.inputs, peer.labels))
        params = {key: _shape(value) for key, value in peer.initial.items()}
        return Problem(params, batch, jax_models.LOSSES[name], jax_models.adam())
    table = _f32(_transformer.TABLE)
    layers = {f"{name}{i}": _f32(shape) for i in range(LAYERS) for name, shape in _transformer.SHAPES.items()}

    def losses(params: Any, words: Any) -> Any:
        x = params["table"][words[:, :-1]]
        for i in range(LAYERS):
            x = _transformer.block({name: params[f"{name}{i}"] for name in _transformer.SHAPES}, x)
        return _transformer.losses(params["table"], x, words)

    words = jax.ShapeDtypeStruct((64, _transformer.LENGTH + 1), "int32")
    return Problem({"table": table, **layers}, (words,), losses, optax.adam(1e-3))


def by_replicax(given: Problem) -> Callable[[], jax.stages.Lowered]:
    """What lowers the step of Replicax."""
    strategy = replicax.MirroredStrategy(replicax.GPUClusterResolver(topology=TOPOLOGY).devices)
    with strategy.scope():
        params = {
            key: replicax.Variable(lambda s=s: jax.numpy.zeros(s.shape, s.dtype), name=key)
            for key, s in given.params.items()
        }
        optimizer = replicax.Optimizer(given.tx)

    def loss(params: Any, batch: Any) -> Any:
        return replicax.compute_average_loss(given.losses(params, *batch))

    def step(batch: Any) -> Any:
        share, gradients = replicax.value_and_grad(loss, params)(params, batch)
        optimizer.apply_gradients(gradients, params)
        return share

    replicas = strategy.num_replicas_in_sync
    element = tuple(s.update(shape=(s.shape[0] // replicas, *s.shape[1:])) for s in given.batch)
    executable, _ = planner._traced_program(strategy, step, element)
    return executable.lowered


def by_hand(given: Problem) -> Callable[[], jax.stages.Lowered]:
    """The function that lowers the hand-written step."""
    mesh = Mesh(replicax.GPUClusterResolver(topology=TOPOLOGY).devices.ravel(), ("replica",))
    specs = PartitionSpec(), PartitionSpec("replica")
    everywhere, along = (NamedSharding(mesh, spec) for spec in specs)
    global_batch = given.batch[0].shape[0]

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state

        def loss_fn(params: Any) -> Any:
            return given.losses(params, *batch).sum() / global_batch

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        gradients = lax.psum(gradients, "replica")
        updates, opt_state = given.tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss[None]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=(everywhere, along))
    state = given.params, jax.eval_shape(given.tx.init, given.params)
    state = jax.tree.map(lambda s: s.update(sharding=everywhere), state)
    batch = jax.tree.map(lambda s: s.update(sharding=along), given.batch)
    return lambda: jitted.lower(state, batch)


SIDES = {"replicax": by_replicax, "hand": by_hand}


def compiled(lower: Callable[[], jax.stages.Lowered]) -> dict[str, Any]:
    """What a step's program has, and how long XLA compiles it, by the clock and by the time of processors."""
    lowered = lower()
    begin, worked = time.perf_counter(), _processor_seconds()
    program = lowered.compile()
    seconds, worked = time.perf_counter() - begin, _processor_seconds() - worked
    memory: Any = program.memory_analysis()
    return {
        "kernels": cost_of(parse(program.as_text())).launches,
        "temporaries": memory.temp_size_in_bytes,
        "compile_s": seconds,
        "processor_s": worked,
    }


def sides(name: str) -> dict[str, dict[str, Any]]:
    """Both programs of a model, compiled in this process."""
    return {side: compiled(make(problem(name))) for side, make in SIDES.items()}


# --- the processes, and the table -----------------------------------------------------------------------


def in_turn(name: str, rounds: int) -> dict[str, Any]:
    """Both sides in fresh processes, which begin with the one or the other."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in list(SIDES)[:: (-1) ** number]:
            command = [sys.executable, __file__, name, "--side", side]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    ours, theirs = found["replicax"], found["hand"]

    def ratio(of: str) -> float:
        return statistics.median(a[of] / b[of] for a, b in zip(ours, theirs, strict=True))

    return {**found, "compile_ratio": ratio("compile_s"), "processor_ratio": ratio("processor_s")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="which of the models; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.side:
        lower = SIDES[args.side](problem(args.models[0]))
        compiled(SIDES["hand"](Problem({}, (jax.ShapeDtypeStruct((8, 1), "float32"),), lambda _, x: x, optax.sgd(1.0))))
        print(json.dumps(compiled(lower)))
        return 0

    import _measure
    from rich.console import Console
    from rich.table import Table

    path = _measure.RESULTS / "gpu_steps.json"
    for name in args.models or MODELS:
        found = in_turn(name, args.rounds)
        earlier = json.loads(path.read_text())["models"] if path.exists() else {}
        _measure.write(path.name, {"topology": TOPOLOGY, "models": {**earlier, name: found}})
    models = json.loads(path.read_text())["models"]
    table = Table("model", "kernels", "by hand", "temporaries", "by hand", "compiling", "by hand", "ratio", "of CPU")
    passed = True
    for name, found in models.items():
        ours, theirs = found["replicax"], found["hand"]
        a, b = ours[0], theirs[0]
        passed &= a["kernels"] <= KERNELS * b["kernels"] and a["temporaries"] <= TEMPORARIES * b["temporaries"]
        passed &= found["processor_ratio"] <= COMPILING
        table.add_row(
            name,
            *(f"{side['kernels']:,}" for side in (a, b)),
            *(f"{side['temporaries'] / 2**20:.2f} MiB" for side in (a, b)),
            *(f"{statistics.median(run['compile_s'] for run in runs):.2f} s" for runs in (ours, theirs)),
            f"{found['compile_ratio']:.2f}",
            f"{found['processor_ratio']:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0 if passed else 1


def _processor_seconds() -> float:
    """Of this process, and of programs that the compiler has started, such as ptxas."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _f32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


if __name__ == "__main__":
    sys.exit(main())
