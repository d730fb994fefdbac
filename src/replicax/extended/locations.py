"""Locations: the devices of results and of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from replicax import context
from replicax.devices.mesh import mirrored_sharding, replica_mesh
from replicax.devices.selection import resolve_devices
from replicax.values import PerReplica
from replicax.variables.store import check_owner
from replicax.variables.variable import Variable
from replicax.workers.replicas import Replicas


def destination(replicas: Replicas, where: Any, what: str) -> Sharding | None:
    """The sharding of results on ``where``; ``None`` for all replicas' devices, where results already are.

    ``where`` is a variable or a value (for its devices), devices, or ``None``; ``what`` names the called method. Inside
    a step only the replicas' own devices are allowed.
    """
    if where is None or isinstance(where, PerReplica):
        return None
    if isinstance(where, Variable):
        check_owner(where, replicas, "this is")
        return where.sharding if where.layout.home is not None and not context.in_step() else None
    if isinstance(where, jax.Array):
        if context.in_step():
            return None
        where = sorted(where.devices(), key=lambda d: d.id)
    if isinstance(where, str | jax.Device):
        where = [where]
    if not isinstance(where, tuple | list):
        raise TypeError(
            f"{what}: destinations must be a variable, a PerReplica value, a device or its name, a list of devices, or "
            f"None for all replicas' devices, got {where!r}"
        )
    if _are(where, replicas.worker_devices) or _are(where, list(replicas.mesh.devices.flat)):
        return None
    devices = resolve_devices(where)
    if context.in_step():
        raise ValueError(
            f"{what}: inside a step a result is on all replicas' devices, and can't be on {list(devices)} alone: pass "
            "a variable or None as destinations, or reduce outside the step"
        )
    return mirrored_sharding(replica_mesh(devices))


def holds_variables(replicas: Replicas, devices: Sequence[jax.Device], where: Any) -> bool:
    """Whether ``where``, a variable or the result of ``non_slot_devices``, names the variables' ``devices``."""
    if isinstance(where, Variable):
        check_owner(where, replicas, "this is")
        return True
    if isinstance(where, str | jax.Device):
        where = [where]
    return where is None or (isinstance(where, tuple | list) and _are(where, devices))


def _are(where: Sequence[Any], devices: Sequence[jax.Device]) -> bool:
    """Whether ``where`` names exactly these devices, some of which may belong to other workers."""
    if all(isinstance(d, jax.Device) for d in where):
        return set(where) == set(devices)
    return set(resolve_devices(where)) == set(devices)
