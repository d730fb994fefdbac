"""Memory of planned steps that is not in one heap: buffers of collectives, temporaries apart, the host's memory."""

from __future__ import annotations

import pytest

import replicax
from replicax.planning import planner
from tests.gpu.described import needs_compiler
from tests.planning.test_planner import build

pytestmark = needs_compiler


def test_heaps_of_collectives_and_of_temporaries_are_in_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"xla_gpu_enable_nccl_user_buffers": True, "xla_gpu_temp_buffer_use_separate_color": True}
    monkeypatch.setenv("XLA_FLAGS", " ".join(f"--{name}={value}" for name, value in flags.items()))
    strategy = replicax.ShardedStrategy(replicax.GPUClusterResolver(topology="h100:2").devices)
    step, spec = build(strategy, layers=1, width=128)
    plan = replicax.plan(strategy, step, spec)
    executable, _ = planner._traced_program(strategy, step, spec)
    compiled = executable.compiled(flags)
    assert "S(1)" in compiled.as_text()
    assert plan.memory.temporaries == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, abs=1024)
    assert sum(plan.memory.peak.values()) == plan.memory.total
