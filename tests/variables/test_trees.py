from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.programs.programs import third_party
from tests.soaking import soak_except

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32)


def leaves_with_names(tree):
    return {v.name: v for v in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, replicax.Variable))}


def test_variables_of_a_tree_are_named_by_their_paths(strategy) -> None:
    key = jax.random.key(3)
    tree = {"dense": {"kernel": jnp.ones((3, 2)), "bias": np.zeros(2, np.float32)}, "layers": (np.arange(2), key)}
    with strategy.scope():
        made = replicax.as_variables(tree, name="net", aggregation="mean")
    found = leaves_with_names(made)
    assert sorted(found) == ["net/dense/bias", "net/dense/kernel", "net/layers/0", "net/layers/1"]
    assert [v.trainable for _, v in sorted(found.items())] == [True, True, False, False]
    assert [v.aggregation.value for _, v in sorted(found.items())] == ["mean", "mean", "none", "none"]
    assert all(v.strategy is strategy for v in found.values())
    with strategy.scope():
        added_up = leaves_with_names(replicax.as_variables(tree, name="net", aggregation="sum"))
    assert [v.aggregation.value for _, v in sorted(added_up.items())] == ["sum", "sum", "sum", "none"]
    back = replicax.as_arrays(made)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, tree))


def test_what_is_no_array_stays_as_it_is() -> None:
    inside = replicax.Variable(1.0, name="inside")
    tree = {"v": inside, "f": jnp.tanh, "n": 3, "none": None, "text": "a"}
    assert replicax.as_variables(tree) == tree
    assert replicax.as_variables(tree)["v"] is inside
    assert float(replicax.as_arrays(tree)["v"]) == 1


def test_a_tree_under_a_sharded_placement_is_split() -> None:
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"], replicax.variables.FixedShardsPartitioner(2))
    with strategy.scope():
        made = replicax.as_variables({"w": np.ones((4, 2), np.float32)})
    assert "split along dim 0" in repr(made["w"])
    with replicax.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        one = replicax.as_variables(
            {"w": np.ones((4, 2), np.float32)}, partitioner=replicax.variables.FixedShardsPartitioner(2)
        )
    assert "split along dim 0" in repr(one["w"])


def test_assigning_a_tree() -> None:
    made = replicax.as_variables({"a": np.ones(2, np.float32), "b": [np.int32(1)], "f": jnp.tanh})
    replicax.assign(made, {"a": np.zeros(2), "b": [replicax.Variable(5)], "f": jnp.sin})
    assert made["a"].numpy().tolist() == [0, 0]
    assert int(made["b"][0]) == 5
    with pytest.raises(ValueError, match="values must have the structure of the variables"):
        replicax.assign(made, {"a": np.ones(2)})
    with pytest.raises(ValueError, match=r"'b/0'.*shape \(2,\); expected \(\)"):
        replicax.assign(made, {"a": np.ones(2), "b": [np.ones(2, np.int32)], "f": None})
    assert made["a"].numpy().tolist() == [0, 0]  # nothing has been assigned


def test_a_tree_has_gradients_where_there_are_variables() -> None:
    made = replicax.as_variables({"w": np.float32(3.0), "n": np.int32(2), "f": jnp.square, "p": 2})

    def loss(tree, scale):
        assert isinstance(tree["w"], jax.Array)
        return tree["f"](tree["w"]) * tree["n"].astype(jnp.float32) * scale

    value, gradients = replicax.value_and_grad(loss, made)(made, scale=1.0)
    assert float(value) == 18
    assert float(gradients.pop("w")) == 12
    assert set(gradients.values()) == {None}
    with pytest.raises(TypeError, match="expected Variables, got.*as_variables"):
        replicax.value_and_grad(loss, {"w": made["w"], "other": jnp.ones(2)})
    with pytest.raises(ValueError, match="apply_gradients: gradients must have the structure"):
        replicax.Optimizer(optax.sgd(0.1)).apply_gradients({"w": 1.0}, made)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (2,))(x[..., None]).reshape(len(x), -1)
        return nn.Dense(2)(nn.LayerNorm()(nn.relu(nn.Dense(5)(x))))


def loss_of(params, x, y):
    return optax.squared_error(Net().apply(params, x), y).mean(-1)


@third_party
def trained_alone(params, tx):
    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(lambda p: loss_of(p, X, Y).mean())(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(4):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return params, losses


def sharded(devices):
    return replicax.ShardedStrategy(devices, replicax.variables.FixedShardsPartitioner(len(devices)))


@pytest.mark.soak
@pytest.mark.parametrize("place", soak_except([replicax.MirroredStrategy, sharded], sharded))
@pytest.mark.parametrize("replicas", soak_except([1, 2, 4], 2))
@third_party
def test_a_linen_model_trains_as_on_one_device(place, replicas) -> None:
    initial = jax.jit(Net().init)(jax.random.key(0), X)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01))
    expected, losses = trained_alone(initial, tx)

    strategy = place([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        params = replicax.as_variables(initial)
        optimizer = replicax.Optimizer(tx)

    def step(x, y):
        def share(params):
            return replicax.compute_average_loss(loss_of(params, x, y))

        loss, gradients = replicax.value_and_grad(share, params)(params)
        optimizer.apply_gradients(gradients, params)
        return replicax.get_replica_context().all_reduce("sum", loss)

    batches = iter(strategy.distribute_dataset([(X, Y)] * 4))
    found = [float(strategy.run(step, args=batch)) for batch in batches]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(replicax.as_arrays(params)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", soak_except([1, 2], 2))
@third_party
def test_an_equinox_module_of_variables_trains_as_on_one_device(replicas) -> None:
    initial = eqx.nn.MLP(3, 2, 5, 1, key=jax.random.key(0))
    tx = optax.adam(0.01)

    def losses_of(model, x, y):
        return optax.squared_error(jax.vmap(model)(x), y).mean(-1)

    @eqx.filter_jit
    def step_alone(model, state):
        loss, gradients = eqx.filter_value_and_grad(lambda m: losses_of(m, X, Y).mean())(model)
        updates, state = tx.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    model, state, losses = initial, tx.init(eqx.filter(initial, eqx.is_array)), []
    for _ in range(4):
        model, state, loss = step_alone(model, state)
        losses.append(float(loss))

    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        live, optimizer = replicax.as_variables(initial), replicax.Optimizer(tx)

    def step(x, y):
        loss, gradients = replicax.value_and_grad(lambda m: replicax.compute_average_loss(losses_of(m, x, y)), live)(
            live
        )
        optimizer.apply_gradients(gradients, live)
        return replicax.get_replica_context().all_reduce("sum", loss)

    found = [float(strategy.run(step, args=b)) for b in strategy.distribute_dataset([(X, Y)] * 4)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(live.layers[0].weight.numpy(), model.layers[0].weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(live)(X), jax.vmap(model)(X), rtol=1e-4, atol=1e-5)  # live outside, too


@pytest.mark.parametrize("new", [lambda old: old + 1, lambda old: jnp.asarray(old)])
def test_a_number_that_changes_is_no_variable(new) -> None:
    state = replicax.as_variables({"step": 0, "w": np.ones(2, np.float32)})

    def step() -> None:
        old = replicax.as_arrays(state)
        replicax.assign(state, {"step": new(old["step"]), "w": old["w"] + 1})

    with pytest.raises(ValueError, match=r"variables\['step'\] is the number 0 .* as in jnp.asarray\(0\)"):
        replicax.get_strategy().run(step)
    assert state["w"].numpy().tolist() == [1, 1]
    replicax.assign(state, {"step": 0, "w": np.zeros(2, np.float32)})
    replicax.assign(state, {"step": np.int32(0), "w": np.ones(2, np.float32)})


def test_assigned_together_as_one_by_one() -> None:
    """Mirrored variables in one transfer; others, and those given twice, as if each had been assigned in turn."""
    strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        split, small = replicax.Variable(np.zeros((512, 64), np.float32)), replicax.Variable(np.float32(0))
        own = replicax.Variable(np.float32(0), synchronization="on_read", aggregation="sum")
        key = replicax.Variable(jax.random.key(0))
    whole = np.arange(512 * 64, dtype=np.float32).reshape(512, 64)
    variables = [small, split, own, key, small]
    replicax.assign(variables, [jnp.ones(()), whole, 6.0, jax.random.key(3), np.float32(2)])
    np.testing.assert_array_equal(split.numpy(), whole)
    assert [float(small.numpy()), float(own.numpy())] == [2, 6]
    assert jnp.array_equal(jax.random.key_data(key.value), jax.random.key_data(jax.random.key(3)))
    given = jnp.zeros(())
    replicax.assign([small, small], [jnp.ones(()), given])
    strategy.run(lambda: small.assign_add(1).value)
    assert [float(small.numpy()), float(given)] == [1, 0]  # what was given is not the variable's memory
    with pytest.raises(ValueError, match="shape"):
        replicax.assign([small, split], [jnp.zeros(()), jnp.zeros(3)])
    assert float(small.numpy()) == 1


def _converts(parts):
    return jnp.asarray(parts[0])


def _checks(parts):
    assert isinstance(parts[0], jax.Array)
    return parts[0]


@pytest.mark.parametrize(
    ("rebuild", "error"), [(_converts, TypeError), (_checks, AssertionError)], ids=["converts", "checks"]
)
def test_a_class_that_does_not_keep_variables(pair, rebuild, error) -> None:
    class Holder:
        def __init__(self, w) -> None:
            self.w = w

    jax.tree_util.register_pytree_node(
        Holder, lambda holder: ((holder.w,), None), lambda _, parts: Holder(rebuild(parts))
    )
    with pair.scope(), pytest.raises(error) as caught:
        replicax.as_variables({"model": Holder(jnp.ones(3))})
    said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "Use its arrays, jax.tree.leaves(value), in its place" in said
    assert error is AssertionError or "keeps no variable in the place of the array 'model/0'" in said
