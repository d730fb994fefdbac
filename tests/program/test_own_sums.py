"""A sum of the replicas' own values takes what has been reduced as it is, wherever it stands in the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax


def in_a_scan(both: Callable[[], Any]) -> Any:
    return jax.lax.scan(lambda carry, _: (carry + both() / 2, None), jnp.zeros(2), None, length=2)[0]


def in_a_branch(both: Callable[[], Any]) -> Any:
    return jax.lax.cond(jnp.bool_(True), both, lambda: jnp.zeros(2))


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
@pytest.mark.parametrize("within", [lambda both: both(), lambda both: jax.jit(both)(), in_a_scan, in_a_branch])
def test_what_has_been_reduced_is_taken_as_it_is(pair: replicax.MirroredStrategy, within: Any, executor: str) -> None:
    def step(x: Any) -> Any:
        replica = replicax.get_replica_context()
        total = replica.all_reduce("sum", x)
        return within(lambda: jnp.stack(replica._sum_unless_reduced([x, total * 1.0])))

    [x] = pair.distribute_dataset([np.array([1.0, 2.0], np.float32)])
    found = pair.run(lambda x: step(x[0]), args=(x,), options=replicax.RunOptions(executor=executor))
    assert found.tolist() == [3.0, 3.0]
