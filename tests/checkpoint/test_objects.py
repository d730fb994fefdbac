"""What can be saved, how it comes back, and what is said of everything else."""

from __future__ import annotations

import functools
import math
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import replicax
from replicax.checkpoint import array_leaves, device_blocks, restoration
from replicax.checkpoint.storage import blocks
from tests.checkpoint.runs import Run
from tests.conftest import strategy_of

DTYPES = [
    "bool",
    "int4",
    "uint4",
    "int8",
    "uint16",
    "int32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
]


def numbers(dtype: str, shape: tuple[int, ...] = (3, 2)) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return (np.arange(math.prod(shape)) % 5).reshape(shape).astype(kind)


def there_and_back(path, **objects):
    """The objects as another checkpoint of the same names has them after a restore; arrays were zeros before."""
    replicax.Checkpoint(**objects).save(path)
    zeros = jax.tree.map(
        lambda x: np.zeros_like(x) if type(x) is np.ndarray else x * 0 if hasattr(x, "shape") else x, objects
    )
    return replicax.Checkpoint(**zeros).restore(path)


def test_arrays_of_all_dtypes(tmp_path) -> None:
    here = {dtype: numbers(dtype) for dtype in DTYPES}
    there = {dtype: jnp.asarray(array) for dtype, array in here.items()}
    variables = {dtype: replicax.Variable(array) for dtype, array in here.items()}
    replicax.Checkpoint(here=here, there=there, variables=variables).save(tmp_path / "a")
    zeros = {dtype: np.zeros((3, 2), array.dtype) for dtype, array in here.items()}
    for dtype, variable in variables.items():
        variable.assign(zeros[dtype])
    again = replicax.Checkpoint(
        here=zeros, there={dtype: jnp.asarray(array) for dtype, array in zeros.items()}, variables=variables
    )
    again.restore(tmp_path / "a")
    for dtype, array in here.items():
        assert again.here[dtype].dtype == array.dtype
        assert isinstance(again.here[dtype], np.ndarray)
        assert isinstance(again.there[dtype], jax.Array)
        assert again.variables[dtype] is variables[dtype]
        for found in (again.here[dtype], again.there[dtype], variables[dtype].value):
            assert np.asarray(found).tobytes() == array.tobytes(), dtype


@pytest.mark.parametrize("is_on_cpu", [True, False])  # other devices send their pieces
def test_large_arrays_are_in_pieces(tmp_path, monkeypatch, is_on_cpu) -> None:
    monkeypatch.setattr(array_leaves, "_is_on_cpu", lambda sharding: is_on_cpu)
    monkeypatch.setattr(blocks.pieces_of, "__defaults__", (100,))
    monkeypatch.setattr(device_blocks, "LARGE", 300)
    monkeypatch.setattr(restoration, "BATCH", 500)
    values = np.random.default_rng(0).normal(size=(17, 13)).astype(np.float32)
    for source, onto in ((replicax.ShardedStrategy, strategy_of), (strategy_of, replicax.ShardedStrategy)):
        variables = []
        for make, count, factor in ((source, 2, 1), (onto, 3, 0)):
            with make([f"cpu:{i}" for i in range(count)] if make is replicax.ShardedStrategy else count).scope():
                variables.append(
                    [replicax.variables.ShardedVariable(values * factor), replicax.Variable(values.T * factor)]
                )
        replicax.Checkpoint(v=variables[0]).save(tmp_path / onto.__name__)
        replicax.Checkpoint(v=variables[1]).restore(tmp_path / onto.__name__)
        np.testing.assert_array_equal(variables[1][0].numpy(), values)
        np.testing.assert_array_equal(variables[1][1].numpy(), values.T)
        variables[1][1].strategy.run(lambda v: v.assign(v + 1.0), args=(variables[1][1],))


@pytest.mark.parametrize("largest", [1, 1000])
def test_arrays_in_the_memory_of_the_host(tmp_path, monkeypatch, largest) -> None:
    monkeypatch.setattr(device_blocks, "LARGE", largest)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, jax.P("x"), memory_kind="pinned_host")
    values = np.arange(4, dtype=np.float32)
    found = there_and_back(tmp_path / "a", x=jax.device_put(values, sharding))["x"]
    assert (found.tolist(), found.sharding) == (values.tolist(), sharding)


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_random_keys(tmp_path, generator) -> None:
    key = jax.random.key(5, impl=generator)
    objects = {"key": key, "keys": jax.random.split(key, 3), "placed": jax.random.split(key, 4)}
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    objects["placed"] = jax.device_put(objects["placed"], jax.NamedSharding(mesh, jax.P("x")))
    checkpoint = replicax.Checkpoint(
        key=jax.random.key(0, impl=generator), keys=objects["keys"][::-1], placed=objects["placed"][::-1]
    )
    replicax.Checkpoint(**objects).save(tmp_path / "a")
    checkpoint.restore(tmp_path / "a")
    for name, value in objects.items():
        found = getattr(checkpoint, name)
        assert (found.dtype, found.sharding) == (value.dtype, value.sharding)
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(value))
    assert jax.random.normal(checkpoint.key) == jax.random.normal(key)
    other = "rbg" if generator == "threefry2x32" else "threefry2x32"
    with pytest.raises(ValueError, match=f"key: saved was {generator} keys"):
        replicax.Checkpoint(**objects | {"key": jax.random.key(0, impl=other)}).restore(tmp_path / "a")


def test_plain_values_come_back_by_value(tmp_path) -> None:
    values = [0, -(2**70), 1.5, float("inf"), float("-inf"), 1e-300, True, None, "", "ü/\\\n\0", 2 - 3j, complex("nan")]
    checkpoint = replicax.Checkpoint(values=values, step=3, nan=float("nan"))
    checkpoint.save(tmp_path / "a")
    again = replicax.Checkpoint(values=[None] * len(values), step=0, nan=0)
    returned = again.restore(tmp_path / "a")
    assert again.values[:-1] == values[:-1]
    assert [type(value) for value in again.values] == [type(value) for value in values]
    assert math.isnan(again.nan)
    assert math.isnan(again.values[-1].real)
    assert again.step == 3
    assert returned["step"] == 3


def test_strings_that_are_not_unicode_and_those_of_numpy(tmp_path) -> None:
    name = "data-\udcff.npz"  # of os.listdir, for a byte that is not UTF-8
    replicax.Checkpoint(files={name: name}, label=np.str_("abc")).save(tmp_path / "a")
    again = replicax.Checkpoint(files={name: ""}, label="")
    again.restore(tmp_path / "a")
    assert (again.files, again.label) == ({name: name}, "abc")


def test_attributes_are_what_is_saved(tmp_path) -> None:
    checkpoint = replicax.Checkpoint(step=0, key=jax.random.key(0))
    checkpoint.step += 5
    checkpoint.save(tmp_path / "a")
    checkpoint.step = 9
    checkpoint.restore(tmp_path / "a")
    assert checkpoint.step == 5
    checkpoint.step = 7
    checkpoint.save(tmp_path / "b")
    checkpoint.step = 0
    assert checkpoint.restore(tmp_path / "b")["step"] == 7
    assert {"step", "key", "save"} <= {*dir(checkpoint)}
    assert repr(checkpoint) == "Checkpoint(step, key)"
    with pytest.raises(AttributeError, match="has no 'stepp'; it has step, key"):
        checkpoint.stepp = 6
    with pytest.raises(AttributeError, match="has no 'stepp'; it has step, key"):
        checkpoint.stepp  # noqa: B018


def test_names_that_look_alike_stay_apart(tmp_path) -> None:
    objects = {
        "a/b": {"c": np.float32(1.0)},
        "a": {"b/c": np.float32(2.0), "b": {"c": np.float32(3.0)}, "b\\": np.float32(4.0)},
        "a\\": {"b": np.float32(10.0)},
        "a\\/b": np.float32(11.0),
        "a\\\\": {"b": np.float32(12.0)},
        "größe": np.float32(5.0),
        "with space.and.dots": [np.float32(6.0), (np.float32(7.0),)],
        "numbers": {0: np.float32(8.0), 10: np.float32(9.0)},
    }
    found = there_and_back(tmp_path / "ordner ü", objects=objects)["objects"]
    assert jax.tree.map(float, found) == jax.tree.map(float, objects)


def test_containers_come_back_as_they_were(tmp_path) -> None:
    state = optax.adam(0.1).init({"w": jnp.ones(2)})
    found = there_and_back(tmp_path / "a", state=state, none={"x": None}, empty={}, pair=(1, [2]))
    assert jax.tree.structure(found["state"]) == jax.tree.structure(state)
    assert found["none"] == {"x": None}
    assert found["empty"] == {}
    assert found["pair"] == (1, [2])


def test_a_variable_with_two_names_is_written_once(tmp_path) -> None:
    v = replicax.Variable(np.random.default_rng(0).normal(size=(100, 100)).astype(np.float32))
    replicax.Checkpoint(a=v).save(tmp_path / "one")
    replicax.Checkpoint(a=v, b={"again": v}).save(tmp_path / "two")
    one, two = (
        sum(f.stat().st_size for f in (tmp_path / n / "arrays-0").rglob("*") if f.is_file()) for n in ("one", "two")
    )
    assert two < one * 1.1
    v.assign(v * 0.0)
    replicax.Checkpoint(a=v, b={"again": v}).restore(tmp_path / "two")
    assert float(abs(v.value).sum()) > 0


def test_names_of_one_array_that_get_arrays_of_their_own_are_saved_apart(tmp_path) -> None:
    params = {"w": jnp.zeros(3)}
    checkpoint = replicax.Checkpoint(params=params, best=params)
    checkpoint.save(tmp_path / "1")
    checkpoint.params = {"w": jnp.ones(3)}
    checkpoint.save(tmp_path / "2")
    checkpoint.restore(tmp_path / "2")
    assert (checkpoint.params["w"].tolist(), checkpoint.best["w"].tolist()) == ([1, 1, 1], [0, 0, 0])


def test_functions_in_a_pytree_stay(tmp_path) -> None:
    layers = [np.tanh, jax.nn.relu, jnp.sin, functools.partial(jax.nn.gelu, approximate=False), lambda x: x]
    model = there_and_back(tmp_path / "a", model={"w": np.ones(3), "layers": layers})["model"]
    assert model["w"].tolist() == [1, 1, 1]
    assert model["layers"] == layers


def test_what_cannot_be_saved_is_named() -> None:
    strategy = strategy_of(2)
    dataset = strategy.distribute_dataset([np.zeros(4)])
    per_replica = strategy.distribute_values_from_function(lambda ctx: 1.0)
    cases = [
        ({"x": object()}, "model/x is of the class builtins.object"),
        ({"x": [np.array(["a"])]}, r"model/x/0 is a NumPy array of dtype <U1\. Saved are variables"),
        ({"x": np.longdouble(1)}, f"model/x is a NumPy array of dtype {np.dtype(np.longdouble)}"),
        ({"x": np.ma.masked_array([1.0], [True])}, "model/x is a masked array, whose mask would be lost"),
        ({"x": np.array([object()])}, "model/x is a NumPy array of dtype object"),
        (
            types.SimpleNamespace(variables={"a": replicax.Variable(1.0), "b": [np.ones(2)]}),
            r"; of an object all variables have .*, but its variables\['b'\]\[0\] is a NumPy array of dtype float64",
        ),
        (dataset, r"model is of the class .*DistributedDataset.*save the iterator, iter\(dataset\)"),
        (
            iter([1, 2]),
            "model is of the class builtins.list_iterator.*; an iterator has to be one of strategy.distribute_dataset",
        ),
        (per_replica, "make a Variable with synchronization='on_read'"),
        (optax.sgd(0.1).update, "model is of the class builtins.function.*; leave functions out, and of an Optax"),
        (optax.sgd(0.1), "model/init is of the class builtins.function.*; leave functions out, and of an Optax"),
        ({"x": dataset.plan}, "model/x is of the class builtins.method"),
        (b"bytes", "model is of the class builtins.bytes.*; make it one of these"),
        (strategy, "; of a strategy save the variables that were made in its scope"),
    ]
    for value, message in cases:
        with pytest.raises(TypeError, match=message):
            replicax.Checkpoint(model=value)
    for value, message in (
        ("folder", r"The first without a name is .*folder.*; the path is for its method: checkpoint.save\(path\)"),
        ({"w": 1.0}, r"The first without a name is .*; of a dict: Checkpoint\(\*\*objects\)"),
        (strategy, "The first without a name is .*; of a strategy save the variables"),
    ):
        with pytest.raises(TypeError, match=message):
            replicax.Checkpoint(value)
    with pytest.raises(ValueError, match="can't flatten model, where the keys of a dict must be of one type"):
        replicax.Checkpoint(model={1: 0.0, "1": 1.0})
    with pytest.raises(ValueError, match="takes what is to be saved, by name"):
        replicax.Checkpoint()
    with pytest.raises(ValueError, match="two objects are called 'm/w': rename a key of one of them"):
        replicax.Checkpoint(**{"m": types.SimpleNamespace(variables={"w": replicax.Variable(1.0)}), "m/w": 1.0})
    with pytest.raises(TypeError, match="x is a value that a step computes: save outside of steps"):
        jax.jit(lambda x: replicax.Checkpoint(x=x))(1.0)
    for name in ("save", "restore", "_x"):
        with pytest.raises(ValueError, match=f"an object can't be called '{name}'"):
            replicax.Checkpoint(**{name: 1})


def test_an_iterator_whose_place_is_unknown(tmp_path) -> None:
    strategy = strategy_of(2)
    iterator = iter(strategy.distribute_dataset(strategy.make_numpy_dataset(np.arange(4.0)).to_iter_dataset().batch(2)))
    checkpoint = replicax.Checkpoint(data=iterator)
    assert checkpoint._lockstep is strategy.extended.replicas.lockstep  # of the workers that read it
    iterator.close()
    with pytest.raises(ValueError, match="data: the iterator has been closed"):
        checkpoint.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_only_outside_of_steps(tmp_path) -> None:
    checkpoint = replicax.Checkpoint(v=replicax.Variable(1.0))
    manager = replicax.CheckpointManager(checkpoint, tmp_path / "b")
    manager.save(1)
    for call, name in (
        (lambda: checkpoint.save(tmp_path / "a"), "Checkpoint.save"),
        (lambda: checkpoint.restore(tmp_path / "a"), "Checkpoint.restore"),
        (manager.restore_latest, "CheckpointManager.restore"),
        (lambda: manager.restore(1), "CheckpointManager.restore"),
    ):
        with pytest.raises(replicax.errors.ContextError, match=f"{name} was called inside a step"):
            replicax.get_strategy().run(call)


def test_inside_a_scope_and_in_debug_mode(tmp_path) -> None:
    run = Run.of(strategy_of(2))
    with replicax.debug(), run.strategy.scope():
        run.go(1)
        run.checkpoint.save(tmp_path / "a")
        values = run.values()
        run.go(1)
        run.checkpoint.restore(tmp_path / "a")
        assert run.values() == values
        run.go(1)
    run.go(1)


def test_an_array_that_was_donated_is_told_by_its_name(tmp_path) -> None:
    checkpoint = replicax.Checkpoint(v=replicax.Variable(1.0), state={"x": jnp.ones(3)})
    state = jax.jit(lambda state: {"x": state["x"] + 1}, donate_argnums=0)(checkpoint.state)
    with pytest.raises(RuntimeError, match="the array state/x has been deleted, .*assign what such a function returns"):
        checkpoint.save(tmp_path / "a")
    checkpoint.state = state
    checkpoint.save(tmp_path / "a")


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])  # NumPy takes any object for a bool
def test_a_lost_variable_is_not_saved_and_comes_back(tmp_path, dtype) -> None:
    v = replicax.Variable(np.ones(3, dtype))
    checkpoint = replicax.Checkpoint(v=v)
    checkpoint.save(tmp_path / "a")
    v.slot.array.delete()
    with pytest.raises(replicax.errors.VariableLostError):
        checkpoint.save(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    checkpoint.restore(tmp_path / "a")
    assert v.numpy().tolist() == [1, 1, 1]
