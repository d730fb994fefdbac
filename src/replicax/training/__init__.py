"""Training: gradients with respect to variables, losses for any number of replicas, metrics and optimizers."""

from replicax.training.gradients import value_and_grad
from replicax.training.losses import as_share, compute_average_loss, scale_regularization_loss
from replicax.training.metrics import Accuracy, Mean
from replicax.training.optimizer import Optimizer
from replicax.training.totals import total_of_shares

__all__ = [
    "Accuracy",
    "Mean",
    "Optimizer",
    "as_share",
    "compute_average_loss",
    "scale_regularization_loss",
    "total_of_shares",
    "value_and_grad",
]
