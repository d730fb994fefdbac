"""The backend of GPUs: gathers of pieces that start one layer ahead, and calls of the host without a GPU."""

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

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_PIPELINED = (
    {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _COLLECTIVES}
    if jax.__version_info__ >= (0, 11)
    else {f"xla_gpu_enable_pipelined_{kind}": True for kind in _COLLECTIVES}
)
_GATHER_THRESHOLD = "xla_gpu_all_gather_combine_threshold_bytes"
GATHERS_AHEAD: dict[str, Any] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    **_PIPELINED,
    _GATHER_THRESHOLD: 2**30,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**30,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
}
"""Settings of the compiler for GPUs with which pieces of variables are gathered one layer ahead.

A loop over layers then starts the gathers of the next layer at the end of a layer, as one, which products of this
layer hide. Without them the backward pass gathers at its beginning, where nothing hides it; and on GPUs before H100s
nothing hides any collective, as the scheduler that does is off there. benchmarks/README.md has what each
changes. Those that ``XLA_FLAGS`` names are left to it.

Thresholds are upper bounds: gathers are combined up to the size of the largest variable, sums up to that of its piece.
If that is a stack of layers, a layer's become one. Layers that are variables of their own stay apart: a gather of all
of them would be one that no product hides.

As an option, a mode has taken the place of a boolean in JAX 0.11; as a flag the boolean is still there.
"""

_LEAST = 30 * 2**20
"""The least threshold: XLA's own."""


class GPU(Backend):
    """The backend of GPUs."""

    def rules(self, jaxpr: _jax.Jaxpr, target: Target) -> list[Rule]:
        return [AbsentHostCalls()] if target.is_absent else []

    def options(self, target: Target) -> Mapping[str, Any] | None:
        if not target.in_pieces:
            return None
        whole, piece = target.in_pieces
        thresholds = [name for name in GATHERS_AHEAD if name.endswith("_threshold_bytes")]
        sizes = {name: whole if name == _GATHER_THRESHOLD else piece for name in thresholds}
        flags = os.environ.get("XLA_FLAGS", "").replace("_enable_pipelined_", "_pipeline_")  # two names for one flag
        return {
            name: min(value, max(_LEAST, sizes[name])) if name in sizes else value
            for name, value in GATHERS_AHEAD.items()
            if f"--{name.replace('_enable_pipelined_', '_pipeline_')}" not in flags
        }


class AbsentHostCalls(Rule):
    """The rule for calls of the host in programs that are compiled for GPUs that are not there.

    JAX needs the GPUs' client for a call of Python, and there is none. Each call becomes the operation by which JAX's
    plugin for GPUs makes it, with no function behind it: the compiled program is the same.
    """

    def is_ours(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name in HOST_CALLS

    def replaced(self, equation: Any, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.outvars]
        is_pure = equation.primitive.name in PURE_HOST_CALLS
        call = jax.ffi.ffi_call("xla_ffi_python_gpu_callback", types, has_side_effect=not is_pure)
        return list(call(*operands, index=np.uint64(0)))
