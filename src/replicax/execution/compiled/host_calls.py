"""Calls of the host, in programs that are compiled for GPUs that are not there.

JAX asks the GPUs' own client for what calls Python, and there is none. What stands for such a call is the operation by
which JAX's plugin for GPUs makes it, with no function behind it: the compiled program is the same.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from replicax import _jax
from replicax._jax.primitive_families import HOST_CALLS, PURE_HOST_CALLS
from replicax.execution.compiled.program_rewriting import Rewriting, Rule

_TARGET = "xla_ffi_python_gpu_callback"


class AbsentHostCalls(Rule):
    """The rule for all such calls."""

    def is_ours(self, equation: Any) -> bool:
        return equation.primitive.name in HOST_CALLS

    def replaced(self, equation: Any, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        return stand_in(equation, operands)


def stand_in(equation: Any, operands: list[Any]) -> list[Any]:
    """What a program for absent GPUs has for a call of the host."""
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
    is_pure = equation.primitive.name in PURE_HOST_CALLS
    call = jax.ffi.ffi_call(_TARGET, types, has_side_effect=not is_pure)
    return list(call(*operands, index=np.uint64(0)))


def host_is_absent(mesh: Mesh) -> bool:
    """Whether programs for ``mesh`` can't call a host: its devices are GPUs that are only described."""
    device = mesh.devices.flat[0]
    return bool(device.platform == "gpu" and _jax.is_absent(device))
