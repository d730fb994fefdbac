"""The other ways to train, each a call that returns when its work is done: many steps in a call, and Flax NNX.

By hand means what an expert would write: donated state, replicated arrays, batches on the devices already.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from _steps import Problem, _mesh, _wait, replicax_step
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import replicax
from _accelerator.problems import Sizes, nnx_losses, nnx_model

Call = Callable[[], None]


def many_steps(problem: Problem, steps: int, devices: Sequence[jax.Device]) -> Call:
    """``run_steps``, which reads its batches from the host."""
    strategy = replicax.MirroredStrategy(devices)
    step, _, _ = replicax_step(strategy, problem)
    batches = iter(strategy.distribute_dataset(_Endless(problem.batch)))

    def one(ctx: Any, *batch: Any) -> None:
        ctx.set_last_step_output("loss", step(batch), "sum")

    def call() -> None:
        strategy.run_steps(one, batches, steps).last_step_outputs["loss"].block_until_ready()

    return call


def many_steps_by_hand(problem: Problem, steps: int, devices: Sequence[jax.Device]) -> Call:
    """A scan in ``jit(shard_map)`` over batches that are on the devices already."""
    mesh, everywhere, _ = _mesh(devices)
    along = PartitionSpec(None, "replica")
    params = jax.device_put(list(problem.initial), everywhere, may_alias=False)
    state = jax.device_put((params, problem.tx.init(params)), everywhere)
    global_batch, tx = len(problem.batch[0]), problem.tx

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: problem.losses(p, *batch).sum() / global_batch)(params)
        loss, grads = lax.psum((loss, grads), "replica")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def many(state: Any, batches: Any) -> Any:
        state, losses = lax.scan(step, state, batches)
        return state, losses[-1]

    specs = {"in_specs": (PartitionSpec(), along), "out_specs": PartitionSpec()}
    mapped = jax.shard_map(many, mesh=mesh, check_vma=False, **specs)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=everywhere)
    stacked = [np.broadcast_to(x, (steps, *x.shape)) for x in problem.batch]
    batches = jax.device_put(tuple(stacked), NamedSharding(mesh, along))

    def call() -> None:
        nonlocal state
        state, loss = jitted(state, batches)
        loss.block_until_ready()

    return call


def nnx_replicax(model: str, sizes: Sizes, problem: Problem, devices: Sequence[jax.Device]) -> Call:
    """``strategy.run`` with an NNX model and its optimizer as arguments."""
    strategy = replicax.MirroredStrategy(devices)
    module, optimizer = _nnx_objects(model, sizes, problem)
    [batch] = strategy.distribute_dataset([problem.batch])

    def step(module: Any, optimizer: Any, batch: Any) -> Any:
        return _nnx_step(replicax.compute_average_loss, model, module, optimizer, batch)

    return lambda: _wait(strategy.run(step, args=(module, optimizer, batch)))


def nnx_by_hand(model: str, sizes: Sizes, problem: Problem, devices: Sequence[jax.Device]) -> Call:
    """``nnx.split`` once, and a step under ``jax.jit`` that merges and returns the state; the batch is sharded."""
    from flax import nnx

    _, everywhere, along = _mesh(devices)
    graphdef, state = nnx.split(_nnx_objects(model, sizes, problem))
    state = jax.device_put(state, everywhere, may_alias=False)
    batch = jax.device_put(problem.batch, along)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
    def step(state: Any, batch: Any) -> Any:
        module, optimizer = nnx.merge(graphdef, state)
        loss = _nnx_step(lambda losses: losses.mean(), model, module, optimizer, batch)
        return nnx.state((module, optimizer)), loss

    def call() -> None:
        nonlocal state
        state, loss = step(state, batch)
        loss.block_until_ready()

    return call


def _nnx_objects(model: str, sizes: Sizes, problem: Problem) -> tuple[Any, Any]:
    from flax import nnx

    module = nnx_model(model, sizes)
    return module, nnx.Optimizer(module, problem.tx, wrt=nnx.Param)


def _nnx_step(average: Callable[[Any], Any], model: str, module: Any, optimizer: Any, batch: Any) -> Any:
    from flax import nnx

    loss, gradients = nnx.value_and_grad(lambda module: average(nnx_losses(model, module, batch)))(module)
    optimizer.update(module, gradients)
    return loss


class _Endless:
    """A dataset of one batch, again and again."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Any:
        return itertools.repeat(self._batch)
