"""Input, strategies, contexts, logical devices."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np

import replicax
from replicax.models import safetensors
from tests.misuses.world import ContextError, inside, merged, scoped

_by_two = replicax.variables.FixedShardsPartitioner(2)

INPUT = [
    (
        "a scalar beside a batch",
        lambda w: next(iter(w.s.distribute_dataset([{"x": np.ones((4, 2)), "rate": 0.1}]))),
        ValueError,
        r"element 0\['rate'\] is a scalar .*args=\(batch, scalar\)",
    ),
    (
        "random keys in a batch",
        lambda w: next(iter(w.s.distribute_dataset([jax.random.split(jax.random.key(0), 4)]))),
        TypeError,
        r"jax.random.key_data\(keys\).*jax.random.wrap_key_data",
    ),
    (
        "random keys as examples",
        lambda w: w.s.make_numpy_dataset({"x": np.ones(4), "key": jax.random.split(jax.random.key(0), 4)}),
        TypeError,
        r"input\['key'\] holds random keys.*random_key\(key\)",
    ),
    (
        "a function for a dataset",
        lambda w: w.s.distribute_dataset(lambda ctx: [np.ones(2)]),
        TypeError,
        "from_function",
    ),
    (
        "a batch of integers too large",
        lambda w: next(iter(w.s.distribute_dataset([np.array([1, 2**40])]))),
        ValueError,
        "1099",
    ),
    (
        "examples of several lengths",
        lambda w: w.s.make_numpy_dataset([np.ones(2), np.ones(3)]),
        ValueError,
        "not arrays of one shape",
    ),
    (
        "the state of nothing",
        lambda w: iter(w.s.distribute_dataset([np.ones(2)])).set_state({}),
        (TypeError, ValueError),
        "get_state",
    ),
    ("a number for a dataset", lambda w: w.s.distribute_dataset(3), TypeError, "dataset"),
    (
        "an iterator for a dataset",
        lambda w: w.s.distribute_dataset(iter([np.ones(2)])),
        TypeError,
        "anew for each epoch",
    ),
    ("nothing for a dataset", lambda w: w.s.distribute_dataset(None), TypeError, "dataset"),
    ("options in a dict", lambda w: w.s.distribute_dataset([np.ones(2)], {}), TypeError, "InputOptions"),
    ("batches without a dim", lambda w: next(iter(w.s.distribute_dataset([1.0, 2.0]))), ValueError, "is a scalar"),
    (
        "a dataset divided in a step",
        lambda w: inside(w, lambda: w.s.distribute_dataset([1])),
        ContextError,
        "inside a replica",
    ),
    (
        "no function of datasets",
        lambda w: w.s.distribute_datasets_from_function([1]),
        TypeError,
        "function of an InputC",
    ),
    ("no function of values", lambda w: w.s.distribute_values_from_function(3), TypeError, "value_fn must be callable"),
    (
        "values of two structures",
        lambda w: w.s.distribute_values_from_function(lambda ctx: [1] * (1 + ctx.replica_id_in_sync_group)),
        ValueError,
        "agree on the structure",
    ),
    ("a replica that is not there", lambda w: replicax.ValueContext(2, 2), ValueError, "below num_replicas_in_sync"),
    (
        "no replica of a value",
        lambda w: replicax.ValueContext(None, 2),
        ValueError,
        "replica_id_in_sync_group must be an int .*got None",
    ),
    ("half replicas", lambda w: replicax.ValueContext(0, 1.5), ValueError, "num_replicas_in_sync must be an int.*1.5"),
    (
        "a traced value of each replica",
        lambda w: jax.jit(lambda y: w.s.distribute_values_from_function(lambda ctx: y))(3.0),
        ContextError,
        "the value of replica 0 is being traced: call it outside jax.jit",
    ),
    (
        "a value of each replica in a merge_fn",
        lambda w: merged(w, lambda s: s.distribute_values_from_function(lambda ctx: 1.0)),
        ContextError,
        "being traced: call it outside .*steps",
    ),
    ("examples without a dim", lambda w: w.s.make_numpy_dataset(3.0), ValueError, "dim"),
    ("examples that differ in number", lambda w: w.s.make_numpy_dataset((np.ones(2), np.ones(3))), ValueError, "dim 0"),
    (
        "a batch that does not divide",
        lambda w: replicax.InputContext(1, 0, 2).get_per_replica_batch_size(3),
        ValueError,
        "3",
    ),
    (
        "no worker of a dataset",
        lambda w: replicax.InputContext(2, None),
        ValueError,
        "pipeline_id must be an int.*None",
    ),
    ("no workers", lambda w: replicax.InputContext(None), ValueError, "num_input_pipelines must be an int.*None"),
    (
        "half replicas of a dataset",
        lambda w: replicax.InputContext(num_replicas_in_sync=1.5),
        ValueError,
        "num_replicas_in_sync must be an int.*1.5",
    ),
    ("an unknown policy", lambda w: replicax.InputOptions(auto_shard_policy="x"), ValueError, "'x'"),
    ("an unknown way with partial batches", lambda w: replicax.InputOptions(partial_batch="x"), ValueError, "'pad'"),
    ("reading ahead by less than nothing", lambda w: replicax.InputOptions(prefetch=-1), ValueError, "prefetch"),
]


def left_in_the_wrong_order(w: Any) -> None:
    outer, inner = w.s.scope(), w.s.scope()
    outer.__enter__()
    inner.__enter__()
    try:
        outer.__exit__(None, None, None)
    finally:
        inner.__exit__(None, None, None)


def split(w: Any, parts: Any) -> Any:
    return w.grid.run(lambda x: w.grid.split_to_logical_devices(x, parts), (np.ones((4, 3), np.float32),))


PLACES = [
    (
        "another task's device",
        lambda w: replicax.MirroredStrategy(["/job:worker/task:1/device:CPU:0"]),
        ValueError,
        "task",
    ),
    ("one device for a list", lambda w: replicax.MirroredStrategy("cpu:0"), TypeError, r"for one device: \['cpu:0'\]"),
    ("a device twice", lambda w: replicax.MirroredStrategy(["cpu:0", "cpu:0"]), ValueError, "twice.*use_cpu_devices"),
    ("a device that is not there", lambda w: replicax.MirroredStrategy(["cpu:99"]), ValueError, "available: cpu:0"),
    ("no device's name", lambda w: replicax.ShardedStrategy(["big one"]), ValueError, "no device 'big one'"),
    ("a number for a device", lambda w: replicax.MirroredStrategy([0]), TypeError, "a string such as 'cpu:0', got 0"),
    ("no devices", lambda w: replicax.MirroredStrategy([]), ValueError, "pass None for all local devices"),
    ("a list for one device", lambda w: replicax.OneDeviceStrategy(["cpu:0"]), TypeError, r"got \['cpu:0'\]"),
    ("no parameter device", lambda w: replicax.CentralStorageStrategy(["cpu:0"], 3), TypeError, "'cpu:0', got 3"),
    ("a number for all partitioners", lambda w: replicax.ShardedStrategy(["cpu:0"], 3), TypeError, "FixedShardsPartit"),
    (
        "no time for workers",
        lambda w: replicax.MultiWorkerMirroredStrategy(["cpu:0"], 0),
        ValueError,
        "positive number",
    ),
    ("a text for time", lambda w: replicax.MultiWorkerMirroredStrategy(["cpu:0"], "9"), ValueError, "positive.*'9'"),
    (
        "an address for parameter servers",
        lambda w: replicax.ParameterServerStrategy("grpc://host"),
        TypeError,
        "must be a replicax.cluster.ClusterResolver, got 'grpc://host'; num_workers",
    ),
    (
        "a number of accelerators of no type",
        lambda w: replicax.cluster.SimpleClusterResolver(replicax.cluster.ClusterSpec({}), num_accelerators=8),
        TypeError,
        r"num_accelerators must be a dict.*\{'GPU': 8\}, got 8",
    ),
    ("no resolver", lambda w: replicax.TPUStrategy("local"), TypeError, "expected a TPUClusterResolver, got 'local'"),
    ("devices for a strategy's insides", lambda w: replicax.Strategy(["cpu:0"]), TypeError, "StrategyExtended"),
    ("names for devices", lambda w: replicax.StrategyExtended(["cpu:0"]), TypeError, "'cpu:0'"),
    ("a name for devices", lambda w: replicax.StrategyExtended("cpu:0"), TypeError, "expected JAX devices"),
    ("no device at all", lambda w: replicax.StrategyExtended([]), TypeError, r"expected JAX devices, .*got \[\]"),
    ("no emulated devices", lambda w: replicax.use_cpu_devices(0), ValueError, "an int of at least 1, got 0"),
    ("emulated devices too late", lambda w: replicax.use_cpu_devices(3), RuntimeError, "too late"),
    (
        "the partitioner of a strategy under a variable's name",
        lambda w: replicax.ShardedStrategy(["cpu:0"], partitioner=_by_two),  # type: ignore[call-arg]
        TypeError,
        "there is no argument 'partitioner'; here it is 'variable_partitioner'",
    ),
    (
        "two objects of one name saved",
        lambda w: replicax.Checkpoint(**{"a": {"b": w.v}, "a/b": w.n}),
        ValueError,
        "two objects are called 'a/b': rename a key",
    ),
    ("a strategy saved", lambda w: replicax.Checkpoint(w.s), TypeError, r"Checkpoint\(model=model.*in its scope"),
    ("a strategy saved by name", lambda w: replicax.Checkpoint(s=w.s), TypeError, "s is of the class.*in its scope"),
    ("a variable saved without a name", lambda w: replicax.Checkpoint(w.v), TypeError, "without a name.*<Variable 'v'"),
    ("a dict saved without a name", lambda w: replicax.Checkpoint({"v": w.v}), TypeError, r"Checkpoint\(\*\*objects\)"),
    ("a path for a checkpoint", lambda w: replicax.Checkpoint("dir"), TypeError, r"checkpoint.save\(path\)"),
    ("no path to save at", lambda w: replicax.Checkpoint(v=w.v).save(None), TypeError, r"save\(path\) must be .*None"),
    (
        "the newest checkpoint where there is none",
        lambda w: replicax.Checkpoint(v=w.v).restore(None),
        TypeError,
        r"restore\(path\) must be a path.*got None\. The newest.*restore_latest\(\)",
    ),
    (
        "a number for the folder of checkpoints",
        lambda w: replicax.CheckpointManager(replicax.Checkpoint(v=w.v), 3),
        TypeError,
        "CheckpointManager: directory must be a path.*got 3",
    ),
    (
        "an unset variable for the folder of checkpoints",
        lambda w: replicax.CheckpointManager(replicax.Checkpoint(v=w.v), ""),
        ValueError,
        r"CheckpointManager: directory must be a path, got an empty string \(the current folder is '.'\)",
    ),
    ("no folder for a log", lambda w: replicax.CSVLog(None), TypeError, r"CSVLog\(folder\) must be a path"),
    ("no folder for weights", lambda w: safetensors.save(None, w.v), TypeError, r"save\(folder\) must be a path"),
    ("no weights to load", lambda w: safetensors.load(None, w.v), TypeError, r"load\(path\) must be a path"),
    (
        "no file for a model",
        lambda w: replicax.models.export(lambda x: x @ w.v, np.ones((2, 3), np.float32), None),
        TypeError,
        r"export\(path=…\) must be a path",
    ),
    ("an Optax transformation saved", lambda w: replicax.Checkpoint(tx=w.optimizer.tx), TypeError, "save its state"),
    ("a copy of a strategy", lambda w: copy.copy(w.s), RuntimeError, "copy.deepcopy"),
    ("the scope of another", lambda w: scoped(w, lambda: w.other.scope().__enter__()), ContextError, "mixing"),
    ("a scope in a step", lambda w: inside(w, lambda: scoped(w, dict)), ContextError, "merge_call"),
    ("scopes in the wrong order", left_in_the_wrong_order, ContextError, "the innermost scope first"),
    ("a name for a strategy", lambda w: replicax.set_strategy("mirrored"), TypeError, r"MirroredStrategy\(\)"),
    (
        "a class for a strategy",
        lambda w: replicax.set_strategy(replicax.MirroredStrategy),
        TypeError,
        "expected a strategy",
    ),
    ("set_strategy in a scope", lambda w: scoped(w, lambda: replicax.set_strategy(w.s)), ContextError, "outside every"),
    ("an old name", lambda w: w.s.experimental_run_v2, AttributeError, r"here it is strategy.run$"),
    ("an old function", lambda w: replicax.VariableAggregation, AttributeError, "replicax.Aggregation"),
    ("an old keyword", lambda w: replicax.MirroredStrategy(num_gpus=2), TypeError, "devices="),
    ("parts for too few dims", lambda w: split(w, [2]), ValueError, "has 2 dims"),
    ("too many parts", lambda w: split(w, [2, 3]), ValueError, "the product must be 2"),
    ("parts that don't divide", lambda w: split(w, [1, 2]), ValueError, "dim 1 of size 3 does not divide"),
    ("a number for parts", lambda w: split(w, 2), ValueError, "a list of positive ints"),
    ("a text split", lambda w: w.grid.run(lambda: w.grid.split_to_logical_devices("x", [2])), TypeError, "numbers"),
    (
        "no such logical device of a value",
        lambda w: w.grid.run(lambda x: w.grid.assign_to_logical_device(x, 2), (1.0,)),
        ValueError,
        "no logical device 2",
    ),
    (
        "a text for a logical device",
        lambda w: w.grid.run(lambda x: w.grid.assign_to_logical_device(x, "1"), (1.0,)),
        TypeError,
        "must be an int, got '1'",
    ),
    ("assigning outside a step", lambda w: w.grid.assign_to_logical_device(1.0, 1), ContextError, "inside a step"),
    (
        "another's logical devices",
        lambda w: w.s.run(lambda x: w.grid.split_to_logical_devices(x, [2]), (np.ones(2),)),
        ContextError,
        "was called in a step of",
    ),
]
