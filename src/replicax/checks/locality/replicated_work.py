"""Finds training steps in which nothing differs between replicas, so that each of them computes everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _jax
from replicax._jax.primitive_families import AXIS_POSITION, DRAWS
from replicax.errors import LocalityWarning, few, users_place, warn_at
from replicax.execution.program.collective_operations import all_get_the_same, over_replicas, replicas_meet
from replicax.execution.program.program import Program
from replicax.locality import T


def warn_of_replicated_work(program: Program, names: Sequence[str]) -> None:
    """Warn if replicas train on a batch that was not distributed, or on the same random numbers."""
    if any(locality is T for locality in program.input_localities) or _jax.contains(program.jaxpr, _makes_a_difference):
        return
    arrays = [
        name
        for name, (aval, _) in zip(names, program.arguments, strict=False)
        if _may_be_a_batch(aval, program.replicas)
    ]
    arrays += [
        f"an array that it captures ({array.dtype.name}{list(array.shape)})"
        for array in program.constants
        if _may_be_a_batch(array, program.replicas)
    ]
    hints = []
    if arrays:
        hints.append(
            "If a batch is among them, give each replica its part: iterate over strategy.distribute_dataset(batches), "
            "or split one batch with next(iter(strategy.distribute_dataset([batch])))."
        )
    if _jax.contains(program.jaxpr, lambda equation: equation.primitive.name in DRAWS):
        hints.append(
            "If each replica should draw its own random numbers, as for environments or samples, draw them with its "
            "key: replicax.get_replica_context().random_key(key)."
        )
    if hints:
        values = f"values that are the same on all {program.replicas} replicas{f' ({few(arrays)})' if arrays else ''}"
        warn_at(
            f"step {program.name!r} differentiates a loss of {values}, so every replica computes all of it. "
            + " ".join(hints),
            LocalityWarning,
            *users_place(),
        )


def _makes_a_difference(equation: _jax.Equation) -> bool:
    """Return whether replicas may get different results from the same operands."""
    if replicas_meet(equation):
        return not all_get_the_same(equation)
    name, params = equation.primitive.name, equation.params
    return (name in AXIS_POSITION and over_replicas(params)) or not _jax.is_deterministic(name, params)


def _may_be_a_batch(array: Any, replicas: int) -> bool:
    """Return whether the array could be divided among the replicas."""
    if not array.ndim or array.shape[0] < replicas or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return False
    return not (array.dtype == jnp.uint32 and array.shape == (2,))  # a random key
