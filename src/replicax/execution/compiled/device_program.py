"""Device programs: what a device with several replicas does, as a program of its own.

:class:`~replicax.execution.compiled.local.local_replicas.LocalReplicas` makes it of the program of one replica. To the
passes that come after it is a program like any other, in which each device is one replica: a value that may differ
between devices is T, and variables are split over the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax import _jax
from replicax.execution.compiled.local.local_replicas import LocalReplicas
from replicax.execution.compiled.local_values import Each, array_of
from replicax.execution.compiled.split_variables import partitioned
from replicax.execution.program.infer import infer
from replicax.locality import Locality, M, T
from replicax.variables.layout import Copies, Layout, Split


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeviceProgram:
    """The program of a device.

    Attributes:
      jaxpr: over the arrays that a device has: ``[k, *shape]`` of a value of each of its k replicas.
      constants: its first operands.
      localities: those of its values, between devices.
    """

    jaxpr: _jax.Jaxpr
    constants: Sequence[Any]
    localities: dict[Any, Locality]


def device_program(
    jaxpr: _jax.Jaxpr, values: Sequence[Any], differ: Sequence[bool], local_replicas: Callable[[], LocalReplicas]
) -> DeviceProgram:
    """The program of a device, inside the mesh's replica axis.

    Args:
      jaxpr: the program of a replica.
      values: what it will be applied to; of pieces it gets the whole.
      differ: for each result whether replicas have values of their own.
      local_replicas: the pass, made inside of the trace.
    """
    stacked = [isinstance(v, Each) for v in values]
    inputs: list[Any] = jaxpr.invars
    shapes = [v.array.shape if isinstance(v, Each) else x.aval.shape for v, x in zip(values, inputs, strict=True)]
    avals = [
        jax.ShapeDtypeStruct(shape, x.aval.dtype, weak_type=x.aval.weak_type)
        for shape, x in zip(shapes, inputs, strict=True)
    ]

    def run(*arrays: Any) -> list[Any]:
        mine = [Each(array) if each else array for array, each in zip(arrays, stacked, strict=True)]
        return [array_of(result) for result in local_replicas().run(jaxpr, mine, differ)]

    closed = jax.make_jaxpr(run)(*avals)
    program = _jax.opened(closed.jaxpr)
    localities: dict[Any, Locality] = {}
    given = [M] * len(closed.consts) + [T if each else M for each in stacked]
    infer(program, given, {}, check=False, found=localities)
    return DeviceProgram(program, closed.consts, localities)


def evaluated(
    jaxpr: _jax.Jaxpr,
    values: list[Any],
    wanted: list[Layout],
    localities: dict[Any, Locality] | None,
    in_order: bool = False,
) -> list[Any]:
    """Apply ``jaxpr`` to one replica's values, and pieces of them; ``localities`` is ``None`` if there are none.

    ``in_order`` says whether sums have a fixed order.
    """
    if localities is None:
        return _jax.called(jaxpr, values)
    return partitioned(jaxpr, values, [w if isinstance(w, Split) else None for w in wanted], localities, in_order)


def evaluated_for_each(
    jaxpr: _jax.Jaxpr,
    values: list[Any],
    wanted: list[Layout],
    local_replicas: Callable[[], LocalReplicas],
    in_pieces: bool,
    in_order: bool = False,
) -> list[Any]:
    """Apply ``jaxpr`` to the values of all replicas of a device."""
    differ = [isinstance(w, Copies) for w in wanted]
    if not in_pieces:
        return local_replicas().run(jaxpr, values, differ)
    program = device_program(jaxpr, values, differ, local_replicas)
    arrays = [v.array if isinstance(v, Each) else v for v in values]
    results = evaluated(program.jaxpr, [*program.constants, *arrays], wanted, program.localities, in_order)
    return [Each(r) if d else r for r, d in zip(results, differ, strict=True)]
