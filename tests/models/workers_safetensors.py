"""Small weights for ``test_safetensors.py``; what its workers do, and its process that measures memory."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import replicax
from replicax.errors import CheckpointError
from replicax.models import safetensors
from replicax.models.safetensors import Transposed

SHAPES = {
    "embed": (12, 8),
    "layers/0/up/kernel": (8, 16),
    "layers/1/up/kernel": (8, 16),
    "stacked": (2, 16, 8),
    "conv": (3, 3, 4, 8),
    "scale": (),
}
NAMES: dict[str, Any] = {
    "embed": "model.embed.weight",
    "layers/{}/up/kernel": Transposed("model.layers.{}.up.weight"),
    "stacked": Transposed("model.layers.{}.down.weight"),
    "conv": Transposed("model.conv.weight", (2, 3, 1, 0)),
    "scale": "model.scale",
}
SPLIT = {"embed": 1, "layers/0/up/kernel": 1, "layers/1/up/kernel": 1, "stacked": 1, "conv": 3}


def weights() -> dict[str, Any]:
    """Tensors as a library of PyTorch would write them."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed.weight": (12, 8), "model.conv.weight": (8, 4, 3, 3)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.up.weight": (16, 8), f"model.layers.{layer}.down.weight": (8, 16)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return tensors | {"model.scale": np.array(0.5, np.float32)}


def written(tensors: dict[str, Any], folder: pathlib.Path, size: int = 1 << 30) -> None:
    """Write ``tensors`` with the library itself, as one file or as several of about ``size`` bytes with an index."""
    folder.mkdir(exist_ok=True, parents=True)
    files: list[dict[str, Any]] = [{}]
    for name, tensor in sorted(tensors.items()):
        if files[-1] and sum(t.nbytes for t in files[-1].values()) + tensor.nbytes > size:
            files.append({})
        files[-1][name] = tensor
    if len(files) == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    for number, file in enumerate(files, 1):
        save_file(file, folder / f"model-{number:05}.safetensors")
    places = {name: f"model-{number:05}.safetensors" for number, file in enumerate(files, 1) for name in file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def variables(strategy: replicax.Strategy, parts: int) -> dict[str, replicax.Variable]:
    """Variables of ``SHAPES``, split over the logical devices of a replica if there are several."""

    def one(path: str, shape: tuple[int, ...]) -> replicax.Variable:
        counts = [parts if dim == SPLIT.get(path) else 1 for dim in range(len(shape))]
        return replicax.Variable(
            np.ones(shape, np.float32), name=path, partition_dimensions=counts if parts > 1 and path in SPLIT else None
        )

    with strategy.scope():
        return {path: one(path, shape) for path, shape in SHAPES.items()}


def read_and_write(folder: str) -> dict[str, Any]:
    """On each of several workers: a model in pieces on all of them."""
    strategy = replicax.MultiWorkerMirroredStrategy(variable_partitioner=replicax.variables.FixedShardsPartitioner(4))
    params = variables(strategy, 1)
    path = pathlib.Path(folder)
    safetensors.load(path / "in", params, NAMES)
    values = {name: v.numpy() for name, v in params.items()}
    safetensors.save(path / "out", params, NAMES, max_file_bytes=3000)
    split = jax.NamedSharding(strategy.extended.mesh, jax.P(replicax.REPLICA_AXIS))
    rows = jax.make_array_from_process_local_data(split, np.full(2, jax.process_index(), np.float32))
    safetensors.save(path / "rows", {"rows": rows})
    replicax.models.export(functools.partial(jnp.add, rows), jax.ShapeDtypeStruct((4,), np.float32), path / "add")
    try:
        if jax.process_index() == 0:
            (path / "in" / "model-00001.safetensors").write_bytes(b"short")
        strategy.reduce("sum", strategy.distribute_values_from_function(lambda ctx: 1.0))  # it is written by then
        safetensors.load(path / "in", params, NAMES)
    except CheckpointError as error:
        return {"values": values, "error": str(error)}
    return {"values": values, "error": ""}


def peak_and_present() -> tuple[int, int]:
    """The most memory that this process has had, and what it has now, in bytes."""
    lines = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))  # type: ignore[return-value]


def measure(folder: str, placement: str) -> None:
    """Print how many bytes above what it keeps the host had at most while it loaded, and what the devices hold."""
    replicax.use_cpu_devices(8)
    parts = 1 if placement == "sharded" else 4
    strategy = replicax.ShardedStrategy(num_logical_devices=parts)
    with strategy.scope():
        params = [
            replicax.Variable(lambda: jnp.zeros((2048, 2048)), name=f"w{i}", partition_dimensions=[1, parts])
            for i in range(4)
        ]
    for v in params:  # touches every page
        v.block_until_ready()
    safetensors.load(folder, params[:1], lambda path: "layers.0.weight", ignore=["layers.{}.weight"])
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    safetensors.load(folder, {str(i): v for i, v in enumerate(params)}, lambda path: f"layers.{path}.weight")
    peak, present = peak_and_present()
    for i, v in enumerate(params):
        assert float(v.stored().addressable_shards[-1].data[0, 0]) == i
    print(peak - present, sum(shard.data.nbytes for v in params for shard in v.stored().addressable_shards))


if __name__ == "__main__":
    measure(*sys.argv[1:])
