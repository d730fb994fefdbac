"""The loop: a run from its first step or its last checkpoint to its end."""

from replicax.loop.api import train
from replicax.loop.callbacks import Callback, EarlyStopping
from replicax.loop.logs.metric_files import CSVLog, TensorBoardLog
from replicax.loop.logs.trackers import MLflowLog, WandbLog
from replicax.loop.training_run import TrainingRun
from replicax.loop.wrapped_steps.accumulation import accumulated
from replicax.loop.wrapped_steps.precision import Precision

__all__ = [
    "CSVLog",
    "Callback",
    "EarlyStopping",
    "MLflowLog",
    "Precision",
    "TensorBoardLog",
    "TrainingRun",
    "WandbLog",
    "accumulated",
    "train",
]
