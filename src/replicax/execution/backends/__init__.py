"""What the compilers of single platforms need, each in a room that registers itself and may be removed."""

import replicax.execution.backends.gpu

try:
    import replicax.execution.backends.cpu  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "replicax.execution.backends.cpu":
        raise
