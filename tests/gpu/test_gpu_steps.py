"""Steps for GPUs are those that somebody writes by hand: as many kernels, and as much memory for temporaries.

How long both take to compile, ``benchmarks/gpu_steps.py`` measures.
"""

from __future__ import annotations

import pytest

from benchmarks.gpu_steps import KERNELS, MODELS, TEMPORARIES, sides
from tests.gpu.described import needs_compiler
from tests.programs.programs import third_party

pytestmark = [needs_compiler, pytest.mark.soak]


@pytest.mark.parametrize("model", MODELS)
@third_party
def test_kernels_and_temporaries_beside_hand_written_jax(model: str) -> None:
    found = sides(model)
    ours, theirs = found["replicax"], found["hand"]
    assert theirs["kernels"] > 30
    assert ours["kernels"] <= KERNELS * theirs["kernels"]
    assert ours["temporaries"] <= TEMPORARIES * theirs["temporaries"]
