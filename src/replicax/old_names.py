"""Old names: what ``tf.distribute`` called things, in all its versions, and what they are called here.

A program that uses one gets an error that says today's name. Old names do not work, and none is looked up as long as
the names are right. ``replicax migrate`` reads the same table: an entry that is only a dotted name is a renaming,
which it can do; an entry that begins with "nothing" has no counterpart.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_OPTIONS = "replicax.CommunicationOptions, for each collective that is to have them"
_NOTHING = "nothing to do: devices are ready when JAX has made them"
_FROM_FUNCTION = "strategy.distribute_datasets_from_function(dataset_fn), which is gone through with for"
_ON_READ = "replicax.Variable(…, synchronization='on_read')"
_STEPS = "strategy.run_steps(fn, iterator, steps)"
_LOCAL = "strategy.local_results(value)"
_SIZE = "strategy.num_replicas_in_sync"
_PROCESSES = "nothing: workers are processes of one program, which replicax.MultiWorkerMirroredStrategy connects"
_ESTIMATOR = "nothing: there are no estimators; replicax.train is the loop around a step"
_OF_A_WORKER = "what replicax.ClusterCoordinator.create_per_worker_dataset returns"
_PREEMPTED = "replicax.train with a replicax.CheckpointManager: at SIGTERM all workers save at one step, and leave"
_CONNECTED = "nothing to do: JAX finds its devices by itself"
_ITERATED = "nothing: an iterator is ready when it has been made"
_EMBEDDING = "nothing yet: a replicax.ShardedVariable holds a table in pieces"

_ON_EXTENDED = (
    "batch_reduce_to between_graph broadcast_to colocate_vars_with non_slot_devices parameter_devices reduce_to "
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

NAMES: dict[str, dict[str, str]] = {
    "replicax": {
        "AdagradParameters": _EMBEDDING,
        "AdamParameters": _EMBEDDING,
        "AllReduceCrossDeviceOps": _OPTIONS,
        "AllReduceCrossTowerOps": _OPTIONS,
        "CentralStorage": "replicax.CentralStorageStrategy",
        "Client": _PROCESSES,
        "CollectiveAllReduceStrategy": "replicax.MultiWorkerMirroredStrategy",
        "CollectiveCommunication": "replicax.CommunicationImplementation",
        "CollectiveHints": "replicax.CommunicationOptions",
        "CrossDeviceOps": _OPTIONS,
        "CrossShardOptimizer": "replicax.Optimizer, which sums gradients over the replicas",
        "CrossTowerOps": _OPTIONS,
        "DeviceOrderMode": "the strings 'auto', 'ring' and 'mesh'",
        "DistributeConfig": _ESTIMATOR,
        "DistributeOptions": "replicax.InputOptions, an argument of strategy.distribute_dataset",
        "DistributedValues": "replicax.PerReplica",
        "DistributionStrategy": "replicax.Strategy",
        "DistributionStrategyExtended": "replicax.StrategyExtended",
        "FtrlParameters": _EMBEDDING,
        "GCEClusterResolver": "nothing: list the machines in a replicax.SimpleClusterResolver",
        "HardwareFeature": _EMBEDDING,
        "HierarchicalCopyAllReduce": _OPTIONS,
        "InputReplicationMode": "strategy.distribute_dataset, or distribute_datasets_from_function",
        "Mirrored": "an ordinary jax.Array: what is the same on every replica needs no wrapper",
        "Monitor": "a loop that calls strategy.run_steps",
        "MultiWorkerAllReduce": _OPTIONS,
        "NcclAllReduce": _OPTIONS,
        "PaddingSpec": "replicax.InputOptions(partial_batch='pad')",
        "Partitioner": "replicax.FixedShardsPartitioner, replicax.MinSizePartitioner or replicax.MaxSizePartitioner",
        "PerDevice": "replicax.PerReplica",
        "PerWorkerValue": _OF_A_WORKER,
        "PerWorkerValues": _OF_A_WORKER,
        "PreemptionCheckpointHandler": _PREEMPTED,
        "PreemptionWatcher": _PREEMPTED,
        "ReductionToOneDevice": _OPTIONS,
        "ReductionToOneDeviceCrossDeviceOps": _OPTIONS,
        "ReductionToOneDeviceCrossTowerOps": _OPTIONS,
        "Server": _PROCESSES,
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
        "UnionResolver": "replicax.UnionClusterResolver",
        "UpdateContext": "nothing: an update needs no device",
        "VariableAggregation": "replicax.Aggregation",
        "VariableSynchronization": "replicax.Synchronization",
        "XLAOptions": "nothing: the options of the compiler are JAX's",
        "batch_parallel": "strategy.run(fn, args), with the arguments from strategy.distribute_dataset",
        "bfloat16_scope": "nothing: give variables and arrays the dtype bfloat16",
        "core": "strategy.assign_to_logical_device(tensor, logical_device_id)",
        "cross_replica_sum": "replicax.get_replica_context().all_reduce('sum', value)",
        "embedding_column": _EMBEDDING,
        "experimental": "replicax itself: its names carry no 'experimental'",
        "experimental_connect_to_cluster": "replicax.initialize_workers(cluster_resolver); TPUs are found without",
        "experimental_connect_to_host": _CONNECTED,
        "experimental_get_current_worker_index": "jax.process_index()",
        "experimental_set_strategy": "replicax.set_strategy",
        "get_cross_replica_context": "replicax.get_strategy, where replicax.in_cross_replica_context() is true",
        "get_cross_tower_context": "replicax.get_strategy, where replicax.in_cross_replica_context() is true",
        "get_distribution_strategy": "replicax.get_strategy",
        "get_loss_reduction": "replicax.compute_average_loss, which needs none",
        "get_tower_context": "replicax.get_replica_context",
        "has_distribution_strategy": "replicax.has_strategy",
        "in_cross_tower_context": "replicax.in_cross_replica_context",
        "initialize_system": _CONNECTED,
        "initialize_tpu_system": _NOTHING,
        "multi_gpu_model": "replicax.MirroredStrategy, whose strategy.run runs a step on each device",
        "outside_compilation": "jax.pure_callback or jax.debug.callback",
        "replicate": "strategy.run(fn, args)",
        "require_replica_context": "nothing: what has its place in a step says so when it is called elsewhere",
        "require_tower_context": "nothing: what has its place in a step says so when it is called elsewhere",
        "rewrite": "strategy.run(fn, args)",
        "run_standard_tensorflow_server": _PROCESSES,
        "shard": "strategy.run(fn, args), with the arguments from strategy.distribute_dataset",
        "shared_embedding_columns": _EMBEDDING,
        "shutdown_system": "nothing to do: JAX gives its devices back when the program ends",
        "shutdown_tpu_system": "nothing to do: JAX gives its devices back when the program ends",
    },
    "Strategy": {
        **_ANY_STRATEGY,
        **{name: f"strategy.extended.{name}" for name in _ON_EXTENDED.split()},
        "batch_reduce": "strategy.extended.batch_reduce_to(reduce_op, value_destination_pairs)",
        "broadcast": "strategy.extended.broadcast_to(tensor, destinations)",
        "call_for_each_replica": "strategy.run(fn, args, kwargs)",
        "call_for_each_tower": "strategy.run(fn, args=(…,)), with the arguments in a tuple",
        "cluster_resolver": "the attribute cluster_resolver, of a MultiWorkerMirroredStrategy or a TPUStrategy",
        "configure": _NOTHING,
        "distribute_dataset_fn": _FROM_FUNCTION,
        "experimental_finalize": _NOTHING,
        "experimental_initialize": _NOTHING,
        "experimental_make_numpy_iterator": "strategy.distribute_dataset(strategy.make_numpy_dataset(arrays).batch(n))",
        "experimental_run": "strategy.run(fn, args=(next(iterator),))",
        "experimental_run_v2": "strategy.run",
        "fetch": "the value itself: jax.device_get(value), or strategy.local_results(value)",
        "finalize": _NOTHING,
        "get_finalize_ops": _NOTHING,
        "get_host_cpu_device": "strategy.get_host_cpu_device, of a TPUStrategy",
        "get_initialization_ops": _NOTHING,
        "group": "what was returned: steps run when they are called, and there is no operation to group",
        "initialize": _NOTHING,
        "is_single_replica": f"{_SIZE} == 1",
        "is_single_tower": f"{_SIZE} == 1",
        "make_dataset_iterator": "iter(strategy.distribute_dataset(dataset))",
        "make_input_fn_iterator": _FROM_FUNCTION,
        "map": "strategy.run(fn, args), with items from strategy.distribute_values_from_function",
        "merge_call": "replicax.get_replica_context().merge_call(merge_fn, args)",
        "num_hosts": "strategy.num_hosts, of a TPUStrategy",
        "num_replicas": _SIZE,
        "num_towers_per_host": "strategy.num_replicas_per_host, of a TPUStrategy",
        "read_var": "variable.read_value(), or strategy.extended.read_var(variable)",
        "update": "strategy.extended.update(var, fn, args)",
        "update_config_proto": _NOTHING,
        "update_non_slot": "strategy.extended.update_non_slot(colocate_with, fn, args)",
        "worker_device_index": "replicax.get_replica_context().replica_id_in_sync_group, inside the step",
    },
    "StrategyExtended": {
        **_ANY_STRATEGY,
        "batch_reduce": "extended.batch_reduce_to(reduce_op, value_destination_pairs)",
        "broadcast": "extended.broadcast_to(tensor, destinations)",
        "call_for_each_tower": "extended.call_for_each_replica(fn, args=(…,)), with the arguments in a tuple",
        "experimental_enable_get_next_as_optional": "nothing to do: the last, partial batch of a pass is exact",
        "experimental_make_numpy_dataset": "strategy.make_numpy_dataset",
        "experimental_require_static_shapes": "nothing: replicas may differ in size, also in compiled steps",
        "reduce": "strategy.reduce(reduce_op, value, axis), or extended.reduce_to(reduce_op, value, destinations)",
        "run": "strategy.run(fn, args, kwargs)",
        "tpu_hardware_feature": _EMBEDDING,
    },
    "ReplicaContext": {
        "device": "devices: a compiled step is one program for all of them",
        "distribution_strategy": "strategy",
        "fetch": "the value itself: return it from the step",
        "is_single_replica": "num_replicas_in_sync == 1",
        "is_single_tower": "num_replicas_in_sync == 1",
        "num_replicas": "num_replicas_in_sync",
        "num_towers": "num_replicas_in_sync",
        "reduce": "all_reduce(reduce_op, value)",
        "replica_id": "replica_id_in_sync_group",
        "tower_id": "replica_id_in_sync_group",
        "tower_local_var_scope": _ON_READ,
    },
    "InputOptions": {
        "experimental_fetch_to_device": "nothing: elements are put on the devices, as many ahead as prefetch says",
        "experimental_per_replica_buffer_size": "prefetch, in elements",
        "experimental_place_dataset_on_device": "nothing: datasets are read on the host",
        "experimental_prefetch_to_device": "prefetch, in elements; 0 for none",
        "experimental_replication_mode": "strategy.distribute_datasets_from_function for one batch a replica",
    },
    "DistributedDataset": {
        "initializer": _ITERATED,
        "make_initializable_iterator": "iter(dataset)",
        "make_one_shot_iterator": "iter(dataset)",
        "reduce": "a Python loop over the dataset",
    },
    "DistributedIterator": {
        "get_next_as_optional": "next(iterator), which ends with StopIteration",
        "initialize": _ITERATED,
        "initializer": _ITERATED,
    },
    "ClusterResolver": {
        "get_task_info": "the attributes task_type and task_id",
    },
    "TPUClusterResolver": {
        "get_coordination_service_leader": "nothing: jax.distributed.initialize knows it",
        "get_tpu_system_metadata": "the attribute topology",
        "set_tpu_topology": "nothing: JAX says what the topology is",
        "tpu_hardware_feature": _EMBEDDING,
    },
    "AutoShardPolicy": {
        "HINT": "replicax.AutoShardPolicy.DATA, or a dataset_fn that looks at its InputContext",
    },
    "MultiStepContext": {
        "run_op": "nothing: the steps have run when run_steps returns",
    },
    "Variable": {
        "assign_moving_average": "assign(momentum * variable + (1 - momentum) * value)",
        "eval": "numpy()",
        "get": _LOCAL,
        "get_shape": "shape",
        "initialized_value": "value",
        "initializer": "nothing: a variable has its value when it has been created",
        "is_initialized": "nothing: a variable has its value when it has been created",
        "load": "assign(value)",
        "primary": "value; the copies are strategy.local_results(variable)",
        "sparse_read": "variable[indices]",
        "values": "strategy.local_results(variable)",
    },
    "Aggregation": {
        "ONLY_FIRST_TOWER": "replicax.Aggregation.ONLY_FIRST_REPLICA",
    },
    "PerReplica": {
        "get": _LOCAL,
        "primary": "strategy.local_results(value)[0]",
    },
}
"""By the class that had it, or ``replicax`` for the module."""


def missing(owner: Any, name: str, otherwise: str | None = None) -> AttributeError:
    """The error that ``owner`` has no attribute ``name``, with today's name if it had one.

    Args:
      owner: an object, the module ``replicax``, or an enum.
      name: of the attribute.
      otherwise: what to say if this is no old name.
    """
    if isinstance(owner, types.ModuleType):
        kinds, what = ["replicax"], f"module {owner.__name__!r}"
    elif isinstance(owner, type):
        kinds, what = [owner.__name__], f"{owner.__name__!r}"
    else:
        kinds = [kind.__name__ for kind in type(owner).__mro__]
        what = f"{kinds[0]!r} object"
    today = next((NAMES[kind][name] for kind in kinds if name in NAMES.get(kind, ())), None)
    hint = "" if today is None else f": a name of tf.distribute's; here it is {today}"
    text = f"{what} has no attribute {name!r}{hint}"
    return AttributeError(text if today or otherwise is None else otherwise, name=name, obj=owner)


class Renamed:
    """Objects whose old names are errors that name today's."""

    __slots__ = ()

    if not TYPE_CHECKING:  # or no wrong name would be seen by a type checker

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name)


class RenamedMembers(enum.EnumMeta):
    """The type of enums whose members' old names are errors that name today's."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            members = cls.__dict__.get("_member_map_", {})  # Python 3.11 looks them up here
            if name in members:
                return members[name]
            raise missing(cls, name)


def keywords_renamed(**old: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function's old keyword arguments be errors that name today's.

    Args:
      old: by the old keyword, what to say: today's keyword, or a sentence if there is none. The function that comes
        back has them as ``old_keywords``.

    >>> from replicax.old_names import keywords_renamed
    >>> @keywords_renamed(grouped="group")
    ... def update(group=True):
    ...     return group
    >>> update(grouped=False)
    Traceback (most recent call last):
    TypeError: update: 'grouped' is a keyword of tf.distribute's; here it is 'group'
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        checked = _refusing(function, old, "is a keyword of tf.distribute's")
        checked.old_keywords = old  # type: ignore[attr-defined]
        return checked

    return decorate


def keywords_of_others(**others: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let keyword arguments that other strategies take be errors that say what to do here.

    >>> from replicax.old_names import keywords_of_others
    >>> @keywords_of_others(num_logical_devices="name one device for each replica")
    ... def strategy(devices=None):
    ...     return devices
    >>> strategy(num_logical_devices=2)
    Traceback (most recent call last):
    TypeError: strategy: 'num_logical_devices' is a keyword of other strategies; name one device for each replica
    """
    return lambda function: _refusing(function, others, "is a keyword of other strategies")


def _refusing(function: Callable[_P, _R], refused: Mapping[str, str], why: str) -> Callable[_P, _R]:
    """``function``, with some keyword arguments being errors."""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if kwargs and not refused.keys().isdisjoint(kwargs):
            keyword = next(name for name in kwargs if name in refused)
            today = refused[keyword]
            here = f"here it is {today!r}" if today.isidentifier() else today
            name = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{name}: {keyword!r} {why}; {here}")
        return function(*args, **kwargs)

    return checked
