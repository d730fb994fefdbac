from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.execution.program.program import Program
from replicax.workers.digests import digest, outputs_of, unabridged


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_what_compares_equal_has_one_fingerprint(dtype: str) -> None:
    a = jnp.array([0.0, 1.0, jnp.nan, jnp.inf]).astype(dtype)
    b = jnp.array([-0.0, 1.0, -jnp.nan, jnp.inf]).astype(dtype)
    assert digest(a) == digest(b) == digest(np.asarray(a))
    assert unabridged(a) == unabridged(b) == unabridged(np.asarray(a))


def test_what_differs_has_another() -> None:
    kinds = [
        jnp.zeros(4),
        jnp.zeros((2, 2)),
        jnp.zeros((0, 2)),
        jnp.zeros(4, jnp.complex64),
        jnp.zeros(4, jnp.int32),
        jnp.ones(4),
        jnp.array([0.0, 0, 0, jnp.nan]),
        jax.random.key(0),
        jax.random.key(1),
        jax.random.key_data(jax.random.key(1)),
        True,
        2,
    ]
    assert len(set(map(digest, kinds))) == len(kinds)
    for i, a in enumerate(kinds):
        assert [unabridged(a) == unabridged(b) for b in kinds] == [i == j for j in range(len(kinds))]


def test_where_an_array_lies_does_not_matter() -> None:
    for device in jax.devices()[:2]:
        assert digest(jax.device_put(jnp.arange(3), device)) == digest(np.arange(3, dtype=np.int32))


def program_of(fn: Callable[..., Any], x: Any) -> Program:
    strategy = replicax.MirroredStrategy(["cpu:0"])
    strategy.run(fn, args=(x,))
    [executable] = [e for _, e in strategy.extended.programs._entries.values() if e.program.name == fn.__name__]
    return executable.program


def test_programs_that_compute_the_same() -> None:
    table = np.arange(4.0, dtype=np.float32)

    def digests(
        rate: float = 2.0, table: Any = table, print_too: bool = False, dtype: Any = "float32", precision: str = "high"
    ) -> Any:
        def traced(x: Any) -> Any:
            if print_too:
                jax.debug.print("sum {}", jnp.exp(x).sum())
            looped = jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x * rate + table), x)
            return jnp.dot(looped, looped, precision=precision).astype(dtype)

        return outputs_of(program_of(traced, np.ones(4, np.float32)))

    first = digests()
    assert [words for words, _ in first] == ["result 0"]
    assert digests() == digests(print_too=True) == first
    assert digests(rate=2.5) != first
    assert digests(table=table + 1) != first
    assert digests(precision="highest") != first
    assert digests(dtype="bfloat16") != digests(dtype="float16")
