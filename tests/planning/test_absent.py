"""Strategies on TPUs that are not there: variables without values, and steps that can't run."""

from __future__ import annotations

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.models import safetensors
from replicax.variables.layout import Copies, Split


@pytest.fixture(scope="module")
def slice_of_16():
    return replicax.TPUClusterResolver(topology="v5e:4x4")


@pytest.fixture
def strategy(slice_of_16):
    return replicax.TPUStrategy(slice_of_16)


def test_variables_have_shapes_and_no_values(strategy) -> None:
    def refused():
        raise AssertionError("this was computed")

    huge = (1 << 20, 1 << 20)  # 4 TiB
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.ones(huge), name="w")
        given = replicax.Variable(np.arange(6.0).reshape(2, 3), name="given")
        never = replicax.Variable(lambda: jax.pure_callback(refused, jax.ShapeDtypeStruct((3,), jnp.float32)))
        number = replicax.Variable(2, dtype=jnp.float32)
        key = replicax.Variable(lambda: jax.random.key(0), name="key")
        copies = replicax.Variable(1.0, synchronization="on_read", aggregation="sum")
        pieces = replicax.variables.ShardedVariable(lambda: jnp.zeros((100, 3)), name="pieces")
        from_another = replicax.Variable(lambda: w.value[0, :3] * 2)
    assert (w.shape, w.dtype) == (huge, jnp.float32)
    assert (given.shape, given.dtype) == ((2, 3), jnp.float32)
    assert never.shape == (3,)
    assert (number.shape, number.dtype) == ((), jnp.float32)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert isinstance(copies.layout, Copies)
    assert isinstance(pieces.layout, Split)
    assert from_another.shape == (3,)
    for variable in (w, given, number, key, copies, pieces, from_another):
        assert isinstance(variable.slot.array, jax.ShapeDtypeStruct)
        assert variable.slot.array.sharding == variable.sharding
        assert variable.slot.array.shape == variable.layout.stored_shape(variable.shape)
    assert repr(given) == "<Variable 'given' float32[2,3] mirrored on 16 replicas: absent>"


def restore_onto(v: replicax.Variable) -> None:
    with tempfile.TemporaryDirectory() as folder:
        replicax.Checkpoint(v=replicax.Variable(1.0)).save(f"{folder}/saved")
        replicax.Checkpoint(v=v).restore(f"{folder}/saved")


def on_read(strategy, aggregation: str) -> replicax.Variable:
    with strategy.scope():
        return replicax.Variable(0.0, name="of_each", synchronization="on_read", aggregation=aggregation)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("reading variable 'v'", lambda s, v: v.value),
        ("reading variable 'v'", lambda s, v: v + 1),
        ("reading variable 'v'", lambda s, v: v.numpy()),
        ("reading variable 'v'", lambda s, v: float(v)),
        ("reading variable 'v'", lambda s, v: s.local_results(v)),
        ("assigning variable 'v'", lambda s, v: v.assign(1.0)),
        ("reading variable 'v'", lambda s, v: v.assign_add(1.0)),
        ("using variable 'of_each'", lambda s, v: on_read(s, "sum").assign(1.0)),
        ("variable 'of_each'", lambda s, v: on_read(s, "mean").assign_add(1.0)),
        ("variable 'of_each'", lambda s, v: on_read(s, "only_first_replica").assign(1.0)),
        ("strategy.run", lambda s, v: s.run(lambda: v.value)),
        ("strategy.run", lambda s, v: s.run(lambda: v.value, options=replicax.RunOptions("per_replica"))),
        ("strategy.distribute_dataset", lambda s, v: s.distribute_dataset([np.zeros(16)])),
        ("distribute_datasets_from_function", lambda s, v: s.distribute_datasets_from_function(lambda c: [])),
        ("distribute_values_from_function", lambda s, v: s.distribute_values_from_function(lambda c: 1)),
        ("Checkpoint.save", lambda s, v: replicax.Checkpoint(v=v).save("never")),
        ("Checkpoint.restore", lambda s, v: restore_onto(v)),
        ("replicax.models.safetensors", lambda s, v: safetensors.save("never", {"v": v})),
        ("extended.broadcast_to", lambda s, v: s.extended.broadcast_to(1.0)),
    ],
)
def test_what_needs_the_devices_says_so(strategy, name: str, use) -> None:
    with strategy.scope():
        v = replicax.Variable(0.0, name="v")
    with pytest.raises(
        replicax.errors.AbsentDeviceError, match=f"{name}.* needs the devices of TPUStrategy.*are absent"
    ) as e:
        use(strategy, v)
    assert "replicax.plan" in str(e.value)
    assert isinstance(v.slot.array, jax.ShapeDtypeStruct)


def test_steps_are_traced_and_optimizers_built(strategy) -> None:
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((8, 3)), name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
    constant = jnp.ones(8)

    def step(x):
        def loss():
            return replicax.compute_average_loss(((x + constant[None]) @ w).sum(-1))

        share, grads = replicax.value_and_grad(loss, [w])()
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        return share, replicax.get_replica_context().merge_call(lambda s, x: s.reduce("mean", x), args=(x,))

    plan = replicax.plan(strategy, step, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    assert [s.name for s in optimizer.variables] == ["optimizer[0].trace/w"]
    assert all(isinstance(s.slot.array, jax.ShapeDtypeStruct) for s in optimizer.variables)
    assert {b.name for b in plan.memory.buffers} >= {"w", "optimizer[0].trace/w", "closed over", "element"}


def test_the_step_is_checked_as_ever(strategy) -> None:
    with strategy.scope():
        v = replicax.Variable(jnp.zeros(8), name="v")
    with pytest.raises(replicax.errors.LocalityError, match="variable 'v' .* was assigned a value, but it differs"):
        replicax.plan(strategy, lambda x: v.assign(x.sum(0)), jax.ShapeDtypeStruct((4, 8), jnp.float32))
    with pytest.raises(replicax.errors.DeadlockError):
        replicax.plan(
            strategy,
            lambda x: jax.lax.cond(x > 0, lambda: replicax.get_replica_context().all_reduce("sum", x), lambda: x),
            jax.ShapeDtypeStruct((), jnp.float32),
        )
