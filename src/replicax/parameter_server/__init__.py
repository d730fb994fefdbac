"""Parameter servers: variables on servers, workers that train with them, and a coordinator that schedules functions."""

from replicax.parameter_server.coordinator import ClusterCoordinator
from replicax.parameter_server.remote_values import PerWorkerDataset, PerWorkerIterator, RemoteValue
from replicax.parameter_server.strategy import ParameterServerStrategy
from replicax.parameter_server.work_report import WorkReport

__all__ = [
    "ClusterCoordinator",
    "ParameterServerStrategy",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "RemoteValue",
    "WorkReport",
]
