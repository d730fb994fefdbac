"""Replicax: write the training step for one replica, choose a strategy, and run it anywhere.

>>> import replicax
>>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
>>> x = strategy.distribute_values_from_function(lambda ctx: float(ctx.replica_id_in_sync_group))
>>> strategy.run(lambda x: replicax.get_replica_context().all_reduce("sum", x + 1), args=(x,))
Array(3., dtype=float32)
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.name_hints import missing
from replicax.system import registry
from replicax.system.exit_codes import EXIT_PREEMPTED

if TYPE_CHECKING:
    from replicax import (
        cluster as cluster,
        data as data,
        errors as errors,
        parameter_server as parameter_server,
        planning as planning,
        variables as variables,
    )
    from replicax.checkpoint import Checkpoint, CheckpointManager
    from replicax.cluster.initialization import initialize_workers
    from replicax.collectives import ReduceOp
    from replicax.communication import CommunicationImplementation, CommunicationOptions
    from replicax.context import (
        ReplicaContext,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
        set_strategy,
    )
    from replicax.data import DistributedDataset, DistributedIterator, InputContext, InputOptions, ValueContext
    from replicax.devices.mesh import REPLICA_AXIS
    from replicax.devices.selection import use_cpu_devices
    from replicax.execution import Executable, Locality
    from replicax.execution.many_steps.step_outputs import MultiStepContext
    from replicax.execution.run import RunOptions, debug
    from replicax.extended import StrategyExtended
    from replicax.gpu.gpu_resolver import GPUClusterResolver
    from replicax.hlo.collective_instructions import Collective
    from replicax.indexed_slices import IndexedSlices
    from replicax.loop import Callback, CSVLog, EarlyStopping, TensorBoardLog, TrainingRun, train
    from replicax.parameter_server import ClusterCoordinator, ParameterServerStrategy
    from replicax.planning import plan
    from replicax.strategies import (
        CentralStorageStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        ShardedStrategy,
    )
    from replicax.strategies.default import DefaultStrategy
    from replicax.strategies.tpu import TPUStrategy
    from replicax.strategy import Strategy
    from replicax.tpu.assignment import DeviceAssignment
    from replicax.tpu.resolver import TPUClusterResolver
    from replicax.tpu.topology import Topology
    from replicax.training import (
        Accuracy,
        Mean,
        Optimizer,
        as_share,
        compute_average_loss,
        scale_regularization_loss,
        total_of_shares,
        value_and_grad,
    )
    from replicax.values import PerReplica
    from replicax.variables import Aggregation, Synchronization, Variable, as_arrays, as_variables, assign
    from replicax.workers.heartbeat import paused

__version__ = "0.1.0"

__all__ = [
    "EXIT_PREEMPTED",
    "REPLICA_AXIS",
    "Accuracy",
    "Aggregation",
    "CSVLog",
    "Callback",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterCoordinator",
    "Collective",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DefaultStrategy",
    "DeviceAssignment",
    "DistributedDataset",
    "DistributedIterator",
    "EarlyStopping",
    "Executable",
    "GPUClusterResolver",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "Locality",
    "Mean",
    "MirroredStrategy",
    "MultiStepContext",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Optimizer",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "ShardedStrategy",
    "Strategy",
    "StrategyExtended",
    "Synchronization",
    "TPUClusterResolver",
    "TPUStrategy",
    "TensorBoardLog",
    "Topology",
    "TrainingRun",
    "ValueContext",
    "Variable",
    "as_arrays",
    "as_share",
    "as_variables",
    "assign",
    "compute_average_loss",
    "debug",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "initialize_workers",
    "paused",
    "plan",
    "scale_regularization_loss",
    "set_strategy",
    "total_of_shares",
    "train",
    "use_cpu_devices",
    "value_and_grad",
]


# Loaded on demand: so commands that need no JAX start quickly, and `import replicax` is as fast as possible.
_LATER = {
    "Accuracy": "replicax.training",
    "Aggregation": "replicax.variables",
    "CSVLog": "replicax.loop",
    "Callback": "replicax.loop",
    "CentralStorageStrategy": "replicax.strategies",
    "Checkpoint": "replicax.checkpoint",
    "CheckpointManager": "replicax.checkpoint",
    "ClusterCoordinator": "replicax.parameter_server",
    "Collective": "replicax.hlo.collective_instructions",
    "CommunicationImplementation": "replicax.communication",
    "CommunicationOptions": "replicax.communication",
    "DefaultStrategy": "replicax.strategies.default",
    "DeviceAssignment": "replicax.tpu.assignment",
    "DistributedDataset": "replicax.data",
    "DistributedIterator": "replicax.data",
    "EarlyStopping": "replicax.loop",
    "Executable": "replicax.execution",
    "GPUClusterResolver": "replicax.gpu.gpu_resolver",
    "IndexedSlices": "replicax.indexed_slices",
    "InputContext": "replicax.data",
    "InputOptions": "replicax.data",
    "Locality": "replicax.execution",
    "Mean": "replicax.training",
    "MirroredStrategy": "replicax.strategies",
    "MultiStepContext": "replicax.execution.many_steps.step_outputs",
    "MultiWorkerMirroredStrategy": "replicax.strategies",
    "OneDeviceStrategy": "replicax.strategies",
    "Optimizer": "replicax.training",
    "ParameterServerStrategy": "replicax.parameter_server",
    "PerReplica": "replicax.values",
    "REPLICA_AXIS": "replicax.devices.mesh",
    "ReduceOp": "replicax.collectives",
    "ReplicaContext": "replicax.context",
    "RunOptions": "replicax.execution.run",
    "ShardedStrategy": "replicax.strategies",
    "Strategy": "replicax.strategy",
    "StrategyExtended": "replicax.extended",
    "Synchronization": "replicax.variables",
    "TPUClusterResolver": "replicax.tpu.resolver",
    "TPUStrategy": "replicax.strategies.tpu",
    "TensorBoardLog": "replicax.loop",
    "Topology": "replicax.tpu.topology",
    "TrainingRun": "replicax.loop",
    "ValueContext": "replicax.data",
    "Variable": "replicax.variables",
    "as_arrays": "replicax.variables",
    "as_share": "replicax.training",
    "as_variables": "replicax.variables",
    "assign": "replicax.variables",
    "compute_average_loss": "replicax.training",
    "debug": "replicax.execution.run",
    "get_replica_context": "replicax.context",
    "get_strategy": "replicax.context",
    "has_strategy": "replicax.context",
    "in_cross_replica_context": "replicax.context",
    "initialize_workers": "replicax.cluster.initialization",
    "paused": "replicax.workers.heartbeat",
    "plan": "replicax.planning",
    "scale_regularization_loss": "replicax.training",
    "set_strategy": "replicax.context",
    "total_of_shares": "replicax.training",
    "train": "replicax.loop",
    "use_cpu_devices": "replicax.devices.selection",
    "value_and_grad": "replicax.training",
}

# Names that were here before, with the module that has them now.
_MOVED = {
    name: module
    for module, names in {
        "replicax.cluster": (
            "ClusterResolver",
            "ClusterSpec",
            "KubernetesClusterResolver",
            "KubernetesExecutableLocation",
            "SimpleClusterResolver",
            "SlurmClusterResolver",
            "TFConfigClusterResolver",
            "UnionClusterResolver",
        ),
        "replicax.data": (
            "AutoShardPolicy",
            "InputPlan",
            "PartialBatch",
            "array_records",
            "csv_rows",
            "parquet_rows",
            "text_lines",
            "tfrecords",
        ),
        "replicax.errors": (
            "AbsentDeviceError",
            "CheckpointError",
            "CompilationError",
            "ContextError",
            "DeadlockError",
            "ExecutorWarning",
            "IntegerRangeError",
            "LocalityError",
            "LocalityWarning",
            "PlacementError",
            "ReproducibilityWarning",
            "RetraceWarning",
            "ShareWarning",
            "TraceError",
            "VariableLostError",
            "WorkerError",
        ),
        "replicax.parameter_server": ("RemoteValue", "WorkReport"),
        "replicax.planning": ("Chip", "Plan"),
        "replicax.variables": (
            "FixedShardsPartitioner",
            "GroupPartitioner",
            "MaxSizePartitioner",
            "MinSizePartitioner",
            "ShardedVariable",
        ),
    }.items()
    for name in names
}
_PLACES = dict.fromkeys(__all__, __name__) | _MOVED
"""The module of each public name."""


def _load_default_strategy() -> tuple[Callable[[], Any], type]:
    from replicax.strategies.default import default
    from replicax.strategy import Strategy

    return default, Strategy


def _load_nnx_adapter() -> Any:
    from replicax.models.nnx import adapter

    return adapter


def _adapt_keras() -> None:
    if "keras.src.trainers.trainer" in sys.modules:  # it is Keras 3
        from replicax.models.keras.scoped_models import install

        install()


def _load_step_check() -> Any:
    from replicax.checks import check_step

    return check_step


def _load_placed_steps() -> Any:
    from replicax.pipeline.placed_program import replicate_placed

    return replicate_placed


def _load_ragged_steps() -> Any:
    from replicax.ragged.sizes import capture_ragged, check_arms

    return capture_ragged, check_arms


def _load_per_replica_executor() -> Any:
    from replicax.per_replica.executor import run_per_replica
    from replicax.per_replica.fallback import fall_back

    return run_per_replica, fall_back


registry.default_strategy = _load_default_strategy
registry.ragged_steps = _load_ragged_steps
registry.per_replica_executor = _load_per_replica_executor
registry.step_checks.append(_load_step_check)
registry.placed_steps = _load_placed_steps
registry.object_adapters["flax.nnx"] = _load_nnx_adapter
registry.scoped_libraries["keras"] = _adapt_keras


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        warnings.warn(f"replicax.{name} is now {_MOVED[name]}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(_MOVED[name]), name)
    if name not in _LATER:
        if name.isidentifier() and name[0] != "_" and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise missing(sys.modules[__name__], name)
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
