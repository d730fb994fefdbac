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
from replicax.system import packages as _packages, registry
from replicax.system.exit_codes import EXIT_PREEMPTED

if TYPE_CHECKING:
    from replicax import (
        cluster as cluster,
        data as data,
        errors as errors,
        loop as loop,
        models as models,
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

__version__ = _packages.VERSION

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


def _by_name(names: dict[str, str]) -> dict[str, str]:
    """The module of each name, from the names of each module."""
    return {name: module for module, some in names.items() for name in some.split()}


# Loaded on demand: so commands that need no JAX start quickly, and `import replicax` is as fast as possible.
_LATER = _by_name(
    {
        "replicax.checkpoint": "Checkpoint CheckpointManager",
        "replicax.cluster.initialization": "initialize_workers",
        "replicax.collectives": "ReduceOp",
        "replicax.communication": "CommunicationImplementation CommunicationOptions",
        "replicax.context": (
            "ReplicaContext get_replica_context get_strategy has_strategy in_cross_replica_context set_strategy"
        ),
        "replicax.data": "DistributedDataset DistributedIterator InputContext InputOptions ValueContext",
        "replicax.devices.mesh": "REPLICA_AXIS",
        "replicax.devices.selection": "use_cpu_devices",
        "replicax.execution": "Executable Locality",
        "replicax.execution.many_steps.step_outputs": "MultiStepContext",
        "replicax.execution.run": "RunOptions debug",
        "replicax.extended": "StrategyExtended",
        "replicax.gpu.gpu_resolver": "GPUClusterResolver",
        "replicax.hlo.collective_instructions": "Collective",
        "replicax.indexed_slices": "IndexedSlices",
        "replicax.loop": "CSVLog Callback EarlyStopping TensorBoardLog TrainingRun train",
        "replicax.parameter_server": "ClusterCoordinator ParameterServerStrategy",
        "replicax.planning": "plan",
        "replicax.strategies": (
            "CentralStorageStrategy MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy ShardedStrategy"
        ),
        "replicax.strategies.default": "DefaultStrategy",
        "replicax.strategies.tpu": "TPUStrategy",
        "replicax.strategy": "Strategy",
        "replicax.tpu.assignment": "DeviceAssignment",
        "replicax.tpu.resolver": "TPUClusterResolver",
        "replicax.tpu.topology": "Topology",
        "replicax.training": (
            "Accuracy Mean Optimizer as_share compute_average_loss scale_regularization_loss total_of_shares "
            "value_and_grad"
        ),
        "replicax.values": "PerReplica",
        "replicax.variables": "Aggregation Synchronization Variable as_arrays as_variables assign",
        "replicax.workers.heartbeat": "paused",
    }
)

# Names that were here before, with the module that has them now.
_MOVED = _by_name(
    {
        "replicax.cluster": (
            "ClusterResolver ClusterSpec KubernetesClusterResolver KubernetesExecutableLocation "
            "SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver UnionClusterResolver"
        ),
        "replicax.data": (
            "AutoShardPolicy InputPlan PartialBatch array_records csv_rows parquet_rows text_lines tfrecords"
        ),
        "replicax.errors": (
            "AbsentDeviceError CheckpointError CompilationError ContextError DeadlockError ExecutorWarning "
            "IntegerRangeError LocalityError LocalityWarning PlacementError ReproducibilityWarning RetraceWarning "
            "ShareWarning TraceError VariableLostError WorkerError"
        ),
        "replicax.parameter_server": "RemoteValue WorkReport",
        "replicax.planning": "Chip Plan",
        "replicax.variables": (
            "FixedShardsPartitioner GroupPartitioner MaxSizePartitioner MinSizePartitioner ShardedVariable"
        ),
    }
)
_PLACES = dict.fromkeys(__all__, __name__) | _MOVED
"""The module of each public name."""


def _later(module: str, name: str) -> Callable[[], Any]:
    """A function that loads a name of a module of Replicax."""
    return lambda: getattr(importlib.import_module(f"{__name__}.{module}"), name)


def _adapt_keras() -> None:
    if "keras.src.trainers.trainer" in sys.modules:  # it is Keras 3
        from replicax.models.keras.scoped_models import install

        install()


registry.default_strategy = _later("strategies.default", "default")
registry.strategy_class = _later("strategy", "Strategy")
registry.examples_in_results = _later("padding.examples", "where_examples_are")
registry.padding_question = _later("padding.questions", "Question")
registry.evaluate_on_device = _later("shared_devices.device_program", "evaluated_on_device")
registry.capture_ragged = _later("ragged.sizes", "capture_ragged")
registry.check_ragged_text = _later("ragged.sizes", "check_arms")
registry.run_per_replica = _later("per_replica.executor", "run_per_replica")
registry.replicate_placed = _later("pipeline.placed_program", "replicate_placed")
registry.object_adapter = _later("models.nnx", "adapter")
registry.scoped_libraries["keras"] = _adapt_keras
if importlib.util.find_spec("replicax.checks") is not None:
    registry.step_checks.append(_later("checks", "check_step"))
if importlib.util.find_spec("replicax.backends") is not None:
    registry.backends = _later("backends", "BACKENDS")


if not TYPE_CHECKING:  # or a type checker would see no wrong name

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
    packages = {module.removeprefix("replicax.") for module in _MOVED.values()}
    return sorted({*__all__, *packages, "loop", "models", *(name for name in globals() if name.startswith("__"))})
