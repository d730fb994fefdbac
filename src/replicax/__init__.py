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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.old_names import missing
from replicax.system import registry
from replicax.system.exit_codes import EXIT_PREEMPTED

if TYPE_CHECKING:
    from replicax.checkpoint import Checkpoint, CheckpointManager
    from replicax.cluster.cluster_resolver import ClusterResolver
    from replicax.cluster.cluster_spec import ClusterSpec
    from replicax.cluster.initialization import initialize_workers
    from replicax.cluster.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
    from replicax.cluster.simple import SimpleClusterResolver
    from replicax.cluster.slurm import SlurmClusterResolver
    from replicax.cluster.tf_config import TFConfigClusterResolver
    from replicax.cluster.union import UnionClusterResolver
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
    from replicax.data import (
        AutoShardPolicy,
        DistributedDataset,
        DistributedIterator,
        InputContext,
        InputOptions,
        InputPlan,
        PartialBatch,
        ValueContext,
    )
    from replicax.data.files import array_records, csv_rows, parquet_rows, text_lines, tfrecords
    from replicax.devices.mesh import REPLICA_AXIS
    from replicax.devices.selection import use_cpu_devices
    from replicax.errors import (
        AbsentDeviceError,
        CheckpointError,
        CompilationError,
        ContextError,
        DeadlockError,
        ExecutorWarning,
        IntegerRangeError,
        LocalityError,
        LocalityWarning,
        PlacementError,
        ReproducibilityWarning,
        RetraceWarning,
        ShareWarning,
        TraceError,
        VariableLostError,
        WorkerError,
    )
    from replicax.execution import Executable, Locality
    from replicax.execution.many_steps.step_outputs import MultiStepContext
    from replicax.execution.run import RunOptions, debug
    from replicax.extended import StrategyExtended
    from replicax.gpu.gpu_resolver import GPUClusterResolver
    from replicax.hlo.collective_instructions import Collective
    from replicax.indexed_slices import IndexedSlices
    from replicax.loop import Callback, CSVLog, EarlyStopping, TensorBoardLog, TrainingRun, train
    from replicax.parameter_server import ClusterCoordinator, ParameterServerStrategy, RemoteValue, WorkReport
    from replicax.planning import Chip, Plan, plan
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
    from replicax.variables import (
        Aggregation,
        FixedShardsPartitioner,
        GroupPartitioner,
        MaxSizePartitioner,
        MinSizePartitioner,
        ShardedVariable,
        Synchronization,
        Variable,
        as_arrays,
        as_variables,
        assign,
    )
    from replicax.workers.heartbeat import paused

__version__ = "0.1.0"

__all__ = [
    "EXIT_PREEMPTED",
    "REPLICA_AXIS",
    "AbsentDeviceError",
    "Accuracy",
    "Aggregation",
    "AutoShardPolicy",
    "CSVLog",
    "Callback",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "Chip",
    "ClusterCoordinator",
    "ClusterResolver",
    "ClusterSpec",
    "Collective",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CompilationError",
    "ContextError",
    "DeadlockError",
    "DefaultStrategy",
    "DeviceAssignment",
    "DistributedDataset",
    "DistributedIterator",
    "EarlyStopping",
    "Executable",
    "ExecutorWarning",
    "FixedShardsPartitioner",
    "GPUClusterResolver",
    "GroupPartitioner",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputPlan",
    "IntegerRangeError",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "Locality",
    "LocalityError",
    "LocalityWarning",
    "MaxSizePartitioner",
    "Mean",
    "MinSizePartitioner",
    "MirroredStrategy",
    "MultiStepContext",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Optimizer",
    "ParameterServerStrategy",
    "PartialBatch",
    "PerReplica",
    "PlacementError",
    "Plan",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "ReproducibilityWarning",
    "RetraceWarning",
    "RunOptions",
    "ShardedStrategy",
    "ShardedVariable",
    "ShareWarning",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "Strategy",
    "StrategyExtended",
    "Synchronization",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TPUStrategy",
    "TensorBoardLog",
    "Topology",
    "TraceError",
    "TrainingRun",
    "UnionClusterResolver",
    "ValueContext",
    "Variable",
    "VariableLostError",
    "WorkReport",
    "WorkerError",
    "array_records",
    "as_arrays",
    "as_share",
    "as_variables",
    "assign",
    "compute_average_loss",
    "csv_rows",
    "debug",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "initialize_workers",
    "parquet_rows",
    "paused",
    "plan",
    "scale_regularization_loss",
    "set_strategy",
    "text_lines",
    "tfrecords",
    "total_of_shares",
    "train",
    "use_cpu_devices",
    "value_and_grad",
]


# Loaded when they are used: so the commands that need no JAX start quickly, and `import replicax` costs what it must.
_LATER = {
    "AbsentDeviceError": "replicax.errors",
    "Accuracy": "replicax.training",
    "Aggregation": "replicax.variables",
    "AutoShardPolicy": "replicax.data",
    "CSVLog": "replicax.loop",
    "Callback": "replicax.loop",
    "CentralStorageStrategy": "replicax.strategies",
    "Checkpoint": "replicax.checkpoint",
    "CheckpointError": "replicax.errors",
    "CheckpointManager": "replicax.checkpoint",
    "Chip": "replicax.planning",
    "ClusterCoordinator": "replicax.parameter_server",
    "ClusterResolver": "replicax.cluster.cluster_resolver",
    "ClusterSpec": "replicax.cluster.cluster_spec",
    "Collective": "replicax.hlo.collective_instructions",
    "CommunicationImplementation": "replicax.communication",
    "CommunicationOptions": "replicax.communication",
    "CompilationError": "replicax.errors",
    "ContextError": "replicax.errors",
    "DeadlockError": "replicax.errors",
    "DefaultStrategy": "replicax.strategies.default",
    "DeviceAssignment": "replicax.tpu.assignment",
    "DistributedDataset": "replicax.data",
    "DistributedIterator": "replicax.data",
    "EarlyStopping": "replicax.loop",
    "Executable": "replicax.execution",
    "ExecutorWarning": "replicax.errors",
    "FixedShardsPartitioner": "replicax.variables",
    "GPUClusterResolver": "replicax.gpu.gpu_resolver",
    "GroupPartitioner": "replicax.variables",
    "IndexedSlices": "replicax.indexed_slices",
    "InputContext": "replicax.data",
    "InputOptions": "replicax.data",
    "InputPlan": "replicax.data",
    "IntegerRangeError": "replicax.errors",
    "KubernetesClusterResolver": "replicax.cluster.kubernetes",
    "KubernetesExecutableLocation": "replicax.cluster.kubernetes",
    "Locality": "replicax.execution",
    "LocalityError": "replicax.errors",
    "LocalityWarning": "replicax.errors",
    "MaxSizePartitioner": "replicax.variables",
    "Mean": "replicax.training",
    "MinSizePartitioner": "replicax.variables",
    "MirroredStrategy": "replicax.strategies",
    "MultiStepContext": "replicax.execution.many_steps.step_outputs",
    "MultiWorkerMirroredStrategy": "replicax.strategies",
    "OneDeviceStrategy": "replicax.strategies",
    "Optimizer": "replicax.training",
    "ParameterServerStrategy": "replicax.parameter_server",
    "PartialBatch": "replicax.data",
    "PerReplica": "replicax.values",
    "PlacementError": "replicax.errors",
    "Plan": "replicax.planning",
    "REPLICA_AXIS": "replicax.devices.mesh",
    "ReduceOp": "replicax.collectives",
    "RemoteValue": "replicax.parameter_server",
    "ReplicaContext": "replicax.context",
    "ReproducibilityWarning": "replicax.errors",
    "RetraceWarning": "replicax.errors",
    "RunOptions": "replicax.execution.run",
    "ShareWarning": "replicax.errors",
    "ShardedStrategy": "replicax.strategies",
    "ShardedVariable": "replicax.variables",
    "SimpleClusterResolver": "replicax.cluster.simple",
    "SlurmClusterResolver": "replicax.cluster.slurm",
    "Strategy": "replicax.strategy",
    "StrategyExtended": "replicax.extended",
    "Synchronization": "replicax.variables",
    "TFConfigClusterResolver": "replicax.cluster.tf_config",
    "TPUClusterResolver": "replicax.tpu.resolver",
    "TPUStrategy": "replicax.strategies.tpu",
    "TensorBoardLog": "replicax.loop",
    "Topology": "replicax.tpu.topology",
    "TraceError": "replicax.errors",
    "UnionClusterResolver": "replicax.cluster.union",
    "TrainingRun": "replicax.loop",
    "ValueContext": "replicax.data",
    "Variable": "replicax.variables",
    "VariableLostError": "replicax.errors",
    "WorkReport": "replicax.parameter_server",
    "WorkerError": "replicax.errors",
    "array_records": "replicax.data.files",
    "as_arrays": "replicax.variables",
    "as_share": "replicax.training",
    "as_variables": "replicax.variables",
    "assign": "replicax.variables",
    "compute_average_loss": "replicax.training",
    "csv_rows": "replicax.data.files",
    "debug": "replicax.execution.run",
    "get_replica_context": "replicax.context",
    "get_strategy": "replicax.context",
    "has_strategy": "replicax.context",
    "in_cross_replica_context": "replicax.context",
    "initialize_workers": "replicax.cluster.initialization",
    "parquet_rows": "replicax.data.files",
    "paused": "replicax.workers.heartbeat",
    "plan": "replicax.planning",
    "scale_regularization_loss": "replicax.training",
    "set_strategy": "replicax.context",
    "text_lines": "replicax.data.files",
    "tfrecords": "replicax.data.files",
    "total_of_shares": "replicax.training",
    "train": "replicax.loop",
    "use_cpu_devices": "replicax.devices.selection",
    "value_and_grad": "replicax.training",
}


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


registry.default_strategy = _load_default_strategy
registry.object_adapters["flax.nnx"] = _load_nnx_adapter
registry.scoped_libraries["keras"] = _adapt_keras


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        if name.isidentifier() and name[0] != "_" and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise missing(sys.modules[__name__], name)
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
