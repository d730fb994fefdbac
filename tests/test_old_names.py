"""Names of the original: errors that name today's."""

from __future__ import annotations

import copy
import re

import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.old_names import NAMES
from tests.conftest import strategy_of


@pytest.fixture(scope="module")
def owners():
    strategy = strategy_of(2)
    with strategy.scope():
        v = replicax.Variable(1.0)
    dataset = strategy.distribute_dataset([np.zeros(4)])
    return {
        "replicax": replicax,
        "Strategy": strategy,
        "StrategyExtended": strategy.extended,
        "ReplicaContext": replicax.get_replica_context(),
        "MultiStepContext": replicax.MultiStepContext(),
        "Variable": v,
        "Aggregation": replicax.Aggregation,
        "AutoShardPolicy": replicax.AutoShardPolicy,
        "DistributedDataset": dataset,
        "DistributedIterator": iter(dataset),
        "InputOptions": replicax.InputOptions(),
        "ClusterResolver": replicax.SimpleClusterResolver(replicax.ClusterSpec({})),
        "TPUClusterResolver": replicax.TPUClusterResolver(emulate="2x1x1x1"),
        "PerReplica": strategy.distribute_values_from_function(lambda ctx: 1.0),
    }


@pytest.mark.parametrize("kind", NAMES)
def test_old_names(owners, kind) -> None:
    for name, today in NAMES[kind].items():
        with pytest.raises(AttributeError, match=rf"no attribute {name!r}: .*here it is {re.escape(today)}$"):
            getattr(owners[kind], name)
        assert not hasattr(owners[kind], name)
        for path in re.findall(r"\b(?:replicax|strategy)(?:\.\w+)+", today):  # what it names is there
            first, *rest = path.split(".")
            owner = replicax if first == "replicax" else replicax.TPUStrategy if "TPU" in today else owners["Strategy"]
            for attribute in rest:
                owner = getattr(owner, attribute)


def test_names_that_never_were(owners) -> None:
    for kind in ("replicax", "Strategy", "StrategyExtended", "ReplicaContext", "MultiStepContext", "Aggregation"):
        with pytest.raises(AttributeError, match="no attribute 'never_was'$"):
            owners[kind].never_was  # noqa: B018
    with pytest.raises(AttributeError, match="a Variable has no attribute 'never_was', and neither has an array"):
        owners["Variable"].never_was  # noqa: B018


def test_what_a_value_of_each_replica_is_not(owners) -> None:
    x = owners["PerReplica"]
    for name in ("shape", "dtype", "sum", "mean", "block_until_ready"):
        with pytest.raises(AttributeError, match=rf"^PerReplica.* has no attribute '{name}'.*strategy.local_results"):
            getattr(x, name)
        assert not hasattr(x, name)
    assert copy.copy(x).count == 2


VALUE = np.float32(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, v: s.reduce(aggregation="sum", value=VALUE), "reduce: 'aggregation' .*here it is 'reduce_op'"),
        (lambda s, v: s.reduce("sum", VALUE, destinations="cpu:0"), "'destinations'.*strategy.extended.reduce_to"),
        (lambda s, v: s.run_steps(lambda ctx: None, None, iterations=3), "'iterations'.*here it is 'steps'"),
        (lambda s, v: s.extended.update(v, lambda v: v, grouped=False), "update: 'grouped' .*here it is 'group'"),
        (lambda s, v: s.extended.update_non_slot(None, lambda: 1, grouped=False), "here it is 'group'"),
        (lambda s, v: s.extended.reduce_to("sum", VALUE, None, experimental_hints=None), "here it is 'options'"),
        (lambda s, v: s.extended.batch_reduce_to("sum", [], experimental_hints=None), "here it is 'options'"),
        (lambda s, v: replicax.get_replica_context().all_reduce("sum", VALUE, experimental_hints=0), "it is 'options'"),
        (lambda s, v: replicax.Variable(1.0, validate_shape=False), "Variable: 'validate_shape'.*leave it out"),
        (lambda s, v: replicax.Variable(initializer=jnp.zeros), "here it is 'initial_value'"),
        (lambda s, v: replicax.MirroredStrategy(num_gpus=2), r"MirroredStrategy: 'num_gpus'.*devices=\['gpu:0'"),
        (lambda s, v: replicax.MirroredStrategy(cross_device_ops=1), "replicax.CommunicationOptions"),
        (lambda s, v: replicax.MultiWorkerMirroredStrategy(num_gpus_per_worker=1), r"devices=\['gpu:0'"),
        (
            lambda s, v: replicax.CentralStorageStrategy(variable_partitioner=1),
            r"MirroredStrategy\(.*variable_partition",
        ),
        (
            lambda s, v: replicax.OneDeviceStrategy("cpu:0", variable_partitioner=1),
            "leave it out: there is one device",
        ),
        (lambda s, v: replicax.TPUStrategy(steps_per_run=3), "'steps_per_run'.*strategy.run_steps"),
        (lambda s, v: replicax.TPUStrategy(experimental_device_assignment=3), "here it is 'device_assignment'"),
        (lambda s, v: replicax.MultiStepContext().set_last_step_output("x", 1, aggregation="sum"), "it is 'reduce_op'"),
    ],
)
def test_old_keywords(owners, call, message) -> None:
    with pytest.raises(TypeError, match=message):
        call(owners["Strategy"], owners["Variable"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'never_was'"):
        owners["Strategy"].reduce("sum", 1, never_was=2)
