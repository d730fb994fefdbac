# ruff: noqa: B018, E402
# %% A notebook, cell by cell.
import replicax

replicax.use_cpu_devices(4)
strategy = replicax.MirroredStrategy()
strategy

# %% Data and a model.
import jax
import jax.numpy as jnp
import numpy as np
import optax

x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
y = np.argmax(x[:, :3], axis=1)
with strategy.scope():
    w = replicax.Variable(jnp.zeros((4, 3)), name="w")
    optimizer = replicax.Optimizer(optax.adam(0.1))
w


# %% A step.
def step(batch):
    features, labels = batch

    def loss():
        return replicax.compute_average_loss(optax.softmax_cross_entropy_with_integer_labels(features @ w, labels))

    share, grads = replicax.value_and_grad(loss, [w])()
    optimizer.apply_gradients(zip(grads, [w], strict=True))
    return share


for batch in strategy.distribute_dataset(strategy.make_numpy_dataset((x, y)).seed(0).shuffle().repeat(10).batch(64)):
    share = strategy.run(step, args=(batch,))
share

# %% "Run all" again.
replicax.use_cpu_devices(4)
f"{strategy.reduce('sum', share):.3f}"

# %% What happens in it.
replicax.plan(strategy, step, (jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)))
