"""What JAX keeps of a function that lives on (jitted, checkpointed, a scan's body) is no other step's or batch's."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of

ROWS = np.arange(8, dtype=np.float32)


def scanned(fn: Any) -> Any:
    """``fn`` in the body of a scan, which lives on."""

    def body(_: None, x: Any) -> Any:
        return None, fn(x)

    return lambda x: jax.lax.scan(body, None, x[None])[1].sum()


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [(8, 7, 8), (7, 8, 7)], ids=str)
@pytest.mark.parametrize("kept", [jax.jit, jax.checkpoint, scanned])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mean_is_over_the_examples_of_its_batch(replicas: int, kept: Any, sizes: tuple[int, ...]) -> None:
    strategy = strategy_of(replicas)
    loss = kept(replicax.compute_average_loss)

    def trained(x: Any) -> Any:
        return loss(x)

    def evaluated(x: Any) -> Any:
        return loss(x)

    for size in sizes:
        for step, partial in ((trained, "exact"), (evaluated, "pad"), (trained, "pad")):
            [batch] = strategy.distribute_dataset([ROWS[:size]], replicax.InputOptions(partial_batch=partial))
            share = strategy.run(step, args=(batch,))
            mean = float(share) if replicas == 1 else float(strategy.reduce("sum", share))
            assert mean == pytest.approx(ROWS[:size].mean(), rel=1e-6), (size, step.__name__, partial)


@pytest.mark.parametrize("kept", [jax.jit, jax.checkpoint])
def test_a_mask_is_that_of_its_batch(kept: Any) -> None:
    strategy = strategy_of(2)

    @kept
    def total(x: Any) -> Any:
        mask = replicax.get_replica_context().example_mask
        return (x if mask is None else jax.numpy.where(mask, x, 0.0)).sum()

    for size, partial in ((8, "exact"), (7, "pad"), (5, "pad"), (8, "exact")):
        [batch] = strategy.distribute_dataset([ROWS[:size]], replicax.InputOptions(partial_batch=partial))
        assert float(strategy.reduce("sum", strategy.run(lambda x: total(x), args=(batch,)))) == ROWS[:size].sum()


def test_a_gathered_batch_has_the_sizes_of_its_replicas() -> None:
    strategy = strategy_of(2)
    gathered = jax.checkpoint(lambda x: replicax.get_replica_context().all_gather(x, axis=0).sum())
    for size in (7, 8, 7):
        [batch] = strategy.distribute_dataset([ROWS[:size]])
        assert float(strategy.run(lambda x: gathered(x), args=(batch,))) == ROWS[:size].sum()
