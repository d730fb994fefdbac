"""Ordinary model code runs unchanged inside a replica: the programs of ``programs_*.py`` against plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from tests.execution import (  # noqa: F401
    programs_collectives,
    programs_derivatives,
    programs_loops,
    programs_models,
    programs_nnx,
    programs_numerics,
    programs_optax,
    programs_random,
    programs_variables,
)
from tests.execution.programs import PROGRAMS, Program

T = replicax.Locality.PER_REPLICA


class Counted:
    """A function that knows how often it has been called."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.fn(*args)


def arguments(which: Program, strategy: replicax.Strategy) -> tuple[Any, ...]:
    """A program's arguments for all replicas."""
    x = strategy.distribute_values_from_function(lambda ctx: which.data(ctx.replica_id_in_sync_group))
    shared = which.shared()
    if which.variables:
        with strategy.scope():
            shared = jax.tree.map(replicax.Variable, shared)
    return x, *shared


def assert_same(found: Any, expected: Any, what: str) -> None:
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
        found, expected = jax.random.key_data(found), jax.random.key_data(expected)
    found, expected = np.asarray(found), np.asarray(expected)
    if found.dtype == jnp.bfloat16 or found.dtype == np.float16:
        found, expected = found.astype(np.float32), expected.astype(np.float32)
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2, err_msg=what)
    elif np.issubdtype(found.dtype, np.inexact):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6, err_msg=what)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=what)


def copies(leaf: Any, replicas: int) -> list[Any]:
    """What each replica's device holds of a result."""
    if isinstance(leaf, replicax.PerReplica):
        return list(leaf.values)
    return [s.data for s in sorted(leaf.addressable_shards, key=lambda s: s.device.id)][:replicas]


def check(which: Program, localities: tuple[Any, ...], result: Any, expected: list[Any]) -> None:
    """Every replica's copy of each leaf of ``result`` is what plain JAX computes for that replica."""
    replicas = len(expected)
    leaves, tree = jax.tree.flatten(result, is_leaf=lambda leaf: isinstance(leaf, replicax.PerReplica))
    flat = [jax.tree.leaves(e) for e in expected]
    assert tree == jax.tree.structure(expected[0])
    assert "".join(locality.value for locality in localities) == which.localities
    for i, (leaf, locality) in enumerate(zip(leaves, localities, strict=True)):
        assert isinstance(leaf, replicax.PerReplica) == (locality is T and replicas > 1)
        held = copies(leaf, replicas)
        assert len(held) == replicas
        for replica in range(replicas):
            assert_same(held[replica], flat[replica][i], f"leaf {i} of {which.name} on replica {replica}")


@pytest.mark.parametrize("which", PROGRAMS, ids=lambda p: p.name)
def test_a_program_is_what_plain_jax_computes(which: Program, strategy: replicax.MirroredStrategy) -> None:
    step, args = Counted(which.step), arguments(which, strategy)
    localities = strategy.extended.trace(step, args).localities
    expected = which.reference(strategy.num_replicas_in_sync)
    for _ in range(2):
        check(which, localities, strategy.run(step, args), expected)
    assert step.calls == 1


@pytest.mark.parametrize("which", [p for p in PROGRAMS if p.differ], ids=lambda p: p.name)
def test_what_may_differ_does_differ(which: Program) -> None:
    """The expected localities are not only bounds: some replica gets something else than the first."""
    flat = [jax.tree.leaves(e) for e in which.reference(4)]
    for i, locality in enumerate(which.localities):
        values = [np.asarray(bits(leaves[i])) for leaves in flat]
        same = all(np.array_equal(v, values[0]) for v in values)
        assert same == (locality == "M"), f"leaf {i}"


def bits(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
