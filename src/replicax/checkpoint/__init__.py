"""Checkpoints: save the objects of a run, and restore them under any strategy."""

from replicax.checkpoint.checkpoint import Checkpoint
from replicax.checkpoint.manager import CheckpointManager

__all__ = ["Checkpoint", "CheckpointManager"]
