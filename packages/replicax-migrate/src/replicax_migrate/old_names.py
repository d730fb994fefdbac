"""Old names: what ``tf.distribute`` called things, in all its releases, and what they are called in Replicax.

An entry that is only a dotted name is a renaming, which ``--write`` can do; an entry that begins with "nothing" has no
counterpart. The names that people still type from habit stand in :mod:`replicax.name_hints`, by which errors go, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from replicax import name_hints

_OPTIONS = name_hints.NAMES["replicax"]["CrossDeviceOps"]
_NOTHING = name_hints.NAMES["replicax"]["initialize_tpu_system"]
_FROM_FUNCTION = "strategy.distribute_datasets_from_function(dataset_fn), and a for loop over it"
_ON_READ = "replicax.Variable(…, synchronization='on_read')"
_STEPS = "strategy.run_steps(fn, iterator, steps)"
_LOCAL = name_hints.NAMES["Strategy"]["unwrap"]
_SIZE = name_hints.NAMES["Strategy"]["num_replicas"]
_PROCESSES = name_hints.NAMES["replicax"]["Server"]
_ESTIMATOR = "nothing: there are no estimators; replicax.train is the loop around a step"
_OF_A_WORKER = "what replicax.ClusterCoordinator.create_per_worker_dataset returns"
_PREEMPTED = name_hints.NAMES["replicax"]["PreemptionCheckpointHandler"]
_CONNECTED = "nothing to do: JAX finds its devices by itself"
_ITERATED = "iter(dataset), anew for each pass: an iterator is ready when it is created"
_EMBEDDING = "nothing yet: a replicax.variables.ShardedVariable holds a table in shards"

_ON_EXTENDED = (
    "between_graph broadcast_to colocate_vars_with non_slot_devices parameter_devices "
    "should_checkpoint should_init should_save_summary value_container worker_devices"
)
_ANY_STRATEGY = {
    "experimental_run_steps_on_iterator": _STEPS,
    "num_towers": _SIZE,
    "run_steps_on_dataset": _STEPS,
    "steps_per_run": f"the argument steps of {_STEPS}",
    "tower_local_var_scope": _ON_READ,
    "unwrap": _LOCAL,
}

_FURTHER: dict[str, dict[str, str]] = {
    "replicax": {
        "AdagradParameters": _EMBEDDING,
        "AdamParameters": _EMBEDDING,
        "AllReduceCrossDeviceOps": _OPTIONS,
        "AllReduceCrossTowerOps": _OPTIONS,
        "CentralStorage": "replicax.CentralStorageStrategy",
        "Client": _PROCESSES,
        "CollectiveAllReduceStrategy": "replicax.MultiWorkerMirroredStrategy",
        "CrossShardOptimizer": "replicax.Optimizer, which sums gradients over the replicas",
        "CrossTowerOps": _OPTIONS,
        "DeviceOrderMode": "the strings 'auto', 'ring' and 'mesh'",
        "DistributeConfig": _ESTIMATOR,
        "DistributeOptions": "replicax.InputOptions, an argument of strategy.distribute_dataset",
        "DistributionStrategy": "replicax.Strategy",
        "DistributionStrategyExtended": "replicax.StrategyExtended",
        "FtrlParameters": _EMBEDDING,
        "GCEClusterResolver": "nothing: list the machines in a replicax.cluster.SimpleClusterResolver",
        "HardwareFeature": _EMBEDDING,
        "InputReplicationMode": "strategy.distribute_dataset, or distribute_datasets_from_function",
        "Mirrored": "an ordinary jax.Array: a value that is the same on every replica needs no wrapper",
        "Monitor": "a loop that calls strategy.run_steps",
        "MultiWorkerAllReduce": _OPTIONS,
        "PaddingSpec": "replicax.InputOptions(partial_batch='pad')",
        "Partitioner": "FixedShardsPartitioner, MinSizePartitioner or MaxSizePartitioner, of replicax.variables",
        "PerDevice": "replicax.PerReplica",
        "PerWorkerValue": _OF_A_WORKER,
        "PerWorkerValues": _OF_A_WORKER,
        "PreemptionWatcher": _PREEMPTED,
        "ReductionToOneDeviceCrossDeviceOps": _OPTIONS,
        "ReductionToOneDeviceCrossTowerOps": _OPTIONS,
        "StandardInputStep": "a function for one replica, run by strategy.run",
        "StandardSingleLossStep": "a function for one replica, run by strategy.run",
        "Step": "a function for one replica, run by strategy.run",
        "StochasticGradientDescentParameters": _EMBEDDING,
        "TPUEmbedding": _EMBEDDING,
        "TPUEmbeddingForServing": _EMBEDDING,
        "TPUEmbeddingV0": _EMBEDDING,
        "TPUEmbeddingV2": _EMBEDDING,
        "TPUStrategyV1": "replicax.TPUStrategy",
        "TPUSystemMetadata": "replicax.Topology, which replicax.TPUClusterResolver() has",
        "TerminationConfig": _PREEMPTED,
        "TowerContext": "replicax.ReplicaContext",
        "UnionResolver": "replicax.cluster.UnionClusterResolver",
        "UpdateContext": "nothing: an update needs no device",
        "XLAOptions": "nothing: set compiler options through JAX",
        "batch_parallel": "strategy.run(fn, args), with the arguments from strategy.distribute_dataset",
        "bfloat16_scope": "nothing: give variables and arrays the dtype bfloat16",
        "core": "strategy.assign_to_logical_device(tensor, logical_device_id)",
        "cross_replica_sum": "replicax.get_replica_context().all_reduce('sum', value)",
        "embedding_column": _EMBEDDING,
        "experimental_connect_to_host": _CONNECTED,
        "experimental_get_current_worker_index": "jax.process_index()",
        "get_cross_replica_context": "replicax.get_strategy, where replicax.in_cross_replica_context() is true",
        "get_cross_tower_context": "replicax.get_strategy, where replicax.in_cross_replica_context() is true",
        "get_distribution_strategy": "replicax.get_strategy",
        "get_loss_reduction": "replicax.compute_average_loss, which needs none",
        "get_tower_context": "replicax.get_replica_context",
        "has_distribution_strategy": "replicax.has_strategy",
        "in_cross_tower_context": "replicax.in_cross_replica_context",
        "initialize_system": _CONNECTED,
        "multi_gpu_model": "replicax.MirroredStrategy, whose strategy.run runs a step on each device",
        "outside_compilation": "jax.pure_callback or jax.debug.callback",
        "replicate": "strategy.run(fn, args)",
        "require_replica_context": "nothing: calls that belong in a step raise an error elsewhere",
        "require_tower_context": "nothing: calls that belong in a step raise an error elsewhere",
        "rewrite": "strategy.run(fn, args)",
        "run_standard_tensorflow_server": _PROCESSES,
        "shard": "strategy.run(fn, args), with the arguments from strategy.distribute_dataset",
        "shared_embedding_columns": _EMBEDDING,
        "shutdown_system": "nothing to do: JAX releases its devices when the program ends",
        "shutdown_tpu_system": "nothing to do: JAX releases its devices when the program ends",
    },
    "Strategy": {
        **_ANY_STRATEGY,
        **{name: f"strategy.extended.{name}" for name in _ON_EXTENDED.split()},
        "batch_reduce": "strategy.extended.batch_reduce_to(reduce_op, value_destination_pairs)",
        "broadcast": "strategy.extended.broadcast_to(tensor, destinations)",
        "call_for_each_tower": "strategy.run(fn, args=(…,)), with the arguments in a tuple",
        "configure": _NOTHING,
        "distribute_dataset_fn": _FROM_FUNCTION,
        "experimental_finalize": _NOTHING,
        "experimental_initialize": _NOTHING,
        "experimental_make_numpy_iterator": "strategy.distribute_dataset(strategy.make_numpy_dataset(arrays).batch(n))",
        "fetch": "the value itself: jax.device_get(value), or strategy.local_results(value)",
        "finalize": _NOTHING,
        "get_finalize_ops": _NOTHING,
        "get_host_cpu_device": "strategy.get_host_cpu_device, of a TPUStrategy",
        "get_initialization_ops": _NOTHING,
        "group": "the values themselves: steps run when they are called, so there are no operations to group",
        "initialize": _NOTHING,
        "is_single_replica": f"{_SIZE} == 1",
        "is_single_tower": f"{_SIZE} == 1",
        "make_dataset_iterator": "iter(strategy.distribute_dataset(dataset))",
        "make_input_fn_iterator": _FROM_FUNCTION,
        "map": "strategy.run(fn, args), with items from strategy.distribute_values_from_function",
        "num_hosts": "strategy.num_hosts, of a TPUStrategy",
        "num_towers_per_host": "strategy.num_replicas_per_host, of a TPUStrategy",
        "read_var": "variable.read_value(), or strategy.extended.read_var(variable)",
        "update_config_proto": _NOTHING,
        "update_non_slot": "strategy.extended.update_non_slot(colocate_with, fn, args)",
        "worker_device_index": "replicax.get_replica_context().replica_id_in_sync_group, inside the step",
    },
    "StrategyExtended": {
        **_ANY_STRATEGY,
        "batch_reduce": "extended.batch_reduce_to(reduce_op, value_destination_pairs)",
        "broadcast": "extended.broadcast_to(tensor, destinations)",
        "call_for_each_tower": "extended.call_for_each_replica(fn, args=(…,)), with the arguments in a tuple",
        "experimental_enable_get_next_as_optional": "nothing to do: the last, partial batch of an epoch is exact",
        "experimental_require_static_shapes": "nothing: replicas may have batches of different sizes",
        "tpu_hardware_feature": _EMBEDDING,
    },
    "ReplicaContext": {
        "device": "devices: a compiled step is one program for all of them",
        "distribution_strategy": "strategy",
        "fetch": "the value itself: return it from the step",
        "is_single_replica": "num_replicas_in_sync == 1",
        "is_single_tower": "num_replicas_in_sync == 1",
        "num_towers": "num_replicas_in_sync",
        "tower_id": "replica_id_in_sync_group",
        "tower_local_var_scope": _ON_READ,
    },
    "DistributedDataset": {
        "initializer": _ITERATED,
        "make_initializable_iterator": "iter(dataset)",
        "make_one_shot_iterator": "iter(dataset)",
        "reduce": "a Python loop over the dataset",
    },
    "DistributedIterator": {
        "initialize": _ITERATED,
        "initializer": _ITERATED,
    },
    "ClusterResolver": {
        "get_task_info": "the attributes task_type and task_id",
    },
    "TPUClusterResolver": {
        "get_coordination_service_leader": "nothing: jax.distributed.initialize finds it",
        "get_tpu_system_metadata": "the attribute topology",
        "set_tpu_topology": "nothing: JAX reports the topology",
        "tpu_hardware_feature": _EMBEDDING,
    },
    "AutoShardPolicy": {
        "HINT": "replicax.data.AutoShardPolicy.DATA, or a dataset_fn that looks at its InputContext",
    },
    "MultiStepContext": {
        "run_op": "nothing: the steps have run when run_steps returns",
    },
    "Variable": {
        "assign_moving_average": "assign(momentum * variable + (1 - momentum) * value)",
        "eval": "numpy()",
        "get": _LOCAL,
        "initializer": "nothing: a variable has its value when it is created",
        "is_initialized": "nothing: a variable has its value when it is created",
        "load": "assign(value)",
        "primary": "value; the copies are strategy.local_results(variable)",
        "sparse_read": "variable[indices]",
    },
    "Aggregation": {
        "ONLY_FIRST_TOWER": "replicax.Aggregation.ONLY_FIRST_REPLICA",
    },
    "PerReplica": {
        "get": _LOCAL,
        "primary": "strategy.local_results(value)[0]",
    },
}

_GPUS = "name this worker's devices: devices=['gpu:0', 'gpu:1']; without the argument all are used"
_OPTIONS_OF_EACH = name_hints.ARGUMENTS["MirroredStrategy.__init__"]["cross_device_ops"]
_NO_SESSION = "nothing: JAX needs no session to see its devices"
_OF_CLOUD = "coordinator_address coordinator_name credentials discovery_url job_name project service zone"
_FOUND = "leave it out: JAX finds its devices by itself"
_NO_STRINGS = "leave it out: variables hold no strings"

_FURTHER_ARGUMENTS: dict[str, dict[str, str]] = {
    "ClusterCoordinator.fetch": {"val": "values"},
    "ClusterResolver.num_accelerators": {"config_proto": _NO_SESSION},
    "InputOptions.__init__": {"experimental_prefetch_to_device": "use prefetch, in elements; 0 for none"},
    "MaxSizePartitioner.__init__": {"bytes_per_string": _NO_STRINGS},
    "MinSizePartitioner.__init__": {"bytes_per_string": _NO_STRINGS},
    "MirroredStrategy.__init__": {"cross_tower_ops": _OPTIONS_OF_EACH, "num_gpus_per_worker": _GPUS},
    "MultiStepContext.set_last_step_output": {"aggregation": "reduce_op"},
    "MultiWorkerMirroredStrategy.__init__": {"num_gpus_per_worker": _GPUS},
    "ReplicaContext.all_reduce": {"aggregation": "reduce_op"},
    "SimpleClusterResolver.num_accelerators": {"config_proto": _NO_SESSION},
    "SlurmClusterResolver.num_accelerators": {"config_proto": _NO_SESSION},
    "Strategy.make_numpy_dataset": {"session": "leave it out: there are no sessions"},
    "Strategy.reduce": {"aggregation": "reduce_op"},
    "Strategy.run_steps": {"dataset": "iterator", "iterations": "steps"},
    "StrategyExtended.batch_reduce_to": {"aggregation": "reduce_op", "method_string": "reduce_op"},
    "StrategyExtended.colocate_vars_with": {"colocate_with_variable": "variable"},
    "StrategyExtended.reduce_to": {"aggregation": "reduce_op", "method_string": "reduce_op"},
    "StrategyExtended.update": {"grouped": "group"},
    "StrategyExtended.update_non_slot": {"grouped": "group"},
    "TPUClusterResolver.__init__": dict.fromkeys(_OF_CLOUD.split(), _FOUND),
    "TPUClusterResolver.connect": {"project": _FOUND, "zone": _FOUND},
    "TPUClusterResolver.num_accelerators": {"config_proto": _NO_SESSION},
    "TPUStrategy.__init__": {
        "experimental_spmd_xla_partitioning": "leave it out: XLA always partitions steps",
        "num_cores": "the resolver finds the cores; choose among them by device_assignment",
        "steps_per_run": "strategy.run_steps takes the number of steps",
    },
    "UnionClusterResolver.num_accelerators": {"config_proto": _NO_SESSION},
    "Variable.__init__": {
        "collections": "keep variables in a pytree of your own",
        "initializer": "initial_value",
        "use_resource": "leave it out",
    },
}


def _joined(first: Mapping[str, dict[str, str]], second: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return {kind: {**first.get(kind, {}), **second.get(kind, {})} for kind in {**first, **second}}


ARGUMENTS = _joined(name_hints.ARGUMENTS, _FURTHER_ARGUMENTS)
"""Keyword arguments, by what took them (``Strategy.reduce``): what each is called now, or a sentence."""

NAMES = _joined(name_hints.NAMES, _FURTHER) | {
    kind: ARGUMENTS[f"{kind}.__init__"] for kind in ("InputOptions", "RunOptions")
}
"""By the class that had it, or ``replicax`` for the module."""
