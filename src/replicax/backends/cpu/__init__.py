"""Rules and options for XLA's CPU backend: operations that it compiles badly are rewritten.

The core knows nothing of this package (:mod:`replicax.execution.compiled.backend`). Without it, programs are compiled
as they are.

A rule stays if it makes a step 1.2 times as quick in at least three of 24 programs (the gallery, the peers' models, and
ten for which no rule was written), slows none by more than 3%, and does not slow the first call; see
``benchmarks/cpu_rules.py``. Where programs gain, on two devices and two cores of a shared machine:

=====================  =====================================================================================
``SmallSums``          8 programs: 1.25 to 1.64 (CNNs, a ViT, diffusion, BERT, a VAE, seq2seq)
``Convolutions``       7 programs with convolutions in ``run_steps``: 2.3 to 17
``PoolingGradients``   1 program: 2.4 (the peers' CNN; its first call takes 0.63 of the time), 1.08 in another
=====================  =====================================================================================

``PoolingGradients`` stays for fewer than three: in no other program does XLA make a loop of pooling's gradient, and the
rule keeps the bits. Five rules went, as they did not gain 1.2 on three: the order of dims of gradients by weights, and
by filters, sums with few dims, max-pooling without windows, and values of residual connections kept in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax.backends.cpu.convolutions import Convolutions
from replicax.backends.cpu.narrow_floats import NarrowProducts, NarrowSums
from replicax.backends.cpu.pooling import PoolingGradients
from replicax.backends.cpu.rule import CPURule
from replicax.backends.cpu.small_sums import SmallSums
from replicax.execution.compiled.backend import Backend, Target
from replicax.execution.compiled.program_rewriting import Rule

SAME_BITS = {
    "xla_disable_hlo_passes": "cse",
    "xla_cpu_experimental_ynn_fusion_type": ",".join(
        f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("INDIVIDUAL_DOT", "INDIVIDUAL_CONVOLUTION", "REDUCE")
    ),
}
"""Options with which one step has the same bits on one device and on several.

A program for several devices is freed of what it computes twice before it is simplified, and one for one device after
that; and then other simplifications apply. So that pass is left out. A library gets products and convolutions, each by
itself, and sums over elements with what their operands are computed from: which is the same wherever a replica is.
"""

SUMS_APART = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
"""Options with which the compiler leaves the all-reduces of a program apart.

It would make one of all of them, at the end of the program, up to which all operands are in memory: the gradients of a
whole model. Compilers for other devices join only so many as are of a limited size.
"""

NEEDED: tuple[type[CPURule], ...] = (NarrowSums, NarrowProducts)
"""Without these, XLA fails."""

RULES: tuple[type[CPURule], ...] = (PoolingGradients, SmallSums, Convolutions)
"""Those that make programs quicker. The first whose operation it is rewrites it."""


class CPU(Backend):
    """The backend of CPUs."""

    def __init__(self, kinds: Sequence[type[CPURule]] = RULES) -> None:
        self.kinds = kinds

    def rules(self, jaxpr: _jax.Jaxpr, target: Target) -> list[Rule]:
        return [rule for rule in (kind() for kind in (*self.kinds, *NEEDED)) if rule.is_wanted(jaxpr, target)]

    def options(self, target: Target) -> Mapping[str, Any] | None:
        return SAME_BITS if target.in_order else SUMS_APART if target.in_pieces else None
