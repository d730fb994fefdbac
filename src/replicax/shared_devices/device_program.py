"""Device programs: what a device with several replicas does, as a program of its own.

:class:`~replicax.shared_devices.local_replicas.LocalReplicas` makes it of the program of one replica. To the
passes that come after it is a program like any other, in which each device is one replica: a value that may differ
between devices is per-replica, and variables are split over the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax import _jax
from replicax.execution.compiled.local_values import Each, array_of
from replicax.execution.compiled.program_rewriting import Rewriting
from replicax.execution.compiled.split_variables import evaluated
from replicax.execution.program.infer import infer, localities_of
from replicax.execution.program.program import Program
from replicax.locality import Locality, M, T
from replicax.shared_devices.local_collectives import OwnDimsFirst
from replicax.shared_devices.local_replicas import LocalReplicas
from replicax.variables.layout import Copies, Layout


def evaluated_on_device(
    jaxpr: _jax.Jaxpr,  # the program of a replica
    values: Sequence[Any],  # its operands: of several replicas an :class:`Each` of what they have of their own
    given: Sequence[Layout],  # how its operands lie on the devices
    wanted: Sequence[Layout],  # how its results are to lie there
    localities: dict[Any, Locality],  # of its values
    program: Program,  # the program, or the one that it is a part of
    per_device: int,  # how many replicas a device has
    in_pieces: bool,  # whether there are pieces of variables among the operands or results
) -> list[Any]:
    """Apply a program to the values of all replicas of a device, inside the mesh's replica axis."""
    in_order = program.reproducible and program.replicas > 1
    own_dims_first = Rewriting([OwnDimsFirst()])
    if own_dims_first.concerns(jaxpr):
        jaxpr = own_dims_first.rewritten(jaxpr)
        infer(jaxpr, [localities.get(v, M) for v in jaxpr.invars], {}, check=False, localities=localities)

    def local_replicas() -> LocalReplicas:
        return LocalReplicas(program.replicas, per_device, localities, program.replicas_at_once, in_order)

    if per_device == 1:
        pairs = zip(values, given, strict=True)
        values = [Each(v[None]) if isinstance(w, Copies) and not isinstance(v, Each) else v for v, w in pairs]
    differ = [isinstance(w, Copies) for w in wanted]
    if in_pieces:
        results = _in_pieces(jaxpr, values, wanted, differ, local_replicas, in_order)
    else:
        results = local_replicas().run(jaxpr, values, differ)
    return [v.array[0] if isinstance(v, Each) else v for v in results] if per_device == 1 else results


def _in_pieces(
    jaxpr: _jax.Jaxpr,
    values: Sequence[Any],
    wanted: Sequence[Layout],
    differ: Sequence[bool],
    local_replicas: Callable[[], LocalReplicas],
    in_order: bool,
) -> list[Any]:
    """The results of the device's program, of which pieces of variables are operands or results."""
    stacked = [isinstance(v, Each) for v in values]

    def run(*arrays: Any) -> list[Any]:
        values = [Each(array) if each else array for array, each in zip(arrays, stacked, strict=True)]
        return [array_of(result) for result in local_replicas().run(jaxpr, values, differ)]

    inputs: list[Any] = jaxpr.invars
    avals = [  # of pieces the program gets the whole
        _jax.shape_of(x.aval).update(shape=v.array.shape if isinstance(v, Each) else x.aval.shape)
        for v, x in zip(values, inputs, strict=True)
    ]
    closed = jax.make_jaxpr(run)(*avals)
    of_device = _jax.opened(closed.jaxpr)
    localities = localities_of(of_device, [M] * len(closed.consts) + [T if each else M for each in stacked])
    arrays = [v.array if isinstance(v, Each) else v for v in values]
    results = evaluated(of_device, [*closed.consts, *arrays], wanted, localities, in_order)
    return [Each(r) if d else r for r, d in zip(results, differ, strict=True)]
