"""A run that was begun under parameter servers goes on under MirroredStrategy, and back."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import replicax
from tests.parameter_server.regression import Regression, batches, in_parts, mirrored, regression
from tests.parameter_server.thread_actors import coordinator_of

FIRST, ALL = 6, 12


def under_servers(model: Regression, coordinator: Any, steps: list[Any]) -> None:
    strategy = coordinator.strategy

    def train(*part: Any) -> Any:
        return strategy.run(model.step, args=part)

    for batch in steps:
        for part in in_parts(batch, strategy.num_workers):
            coordinator.schedule(train, args=part)
    coordinator.join(timeout_seconds=100)


def saved(model: Regression) -> replicax.Checkpoint:
    return replicax.Checkpoint(w=model.w, b=model.b, iterations=model.iterations, optimizer=model.optimizer)


@pytest.mark.parametrize("begins_on_servers", [True, False])
def test_it_goes_on_elsewhere(begins_on_servers: bool, tmp_path: pathlib.Path) -> None:
    served = replicax.ParameterServerStrategy(
        num_workers=2, num_servers=2, mode="sync", variable_partitioner=replicax.variables.FixedShardsPartitioner(2)
    )
    pair = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    on_servers, on_pair = regression(served), regression(pair)
    steps = list(batches(ALL))

    def under_pair(some: list[Any]) -> None:
        for batch in pair.distribute_dataset(some):
            pair.run(on_pair.step, args=batch)

    with coordinator_of(served) as (coordinator, _):
        if begins_on_servers:
            under_servers(on_servers, coordinator, steps[:FIRST])
            saved(on_servers).save(tmp_path / "checkpoint")
            saved(on_pair).restore(tmp_path / "checkpoint")
            under_pair(steps[FIRST:])
            model = on_pair
        else:
            under_pair(steps[:FIRST])
            saved(on_pair).save(tmp_path / "checkpoint")
            saved(on_servers).restore(tmp_path / "checkpoint")
            under_servers(on_servers, coordinator, steps[FIRST:])
            model = on_servers
        assert int(model.iterations) == ALL
        for found, expected in zip(model.values, mirrored(2, ALL).values, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)
