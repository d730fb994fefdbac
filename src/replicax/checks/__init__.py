"""Checks of captured steps that warn of mistakes without an error. They change nothing; the core works without them.

``replicax/__init__.py`` registers :func:`check_step`, and capture calls whatever is registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from replicax.checks.locality.common_draws import warn_of_common_draws
from replicax.checks.locality.replicated_work import warn_of_replicated_work
from replicax.execution.program.program import Program


def check_step(program: Program, names: Sequence[str], asked: bool, is_ragged: bool, is_served: bool) -> Program:
    """Warn of mistakes in a step of several replicas.

    Args:
      program: the captured program.
      names: the names of its arguments.
      asked: whether the step has read the number of replicas.
      is_ragged: whether other replicas may have another number of examples.
      is_served: whether its variables are on parameter servers, whose workers get their parts in another way.

    Returns:
      The program, with the known scales of its results.
    """
    warn_of_common_draws(program)
    has_derivatives = program.has_derivatives
    if has_derivatives and not is_served:
        warn_of_replicated_work(program, names)
    if has_derivatives or program.returns_numbers or is_ragged:
        from replicax.checks.loss_scale.mistakes import check_loss_scale  # not every program has a loss

        program = dataclasses.replace(program, scales=check_loss_scale(program, asked, is_ragged))
    return program
