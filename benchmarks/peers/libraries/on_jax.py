"""JAX by hand: ``jit(shard_map)`` for one step after the other, and a ``lax.scan`` of ten in one dispatch.

As somebody who knows JAX writes it: state replicated, donated and with its layout pinned, the gradients summed by one
``lax.psum`` of the tree, each device's share of the loss returned, the batches on their devices already.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers.libraries import jax_models
from benchmarks.peers.libraries.training import Training
from benchmarks.peers.problems import Problem

STRIDE = 10


def use_devices(replicas: int) -> None:
    """Emulate so many devices, with as many threads as they need in order not to wait for each other for ever."""
    os.environ["NPROC"] = str(max(2 * replicas, int(os.environ.get("NPROC", "0") or len(os.sched_getaffinity(0)))))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", replicas)


def jit(problem: Problem, replicas: int) -> Training:
    """A program for each step."""
    use_devices(replicas)
    step, state, (everywhere, along) = _step(problem)
    specs = PartitionSpec(), PartitionSpec("replica")
    mapped = jax.shard_map(step, mesh=everywhere.mesh, in_specs=specs, out_specs=specs, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=(everywhere, along))
    batch = jax.device_put((problem.inputs, problem.labels), along)

    def steps(n: int) -> float:
        nonlocal state
        for _ in range(n):
            state, loss = jitted(state, batch)
        return float(loss.sum())

    return Training(_count(state), steps)


def scan(problem: Problem, replicas: int) -> Training:
    """A program for ten steps, on ten batches that the devices have already."""
    use_devices(replicas)
    step, state, (everywhere, _) = _step(problem)
    specs = PartitionSpec(), PartitionSpec(None, "replica")
    along = NamedSharding(everywhere.mesh, specs[1])

    def many(state: Any, batches: Any) -> tuple[Any, Any]:
        return lax.scan(step, state, batches)

    mapped = jax.shard_map(many, mesh=everywhere.mesh, in_specs=specs, out_specs=specs, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=(everywhere, along))
    batches = jax.device_put(tuple(np.stack([x] * STRIDE) for x in (problem.inputs, problem.labels)), along)

    def steps(n: int) -> float:
        nonlocal state
        for _ in range(n // STRIDE):
            state, losses = jitted(state, batches)
        return float(losses[-1].sum())

    return Training(_count(state), steps, STRIDE)


def reference(problem: Problem, replicas: int) -> Training:
    """What all have to compute: the whole batch on one device, in float64, without any of this."""
    assert replicas == 1
    jax.config.update("jax_enable_x64", True)
    tx, losses = jax_models.adam(), jax_models.LOSSES[problem.name]
    params = {name: jax.numpy.array(value, "float64") for name, value in problem.initial.items()}
    inputs = problem.inputs.astype("float64") if problem.inputs.dtype == "float32" else problem.inputs
    state = params, tx.init(params)

    @jax.jit
    def step(state: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, gradients = jax.value_and_grad(lambda p: losses(p, inputs, problem.labels).mean())(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def steps(n: int) -> float:
        nonlocal state
        for _ in range(n):
            state, loss = step(state)
        return float(loss)

    return Training(_count(state), steps)


def _step(problem: Problem) -> Any:
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    everywhere, along = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))
    tx, losses, global_batch = jax_models.adam(), jax_models.BY_HAND[problem.name], len(problem.inputs)
    params = jax.device_put(dict(problem.initial), everywhere, may_alias=False)
    state = jax.device_put((params, tx.init(params)), everywhere)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state

        def loss_fn(params: Any) -> Any:
            return losses(params, *batch).sum() / global_batch

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        gradients = lax.psum(gradients, "replica")
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss[None]

    return step, state, (everywhere, along)


def _count(state: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(state[0]))
