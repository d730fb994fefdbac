"""Meshes of the user's: one that is set around a strategy, arrays that lie on one, and ``shard_map`` in a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import replicax
from replicax.variables.partitioners import over_all
from tests.soaking import soak_except

DEVICES = [f"cpu:{i}" for i in range(4)]
X = np.random.default_rng(5).normal(size=(13, 4)).astype(np.float32)
PLACES: dict[str, Callable[[], replicax.Strategy]] = {
    "mirrored": lambda: replicax.MirroredStrategy(DEVICES),
    "split, in parts": lambda: replicax.ShardedStrategy(DEVICES, over_all(2, min_bytes=0), num_logical_devices=2),
    "several on each": lambda: replicax.ShardedStrategy(DEVICES[:2], over_all(2, min_bytes=0), num_replicas=4),
    "at home": lambda: replicax.CentralStorageStrategy(DEVICES[:2], "cpu:3"),
}


def mesh_of(*types: str) -> Mesh:
    """Of a dim for each, four devices in all."""
    sizes = {1: (4,), 2: (2, 2)}[len(types)]
    return jax.make_mesh(
        sizes,
        ("replica", "model")[: len(types)],  # the one name is also the strategy's
        axis_types=tuple(getattr(AxisType, name) for name in types),
        devices=jax.devices()[:4],
    )


def trained(strategy: replicax.Strategy, executor: str) -> list[Any]:
    """Two steps, of which the second has uneven sizes; reading, assigning and reducing between them."""
    options = replicax.RunOptions(executor)
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.full((4, 4), 0.5), name="w")
        seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
        optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)))
    factor = np.arange(4, dtype=np.float32)

    def step(x: Any) -> Any:
        seen.assign_add(x.shape[0])
        share, gradients = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(jnp.square(x @ w - factor[None]).sum(-1)), [w]
        )()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return share

    losses = []
    for x in strategy.distribute_dataset([X[:8], X]):
        losses.append(float(strategy.reduce("sum", strategy.run(step, args=(x,), options=options))))
        w.assign_add(jnp.ones((4, 4)))
        w.assign(w * 0.5)
    return [losses, w.numpy(), int(seen)]


@functools.cache
def on_one_device() -> list[Any]:
    return trained(replicax.OneDeviceStrategy("cpu:0"), "compiled")


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", soak_except(["compiled", "per_replica"], "compiled"))
@pytest.mark.parametrize("types", [("Auto",), ("Explicit",), ("Explicit", "Auto")], ids=" and ".join)
@pytest.mark.parametrize("place", soak_except(PLACES, "split, in parts", "several on each"))
def test_a_mesh_that_is_set_changes_nothing(place: str, types: tuple[str, ...], executor: str) -> None:
    with jax.set_mesh(mesh_of(*types)):
        found = trained(PLACES[place](), executor)
    for mine, theirs in zip(found, on_one_device(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_mesh_that_is_set_is_not_that_of_steps_nor_of_what_is_shown(executor: str) -> None:
    strategy, options = replicax.MirroredStrategy(DEVICES), replicax.RunOptions(executor)
    mesh = mesh_of("Explicit", "Auto")

    def number() -> Any:
        assert jax.sharding.get_abstract_mesh().empty
        return replicax.get_replica_context().replica_id_in_sync_group

    with jax.set_mesh(mesh):
        numbers = strategy.run(number, options=options)
        assert repr(numbers) == "PerReplica(int32[], 4 replicas: 0, 1, 2, 3)"
        assert f"{strategy.run(lambda: number() * 0, options=options):02d}" == "00"
        again = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
        doubled = strategy.run(lambda n, m: (n + m)[None], (numbers, again), options=options)
        assert strategy.gather(doubled, 0).tolist() == [0, 2, 4, 6]
        with strategy.scope():
            v = replicax.Variable(lambda: jnp.zeros(2), name="v")
        assert "mirrored on 4 replicas: [1. 1.]" in repr(v.assign_add(np.ones(2, np.float32)))
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


class Called:
    """What public calls need, under one strategy."""

    def __init__(self) -> None:
        self.s = strategy = replicax.MirroredStrategy(DEVICES)
        with strategy.scope():
            self.v = replicax.Variable(jnp.ones(4), name="v")
            self.seen = replicax.Variable(jnp.ones(4), name="seen", synchronization="on_read", aggregation="sum")
            self.optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
        self.x = strategy.distribute_values_from_function(lambda ctx: ONES * ctx.replica_id_in_sync_group)

    def data(self) -> Any:
        return self.s.distribute_dataset([X[:8]] * 2)

    def apply(self) -> Any:
        self.optimizer.apply_gradients([(ONES, self.v)], aggregate=False)
        return self.v.value

    def steps(self) -> Any:
        step = lambda ctx, x: ctx.set_last_step_output("sum", x.sum(), "sum")  # noqa: E731
        return self.s.run_steps(step, iter(self.data()), 2).last_step_outputs

    def train(self) -> Any:
        step = lambda x: replicax.compute_average_loss(x.sum(-1))  # noqa: E731
        return replicax.train(step, self.data(), 2, progress=False).numbers["loss"]


ONES = np.ones(4, np.float32)
PUBLIC_CALLS: dict[str, Callable[[Called], Any]] = {
    "apply_gradients": Called.apply,
    "value_and_grad": lambda c: replicax.value_and_grad(lambda: (c.v * c.v).sum(), [c.v])(),
    "run_steps": Called.steps,
    "reduce": lambda c: c.s.reduce("sum", c.x),
    "gather": lambda c: c.s.gather(c.x, 0),
    "local_results": lambda c: c.s.local_results(c.x),
    "read_var": lambda c: c.s.extended.read_var(c.seen),
    "call_for_each_replica": lambda c: c.s.extended.call_for_each_replica(lambda x: x + 1, args=(c.v,)),
    "trace": lambda c: str(c.s.extended.trace(lambda x: x * 2, (c.x,)).collectives()),
    "reduce_to": lambda c: c.s.extended.reduce_to("sum", c.x, c.v),
    "batch_reduce_to": lambda c: c.s.extended.batch_reduce_to("mean", [(c.x, c.v)]),
    "broadcast_to": lambda c: c.s.extended.broadcast_to(2.0),
    "update": lambda c: c.s.extended.update(c.v, lambda v, a: v.assign(a), (3 * ONES,)),
    "update_non_slot": lambda c: c.s.extended.update_non_slot(c.s.extended.non_slot_devices([c.v]), lambda: 1.0),
    "an operator": lambda c: c.v + ONES,
    "read_value": lambda c: [c.v.value, c.seen.value, repr(c.v)],
    "as_variables": lambda c: replicax.as_variables({"v": ONES})["v"].numpy(),
    "assign": lambda c: replicax.assign({"v": c.v}, {"v": 2 * ONES}) or c.v.numpy(),
    "an iterator": lambda c: [c.s.gather(x, 0) for x in c.data()],
    "train": Called.train,
}


@pytest.mark.parametrize("call", PUBLIC_CALLS)
def test_a_mesh_that_is_set_is_left_as_it_was(call: str) -> None:
    expected, mesh = PUBLIC_CALLS[call](Called()), mesh_of("Explicit", "Auto")
    called = Called()
    with jax.set_mesh(mesh):
        found = PUBLIC_CALLS[call](called)
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    assert repr(jax.tree.map(np.asarray, found)) == repr(jax.tree.map(np.asarray, expected))


def test_a_plan_is_the_same_under_a_mesh_that_is_set() -> None:
    strategy = replicax.MirroredStrategy(DEVICES)
    with strategy.scope():
        w = replicax.Variable(jnp.zeros((4, 4)))
    spec = jax.ShapeDtypeStruct((2, 4), "float32")
    plans = [replicax.plan(strategy, lambda x: x @ w, spec)]
    with jax.set_mesh(mesh_of("Explicit")):
        plans.append(replicax.plan(strategy, lambda x: x @ w, spec))
    assert plans[0].memory == plans[1].memory


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize("place", PLACES)
def test_arrays_from_elsewhere(place: str, executor: str) -> None:
    """On another device, on all, or what the strategy itself has reduced: assigned, given and closed over."""
    strategy = PLACES[place]()
    with strategy.scope():
        v = replicax.Variable(jnp.zeros(4), name="v")
    numbers = np.arange(4, dtype=np.float32)
    explicit = NamedSharding(mesh_of("Explicit"), PartitionSpec("replica"))
    given = [
        jax.device_put(numbers, jax.devices()[2]),
        jax.device_put(numbers, NamedSharding(mesh_of("Auto"), PartitionSpec("replica"))),
        jax.device_put(numbers, explicit),
        strategy.reduce("mean", strategy.distribute_values_from_function(lambda _: numbers)),
    ]
    for i, value in enumerate(given):
        v.assign(value)
        v.assign_add(value)
        v.assign_sub(value)
        options = replicax.RunOptions(executor)
        strategy.run(lambda x: v.assign_add(x), args=(value,), options=options)
        expected = 2 * numbers
        if given[i].sharding != explicit:  # JAX wants such as arguments
            strategy.run(lambda value=value: v.assign_add(value * 3.0), options=options)
            expected = 5 * numbers
        np.testing.assert_array_equal(v.numpy(), expected)


def parts(x: Any, w: Any) -> Any:
    """What a logical device computes of ``tanh(x @ w)``, of which it has some columns: their share of a row's sum."""
    y = jnp.tanh(x @ w)
    return y / lax.psum(jnp.square(y).sum(-1, keepdims=True), "logical0")


def mapped(how: str) -> Callable[[Any, Any], Any]:
    if how == "smap":
        return jax.smap(parts, in_axes=(None, 1), out_axes=1, axis_name="logical0")
    names = {"axis_names": {"logical0"}} if how == "the axis" else {}
    columns = PartitionSpec(None, "logical0")
    return jax.shard_map(parts, in_specs=(PartitionSpec(), columns), out_specs=columns, **names)  # type: ignore[arg-type]


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["smap", "the axis", "all axes"])
@pytest.mark.parametrize("per_device", [1, 2])
@pytest.mark.parametrize("split", [False, True])
def test_a_step_maps_over_its_own_logical_devices(split: bool, per_device: int, how: str) -> None:
    strategy = replicax.MirroredStrategy(
        DEVICES, over_all(2, min_bytes=0) if split else None, num_replicas=2 * per_device, num_logical_devices=2
    )
    initial = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(4, 4)
    with strategy.scope():
        w = replicax.Variable(initial, name="w", partition_dimensions=[1, 2])
    fn = mapped(how)

    def step(x: Any) -> Any:
        share, [gradient] = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(jnp.square(fn(x, w.value)).sum(-1)), [w]
        )()
        w.assign_sub(0.1 * replicax.get_replica_context().all_reduce("sum", gradient))
        return share

    def alone(w: Any) -> Any:
        y = jnp.tanh(X[:8] @ w)
        return jnp.square(y / jnp.square(y).sum(-1, keepdims=True)).sum(-1).mean()

    [x] = strategy.distribute_dataset([X[:8]])
    loss = strategy.reduce("sum", strategy.run(step, args=(x,)))
    expected, gradient = jax.jit(jax.value_and_grad(alone))(initial)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), initial - 0.1 * gradient, rtol=1e-5, atol=1e-6)


def test_what_a_step_can_not_take_up_is_said() -> None:
    strategy = replicax.MirroredStrategy(DEVICES, num_logical_devices=2)
    with pytest.raises(ValueError, match=r"(?s)step 'parts' maps over a mesh, .* there is none.*first device"):
        strategy.run(mapped("smap"), args=(X, X.T), options=replicax.RunOptions("per_replica"))
    with jax.set_mesh(mesh_of("Explicit")):
        ones = jnp.ones(4)
        with pytest.raises(NotImplementedError, match=r"step 'scale' at .*: pass the array in args, or close over np"):
            strategy.run(scale_by(ones), args=(X[:4],))
        np.testing.assert_array_equal(strategy.run(scale_by(np.asarray(ones)), args=(X[:4],)), X[:4])
        np.testing.assert_array_equal(strategy.run(lambda x, y: x * y[None], args=(X[:4], ones)), X[:4])


def scale_by(factor: Any) -> Callable[[Any], Any]:
    def scale(x: Any) -> Any:
        return x * factor[None]

    return scale
