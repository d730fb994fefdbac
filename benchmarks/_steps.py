"""The same steps twice: through Replicax's public API, and as hand-written ``jit(shard_map)``.

The hand-written ones are what somebody who knows JAX would write: replicated state, donated; the layout of every
output pinned; each device's slice of the batch on the device already; gradients summed by one ``lax.psum`` of the
tree; each device's share of the loss returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax
from replicax.execution.collectives import Collective, collectives_in

GLOBAL_BATCH = 128
Model = Callable[[Sequence[Any], Any], Any]


@dataclasses.dataclass
class Side:
    """One of the two.

    Attributes:
      call: runs the step once, and returns when it is done.
      traces: how often the Python of the step has run.
      collectives: of the compiled program.
      state: the present values of the parameters.
    """

    call: Callable[[], None]
    traces: Callable[[], int]
    collectives: Callable[[], list[Collective]]
    state: Callable[[], list[np.ndarray[Any, Any]]]


# --- a training step ------------------------------------------------------------------------------------


def train_replicax(model: Model, initial: Sequence[Any], batch: Any, tx: optax.GradientTransformation) -> Side:
    strategy = replicax.MirroredStrategy()
    with strategy.scope():
        variables = [replicax.Variable(value) for value in initial]
        optimizer = replicax.Optimizer(tx)
    traces: list[None] = []

    def step(batch: Any) -> Any:
        traces.append(None)
        images, labels = batch

        def loss_fn() -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(variables, images), labels)
            return replicax.compute_average_loss(losses)

        loss, gradients = replicax.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    [distributed] = strategy.distribute_dataset([batch])

    def call() -> None:
        _wait(strategy.run(step, args=(distributed,)))

    return Side(
        call,
        lambda: len(traces),
        lambda: strategy.extended.trace(step, args=(distributed,)).collectives(),
        lambda: [v.numpy() for v in variables],
    )


def train_by_hand(model: Model, initial: Sequence[Any], batch: Any, tx: optax.GradientTransformation) -> Side:
    mesh, everywhere, along = _mesh()
    params = jax.device_put(list(initial), everywhere, may_alias=False)
    state = jax.device_put((params, tx.init(params)), everywhere)
    traces: list[None] = []

    def step(state: Any, batch: Any) -> Any:
        traces.append(None)
        params, opt_state = state
        images, labels = batch

        def loss_fn(params: Any) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(params, images), labels)
            return losses.sum() / GLOBAL_BATCH

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        gradients = lax.psum(gradients, "replica")
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss[None]

    specs = PartitionSpec(), PartitionSpec("replica")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=(everywhere, along))
    distributed = jax.device_put(batch, along)

    def call() -> None:
        nonlocal state
        state, loss = jitted(state, distributed)
        _wait(loss)

    return Side(
        call,
        lambda: len(traces),
        lambda: collectives_in(jitted.lower(state, distributed).compile().as_text()),
        lambda: list(map(np.asarray, state[0])),
    )


def mlp() -> tuple[Model, list[Any], Any, optax.GradientTransformation]:
    """784-512-512-10, Adam, batch 128."""
    sizes = 784, 512, 512, 10
    rng = np.random.default_rng(0)
    initial: list[Any] = []
    for n_in, n_out in zip(sizes, sizes[1:], strict=False):
        initial.append(rng.normal(0, n_in**-0.5, (n_in, n_out)).astype(np.float32))
        initial.append(np.zeros(n_out, np.float32))

    def model(params: Sequence[Any], x: Any) -> Any:
        w1, b1, w2, b2, w3, b3 = params
        x = jax.nn.relu(x @ w1 + b1)
        x = jax.nn.relu(x @ w2 + b2)
        return x @ w3 + b3

    images = rng.normal(size=(GLOBAL_BATCH, 784)).astype(np.float32)
    return model, initial, (images, _labels(rng, 10)), optax.adam(1e-3)


def small_layers(count: int = 100, width: int = 32) -> tuple[Model, list[Any], Any, optax.GradientTransformation]:
    """A hundred residual layers of 32×32, whose gradients are 4 KiB each; plain gradient descent, batch 128."""
    rng = np.random.default_rng(0)
    initial = [rng.normal(0, 0.1 * width**-0.5, (width, width)).astype(np.float32) for _ in range(count)]

    def model(params: Sequence[Any], x: Any) -> Any:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return x

    images = rng.normal(size=(GLOBAL_BATCH, width)).astype(np.float32)
    return model, initial, (images, _labels(rng, width)), optax.sgd(0.01)


# --- a call with many variables -------------------------------------------------------------------------


def count_replicax(count: int = 200) -> Side:
    """A step that reads and writes ``count`` variables of 8 numbers."""
    strategy = replicax.MirroredStrategy()
    with strategy.scope():
        variables = [replicax.Variable(np.full(8, i, np.float32)) for i in range(count)]
    traces: list[None] = []

    def step() -> Any:
        traces.append(None)
        for v in variables:
            v.assign_add(jnp.ones(8))
        return variables[0] + 0

    def call() -> None:
        _wait(strategy.run(step))

    return Side(
        call,
        lambda: len(traces),
        lambda: strategy.extended.trace(step).collectives(),
        lambda: [v.numpy() for v in variables],
    )


def count_by_hand(count: int = 200) -> Side:
    mesh, everywhere, _ = _mesh()
    state = jax.device_put([np.full(8, i, np.float32) for i in range(count)], everywhere)
    traces: list[None] = []

    def step(state: list[Any]) -> tuple[list[Any], Any]:
        traces.append(None)
        state = [x + jnp.ones(8) for x in state]
        return state, state[0] + 0

    spec = PartitionSpec()
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=everywhere)

    def call() -> None:
        nonlocal state
        state, first = jitted(state)
        _wait(first)

    return Side(
        call,
        lambda: len(traces),
        lambda: collectives_in(jitted.lower(state).compile().as_text()),
        lambda: list(map(np.asarray, state)),
    )


# --- shared ---------------------------------------------------------------------------------------------


def _mesh() -> tuple[Mesh, NamedSharding, NamedSharding]:
    mesh = Mesh(np.array(jax.local_devices()), ("replica",))
    return mesh, NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))


def _labels(rng: np.random.Generator, classes: int) -> Any:
    return rng.integers(classes, size=GLOBAL_BATCH).astype(np.int32)


def _wait(result: Any) -> None:
    """Return when ``result`` is there, and with it everything else that its program computes."""
    if isinstance(result, replicax.PerReplica):
        # What strategy.local_results would wait for, without taking it apart into one array for each device.
        result = result.form.array  # type: ignore[union-attr]
    result.block_until_ready()
