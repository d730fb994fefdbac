"""``CPURule``: a rule for programs that XLA's CPU backend compiles."""

from __future__ import annotations

from replicax import _jax
from replicax.execution.compiled.backend import Target
from replicax.execution.compiled.program_rewriting import Rule


class CPURule(Rule):
    """A rule for programs whose values the compiler does not split."""

    keeps_order = False
    """Whether it adds up in the order in which the program does."""

    def is_wanted(self, jaxpr: _jax.Jaxpr, target: Target) -> bool:
        """Whether the rule has something to do in a program."""
        may_be = not target.automatic and (self.keeps_order or not target.in_order)
        return may_be and _jax.contains(jaxpr, self.is_ours)
