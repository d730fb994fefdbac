"""Feeding: elements on the host become values on the replicas' devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax import _jax
from replicax.data.staging import Staged
from replicax.execution.placing import devices_here
from replicax.topology.mesh import REPLICA_AXIS
from replicax.values import Components, PerReplica, Stacked

if TYPE_CHECKING:
    from replicax.data.elements import Element


def feeder(mesh: Mesh) -> Callable[[Element | Staged], Any]:
    """A function that puts elements on the devices of ``mesh``, on any thread, under this thread's JAX settings."""
    adopt = _jax.settings_of_this_thread()
    adopted = {threading.get_ident()}

    def feed(element: Element | Staged) -> Any:
        if threading.get_ident() not in adopted:
            adopt()
            adopted.add(threading.get_ident())
        return element.placed(mesh) if isinstance(element, Staged) else fed(element, mesh)

    return feed


def fed(element: Element, mesh: Mesh) -> Any:
    """The pytree with ``PerReplica`` leaves; with one replica, bare arrays."""
    n = mesh.shape[REPLICA_AXIS]
    if element.alike:
        sharding = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS) if n > 1 else PartitionSpec())
        stacks = _stacks(element)
        if n == 1:
            leaves = jax.device_put([stack[0] for stack in stacks], sharding)
        elif len(element.parts) == n:
            leaves = [PerReplica(Stacked(array)) for array in jax.device_put(stacks, sharding)]
        else:
            leaves = [
                PerReplica(Stacked(jax.make_array_from_process_local_data(sharding, stack, (n, *stack.shape[1:]))))
                for stack in stacks
            ]
    else:
        here = devices_here(mesh)
        rows = [jax.device_put(p.leaves, d) for p, d in zip(element.parts, here.values(), strict=True)]
        leaves = [PerReplica(Components(column, tuple(here), n)) for column in zip(*rows, strict=True)]
    return jax.tree_util.tree_unflatten(element.tree, leaves)


def _stacks(element: Element) -> list[Any]:
    """For each leaf an array ``[len(parts), rows, …]``.

    Always a copy: the dataset may fill the same buffer again while this element is still on its way to the devices.
    """
    if element.filled is not None:
        return element.filled
    columns = zip(*(part.leaves for part in element.parts), strict=True)
    return [_stacked(column) for column in columns]


def _stacked(leaves: tuple[Any, ...]) -> Any:
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        return jax.numpy.stack(leaves)
    return np.stack(leaves)
