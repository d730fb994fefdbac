"""What a save copies to the host: everything as it is at the call, whatever happens to the memory then."""

from __future__ import annotations

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout

import replicax

Pair = namedtuple("Pair", "first second")


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
        pytest.param(np.array(7), id="no dims"),
        pytest.param(jnp.float32(1.5), id="number on a device"),
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
    checkpoint.array = np.zeros_like(array) if type(array) is np.ndarray else array * 0
    checkpoint.before = checkpoint.before * 0
    checkpoint.restore(tmp_path / "a")
    assert type(checkpoint.array) is type(array)
    assert checkpoint.array.dtype == np.asarray(array).dtype.newbyteorder("=")
    assert np.asarray(checkpoint.array).tolist() == np.asarray(array).tolist()
    assert checkpoint.before.tolist() == [0, 1, 2]
    checkpoint.before[...] = 1  # NumPy's arrays can be written to


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


def test_state_that_an_optimizer_or_metric_has_got_since_the_last_save_is_saved(tmp_path) -> None:
    class Metric:
        def __init__(self) -> None:
            self.variables = {"total": replicax.Variable(1.0)}

    def checkpoint_of(start: float) -> replicax.Checkpoint:
        return replicax.Checkpoint(
            w=replicax.Variable(start), optimizer=replicax.Optimizer(optax.trace(0.5)), m=Metric()
        )

    def grow(checkpoint: replicax.Checkpoint, value: float) -> None:
        checkpoint.optimizer.build([checkpoint.w])
        checkpoint.m.variables["count"] = replicax.Variable(value)
        for slot in checkpoint.optimizer.variables:
            slot.assign(value)

    first, second = checkpoint_of(1.0), checkpoint_of(0.0)
    first.save(tmp_path / "0")
    grow(first, 7.0)
    first.save(tmp_path / "1")
    grow(second, 0.0)
    second.restore(tmp_path / "1")
    assert [float(slot.value) for slot in second.optimizer.variables] == [7.0]
    assert float(second.m.variables["count"].value) == 7.0


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(lambda: np.ones(4, np.float32), id="shape"),
        pytest.param(lambda: np.ones(3, np.int8), id="dtype"),
        pytest.param(lambda: jnp.ones(3), id="of JAX"),
        pytest.param(lambda: 5.0, id="number"),
    ],
)
def test_an_array_may_be_another_one_in_the_next_save(tmp_path, later) -> None:
    checkpoint = replicax.Checkpoint(x=np.zeros(3, np.float32), y=np.arange(2))
    checkpoint.save(tmp_path / "0")
    checkpoint.x = later()
    checkpoint.save(tmp_path / "1")
    checkpoint.x = checkpoint.x * 0
    checkpoint.restore(tmp_path / "1")
    assert type(checkpoint.x) is type(later())
    assert np.asarray(checkpoint.x).dtype == np.asarray(later()).dtype
    assert np.asarray(checkpoint.x).tolist() == np.asarray(later()).tolist()


def test_a_restored_variable_is_changed_in_place_though_its_old_value_was_read(tmp_path) -> None:
    v = replicax.Variable(np.zeros(3, np.float32))
    checkpoint = replicax.Checkpoint(v=v)
    checkpoint.save(tmp_path / "a")
    read = v.read_value()
    checkpoint.restore(tmp_path / "a")
    restored = v.slot.array
    v.strategy.run(lambda: v.assign_add(np.ones(3, np.float32)))
    assert (restored.is_deleted(), read.tolist()) == (True, [0.0, 0.0, 0.0])
