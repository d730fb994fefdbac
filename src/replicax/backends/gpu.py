"""What programs for GPUs need: gathers of pieces of variables that start one layer ahead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from replicax import _jax
from replicax.execution.compiled.backend import Backend, Target


class GPU(Backend):
    """The backend of GPUs."""

    def options(self, target: Target) -> Mapping[str, Any] | None:
        if not target.in_pieces:
            return None
        flags = os.environ.get("XLA_FLAGS", "").replace("_enable_pipelined_", "_pipeline_")  # two names for one flag
        return {
            name: value
            for name, value in _jax.GATHERS_AHEAD_ON_GPU.items()
            if f"--{name.replace('_enable_pipelined_', '_pipeline_')}" not in flags
        }
