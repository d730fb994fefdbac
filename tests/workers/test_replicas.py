"""Replicas: the part of a strategy that lower packages know."""

from __future__ import annotations

import copy
import dataclasses

import jax
import numpy as np
import pytest

import replicax


def test_they_say_what_the_strategy_says() -> None:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    strategy = replicax.Strategy(replicax.StrategyExtended(devices))
    extended, replicas = strategy.extended, strategy.extended.replicas
    assert (replicas.num_replicas, replicas.local_replicas) == (strategy.num_replicas_in_sync, extended.local_replicas)
    assert replicas.worker_devices == extended.worker_devices
    assert replicas.logical_devices.tolist() == devices.tolist()
    assert replicas.mesh == extended.mesh
    assert replicas.lockstep is extended.lockstep
    assert repr(replicas) == repr(strategy)


def test_they_do_not_change() -> None:
    replicas = replicax.MirroredStrategy(["cpu:0", "cpu:1"]).extended.replicas
    with pytest.raises(dataclasses.FrozenInstanceError):
        replicas.num_replicas = 3  # type: ignore[misc]


def test_each_strategy_has_its_own() -> None:
    strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    twin, other = copy.deepcopy(strategy), replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    own = [s.extended.replicas for s in (strategy, twin, other)]
    assert [replicas.strategy for replicas in own] == [strategy, twin, other]
    assert len(set(own)) == 3
    with twin.scope():
        assert replicax.Variable(1.0).replicas is own[1]
