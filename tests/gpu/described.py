"""Whether XLA's compiler for GPUs is here, and strategies on GPUs that are not."""

from __future__ import annotations

import functools
import importlib.util

import pytest

import replicax
from replicax.gpu import cuda_compiler

COMPILER = importlib.util.find_spec("jax_cuda12_plugin") is not None

needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs replicax[gpu-plan]; make gpu has it")


# All that describe the same GPUs share a process that compiles, which takes seconds to begin; so tests describe few.
cuda_compiler.CompileProcess = functools.cache(cuda_compiler.CompileProcess)


def devices(name: str = "h100:8"):
    return replicax.GPUClusterResolver(topology=name).devices
