"""Into which parts variables are split over servers, and which partitioners can't be meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest

import replicax
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0
BY_HALVES = replicax.variables.FixedShardsPartitioner(2)
BY_COLUMNS = replicax.variables.FixedShardsPartitioner(3, dim=-1)


def counted_by(shape: tuple[int, ...], dtype: Any) -> Any:
    """A partitioner of one's own, with NumPy's numbers."""
    return np.minimum(shape, [2, 1][: len(shape)])


@pytest.mark.parametrize(
    ("of_strategy", "of_variable", "dim", "bounds"),
    [
        (None, None, 0, [(0, 6)]),
        (BY_HALVES, None, 0, [(0, 3), (3, 6)]),
        (None, BY_HALVES, 0, [(0, 3), (3, 6)]),
        (BY_HALVES, BY_COLUMNS, 1, [(0, 2), (2, 4)]),  # 3 parts of 4 columns: two of 2
        (replicax.variables.MinSizePartitioner(32, 3), None, 0, [(0, 2), (2, 4), (4, 6)]),
        (replicax.variables.MaxSizePartitioner(64), None, 0, [(0, 3), (3, 6)]),
        (replicax.variables.FixedShardsPartitioner(100), None, 0, [(0, 2), (2, 4), (4, 6)]),  # one for each server
        (counted_by, None, 0, [(0, 3), (3, 6)]),
    ],
)
def test_each_variable_is_in_the_parts_that_are_asked_for(
    of_strategy: Any, of_variable: Any, dim: int, bounds: list[tuple[int, int]]
) -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=3, variable_partitioner=of_strategy)
    before = np.arange(24, dtype=np.float32).reshape(6, 4)
    with strategy.scope():
        w = replicax.Variable(before, name="w", partitioner=of_variable)
        optimizer = replicax.Optimizer(optax.sgd(1.0, momentum=0.5))

    def step() -> None:
        optimizer.apply_gradients([(replicax.scale_regularization_loss(w.value), w)])

    with coordinator_of(strategy) as (coordinator, _):
        for _ in range(2):
            coordinator.schedule(lambda: strategy.run(step)).fetch(WAIT)
        shards = coordinator._cluster.home.definitions.shards[w.number]
        assert shards.dim == dim
        assert sorted(shards.bounds.values()) == bounds
        np.testing.assert_allclose(w.numpy(), -0.5 * before)


def test_each_part_goes_to_the_server_with_the_fewest_bytes() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=3)
    with strategy.scope():
        halves = replicax.Variable(np.zeros(12, np.float32), partitioner=BY_HALVES)
        others = [replicax.Variable(np.zeros(size, np.float32)) for size in (9, 1)]
        others.append(replicax.Variable(np.zeros((0, 2), np.float32), partitioner=lambda shape, dtype: [2, 1]))
    with coordinator_of(strategy) as (coordinator, _):
        coordinator.schedule(lambda: None).fetch(WAIT)
        shards = coordinator._cluster.home.definitions.shards
        assert [shards[v.number].servers for v in (halves, *others)] == [(0, 1), (2,), (0,), (1,)]


def test_groups_are_refused() -> None:
    groups = replicax.variables.GroupPartitioner(2)
    with pytest.raises(ValueError, match="On parameter servers the servers have the parts, and there are no groups"):
        replicax.ParameterServerStrategy(variable_partitioner=groups)
    with replicax.ParameterServerStrategy().scope(), pytest.raises(ValueError, match="there are no groups"):
        replicax.Variable(np.zeros(4), partitioner=groups)


@pytest.mark.parametrize("returned", [[2, 2], [0, 1], [2.0, 1], [2], 2, None])
def test_what_no_partitioner_may_return_is_an_error_that_names_the_variable(returned: Any) -> None:
    strategy = replicax.ParameterServerStrategy(num_servers=2, variable_partitioner=lambda shape, dtype: returned)
    with strategy.scope():
        _w = replicax.Variable(np.zeros((4, 2), np.float32), name="w")
    with coordinator_of(strategy) as (coordinator, _), pytest.raises(ValueError, match="variable 'w': the partitioner"):
        coordinator.schedule(lambda: None)
