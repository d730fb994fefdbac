"""Replicax: write the training step for one replica, choose a strategy, and run it anywhere.

>>> import replicax
>>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
>>> x = strategy.distribute_values_from_function(lambda ctx: float(ctx.replica_id_in_sync_group))
>>> strategy.run(lambda x: replicax.get_replica_context().all_reduce("sum", x + 1), args=(x,))
Array(3., dtype=float32)
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from replicax.checkpoint import Checkpoint, CheckpointManager
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
    PlacementError,
    RetraceWarning,
    TraceError,
    VariableLostError,
    WorkerError,
)
from replicax.execution import Executable, Locality
from replicax.execution.many_steps.step_outputs import MultiStepContext
from replicax.execution.run import RunOptions, debug
from replicax.extended import StrategyExtended
from replicax.hlo.collective_instructions import Collective
from replicax.indexed_slices import IndexedSlices
from replicax.old_names import missing
from replicax.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ShardedStrategy,
)
from replicax.strategies.default import DefaultStrategy
from replicax.strategy import Strategy
from replicax.training import Accuracy, Mean, Optimizer, compute_average_loss, scale_regularization_loss, value_and_grad
from replicax.values import PerReplica
from replicax.variables import (
    Aggregation,
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    ShardedVariable,
    Synchronization,
    Variable,
)

if TYPE_CHECKING:
    from replicax.planning import Chip, Plan, plan
    from replicax.strategies.tpu import TPUStrategy
    from replicax.tpu.assignment import DeviceAssignment
    from replicax.tpu.resolver import TPUClusterResolver
    from replicax.tpu.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "REPLICA_AXIS",
    "AbsentDeviceError",
    "Accuracy",
    "Aggregation",
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "Chip",
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
    "Executable",
    "ExecutorWarning",
    "FixedShardsPartitioner",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputPlan",
    "IntegerRangeError",
    "Locality",
    "LocalityError",
    "MaxSizePartitioner",
    "Mean",
    "MinSizePartitioner",
    "MirroredStrategy",
    "MultiStepContext",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Optimizer",
    "PartialBatch",
    "PerReplica",
    "PlacementError",
    "Plan",
    "ReduceOp",
    "ReplicaContext",
    "RetraceWarning",
    "RunOptions",
    "ShardedStrategy",
    "ShardedVariable",
    "Strategy",
    "StrategyExtended",
    "Synchronization",
    "TPUClusterResolver",
    "TPUStrategy",
    "Topology",
    "TraceError",
    "ValueContext",
    "Variable",
    "VariableLostError",
    "WorkerError",
    "array_records",
    "compute_average_loss",
    "csv_rows",
    "debug",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "parquet_rows",
    "plan",
    "scale_regularization_loss",
    "set_strategy",
    "text_lines",
    "tfrecords",
    "use_cpu_devices",
    "value_and_grad",
]


# Loaded when they are used, so that `import replicax` is quick.
_LATER = {
    "Chip": "replicax.planning",
    "DeviceAssignment": "replicax.tpu.assignment",
    "Plan": "replicax.planning",
    "TPUClusterResolver": "replicax.tpu.resolver",
    "TPUStrategy": "replicax.strategies.tpu",
    "Topology": "replicax.tpu.topology",
    "plan": "replicax.planning",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise missing(sys.modules[__name__], name)
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
