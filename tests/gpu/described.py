"""Whether XLA's compiler for GPUs is here, and strategies on GPUs that are not."""

from __future__ import annotations

import functools
import importlib.util

import pytest

import replicax

COMPILER = importlib.util.find_spec("jax_cuda12_plugin") is not None

needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs replicax[gpu-plan]; make gpu has it")


@functools.cache
def devices(name: str = "h100:8"):
    """The same each time: each has a process that compiles, which takes seconds to begin."""
    return replicax.GPUClusterResolver(topology=name).devices
