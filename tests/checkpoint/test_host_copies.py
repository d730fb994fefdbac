"""What a save copies to the host: everything as it is at the call, whatever happens to the memory then."""

from __future__ import annotations

import gc
import threading
import time
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import replicax
from replicax.checkpoint import host_copies
from replicax.checkpoint.device_blocks import Part, PartPiece
from replicax.checkpoint.host_copies import HostCopier
from replicax.checkpoint.leaves import Leaves
from replicax.checkpoint.storage.blocks import whole_block
from replicax.checkpoint.storage.index import ArrayKind

Pair = namedtuple("Pair", "first second")


def copier_of(**arrays: np.ndarray) -> tuple[HostCopier, dict]:
    leaves = Leaves(arrays).arrays()
    own = {
        name: [PartPiece.of(part, part.block) for part in leaf.parts() if 0 not in leaf.kind.shape]
        for name, leaf in leaves.items()
    }
    return HostCopier(leaves, own), leaves


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_taken_again_when_nobody_refers_to_it() -> None:
    copier, leaves = copier_of(a=np.arange(6.0), b=np.arange(3, dtype=np.int8), c=np.ones(5))
    first = copier.copied(leaves).pieces()
    where = {place: address(data) for place, data in first.items()}
    second = copier.copied(leaves).pieces()
    for place, data in first.items():
        assert not np.shares_memory(data, second[place])
    where = {place: address(data) for place, data in second.items()}
    del first, second, data
    third = copier.copied(leaves).pieces()
    assert {place: address(data) for place, data in third.items()} == where
    assert [data.tolist() for _, data in sorted(third.items())] == [np.arange(6.0).tolist(), [0, 1, 2], [1.0] * 5]


def test_much_memory_is_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(host_copies, "KEPT", 8)
    copier, leaves = copier_of(a=np.arange(6.0))
    [(_, data)] = copier.copied(leaves).pieces().items()
    assert copier._memory._kept is None
    assert data.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_restore_gives_the_memory_back(tmp_path) -> None:
    checkpoint = replicax.Checkpoint(v=replicax.Variable(np.ones(1000)))
    checkpoint.save(tmp_path / "a")
    kept = checkpoint._plan[2]._copier._memory._kept
    assert kept.nbytes >= 4000
    del kept
    checkpoint.restore(tmp_path / "a")
    assert checkpoint._plan is None


def test_each_save_has_the_values_of_its_time(pair, tmp_path) -> None:
    with pair.scope():
        variables = [replicax.Variable(np.zeros((n, 3), np.float32)) for n in range(40)]
    checkpoint = replicax.Checkpoint(model=variables)

    def step() -> None:
        for number, variable in enumerate(variables):
            variable.assign_add(jnp.full(variable.shape, number + 1.0))

    for number in range(4):
        pair.run(step)
        checkpoint.save(tmp_path / str(number), wait=False)
    pair.run(step)
    for number in (3, 0, 2, 1):
        checkpoint.restore(tmp_path / str(number))
        for place, variable in enumerate(variables):
            assert (variable.numpy() == (number + 1) * (place + 1)).all()


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.asfortranarray(np.arange(12.0).reshape(3, 4)), id="columns first"),
        pytest.param(np.arange(24.0)[::-2], id="with gaps"),
        pytest.param(np.arange(4, dtype=">i4"), id="big-endian"),
        pytest.param(np.float64(2.5), id="scalar"),
        pytest.param(np.zeros((0, 3)), id="empty"),
        pytest.param(jnp.arange(4, dtype=jnp.int4), id="int4"),
        pytest.param(jnp.arange(4, dtype=jnp.bfloat16), id="bfloat16"),
        pytest.param(jnp.array([True, False]), id="bool"),
        pytest.param(jnp.array([1 + 2j]), id="complex"),
        pytest.param(jnp.zeros((2, 0)), id="empty on a device"),
        pytest.param("columns", id="columns first on a device"),
    ],
)
def test_arrays_however_they_lie(tmp_path, array) -> None:
    if isinstance(array, str):
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        array = jax.device_put(jnp.arange(6.0).reshape(2, 3), Format(Layout((1, 0)), device))
    checkpoint = replicax.Checkpoint(array=array, before=np.arange(3, dtype=np.int8))
    checkpoint.save(tmp_path / "a")
    checkpoint.restore(tmp_path / "a")
    assert checkpoint.array.dtype == np.asarray(array).dtype.newbyteorder("=")
    assert np.asarray(checkpoint.array).tolist() == np.asarray(array).tolist()
    assert checkpoint.before.tolist() == [0, 1, 2]


class Elsewhere:
    """An array on a device that is no CPU, and what was asked of it, in order."""

    is_on_host = False

    def __init__(self, name: str, calls: list[str], data: np.ndarray) -> None:
        self.name, self.calls, self.data = name, calls, data
        self.kind = ArrayKind(data.shape, data.dtype.name)

    def here(self) -> list[Elsewhere]:
        return [self]

    def copy_to_host_async(self) -> None:
        self.calls.append(f"send {self.name}")

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.calls.append(f"take {self.name}")
        return self.data


def test_other_devices_send_everything_before_the_first_is_waited_for() -> None:
    calls: list[str] = []
    leaves = {name: Elsewhere(name, calls, np.arange(4.0) + i) for i, name in enumerate("ab")}
    part = Part(whole_block((4,)), (0,), position=0)
    own = {
        "a": [PartPiece.of(part, part.block)],
        "b": [PartPiece.of(part, ((0, 3),)), PartPiece.of(part, ((3, 4),))],
    }
    found = HostCopier(leaves, own).copied(leaves).pieces()
    assert calls == ["send a", "send b", "take a", "take b"]
    assert np.shares_memory(found["a", ((0, 4),)], leaves["a"].data)  # it is new memory already
    assert [found["b", block].tolist() for block in (((0, 3),), ((3, 4),))] == [[1, 2, 3], [4]]


@pytest.mark.parametrize("kind", ["list", "dict", "tuple in a dict", "namedtuple", "renamed", "reordered", "subclass"])
def test_what_is_in_containers_is_looked_at_in_each_save(tmp_path, kind) -> None:
    class Layers(list):
        pass

    a, b, c = (replicax.Variable(value) for value in (1.0, 2.0, 3.0))
    tree: dict = {
        "list": {"layers": [a, b]},
        "dict": {"layers": {"w": a, "b": b}},
        "tuple in a dict": {"layers": ({"w": a}, b)},
        "namedtuple": {"layers": Pair({"w": a}, b)},
        "renamed": {"layers": {"w": a, "b": b}},
        "reordered": {"layers": [a, b]},
        "subclass": {"layers": Layers([a, b])},
    }[kind]
    checkpoint = replicax.Checkpoint(model=tree)
    checkpoint.save(tmp_path / "0")
    checkpoint.save(tmp_path / "1")
    layers = tree["layers"]
    if kind in ("list", "subclass"):
        layers[0] = c
    elif kind == "dict":
        layers["w"] = c
    elif kind in ("tuple in a dict", "namedtuple"):
        layers[0]["w"] = c
    elif kind == "renamed":
        layers["v"] = layers.pop("w")
    else:
        layers.reverse()
    checkpoint.save(tmp_path / "2")
    for variable in (a, b, c):
        variable.assign(0.0)
    checkpoint.restore(tmp_path / "2")
    found = [float(v.value) for v in (a, b, c)]
    assert found == ([1.0, 2.0, 0.0] if kind in ("renamed", "reordered") else [0.0, 2.0, 3.0])
    if kind == "renamed":
        with pytest.raises(ValueError, match="model/layers/v"):
            checkpoint.restore(tmp_path / "1")


def test_the_thread_ends_with_its_checkpoint(tmp_path) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "replicax-checkpoint"}

    before = threads()
    checkpoint = replicax.Checkpoint(v=replicax.Variable(1.0))
    for number in range(3):
        checkpoint.save(tmp_path / str(number), wait=number == 1)
    checkpoint.wait()
    [mine] = threads() - before
    del checkpoint
    gc.collect()
    end = time.monotonic() + 60
    while mine.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert not mine.is_alive()
