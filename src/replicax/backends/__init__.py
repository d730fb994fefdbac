"""What the compilers of single platforms need and others do not: a room for each, which may be removed."""

from replicax.backends.gpu import GPU
from replicax.execution.compiled.backend import Backend

BACKENDS: dict[str, Backend] = {"gpu": GPU()}
"""The backends by platform."""

try:
    from replicax.backends.cpu import CPU
except ModuleNotFoundError as error:
    if error.name != "replicax.backends.cpu":
        raise
else:
    BACKENDS["cpu"] = CPU()
