"""Names that people type from habit: those of TensorFlow 2, and arguments that only other strategies take.

They do not work, and the error says what to write instead. Right names cost no lookup. The table has only what people
type from habit: the distribution ``replicax-migrate`` knows the names of all releases of
``tf.distribute`` (it reads this table, too), and lists those that a program uses.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_OPTIONS = "replicax.CommunicationOptions, an argument of each collective"
_SIZE = "strategy.num_replicas_in_sync"
_DEVICES = "name the devices: devices=['gpu:0', 'gpu:1']; without the argument all are used"
_ONE_DEVICE = "MirroredStrategy(devices, num_logical_devices=…) has replicas of several devices"

NAMES: dict[str, dict[str, str]] = {
    "replicax": {
        "CollectiveCommunication": "replicax.CommunicationImplementation",
        "CollectiveHints": "replicax.CommunicationOptions",
        "CrossDeviceOps": _OPTIONS,
        "DistributedValues": "replicax.PerReplica",
        "HierarchicalCopyAllReduce": _OPTIONS,
        "NcclAllReduce": _OPTIONS,
        "PreemptionCheckpointHandler": "replicax.train with a replicax.CheckpointManager: at SIGTERM all workers save "
        "at the same step, and exit",
        "ReductionToOneDevice": _OPTIONS,
        "Server": "nothing: workers are processes of one program, which replicax.MultiWorkerMirroredStrategy connects",
        "VariableAggregation": "replicax.Aggregation",
        "VariableSynchronization": "replicax.Synchronization",
        "experimental": "replicax itself: its names carry no 'experimental'",
        "experimental_connect_to_cluster": "replicax.initialize_workers(cluster_resolver); TPUs are found without",
        "experimental_set_strategy": "replicax.set_strategy",
        "initialize_tpu_system": "nothing to do: JAX initializes the devices",
    },
    "Strategy": {
        "batch_reduce_to": "strategy.extended.batch_reduce_to",
        "call_for_each_replica": "strategy.run(fn, args, kwargs)",
        "cluster_resolver": "the attribute cluster_resolver, of a MultiWorkerMirroredStrategy or a TPUStrategy",
        "experimental_run": "strategy.run(fn, args=(next(iterator),))",
        "experimental_run_v2": "strategy.run",
        "merge_call": "replicax.get_replica_context().merge_call(merge_fn, args)",
        "num_replicas": _SIZE,
        "reduce_to": "strategy.extended.reduce_to",
        "unwrap": "strategy.local_results(value)",
        "update": "strategy.extended.update(var, fn, args)",
    },
    "StrategyExtended": {
        "experimental_make_numpy_dataset": "strategy.make_numpy_dataset",
        "reduce": "strategy.reduce(reduce_op, value, axis), or extended.reduce_to(reduce_op, value, destinations)",
        "run": "strategy.run(fn, args, kwargs)",
    },
    "ReplicaContext": {
        "num_replicas": "num_replicas_in_sync",
        "reduce": "all_reduce(reduce_op, value)",
        "replica_id": "replica_id_in_sync_group",
    },
    "CheckpointManager": {
        "checkpoints": "steps",
        "latest_checkpoint": "latest_step",
        "restore_or_initialize": "restore_latest",
    },
    "Mean": {
        "reset_state": "reset",
        "reset_states": "reset",
        "update_state": "update",
    },
    "Optimizer": {
        "iterations": "a replicax.Variable of your own, which the step counts up",
        "learning_rate": "an argument of the Optax transformation: a number or a schedule",
        "minimize": "replicax.value_and_grad(fn, variables), and optimizer.apply_gradients",
    },
    "DistributedIterator": {
        "get_next_as_optional": "next(iterator), which ends with StopIteration",
    },
    "Variable": {
        "get_shape": "shape",
        "initialized_value": "value",
        "values": "strategy.local_results(variable)",
    },
}
"""Attributes, by the class that had them, or ``replicax`` for the module. An entry that is only a dotted name is a
renaming; one that begins with "nothing" has no counterpart."""

ARGUMENTS: dict[str, dict[str, str]] = {
    "CentralStorageStrategy.__init__": {
        "num_logical_devices": f"variables are whole here, and a replica has one device: {_ONE_DEVICE}",
        "variable_partitioner": "variables are whole here, on the parameter_device: to have a piece on each replica, "
        "use MirroredStrategy(devices, variable_partitioner=…) or ShardedStrategy(devices)",
    },
    "InputOptions.__init__": {
        "experimental_fetch_to_device": "leave it out: elements are put on the devices, as many ahead as prefetch says",
        "experimental_per_replica_buffer_size": "use prefetch, in elements",
        "experimental_place_dataset_on_device": "leave it out: datasets are read on the host",
        "experimental_replication_mode": "use strategy.distribute_datasets_from_function for one batch a replica",
    },
    "MirroredStrategy.__init__": {
        "cross_device_ops": "each collective takes replicax.CommunicationOptions",
        "num_gpus": _DEVICES,
    },
    "MultiWorkerMirroredStrategy.__init__": {
        "communication": "communication_options=replicax.CommunicationOptions(…)",
    },
    "OneDeviceStrategy.__init__": {
        "num_logical_devices": _ONE_DEVICE,
        "variable_partitioner": "leave it out: there is one device, which has all of each variable",
    },
    "ReplicaContext.all_gather": {"experimental_hints": "options"},
    "ReplicaContext.all_reduce": {"experimental_hints": "options"},
    "RunOptions.__init__": {
        "experimental_bucketizing_dynamic_shape": "leave it out: each size has a program, or all have one with "
        "replicax.InputOptions(partial_batch='pad')",
        "experimental_enable_dynamic_batch_size": "leave it out: batches may differ in size",
        "experimental_xla_options": "set the environment variable XLA_FLAGS before JAX makes its devices",
    },
    "ShardedStrategy.__init__": {"partitioner": "variable_partitioner"},
    "Strategy.reduce": {"destinations": "strategy.extended.reduce_to chooses where the result is"},
    "StrategyExtended.batch_reduce_to": {"experimental_hints": "options"},
    "StrategyExtended.reduce_to": {"experimental_hints": "options"},
    "TPUStrategy.__init__": {
        "experimental_device_assignment": "device_assignment",
        "num_logical_devices": "the devices of a replica are those of its block of cores: device_assignment="
        "DeviceAssignment.build(resolver.topology, computation_shape=…, num_replicas=None)",
    },
    "Variable.__init__": {
        "caching_device": "leave it out: programs keep what they read",
        "constraint": "after the update, assign the constrained value",
        "shape": "give initial_value that shape",
        "validate_shape": "leave it out: a variable keeps its shape",
    },
}
"""Keyword arguments, by what does not take them: the argument that took their place, or a sentence."""


def missing(owner: Any, name: str, otherwise: str | None = None) -> AttributeError:
    """The error that ``owner`` has no attribute ``name``, with what the table says to write, or ``otherwise``."""
    if isinstance(owner, types.ModuleType):
        kinds, what = ["replicax"], f"module {owner.__name__!r}"
    else:
        kinds = [kind.__name__ for kind in type(owner).__mro__]
        what = f"{kinds[0]!r} object"
    today = next((NAMES[kind][name] for kind in kinds if name in NAMES.get(kind, ())), None)
    hint = "" if today is None else f": a name of TensorFlow's; here it is {today}"
    text = f"{what} has no attribute {name!r}{hint}"
    return AttributeError(text if today or otherwise is None else otherwise, name=name, obj=owner)


class NameHints:
    """Objects whose errors say what to write instead of an attribute or an argument that the table has."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        with_hints(cls)

    if not TYPE_CHECKING:  # or no wrong name would be seen by a type checker

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name)


def with_hints(kind: type[_T]) -> type[_T]:
    """Let the arguments that the table has of a class be errors with its answer; returns the class."""
    for path, arguments in ARGUMENTS.items():
        owner, _, method = path.partition(".")
        if owner == kind.__name__:
            where = path.removesuffix(".__init__")
            setattr(kind, method, refusing(where, arguments)(getattr(kind, method)))
    return kind


def refusing(where: str, arguments: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let keyword arguments that a function does not take be errors that say what to write instead."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if kwargs and not arguments.keys().isdisjoint(kwargs):
                keyword = next(name for name in kwargs if name in arguments)
                today = arguments[keyword]
                here = f"here it is {today!r}" if today.isidentifier() else today
                raise TypeError(f"{where}: there is no argument {keyword!r}; {here}")
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if error.__traceback__ is not None:
                    error.__traceback__ = error.__traceback__.tb_next  # without this frame
                raise

        return checked

    return decorate
