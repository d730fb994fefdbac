"""Weights in Hugging Face's layout, on every placement; wrong files; memory; several workers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import replicax
from replicax.errors import CheckpointError, ContextError
from replicax.models import safetensors
from replicax.models.safetensors import Transposed, loading, saving
from tests import processes
from tests.conftest import strategy_of
from tests.models import workers_safetensors
from tests.models.workers_safetensors import NAMES, SHAPES, variables, weights, written


def halves(shape: tuple[int, ...], dtype: Any) -> list[int]:
    return [2 if dim == 0 else 1 for dim in range(len(shape))]


PLACEMENTS: dict[str, Callable[[], replicax.Strategy]] = {
    "one device": lambda: replicax.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: strategy_of(4),
    "sharded": replicax.ShardedStrategy,
    "tensor parallel": lambda: replicax.MirroredStrategy(num_logical_devices=2),
    "sharded, tensor parallel": lambda: replicax.ShardedStrategy(
        variable_partitioner=replicax.variables.GroupPartitioner(2, halves),
        num_logical_devices=2,
    ),
    "in pieces that are filled up": lambda: replicax.MirroredStrategy(
        ["cpu:0", "cpu:1", "cpu:2"], variable_partitioner=replicax.variables.FixedShardsPartitioner(3)
    ),
}


def parts_of(strategy: replicax.Strategy) -> int:
    return strategy.extended.num_logical_devices


def same(found: Any, wanted: Any) -> None:
    for path, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[path]), value, err_msg=path)


def here(tensors: dict[str, Any]) -> dict[str, Any]:
    """The arrays of ``SHAPES``, from the tensors."""
    return {
        "embed": tensors["model.embed.weight"],
        "layers/0/up/kernel": tensors["model.layers.0.up.weight"].T,
        "layers/1/up/kernel": tensors["model.layers.1.up.weight"].T,
        "stacked": np.stack([tensors[f"model.layers.{i}.down.weight"].T for i in range(2)]),
        "conv": tensors["model.conv.weight"].transpose(2, 3, 1, 0),
        "scale": tensors["model.scale"],
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [1 << 30, 3000], ids=["one-file", "several-files"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_reads_and_writes_the_same(placement: str, size: int, tmp_path: pathlib.Path) -> None:
    tensors = weights()
    written(tensors, tmp_path / "in", size)
    strategy = PLACEMENTS[placement]()
    params = variables(strategy, parts_of(strategy))
    layouts = {path: v.stored().sharding for path, v in params.items()}
    assert safetensors.load(tmp_path / "in", params, NAMES)["embed"] is params["embed"]
    same({path: v.numpy() for path, v in params.items()}, here(tensors))
    assert {path: v.stored().sharding for path, v in params.items()} == layouts

    total = sum(tensor.nbytes for tensor in tensors.values())
    safetensors.save(tmp_path / "out", params, NAMES, max_file_bytes=min(size, total))
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert (files == ["model.safetensors"]) == (size > 3000)
    found = {k: v for file in files if file.endswith("tensors") for k, v in load_file(tmp_path / "out" / file).items()}
    assert found.keys() == tensors.keys()
    same(found, tensors)
    with safe_open(tmp_path / "out" / files[0], "np") as first:
        assert first.metadata() == {"format": "pt"}  # which libraries of Hugging Face ask for
    if size == 3000:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == total
    other = variables(replicax.OneDeviceStrategy("cpu:1"), 1)
    safetensors.load(tmp_path / "out", other, NAMES)
    same({path: v.numpy() for path, v in other.items()}, here(tensors))


def test_arrays_keep_their_sharding_and_are_new(tmp_path: pathlib.Path) -> None:
    tensors = weights()
    written(tensors, tmp_path)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    where = NamedSharding(mesh, PartitionSpec("a", "b"))
    tree = {path: np.zeros(shape, np.float32) for path, shape in SHAPES.items()}
    tree |= {"embed": jax.device_put(tree["embed"], where)}
    tree |= {"layers/0/up/kernel": jax.ShapeDtypeStruct(SHAPES["layers/0/up/kernel"], np.float32, sharding=where)}
    tree |= {"scale": jax.ShapeDtypeStruct((), np.float32), "name": "a model", "key": jax.random.key(0)}
    loaded = safetensors.load(tmp_path, tree, NAMES)
    same(loaded, here(tensors))
    assert loaded["embed"].sharding == loaded["layers/0/up/kernel"].sharding == where
    assert isinstance(loaded["conv"], np.ndarray)
    assert loaded["name"] == "a model"
    safetensors.save(tmp_path / "again", loaded, NAMES)
    same(load_file(tmp_path / "again" / "model.safetensors"), tensors)
    assert not np.asarray(tree["embed"]).any()


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_models_of_nnx_in_place_before_and_after_a_step(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        f"net.{i}.{name}": rng.normal(size=shape).astype(np.float32)
        for i, sizes in enumerate([(8, 4), (4, 8)])
        for name, shape in (("weight", sizes), ("bias", sizes[:1]))
    }
    save_file(tensors, tmp_path / "net.safetensors")
    names = {
        "layers/{}/kernel": Transposed("net.{}.weight"),
        "layers/{}/bias": "net.{}.bias",
        "dropout/rngs/count": None,
    }
    net = Net(nnx.Rngs(0))
    assert safetensors.load(tmp_path / "net.safetensors", net, names) is net
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    x = np.ones((4, 4), np.float32)

    def forward(net: Net, x: jax.Array) -> jax.Array:
        return net.layers[1](net.layers[0](x))

    def output() -> Any:
        return strategy.gather(
            strategy.run(forward, args=(net, strategy.distribute_dataset([x]).__iter__().__next__())), 0
        )

    wanted = (x @ tensors["net.0.weight"].T + tensors["net.0.bias"]) @ tensors["net.1.weight"].T + tensors["net.1.bias"]
    np.testing.assert_allclose(output(), wanted, rtol=1e-5)
    nnx.update(net, jax.tree.map(jnp.zeros_like, nnx.state(net, nnx.Param)))
    assert not np.asarray(output()).any()
    safetensors.load(tmp_path / "net.safetensors", net, names)
    np.testing.assert_allclose(output(), wanted, rtol=1e-5)

    safetensors.save(tmp_path / "state", nnx.state(net, nnx.Param), names)
    same(load_file(tmp_path / "state" / "model.safetensors"), tensors)


def test_a_state_of_nnx_in_place_so_the_model_has_the_weights(tmp_path: pathlib.Path) -> None:
    safetensors.save(tmp_path, {"scale": np.full(3, 5, np.float32), "bias": np.full(3, 6, np.float32)})
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    loaded = safetensors.load(tmp_path, {"norm": nnx.state(model, nnx.Param)}, lambda path: path.removeprefix("norm/"))
    assert loaded["norm"]["scale"] is model.scale
    same({"scale": model.scale[...], "bias": model.bias[...]}, {"scale": [5, 5, 5], "bias": [6, 6, 6]})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    key: Any
    value: Any


def test_an_array_that_is_called_value_keeps_its_name_outside_of_a_box(tmp_path: pathlib.Path) -> None:
    one = np.ones(2, np.float32)
    boxed = nn.Partitioned(one, ("x",))
    safetensors.save(tmp_path, {"attn": Attention(one, nnx.Param(one)), "linen": boxed, "other": Attention(boxed, one)})
    names = {"attn.key", "attn.value", "linen", "other.key", "other.value"}
    assert load_file(tmp_path / "model.safetensors").keys() == names


def test_half_precision_is_cast_if_asked(tmp_path: pathlib.Path) -> None:
    tensors = weights()
    params = variables(strategy_of(2), 1)
    safetensors.save(tmp_path, here(tensors), NAMES, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"embed, float32\[12,8\]: model.embed.weight .* bfloat16\[12,8\] \(cast=True"):
        safetensors.load(tmp_path, params, NAMES)
    safetensors.load(tmp_path, params, NAMES, cast=True)
    half = {path: value.astype(jnp.bfloat16).astype(np.float32) for path, value in here(tensors).items()}
    same({path: v.numpy() for path, v in params.items()}, half)


@pytest.mark.parametrize("dtype", ["int32", "bool", np.complex64])
def test_floats_are_saved_as_floats_only(dtype: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="safetensors.save: dtype must be a float dtype, such as 'bfloat16', got .*"):
        safetensors.save(tmp_path / "new", here(weights()), NAMES, dtype=dtype)
    assert not (tmp_path / "new").exists()


def test_of_other_numbers_the_dtype_stays(tmp_path: pathlib.Path) -> None:
    tree = {"n": np.int32([1]), "c": np.complex64([1j]), "x": np.float32([1.5])}
    safetensors.save(tmp_path, tree, dtype="float16")
    loaded = safetensors.load(tmp_path, {**tree, "x": np.zeros(1, np.float16), "c": tree["c"] * 0})
    assert {name: value.dtype for name, value in loaded.items()} == {"n": np.int32, "c": np.complex64, "x": np.float16}
    same(loaded, tree)


def test_stacked_layers_are_cast_each_from_its_own_dtype(tmp_path: pathlib.Path) -> None:
    safetensors.save(tmp_path, {"0": np.float16([1, 2]), "1": np.float32([1e6, 1.0001])})
    loaded = safetensors.load(tmp_path, {"x": np.zeros((2, 2), np.float32)}, {"x": "{}"}, cast=True)
    same(loaded, {"x": np.float32([[1, 2], [1e6, 1.0001]])})


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path: pathlib.Path) -> None:
    (tmp_path / "parts").mkdir()
    save_file({"a": np.float32([1]), "twice": np.float32([2])}, tmp_path / "parts" / "1.safetensors")
    save_file({"b": np.float32([3]), "twice": np.float32([4])}, tmp_path / "2.safetensors")
    places = {"a": "parts/1.safetensors", "twice": "parts/1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    loaded = safetensors.load(tmp_path, {name: np.zeros(1, np.float32) for name in places})
    same(loaded, {"a": [1], "twice": [2], "b": [3]})


@pytest.mark.parametrize("kind", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"])
def test_numbers_of_eight_bits(kind: str, tmp_path: pathlib.Path) -> None:
    numbers = np.array([[1, 2, 4], [0.5, 1, 2]], np.float32)
    saved = jnp.asarray(numbers, f"float8_{kind}")
    safetensors.save(tmp_path, {"w": saved})
    assert safetensors.load(tmp_path, {"w": jnp.zeros_like(saved)})["w"].tolist() == numbers.tolist()
    same(safetensors.load(tmp_path, {"w": np.zeros_like(numbers)}, cast=True), {"w": numbers})


# --- what is wrong --------------------------------------------------------------------------------------


def cut(folder: pathlib.Path, file: str, size: int) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:size])


def index_changed(folder: pathlib.Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rewritten(folder: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    for file in folder.iterdir():
        file.unlink()
    tensors = weights()
    change(tensors)
    written(tensors, folder)


FIRST = "model-00001.safetensors"
WRONG: dict[str, tuple[Callable[[pathlib.Path], Any], type[Exception], str]] = {
    "truncated": (
        lambda f: cut(f, FIRST, 1000),
        CheckpointError,
        rf"{FIRST} is no safetensors file, or damaged: .*\(1,000 bytes\)",
    ),
    "empty": (lambda f: cut(f, FIRST, 0), CheckpointError, rf"{FIRST} is no safetensors file"),
    "no shard": (
        lambda f: (f / FIRST).unlink(),
        FileNotFoundError,
        rf"index.json names the file {FIRST}, with model.conv.weight, which is not there",
    ),
    "a tensor that is not in its shard": (
        lambda f: index_changed(f, lambda places: places.update({"model.scale": FIRST})),
        CheckpointError,
        f"says that model.scale is in {FIRST}, where it is not",
    ),
    "an index that is cut": (
        lambda f: cut(f, "model.safetensors.index.json", 30),
        CheckpointError,
        "the index .* damaged",
    ),
    "an index of something else": (
        lambda f: (f / "model.safetensors.index.json").write_text("[1]"),
        CheckpointError,
        "the index .* damaged",
    ),
    "no weights": (
        lambda f: [file.unlink() for file in f.glob("model*")] and [(f / f"{i}.json").touch() for i in range(7)],
        FileNotFoundError,
        r"has neither model.safetensors nor model.safetensors.index.json; it has 0.json, .*, 4.json$",
    ),
    "no files": (
        lambda f: [file.unlink() for file in f.iterdir()],
        FileNotFoundError,
        r"has neither model.safetensors nor model.safetensors.index.json; it has no files$",
    ),
    "another shape": (
        lambda f: rewritten(f, lambda t: t.update({"model.embed.weight": np.zeros((12, 6), np.float32)})),
        ValueError,
        r"embed, float32\[12,8\]: model.embed.weight in model.safetensors is float32\[12,6\]",
    ),
    "a shape that is transposed": (
        lambda f: rewritten(
            f, lambda t: t.update({"model.layers.1.up.weight": t["model.layers.1.up.weight"].T.copy()})
        ),
        ValueError,
        r"layers/1/up/kernel, .*Transposed\(name\) or a plain name: the other one fits",
    ),
    "another dtype": (
        lambda f: rewritten(f, lambda t: t.update({"model.scale": np.array(3, np.int32)})),
        ValueError,
        r"scale, float32\[\]: model.scale in model.safetensors is int32\[\]$",
    ),
    "another architecture": (
        lambda f: rewritten(f, lambda t: t.update({f"h.{i}.attn": t.pop(name) for i, name in enumerate(list(t))})),
        ValueError,
        r"no model.embed.weight, for embed\n(.*\n)*  the files also have h.0.attn in (.*\n)*To leave tensors out",
    ),
    "more than a screenful": (
        lambda f: rewritten(f, lambda t: t.update({f"h.{i}": t["model.scale"] for i in range(12)})),
        ValueError,
        r"the files also have h.7 in .*\n  … and 2 more\n",
    ),
    "a layer more": (
        lambda f: rewritten(f, lambda t: t.update({"model.layers.2.up.weight": t["model.layers.1.up.weight"]})),
        ValueError,
        r"do not fit; nothing was loaded:\n  the files also have model.layers.2.up.weight in ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_and_nothing_changes(case: str, tmp_path: pathlib.Path) -> None:
    written(weights(), tmp_path, 3000)
    params = variables(strategy_of(2), 1)
    before = {path: v.numpy() for path, v in params.items()}
    change, error, message = WRONG[case]
    change(tmp_path)
    with pytest.raises(error, match=re.compile(message, re.MULTILINE)):
        safetensors.load(tmp_path, params, NAMES)
    same({path: v.numpy() for path, v in params.items()}, before)


def test_ignored_and_left_out(tmp_path: pathlib.Path) -> None:
    tensors = weights() | {f"h.{i}.attn.bias": np.zeros(2, np.float32) for i in range(3)}
    written(tensors, tmp_path)
    params = variables(strategy_of(2), 1)
    names = {**NAMES, "embed": None}
    safetensors.load(tmp_path, params, names, ignore=["h.{}.attn.bias", "model.embed.weight"])
    same({path: v.numpy() for path, v in params.items()}, {**here(tensors), "embed": np.ones((12, 8))})


class Device:
    """A device that tells how much memory it has left."""

    def __init__(self, free: int) -> None:
        self.stats = {"bytes_limit": 1000 + free, "bytes_in_use": 1000}


@pytest.mark.parametrize(("free", "fits"), [(512, True), (511, False)])
def test_a_device_that_lacks_the_memory(free: int, fits: bool, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    written(weights(), tmp_path, 3000)
    monkeypatch.setattr(loading, "_stats", lambda device: Device(free).stats if device.id == 1 else {})
    params = variables(strategy_of(2), 1)  # one at a time: the largest are 8 x 16
    params["conv"] = np.zeros(SHAPES["conv"], np.float32)
    params["stacked"] = np.zeros(SHAPES["stacked"], np.float32)
    before = params["embed"].numpy()
    if fits:
        safetensors.load(tmp_path, params, NAMES)
        return
    message = r"cpu:1 has 511 bytes free, and the weights in .* need 512 there, up to layers/0/up/kernel, "
    with pytest.raises(MemoryError, match=message + r"float32\[8,16\] \(model.layers.0.up.weight in model-.*; nothing"):
        safetensors.load(tmp_path, params, NAMES)
    np.testing.assert_array_equal(params["embed"].numpy(), before)


def test_new_arrays_are_there_together(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors.save(tmp_path, {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)})
    monkeypatch.setattr(loading, "_stats", lambda device: Device(127).stats)
    one, half = (
        jax.ShapeDtypeStruct((4, 4), np.float32),
        NamedSharding(Mesh(jax.devices()[:2], "x"), PartitionSpec("x")),
    )
    with pytest.raises(MemoryError, match=r"cpu:0 has 127 bytes free, and the weights in .* need 128 there, up to b"):
        safetensors.load(tmp_path, {"a": one, "b": one})
    split = jax.ShapeDtypeStruct((4, 4), np.float32, sharding=half)
    safetensors.load(tmp_path, {"a": one, "b": split})


def test_a_device_that_is_full_while_it_loads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors.save(tmp_path, {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    with strategy_of(2).scope():
        params = replicax.as_variables({"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)})
    calls: list[Any] = []

    def put(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 16 bytes.")
        return device_put(*args, **kwargs)

    device_put = jax.device_put
    monkeypatch.setattr(jax, "device_put", put)
    message = r"model.safetensors was broken off at b \(b\): RESOURCE_EXHAUSTED.*; variables before it are loaded"
    with pytest.raises(CheckpointError, match=message):
        safetensors.load(tmp_path, params)
    assert params["a"].numpy().all()
    assert not params["b"].numpy().any()


def test_a_file_that_is_cut_after_the_check(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors.save(tmp_path, {"a": np.ones(4, np.float32)})
    monkeypatch.setattr(loading, "_check_room", lambda *_: cut(tmp_path, "model.safetensors", 80))
    with pytest.raises(CheckpointError, match=r"model.safetensors was broken off at a \(a\): mmap"):
        safetensors.load(tmp_path, {"a": np.ones(4, np.float32)})


def test_mistakes_in_names(tmp_path: pathlib.Path) -> None:
    written(weights(), tmp_path)
    params = variables(strategy_of(2), 1)
    names: dict[str, Any] = {**NAMES, "embedding": NAMES["embed"]}
    del names["embed"]
    with pytest.raises(ValueError, match=r"names has no entry for embed \(did you mean 'embedding'\?\); None leaves"):
        safetensors.load(tmp_path, params, names)
    with pytest.raises(TypeError, match="for embed it gives 3; expected a name"):
        safetensors.load(tmp_path, params, {**NAMES, "embed": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"does not fit embed, whose shape is \(12, 8\)"):
        safetensors.load(tmp_path, params, {**NAMES, "embed": Transposed("model.embed.weight", (0, 2))})
    with pytest.raises(ValueError, match=r"names: embed and scale are both called x"):
        safetensors.save(tmp_path / "new", params, {**NAMES, "embed": "x", "scale": "x"})
    with pytest.raises(ValueError, match=r"embed is called 'x\.1\.\{\}\.\{\}', but only one \{\} can stand for"):
        safetensors.save(tmp_path / "new", params, {**NAMES, "embed": "x.1.{}.{}"})
    assert not (tmp_path / "new").exists()


def test_two_arrays_of_one_path(tmp_path: pathlib.Path) -> None:
    tree = {"a/b": np.zeros(2, np.float32), "a": {"b": np.ones(2, np.float32)}}
    with pytest.raises(ValueError, match="two arrays have the path a/b: rename one"):
        safetensors.save(tmp_path, tree)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="tree, of the class Optimizer, has no variables and arrays"):
        safetensors.save(tmp_path, replicax.Optimizer(optax.sgd(0.1)))
    assert list(tmp_path.iterdir()) == []
    safetensors.save(tmp_path, {**tree, "a/b": "not an array"})
    with pytest.raises(ValueError, match="two arrays have the path a/b: rename one"):
        safetensors.load(tmp_path, tree)
    assert safetensors.load(tmp_path, {**tree, "a/b": "not an array"})["a/b"] == "not an array"


def test_places_where_nothing_is_loaded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(weights(), tmp_path)
    strategy = strategy_of(2)
    params = variables(strategy, 1)
    for method in (safetensors.load, safetensors.save):
        with pytest.raises(ContextError, match=rf"safetensors.{method.__name__} was called inside a step"):
            strategy.run(lambda method=method: method(tmp_path, params, NAMES))
    with pytest.raises(FileNotFoundError, match="there is no .*nowhere"):
        safetensors.load(tmp_path / "nowhere", params, NAMES)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'replicax\[safetensors\]'"):
        safetensors.load(tmp_path, params, NAMES)


def test_a_save_over_weights_and_one_that_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = here(weights())
    (tmp_path / "config.json").write_text("{}")
    safetensors.save(tmp_path, tree, NAMES)
    with pytest.raises(FileExistsError, match=r"model.safetensors is there already: save to another folder"):
        safetensors.save(tmp_path, tree, NAMES)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.safetensors.index.json")
    with pytest.raises(FileExistsError, match=r"model.safetensors.index.json is there already"):
        safetensors.save(tmp_path, tree, NAMES)

    calls = []

    def full(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        save_file(*args, **kwargs)
        if len(calls) == 2:
            raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(CheckpointError, match="could not be saved to .*: No space left on device"):
        safetensors.save(tmp_path / "full", tree, NAMES, max_file_bytes=500)
    assert list((tmp_path / "full").iterdir()) == []


@pytest.mark.parametrize("method", ["write_text", "replace"])
def test_a_save_that_fails_at_its_index_leaves_nothing(
    method: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, flushed = getattr(pathlib.Path, method), list[str]()

    def full(self: pathlib.Path, *args: Any) -> Any:
        if self.name.endswith("index.json.part"):
            assert method == "write_text" or [*tmp_path.glob("*.part*")] == [self]  # the index comes last
            raise OSError("No space left on device")
        return original(self, *args)

    tree = here(weights())
    monkeypatch.setattr(saving, "flush", lambda path: flushed.append(path))
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, method, full)
        with pytest.raises(CheckpointError, match="could not be saved to .*: No space left on device"):
            safetensors.save(tmp_path, tree, NAMES, max_file_bytes=500)
    assert list(tmp_path.iterdir()) == []
    flushed.clear()
    safetensors.save(tmp_path, tree, NAMES, max_file_bytes=500)
    assert len(flushed) == len(list(tmp_path.iterdir()))


# --- memory, and several workers ------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["sharded", pytest.param("tensor parallel", marks=pytest.mark.soak)])
def test_the_host_has_one_tensor_more_at_most(placement: str, tmp_path: pathlib.Path) -> None:
    tensors = {f"layers.{i}.weight": np.full((2048, 2048), i, np.float32) for i in range(4)}  # 16 MiB each
    written(tensors, tmp_path, 64 << 20)
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.workers_safetensors", str(tmp_path), placement],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    above, kept = map(int, done.stdout.split())
    assert kept == 4 << 24
    assert above < (16 << 20) * 1.5  # the tensor that is read, and pages of the file


def test_each_worker_reads_its_part_and_the_chief_writes(tmp_path: pathlib.Path) -> None:
    tensors = weights()
    written(tensors, tmp_path / "in", 3000)
    results = processes.run(workers_safetensors.read_and_write, str(tmp_path), workers=2, devices=2)
    for result in results:
        same(result["values"], here(tensors))
        assert "model-00001.safetensors" in result["error"]
    found = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert found.keys() == tensors.keys()
    same(found, tensors)
    added = jax.export.deserialize(bytearray((tmp_path / "add").read_bytes())).call(np.zeros(4, np.float32))
    for rows in (load_file(tmp_path / "rows" / "model.safetensors")["rows"], added):
        assert rows.tolist() == [0.0, 0.0, 1.0, 1.0]
