"""How a step becomes a program, and the program runs: capture, infer, replicate, run."""

from replicax.execution.marks import Locality
from replicax.execution.replicate import Executable

__all__ = ["Executable", "Locality"]
