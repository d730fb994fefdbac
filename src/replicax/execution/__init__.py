"""Execution of steps: a step becomes a program, and the program runs (capture, infer, replicate, run)."""

from replicax.execution.compiled.replicate import Executable
from replicax.locality import Locality

__all__ = ["Executable", "Locality"]
