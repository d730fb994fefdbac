"""Backends: what the compiler for one platform needs and others do not.

A package at the edge (:mod:`replicax.backends`) has them. Nothing here knows which there are: a platform without
one gets programs as the other passes leave them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from replicax import _jax
from replicax.execution.compiled.program_rewriting import Rule
from replicax.system import registry


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """How a program is about to be compiled.

    Attributes:
      in_a_loop: whether it will be in a loop as a whole.
      automatic: whether the compiler decides how values are split over logical devices.
      in_pieces: whether it has variables that are split over the replicas.
      in_order: whether sums have a fixed order.
      is_absent: whether its devices are only described.
    """

    in_a_loop: bool = False
    automatic: bool = False
    in_pieces: bool = False
    in_order: bool = False
    is_absent: bool = False


class Backend:
    """What one platform's compiler needs: nothing, unless a subclass says otherwise."""

    def rules(self, jaxpr: _jax.Jaxpr, target: Target) -> list[Rule]:
        """The rules of the pass that comes last, for a program that has something for them to do."""
        return []

    def options(self, target: Target) -> Mapping[str, Any] | None:
        """What the compiler is told besides what ``XLA_FLAGS`` says."""
        return None


_NONE = Backend()


def backend_of(mesh: Mesh) -> Backend:
    """The backend of the devices of ``mesh``."""
    return registry.backends().get(mesh.devices.flat[0].platform, _NONE)
