"""Predicted steps on GPUs beside those that others have measured and published.

    python benchmarks/published_runs.py                   # all rows; about half an hour on two cores
    python benchmarks/published_runs.py maxtext-7b-8      # one of them, and the table with the others from the last run
    python benchmarks/published_runs.py --table           # the table of the last run

Nothing is measured here: a model of the published sizes is compiled for the published GPUs, which are not there, and
its schedule is walked (``replicax.plan``). Needs ``replicax[gpu-plan]``. No efficiency was fitted on these rows:
``EFFICIENCY`` of kernels, and ``Chip.sustained`` of A100s and H100s, are what such kernels are known to reach, and were
left as they were when the first rows came out. Of two rows the settings were looked up once more after their first
prediction, so these (``SEEN``) are not blind. Prints a table, and writes ``results/published_runs.json``. See
docs/plan_accuracy.md.

The model is that of ``examples/language_model.py`` with another attention. The published programs use kernels of cuDNN
or FlashAttention, which can't be compiled without a GPU; what stands for them are Pallas' Triton kernels that JAX
brings, which also keep the scores to themselves. They are compiled, but what they take is predicted by formula
(``replicax.planning.timeline.attention``), at what cuDNN's kernels reach. What the published programs keep for the
backward pass is kept here as well (``Row.keeps``); all go through their layers in a scan here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import _measure
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.gpu.attention import mha

import replicax
from examples.language_model import Size, rms_norm, rotary, shapes
from replicax.backends.gpu import GATHERS_AHEAD
from replicax.planning.chip_specs import chip_of

SIZES = {
    "llama2-7b": Size(32, 4096, 32, 32, 11_008, 32_000, 4096),
    "llama2-13b": Size(40, 5120, 40, 40, 13_824, 32_000, 4096),
    "llama2-70b": Size(80, 8192, 64, 8, 28_672, 32_000, 4096),
    "llama3-8b": Size(32, 4096, 32, 8, 14_336, 128_256, 8192),
    "llama3-70b": Size(80, 8192, 64, 8, 28_672, 128_256, 8192),
    "gpt-126m": Size(12, 768, 12, 12, 3072, 50_304, 2048),
    "gpt-5b": Size(24, 4096, 32, 32, 16_384, 51_200, 2048),
}

KEPT = {
    "all": None,
    "nothing": (),
    "queries, keys, values": ("query", "key", "value"),
    "products, attention": ("query", "key", "value", "attention", "out", "gate", "up", "down"),
    "half of the products, attention": ("query", "value", "attention", "gate", "down"),
}
"""Of a layer, for the backward pass."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A published run: the settings, and the seconds of a step (or what they follow from)."""

    size: str
    topology: str
    batch: int
    length: int
    seconds: float
    who: str
    source: str
    keeps: str = "products, attention"
    group: int | None = None
    memory: float = 0.0  # GiB of a device
    change: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def gpus(self) -> int:
        hosts, _, each = self.topology.partition(":")[2].rpartition("x")
        return int(hosts or 1) * int(each)

    def plan(self) -> replicax.planning.Plan:
        resolver = replicax.GPUClusterResolver(topology=self.topology)
        partitioner = replicax.variables.GroupPartitioner(self.group) if self.group else None
        devices = list(resolver.devices.flat)
        strategy: replicax.Strategy = replicax.ShardedStrategy(devices, variable_partitioner=partitioner)
        if self.group == 1:
            strategy = replicax.MirroredStrategy(devices)
        chip = chip_of(devices[0].device_kind)
        assert chip is not None
        step, spec = model(strategy, SIZES[self.size], self.batch, self.length, self.keeps, "gpt" in self.size)
        return replicax.plan(strategy, step, spec, chip=dataclasses.replace(chip, **self.change))


TOOLBOX = "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/README.md"
RECIPES = "https://github.com/AI-Hypercomputer/gpu-recipes/tree/main/training/a3mega/llama-2-7b/maxtext-pretraining-gke"
DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd/maxtext/README_70b.md"
DGXC_PAX = "https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd/paxml/README_5b.md"
PAX = "https://github.com/NVIDIA/JAX-Toolbox/blob/08b08d19/rosetta/rosetta/projects/pax/README.md"
DGXC_LLAMA3 = "https://catalog.ngc.nvidia.com/orgs/nvidia/teams/dgxc-benchmarking/resources/maxtext-llama3-70b-dgxc-benchmarking-d"
TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "https://github.com/pytorch/torchtitan/blob/v0.1.0/docs/performance.md"

# torchtitan's H100s have HBM2e and 500 W of 700: what products sustain is taken to go with the root of the power.
HBM2E = {"bandwidth": 2.4e12, "memory": 96e9, "sustained": 0.72 * (500 / 700) ** 0.5}
QKV, HALF = "queries, keys, values", "half of the products, attention"
A100 = "a100-80gb"

ROWS = {
    "maxtext-7b-8": Row("llama2-7b", "h100:8", 2, 4096, 0.721, "MaxText", TOOLBOX),
    "maxtext-7b-256": Row("llama2-7b", "h100:32x8", 4, 4096, 1.500, "MaxText", RECIPES, group=8),
    "maxtext-70b-64": Row("llama2-70b", "h100:8x8", 2, 4096, 6.999, "MaxText", DGXC, QKV),
    "maxtext-70b-128": Row("llama2-70b", "h100:16x8", 2, 4096, 7.072, "MaxText", DGXC, QKV),
    "maxtext-70b-256": Row("llama2-70b", "h100:32x8", 2, 4096, 7.153, "MaxText", DGXC, QKV),
    "maxtext-70b-512": Row("llama2-70b", "h100:64x8", 2, 4096, 7.091, "MaxText", DGXC, QKV, group=128),
    "maxtext-70b-128-long": Row("llama3-70b", "h100:16x8", 2, 8192, 15.570, "MaxText", DGXC_LLAMA3, QKV),
    "pax-5b-16": Row("gpt-5b", "h100:2x8", 4, 2048, 0.634, "Pax", DGXC_PAX),
    "pax-5b-128": Row("gpt-5b", "h100:16x8", 4, 2048, 0.651, "Pax", DGXC_PAX),
    "pax-5b-256-a100": Row("gpt-5b", f"{A100}:32x8", 8, 2048, 2048 / 598.83, "Pax", PAX, "nothing"),
    "pax-126m-64-a100": Row("gpt-126m", f"{A100}:8x8", 4, 2048, 256 / 2339.8, "Pax", PAX, "nothing", group=1),
    "titan-8b-8": Row("llama3-8b", "h100:8", 2, 8192, 2 * 8192 / 6667, "torchtitan", TITAN, HALF, None, 77.0, HBM2E),
    "titan-8b-128": Row(
        "llama3-8b", "h100:16x8", 2, 8192, 2 * 8192 / 6514, "torchtitan", TITAN, HALF, None, 62.0, HBM2E
    ),
    "titan-8b-64-a100": Row("llama3-8b", f"{A100}:8x8", 1, 8192, 8192 / 2973, "torchtitan", TITAN_A100, HALF),
    "titan-70b-64-a100": Row("llama3-70b", f"{A100}:8x8", 1, 8192, 8192 / 331, "torchtitan", TITAN_A100, "nothing"),
    "titan-13b-64-a100": Row("llama2-13b", f"{A100}:8x8", 2, 4096, 2 * 4096 / 2162, "torchtitan", TITAN_A100, "all"),
}


SEEN = ("pax-5b-256-a100", "pax-126m-64-a100")
"""Rows whose settings were set after a first prediction had been seen."""


# --- the program ----------------------------------------------------------------------------------------


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention whose scores stay in its kernel."""
    shared = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, shared, axis=2) for x in (key, value))
    with jax.named_scope("causal"):
        return mha(query, key, value, None, sm_scale=query.shape[-1] ** -0.5, causal=True)


def layer(x: jax.Array, weights: dict[str, jax.Array], is_gated: bool) -> jax.Array:
    def named(name: str, y: jax.Array) -> jax.Array:
        return checkpoint_name(y, name)

    y = rms_norm(x, weights["attention_norm"])
    q, k, v = (named(n, jnp.einsum("btd,dhe->bthe", y, weights[n])) for n in ("query", "key", "value"))
    x = x + named("out", jnp.einsum("bthe,hed->btd", attention(rotary(q), rotary(k), v), weights["out"]))
    y = rms_norm(x, weights["mlp_norm"])
    up = named("up", y @ weights["up"])
    hidden = jax.nn.silu(named("gate", y @ weights["gate"])) * up if is_gated else jax.nn.gelu(up)
    return x + named("down", hidden @ weights["down"])


def checkpointed(keeps: str, is_gated: bool) -> Any:
    def one(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return layer(x, weights, is_gated), None

    names = KEPT[keeps]
    if names is None:
        return one
    by_name = jax.checkpoint_policies.save_only_these_names(*names)

    def is_kept(primitive: Any, *args: Any, **params: Any) -> Any:
        return ("attention" in names and primitive.name == "pallas_call") or by_name(primitive, *args, **params)

    return jax.checkpoint(one, policy=is_kept)


def model(
    strategy: replicax.Strategy, size: Size, batch: int, length: int, keeps: str, is_plain: bool
) -> tuple[Any, jax.ShapeDtypeStruct]:
    """A training step in bfloat16, with float32 parameters and Adam, as in ``examples/language_model.py``."""
    wanted = {name: shape for name, shape in shapes(size).items() if not (is_plain and name == "gate")}
    with strategy.scope():
        variables = {
            name: replicax.Variable(lambda shape=shape: jnp.zeros(shape), name=name) for name, shape in wanted.items()
        }
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
        optimizer = replicax.Optimizer(rule)
    one = checkpointed(keeps, not is_plain)

    def train_step(text: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            weights = {name: v.value.astype(jnp.bfloat16) for name, v in variables.items()}
            x = weights["embedding"][text[:, :-1]]
            layers = {k: w for k, w in weights.items() if k not in ("embedding", "norm", "head")}
            x, _ = jax.lax.scan(one, x, layers)
            logits = (rms_norm(x, weights["norm"]) @ weights["head"]).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
            return replicax.compute_average_loss(losses.mean(axis=-1))

        value, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(gradients, variables)
        return value

    return train_step, jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)


# --- the table ------------------------------------------------------------------------------------------


def planned(row: Row) -> dict[str, Any]:
    GATHERS_AHEAD.clear()  # XLA's own defaults
    found = row.plan()
    timeline = found.timeline
    assert timeline is not None
    return {
        "predicted_s": timeline.seconds,
        "published_s": row.seconds,
        "error": timeline.seconds / row.seconds - 1,
        "utilization": timeline.utilization,
        "hidden": timeline.hidden,
        "exposed_s": timeline.exposed,
        "by_kind_s": timeline.by_kind,
        "memory": found.memory.total,
        "published_memory": row.memory * 2**30,
        "compile_s": found.compile_seconds,
        "device": found.device_kind,
    }


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    path = _measure.RESULTS / "published_runs.json"
    for name in [] if sys.argv[1:] == ["--table"] else sys.argv[1:] or ROWS:
        found = planned(ROWS[name])
        earlier = json.loads(path.read_text())["rows"] if path.exists() else {}
        _measure.write(path.name, {"rows": {**earlier, name: found}})
    rows = {name: found for name, found in json.loads(path.read_text())["rows"].items() if name in ROWS}
    table = Table("run", "GPUs", "texts", "keeps", "published", "predicted", "error", "MFU", "hidden", "needs", "by")
    for name, row in ROWS.items():
        if (found := rows.get(name)) is not None:
            needs = f"{found['memory'] / 2**30:.1f} GiB" + (f" of {row.memory}" if row.memory else "")
            table.add_row(
                name,
                f"{row.gpus} {row.topology.partition(':')[0]}",
                f"{row.batch} × {row.length:,}",
                row.keeps,
                f"{found['published_s']:.3f} s",
                f"{found['predicted_s']:.3f} s",
                f"{found['error']:+.1%}",
                f"{found['utilization']:.1%}",
                f"{found['hidden']:.1%}",
                needs,
                row.who,
            )
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    if len(rows) > 1:
        blind = [found for name, found in rows.items() if name not in SEEN]
        for some, which in ((list(rows.values()), "rows"), (blind, "rows that were predicted blind")):
            median = np.median([abs(found["error"]) for found in some])
            order = rank_correlation(*([f[key] for f in some] for key in ("predicted_s", "published_s")))
            console.print(f"{len(some)} {which}: the median error is {median:.1%}, the rank correlation {order:.3f}")


if __name__ == "__main__":
    main()
