"""Train a model in two stages, each on a core of its own, with microbatches that overlap.

    python examples/pipeline.py

It runs on an emulated TPU slice of 2×2 chips with two cores each: four replicas, of which each has a core for each
stage. On a real slice leave `emulate` out. What makes it a pipeline are the two lines with `assign_to_logical_device`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

STAGES, MICROBATCHES = 2, 4
BATCH, WIDTH, LAYERS = 256, 64, 4  # the GLOBAL batch; layers of a stage
STEPS = 200


def make_strategy():
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")
    assignment = replicax.DeviceAssignment.build(resolver.topology, computation_shape=[1, 1, 1, STAGES], num_replicas=4)
    return replicax.TPUStrategy(resolver, assignment)


def make_data(seed):
    """What a random network of the same kind makes of random inputs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4 * BATCH, WIDTH)).astype(np.float32)
    hidden = np.tanh(x @ rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5)
    return x, hidden.astype(np.float32)


def build(strategy, seed):
    """The step, and the weights of each stage. Call it in ``strategy.scope()``."""
    keys = jax.random.split(jax.random.key(seed), STAGES * LAYERS).reshape(STAGES, LAYERS)
    stages = [
        # Given a function and a logical device, a variable is made where it will live, and is nowhere else.
        [
            replicax.Variable(
                lambda key=key: jax.random.normal(key, (WIDTH, WIDTH)) / (2 * WIDTH**0.5),
                name=f"stage{k}/layer{i}",
                logical_device=k,
            )
            for i, key in enumerate(stage_keys)
        ]
        for k, stage_keys in enumerate(keys)
    ]
    weights = [w for stage in stages for w in stage]
    optimizer = replicax.Optimizer(optax.adam(1e-3))

    def loss_of(x, y):
        for k, stage in enumerate(stages):
            x = strategy.assign_to_logical_device(x, k)  # what follows runs there, and so does its gradient
            for w in stage:
                x = x + jnp.tanh(x @ w)
        return replicax.compute_average_loss(jnp.mean((x - y) ** 2, axis=-1), global_batch_size=BATCH)

    def step(x, y):
        y = strategy.assign_to_logical_device(y, STAGES - 1)  # the labels go straight to where the loss is

        def loss_fn():
            parts = zip(jnp.split(x, MICROBATCHES), jnp.split(y, MICROBATCHES), strict=True)
            return sum(loss_of(*part) for part in parts)

        loss, gradients = replicax.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return replicax.get_replica_context().all_reduce("sum", loss)

    return step, stages


def train(strategy, steps):
    """Train for some steps; return the losses, the weights of each stage, and a look at the compiled step."""
    with strategy.scope():
        step, stages = build(strategy, seed=0)
    x, y = make_data(seed=1)
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    dataset = strategy.distribute_dataset(batches)
    losses = []
    while len(losses) < steps:
        for batch in dataset:
            losses.append(strategy.run(step, args=batch))
    return losses, stages, strategy.extended.trace(step, args=batch)


def main():
    losses, stages, program = train(make_strategy(), STEPS)
    print(f"loss {float(losses[0]):.3f} → {float(losses[-1]):.3f} after {len(losses)} steps")
    for k, stage in enumerate(stages):
        print(f"stage {k} is on the devices {sorted(d.id for d in stage[0].value.devices())}")
    print(program.placement())


if __name__ == "__main__":
    main()
