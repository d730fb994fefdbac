"""The same steps twice: through Replicax's public API, and as hand-written ``jit(shard_map)``.

The hand-written ones are what somebody who knows JAX would write: replicated state, donated; the layout of
every output pinned; each device's slice of the batch on its device already; the gradients summed by one
``lax.psum`` of the tree; each device's share of the loss returned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax
from replicax.hlo.collective_instructions import Collective, collectives_in

GLOBAL_BATCH = 128


@dataclasses.dataclass
class Side:
    """One of the two ways.

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


# --- what is trained ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Problem:
    """What to train.

    Attributes:
      initial: the parameters to start from.
      batch: a tuple of arrays ``[global_batch, …]``.
      losses: a function of the parameters and a slice of the batch: the loss of each example.
      tx: the optimizer.
    """

    initial: Sequence[Any]
    batch: tuple[Any, ...]
    losses: Callable[..., Any]
    tx: optax.GradientTransformation


def mlp() -> Problem:
    """784-512-512-10, softmax cross entropy, Adam, batch 128."""
    sizes = 784, 512, 512, 10
    rng = np.random.default_rng(0)
    initial: list[Any] = []
    for n_in, n_out in itertools.pairwise(sizes):
        initial.append(rng.normal(0, n_in**-0.5, (n_in, n_out)).astype(np.float32))
        initial.append(np.zeros(n_out, np.float32))

    def losses(params: Sequence[Any], images: Any, labels: Any) -> Any:
        w1, b1, w2, b2, w3, b3 = params
        x = jax.nn.relu(images @ w1 + b1)
        x = jax.nn.relu(x @ w2 + b2)
        return optax.softmax_cross_entropy_with_integer_labels(x @ w3 + b3, labels)

    return Problem(initial, _images(rng, 784, 10), losses, optax.adam(1e-3))


def small_gradients(count: int = 100, width: int = 32) -> Problem:
    """A hundred 32×32 parameters, each pulled towards the examples: little to do but to reduce the gradients.

    One example for each device, gradient descent.
    """
    rng = np.random.default_rng(0)
    initial = [rng.normal(size=(width, width)).astype(np.float32) for _ in range(count)]

    def losses(params: Sequence[Any], x: Any) -> Any:
        return jnp.sum(sum((x - w) ** 2 for w in params), axis=(1, 2))

    batch = (rng.normal(size=(jax.device_count(), width, width)).astype(np.float32),)
    return Problem(initial, batch, losses, optax.sgd(0.01))


def small_layers(count: int = 100, width: int = 32) -> Problem:
    """A hundred residual layers of 32×32: as many small gradients, in a step that has much else to compute.

    Softmax cross entropy, gradient descent, batch 128.
    """
    rng = np.random.default_rng(0)
    scale = 0.1 * width**-0.5
    initial = [rng.normal(0, scale, (width, width)).astype(np.float32) for _ in range(count)]

    def losses(params: Sequence[Any], x: Any, labels: Any) -> Any:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return optax.softmax_cross_entropy_with_integer_labels(x, labels)

    return Problem(initial, _images(rng, width, width), losses, optax.sgd(0.01))


def transformer(layers: int, width: int = 64, heads: int = 4, words: int = 128, length: int = 32) -> Problem:
    """A transformer with twelve parameters a layer, most of them small, AdamW with clipping, batch 16."""
    rng = np.random.default_rng(0)

    def matrix(n_in: int, n_out: int) -> Any:
        return rng.normal(0, n_in**-0.5, (n_in, n_out)).astype(np.float32)

    def zeros(n: int) -> Any:
        return np.zeros(n, np.float32)

    ones = np.ones(width, np.float32)
    initial = [matrix(words, width), matrix(length, width), ones, zeros(width)]
    for _ in range(layers):
        initial += [ones, zeros(width), matrix(width, 3 * width), zeros(3 * width), matrix(width, width), zeros(width)]
        initial += [ones, zeros(width), matrix(width, 4 * width), zeros(4 * width), matrix(4 * width, width)]
        initial += [zeros(width)]

    def norm(x: Any, scale: Any, shift: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale + shift

    def block(x: Any, parameters: Sequence[Any]) -> Any:
        scale1, shift1, qkv, b_qkv, out, b_out, scale2, shift2, up, b_up, down, b_down = parameters
        joint = (norm(x, scale1, shift1) @ qkv + b_qkv).reshape(len(x), length, heads, -1)
        q, k, v = jnp.split(joint, 3, axis=3)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // heads)
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ out + b_out
        return x + jax.nn.gelu(norm(x, scale2, shift2) @ up + b_up) @ down + b_down

    def losses(params: Sequence[Any], words: Any) -> Any:
        table, places, scale, shift, *rest = params
        x = table[words[:, :-1]] + places
        for i in range(0, len(rest), 12):
            x = block(x, rest[i : i + 12])
        logits = norm(x, scale, shift) @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean(-1)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    batch = (rng.integers(words, size=(16, length + 1)).astype(np.int32),)
    return Problem(initial, batch, losses, tx)


def _images(rng: np.random.Generator, width: int, classes: int) -> tuple[Any, Any]:
    images = rng.normal(size=(GLOBAL_BATCH, width)).astype(np.float32)
    return images, rng.integers(classes, size=GLOBAL_BATCH).astype(np.int32)


# --- a training step ------------------------------------------------------------------------------------


def replicax_step(
    strategy: replicax.Strategy, problem: Problem, optimizer: replicax.Optimizer | None = None
) -> tuple[Callable[..., Any], list[Any], list[None]]:
    """The step, its variables, and a list that grows when the Python of the step runs."""
    with strategy.scope():
        variables = [replicax.Variable(value) for value in problem.initial]
        optimizer = optimizer or replicax.Optimizer(problem.tx)
    losses = problem.losses
    traces: list[None] = []

    def step(batch: Any) -> Any:
        traces.append(None)

        def loss_fn() -> Any:
            return replicax.compute_average_loss(losses(variables, *batch))

        loss, gradients = replicax.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step, variables, traces


def train_replicax(problem: Problem, devices: Sequence[jax.Device] | None = None) -> Side:
    """On ``devices``, or all local ones."""
    strategy = replicax.MirroredStrategy(devices)
    step, variables, traces = replicax_step(strategy, problem)
    [distributed] = strategy.distribute_dataset([problem.batch])

    def call() -> None:
        _wait(strategy.run(step, args=(distributed,)))

    return Side(
        call,
        lambda: len(traces),
        lambda: strategy.extended.trace(step, args=(distributed,)).collectives(),
        lambda: [v.numpy() for v in variables],
    )


def train_by_hand(problem: Problem, devices: Sequence[jax.Device] | None = None) -> Side:
    """On ``devices``, or all local ones. The first call makes the optimizer's state, as that of Replicax does."""
    mesh, everywhere, along = _mesh(devices)
    params = jax.device_put(list(problem.initial), everywhere, may_alias=False)
    state: Any = None
    losses, tx, global_batch = problem.losses, problem.tx, len(problem.batch[0])
    traces: list[None] = []

    def step(state: Any, batch: Any) -> Any:
        traces.append(None)
        params, opt_state = state

        def loss_fn(params: Any) -> Any:
            return losses(params, *batch).sum() / global_batch

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        gradients = lax.psum(gradients, "replica")
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss[None]

    specs = PartitionSpec(), PartitionSpec("replica")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=(everywhere, along))
    distributed = jax.device_put(problem.batch, along)

    def call() -> None:
        nonlocal state
        if state is None:
            state = jax.device_put((params, tx.init(params)), everywhere)
        state, loss = jitted(state, distributed)
        _wait(loss)

    return Side(
        call,
        lambda: len(traces),
        lambda: _collectives(jitted, state, distributed),
        lambda: list(map(np.asarray, state[0])),
    )


# --- a call with many variables -------------------------------------------------------------------------


def count_replicax(count: int = 200) -> Side:
    """A step that adds 1 to each of ``count`` variables of 8 numbers, which it captures as a list."""
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
        lambda: _collectives(jitted, state),
        lambda: list(map(np.asarray, state)),
    )


# --- shared ---------------------------------------------------------------------------------------------


def _mesh(devices: Sequence[jax.Device] | None = None) -> tuple[Mesh, NamedSharding, NamedSharding]:
    mesh = Mesh(np.array(devices or jax.local_devices()), ("replica",))
    return mesh, NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))


def _collectives(jitted: Any, *args: Any) -> list[Collective]:
    return collectives_in(jitted.lower(*args).compile().as_text())


def _wait(result: Any) -> None:
    """Return when ``result`` is there, and with it everything else that its program computes."""
    if isinstance(result, replicax.PerReplica):
        # What strategy.local_results would wait for, without taking it apart into an array for each device.
        result = result.form.array  # type: ignore[union-attr]
    result.block_until_ready()
