"""Backends: rules and options for the compiler of one platform.

They are in :mod:`replicax.backends`, which registers them. Without one, programs stay as the other passes leave them.
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
    """How a program will be compiled."""

    in_a_loop: bool  # whether it will be in a loop as a whole
    automatic: bool  # whether the compiler decides how values are split over logical devices
    # The bytes of the largest variable that is split over the replicas, and of a piece of it; ``None`` if there is
    # none.
    in_pieces: tuple[int, int] | None
    in_order: bool  # whether sums have a fixed order
    is_absent: bool  # whether its devices are only described


class Backend:
    """The rules and options for one platform's compiler; by default none."""

    def rules(self, jaxpr: _jax.Jaxpr, target: Target) -> list[Rule]:
        """The rules of the last pass that apply to a program."""
        return []

    def options(self, target: Target) -> Mapping[str, Any] | None:
        """Options of the compiler, in addition to those in ``XLA_FLAGS``."""
        return None


_NONE = Backend()


def backend_of(mesh: Mesh) -> Backend:
    """The backend of the devices of ``mesh``."""
    return registry.backends().get(mesh.devices.flat[0].platform, _NONE)
