"""Names and arguments that people from TensorFlow type from habit: errors that say what to write instead."""

from __future__ import annotations

import copy
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.name_hints import ARGUMENTS, NAMES, NameHints
from tests.conftest import strategy_of


@pytest.fixture(scope="module")
def owners(tmp_path_factory):
    strategy = strategy_of(2)
    with strategy.scope():
        v = replicax.Variable(1.0)
        mean = replicax.Mean()
    return {
        "CheckpointManager": replicax.CheckpointManager(replicax.Checkpoint(v=v), tmp_path_factory.mktemp("run")),
        "Mean": mean,
        "Optimizer": replicax.Optimizer(optax.sgd(0.1)),
        "replicax": replicax,
        "Strategy": strategy,
        "StrategyExtended": strategy.extended,
        "ReplicaContext": replicax.get_replica_context(),
        "Variable": v,
        "DistributedIterator": iter(strategy.distribute_dataset([np.zeros(4)])),
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
            owner = replicax if first == "replicax" else owners["Strategy"]
            for attribute in rest:
                owner = getattr(owner, attribute)


def test_names_that_never_were(owners) -> None:
    for kind in ("replicax", "Strategy", "StrategyExtended", "ReplicaContext", "DistributedIterator"):
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


@pytest.mark.parametrize(("path", "argument"), [(path, name) for path in ARGUMENTS for name in ARGUMENTS[path]])
def test_old_arguments(owners, path, argument) -> None:
    kind, method = path.split(".")
    called = getattr(replicax, kind) if method == "__init__" else getattr(owners[kind], method)
    where = kind if method == "__init__" else path
    today = ARGUMENTS[path][argument]
    here = f"here it is {today!r}" if today.isidentifier() else today
    with pytest.raises(TypeError, match=f"^{where}: there is no argument {argument!r}; {re.escape(here)}$"):
        called(**{argument: None})
    with pytest.raises(TypeError, match="argument"):
        called(never_was=None)


def test_arguments_that_are_taken_are_not_refused(owners) -> None:
    total = replicax.get_replica_context().all_reduce("sum", jnp.ones(2), options=None)
    np.testing.assert_array_equal(total, [1, 1])
    assert owners["Strategy"].reduce(reduce_op="sum", value=owners["PerReplica"]) == 2


def test_a_strategy_of_the_users_own_may_take_an_argument_that_its_base_refuses() -> None:
    class Gpus(replicax.MirroredStrategy):
        def __init__(self, num_gpus: int) -> None:
            super().__init__([f"cpu:{i}" for i in range(num_gpus)])

    assert Gpus(num_gpus=2).num_replicas_in_sync == 2
    assert issubclass(Gpus, NameHints)
