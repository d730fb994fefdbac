"""Train on images that are too large for one device: each is split over the four devices of a replica.

    python examples/spatial.py

Each of two replicas works on its images; within a replica every image is cut into quarters. The convolutions are
written as always: the devices exchange the borders of their quarters, and nothing else, because that is all that a
convolution needs of its neighbours. The eight devices are emulated, as a TPU slice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

BATCH, SIZE, CHANNELS = 8, 64, 8  # the GLOBAL batch: four images for each of two replicas
QUARTERS = [1, 2, 2, 1]  # batch, height, width, channels
STEPS = 30


def batches(steps, seed=0):
    """Noisy images, and what they were before."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE].astype(np.float32) / SIZE
    for _ in range(steps):
        a, b, phase = (rng.uniform(2, 12, size=(BATCH, 1, 1)) for _ in range(3))
        clean = np.sin(a * rows + b * columns + phase).astype(np.float32)[..., None]
        yield clean + 0.5 * rng.normal(size=clean.shape).astype(np.float32), clean


def build(strategy, quarters, seed=0):
    """The variables and the step. Call it in ``strategy.scope()``."""
    keys = jax.random.split(jax.random.key(seed), 3)
    he_normal = jax.nn.initializers.he_normal()
    shapes = [(5, 5, 1, CHANNELS), (5, 5, CHANNELS, CHANNELS), (5, 5, CHANNELS, 1)]
    kernels = [replicax.Variable(he_normal(key, shape), name="kernel") for key, shape in zip(keys, shapes, strict=True)]
    optimizer = replicax.Optimizer(optax.adam(0.01))

    def model(x):
        for i, kernel in enumerate(kernels):
            x = jax.lax.conv_general_dilated(
                x, kernel.value, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x) if i < 2 else x
        return x

    def train_step(batch):
        # All that follows is computed in quarters, and so are the gradients.
        noisy, clean = (strategy.split_to_logical_devices(images, quarters) for images in batch)

        def loss_fn():
            return replicax.compute_average_loss(jnp.square(model(noisy) - clean).mean((1, 2, 3)))

        loss, gradients = replicax.value_and_grad(loss_fn, kernels)()
        optimizer.apply_gradients(zip(gradients, kernels, strict=True))
        return loss

    return kernels, train_step


def train(strategy, quarters, steps=STEPS):
    """The loss of each step, the variables and the compiled step."""
    with strategy.scope():
        kernels, train_step = build(strategy, quarters)
    shares = []
    for batch in strategy.distribute_dataset(list(batches(steps))):
        # So that images need not be whole on any device.
        batch = strategy.split_to_logical_devices(batch, quarters)
        shares.append(strategy.run(train_step, args=(batch,)))
    losses = strategy.reduce("sum", shares) if strategy.num_replicas_in_sync > 1 else shares
    return [float(loss) for loss in losses], kernels, strategy.extended.trace(train_step, args=(batch,))


def main():
    resolver = replicax.TPUClusterResolver(emulate="2x2x1x2")  # 2×2 chips of two cores; leave `emulate` out on a TPU
    # A replica on each pair of neighbouring chips: four cores.
    assignment = replicax.DeviceAssignment.build(resolver.topology, computation_shape=[2, 1, 1, 2], num_replicas=2)
    strategy = replicax.TPUStrategy(resolver, assignment)
    print(strategy)

    losses, _, program = train(strategy, QUARTERS)
    for step in range(0, STEPS, 5):
        print(f"step {step:3}   loss {np.mean(losses[step : step + 5]):.3f}")
    borders = [c.bytes for c in program.collectives() if c.kind == "collective-permute"]
    print(f"{len(borders)} exchanges of borders in each step, the largest of {max(borders):,} bytes")


if __name__ == "__main__":
    main()
