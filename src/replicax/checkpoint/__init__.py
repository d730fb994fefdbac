"""Checkpoints: saving what a run consists of, and restoring it onto any strategy."""

from replicax.checkpoint.checkpoint import Checkpoint
from replicax.checkpoint.checkpoint_manager import CheckpointManager

__all__ = ["Checkpoint", "CheckpointManager"]
