"""Parameter servers: variables on servers, workers that train on their own or in step, a coordinator that schedules."""

from replicax.parameter_server.cluster_coordinator import ClusterCoordinator
from replicax.parameter_server.parameter_server_strategy import ParameterServerStrategy
from replicax.parameter_server.remote_values import PerWorkerDataset, PerWorkerIterator, RemoteValue
from replicax.parameter_server.work_report import WorkReport

__all__ = [
    "ClusterCoordinator",
    "ParameterServerStrategy",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "RemoteValue",
    "WorkReport",
]
