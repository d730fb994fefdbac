"""Programs on another mesh than that for which they were traced."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.extend import core as _extend

from replicax._jax.internals import core as _core, literals as _literals
from replicax._jax.jaxprs.programs import map_jaxprs, sub_jaxprs
from replicax._jax.jaxprs.types import Equation, Jaxpr, Literal, ShapedArray
from replicax._jax.primitive_families import PLACING
from replicax._jax.traces import MESH_SETTING

NO_MESH = jax.sharding.AbstractMesh((), ())


def abstract_mesh(mesh: Any, axes: Collection[str]) -> Any:
    """The abstract mesh of programs inside ``shard_map(mesh=mesh)`` over these of its axes."""
    types = [jax.sharding.AxisType.Manual if axis in axes else jax.sharding.AxisType.Auto for axis in mesh.axis_names]
    return mesh.abstract_mesh.update(axis_types=tuple(types))


def foreign_mesh(jaxpr: Jaxpr, axes: Set[str]) -> Equation | None:
    """The first equation in which something maps over a mesh, or is laid on one, with other axes than these."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in PLACING:
            for value in equation.params.values():
                for one in value if isinstance(value, (tuple, list)) else (value,):
                    mesh = one.mesh if isinstance(one, jax.sharding.NamedSharding) else one
                    if isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)) and set(mesh.axis_names) - axes:
                        return equation
        if any(foreign_mesh(inner, axes) is not None for inner in sub_jaxprs(equation)):
            return equation
    return None


def fresh(atom: Any, mesh: Any) -> Any:
    """A new variable of the kind of ``atom`` (or the same literal), for a program inside another mesh."""
    aval = atom.aval
    if isinstance(aval, ShapedArray):  # in JAX's eyes one inside another mesh is of another kind
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * aval.ndim))
        aval = aval.update(sharding=sharding)
    if not isinstance(atom, Literal):
        return _extend.Var(aval)
    value = atom.val
    if isinstance(value, _literals.TypedNdArray):  # which has an abstract value of its own
        value = _literals.TypedNdArray(np.asarray(value), aval)
    return Literal(value, aval)


def on_mesh(equation: Equation, invars: Sequence[Any], outvars: Sequence[Any], mesh: Any) -> Equation:
    """``equation`` with other operands and results, in a program inside another mesh (an :func:`abstract_mesh`)."""
    with equation.ctx.manager:  # which puts back at its end what is changed here
        MESH_SETTING.set_local(mesh)
        ctx = _core.JaxprEqnContext()
    params = {
        name: jax.sharding.NamedSharding(mesh, value.spec) if isinstance(value, jax.sharding.NamedSharding) else value
        for name, value in map_jaxprs(equation.params, lambda program: _program_on(program, mesh)).items()
    }
    return equation.replace(invars=list(invars), outvars=list(outvars), params=params, ctx=ctx)


def _program_on(jaxpr: Jaxpr, mesh: Any) -> Jaxpr:
    env: dict[Any, Any] = {}

    def moved(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return fresh(atom, mesh)
        if atom not in env:
            env[atom] = atom if isinstance(atom, _core.DropVar) else fresh(atom, mesh)
        return env[atom]

    return jaxpr.replace(
        constvars=[moved(v) for v in jaxpr.constvars],
        invars=[moved(v) for v in jaxpr.invars],
        eqns=[on_mesh(e, [moved(v) for v in e.invars], [moved(v) for v in e.outvars], mesh) for e in jaxpr.eqns],
        outvars=[moved(v) for v in jaxpr.outvars],
    )
