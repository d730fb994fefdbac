"""The update of an optimizer on a server, and the check that servers can apply it to their parts separately."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax._jax import Equation
from replicax._jax.primitive_families import CASTS, ELEMENTWISE, IDENTITIES
from replicax.execution.program.dataflow import Control, Dataflow, Found
from replicax.variables.variable import Variable

Update = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""Maps gradients, parameters and the optimizer's state, as lists, to new parameters and state."""


def update_of(tx: Any, tree: Any) -> Update:
    """The update of an Optax transformation of parameters with this structure of pytree."""
    import optax

    def update(gradients: list[Any], parameters: list[Any], state: list[Any]) -> tuple[list[Any], list[Any]]:
        values = jax.tree_util.tree_unflatten(tree, parameters)
        structure = jax.tree_util.tree_structure(jax.eval_shape(tx.init, values))
        cast = [jnp.asarray(g, p.dtype) for g, p in zip(gradients, parameters, strict=True)]
        gradients_tree = jax.tree_util.tree_unflatten(tree, cast)
        updates, after = tx.update(gradients_tree, jax.tree_util.tree_unflatten(structure, state), values)
        leaves = jax.tree_util.tree_leaves
        return leaves(optax.apply_updates(values, updates)), leaves(after)

    return update


_MIXES = "mixes"
"""In the dependences of a value: it combines elements of a parameter, so that a part alone would not do."""
_Dependence = frozenset[Any]  # of parameters, and perhaps _MIXES


class _Dependences(Dataflow[_Dependence]):
    """The parameters that each value depends on; their gradients and slots count as them."""

    def join(self, facts: Iterable[_Dependence]) -> _Dependence:
        return frozenset().union(*facts)

    def decided(self, fact: _Dependence, decision: _Dependence) -> _Dependence:
        return fact | decision

    def operation(
        self, equation: Equation, facts: list[_Dependence], control: Control, final: bool
    ) -> Found[_Dependence]:
        joined = self.join(facts)
        if equation.primitive.name not in ELEMENTWISE | IDENTITIES | CASTS and joined:
            joined |= {_MIXES}
        return [joined] * len(equation.outvars), facts


def check_by_parts(
    update: Update,
    parameters: Sequence[Variable],
    state: Sequence[Variable],
    owners: Sequence[Variable | None],
    split: Collection[Variable],
    servers: int,
) -> None:
    """Raise unless each server can apply the update to its parts alone; a single one can apply any.

    It traces the update in any case, so errors of the update itself are raised here, and not later on a server. The
    owner of a leaf of the state is the parameter that it is a slot of, with its shape; ``None`` for other leaves. The
    parameters in ``split`` are in several parts.

    Raises:
      ValueError: it needs whole parameters that are split, or several parameters together.
    """
    values, slots_of = ([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in vs] for vs in (parameters, state))
    traced = jax.make_jaxpr(update)(values, values, slots_of)
    if servers == 1:
        return
    facts = [frozenset({v}) for v in parameters]
    slots = [frozenset() if owner is None else frozenset({owner}) for owner in owners]
    dependences, _ = _Dependences(frozenset()).run(traced.jaxpr, [*facts, *facts, *slots], final=True)
    for fact, owner in zip(dependences, [*parameters, *owners], strict=True):
        if others := [v for v in parameters if v in fact and v is not owner]:
            of = "its state" if owner is None else f"variable {owner.name!r}"
            raise ValueError(
                f"this optimizer can't be applied on several servers: its update of {of} depends on "
                f"variable {others[0].name!r}, too, as when gradients are clipped by their global norm. Use "
                "num_servers=1 without variable_partitioner, or a transformation of each variable by itself "
                "(optax.clip_by_block_rms, optax.clip)."
            )
        if owner is not None and owner in split and _MIXES in fact:
            raise ValueError(
                f"this optimizer can't be applied to parts of variable {owner.name!r}: its update of an element "
                "depends on others, as in optax.lamb or optax.adafactor. Leave variable_partitioner out, or have it "
                "keep this variable whole."
            )
