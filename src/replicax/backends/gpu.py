"""What programs for GPUs need: gathers of pieces that start one layer ahead, and calls of the host without a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from replicax import _jax
from replicax._jax.primitive_families import HOST_CALLS, PURE_HOST_CALLS
from replicax.execution.compiled.backend import Backend, Target
from replicax.execution.compiled.program_rewriting import Rewriting, Rule


class GPU(Backend):
    """The backend of GPUs."""

    def rules(self, jaxpr: _jax.Jaxpr, target: Target) -> list[Rule]:
        return [AbsentHostCalls()] if target.is_absent else []

    def options(self, target: Target) -> Mapping[str, Any] | None:
        if not target.in_pieces:
            return None
        flags = os.environ.get("XLA_FLAGS", "").replace("_enable_pipelined_", "_pipeline_")  # two names for one flag
        return {
            name: value
            for name, value in _jax.GATHERS_AHEAD_ON_GPU.items()
            if f"--{name.replace('_enable_pipelined_', '_pipeline_')}" not in flags
        }


class AbsentHostCalls(Rule):
    """The rule for calls of the host in programs that are compiled for GPUs that are not there.

    JAX asks the GPUs' own client for what calls Python, and there is none. What stands for such a call is the operation
    by which JAX's plugin for GPUs makes it, with no function behind it: the compiled program is the same.
    """

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in HOST_CALLS

    def replaced(self, equation: Any, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
        is_pure = equation.primitive.name in PURE_HOST_CALLS
        call = jax.ffi.ffi_call("xla_ffi_python_gpu_callback", types, has_side_effect=not is_pure)
        return list(call(*operands, index=np.uint64(0)))
