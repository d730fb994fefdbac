"""Replicax: ``strategy.run`` for one step after the other, and ``run_steps`` for ten in one dispatch."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import replicax
from benchmarks.peers.libraries import jax_models
from benchmarks.peers.libraries.training import Training
from benchmarks.peers.problems import Problem

STRIDE = 10


def run(problem: Problem, replicas: int, devices: int | None = None) -> Training:
    """``strategy.run``, with the batch on the devices already."""
    strategy, params, step = _step(problem, replicas, devices or replicas)
    batch = strategy.distribute_values_from_function(lambda ctx: problem.rows(ctx.replica_id_in_sync_group, replicas))

    def steps(n: int) -> float:
        for _ in range(n):
            share = strategy.run(step, args=batch)
        return float(strategy.reduce("sum", share))

    return Training(_count(params), steps)


def run_on_cores(problem: Problem, replicas: int) -> Training:
    """The same replicas on no more devices than the machine has cores: those of a device compute together."""
    return run(problem, replicas, min(replicas, len(os.sched_getaffinity(0))))


def run_steps(problem: Problem, replicas: int) -> Training:
    """``strategy.run_steps``, which takes its batches from a dataset: it reads, divides and copies each."""
    strategy, params, step = _step(problem, replicas, replicas)

    def batches() -> Iterator[Any]:
        return itertools.repeat((problem.inputs, problem.labels))

    iterator = iter(strategy.distribute_dataset(batches))

    def one(ctx: replicax.MultiStepContext, inputs: Any, labels: Any) -> None:
        ctx.set_last_step_output("loss", step(inputs, labels), "sum")

    def steps(n: int) -> float:
        for _ in range(n // STRIDE):
            outputs = strategy.run_steps(one, iterator, STRIDE).last_step_outputs
        return float(outputs["loss"])

    return Training(_count(params), steps, STRIDE, close=iterator.close)


def _step(problem: Problem, replicas: int, devices: int) -> Any:
    replicax.use_cpu_devices(devices)
    strategy = replicax.MirroredStrategy(num_replicas=replicas, replicas_at_once=replicas // devices)
    losses = jax_models.LOSSES[problem.name]
    with strategy.scope():
        params = replicax.as_variables(dict(problem.initial))
        optimizer = replicax.Optimizer(jax_models.adam())

    def loss_fn(params: Any, inputs: Any, labels: Any) -> Any:
        return replicax.compute_average_loss(losses(params, inputs, labels))

    def step(inputs: Any, labels: Any) -> Any:
        share, gradients = replicax.value_and_grad(loss_fn, params)(params, inputs, labels)
        optimizer.apply_gradients(gradients, params)
        return share

    return strategy, params, step


def _count(params: dict[str, Any]) -> int:
    return sum(math.prod(v.shape) for v in params.values())
