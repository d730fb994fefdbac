"""Checks of captured steps that warn of mistakes without an error. They change nothing; the core works without them.

``replicax/__init__.py`` registers :func:`check_step`, and :func:`replicax.execution.tracing.capture.checked`
calls whatever is registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replicax import _jax
from replicax.checks.locality.common_draws import warn_of_common_draws
from replicax.checks.locality.replicated_work import warn_of_replicated_work
from replicax.collectives import share_p
from replicax.execution.program.program import Program


def check_step(programs: list[Program], names: Sequence[str], is_served: bool) -> list[Program]:
    """Warn of mistakes in a step of several replicas.

    Args:
      programs: the captured program; if replicas differ in size, that of each size.
      names: the names of its arguments.
      is_served: whether its variables are on parameter servers, whose workers get their parts in another way.

    Returns:
      The programs, with the known scales of their results.
    """
    has_derivatives = False
    for program in programs:
        warn_of_common_draws(program)
        if program.has_derivatives:
            has_derivatives = True
            if not is_served:
                warn_of_replicated_work(program, names)
    has_shares = _jax.contains(programs[0].jaxpr, lambda equation: equation.primitive is share_p)
    if has_derivatives or has_shares or programs[0].returns_numbers or len(programs) > 1:
        from replicax.checks.loss_scale.mistakes import check_loss_scale  # not every program has a loss

        scales = check_loss_scale(programs)
        return [dataclasses.replace(program, scales=scales) for program in programs]
    return programs
