"""The names and layouts of the leaves of an optimizer's state, and the state as users see it.

Optax keeps its state in trees that contain trees like that of the parameters. So if the path of a leaf ends with the
path of a variable in the parameters' tree, the leaf belongs to that variable.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import jax

from replicax.pytrees import is_leaf, registered
from replicax.variables import Variable
from replicax.variables.layout import Layout
from replicax.variables.trees import assign

Path = tuple[Any, ...]


def owners_of(
    leaves: Sequence[tuple[Path, Any]], variables: Sequence[tuple[Path, Variable]]
) -> list[tuple[Path, Variable] | None]:
    """The variable that each leaf of the state is a slot of, by paths and shapes, and its path; ``None``: a counter."""
    by_text = {jax.tree_util.keystr(place): (place, v) for place, v in variables}  # keys of users may have no hash

    def owner_of(path: Path, shape: tuple[int, ...]) -> tuple[Path, Variable] | None:
        ends = [path[i:] for i in range(len(path) + 1)]
        found = [(end, by_text.get(jax.tree_util.keystr(end))) for end in ends]
        fitting = [pair for end, pair in found if pair is not None and pair[0] == end]  # the longest first
        # A single variable that is not in a tree has the empty path: then its slots are the leaves of its shape.
        return next((p for p in fitting if p[1].shape == shape), next((p for p in fitting if p[0]), None))

    return [owner_of(path, leaf.shape) for path, leaf in leaves]


def name_of_slot(optimizer: str, path: Path, owner: tuple[Path, Variable] | None) -> str:
    """The name of a leaf of the state: the optimizer's name, the path, and the name of its variable."""
    if owner is None:
        return f"{optimizer}{jax.tree_util.keystr(path)}"
    return f"{optimizer}{jax.tree_util.keystr(path[: len(path) - len(owner[0])])}/{owner[1].name}"


def layouts_of_slots(
    shapes: Sequence[tuple[int, ...]], owners: Sequence[tuple[Path, Variable] | None], variables: Sequence[Variable]
) -> list[Layout]:
    """The layout of each slot: its variable's if the shapes are the same; otherwise that of another of its shape."""
    default = variables[0].strategy.extended.default_layout
    of_others = {v.shape: v.layout for v in reversed(variables)}
    return [
        owner[1].layout if owner is not None and owner[1].shape == shape else of_others.get(shape, default)
        for shape, owner in zip(shapes, owners, strict=True)
    ]


class AssigningDict(dict[Any, Any]):
    """A dict of variables; setting an item assigns them, so that steps that are compiled already use the new value."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if any(isinstance(leaf, Variable) for leaf in jax.tree_util.tree_leaves(self, is_leaf=is_leaf)):
            assign(*(jax.tree_util.tree_leaves(item, is_leaf=is_leaf) for item in (self[key], value)))
        else:  # a copy of the state that has arrays in place of variables
            super().__setitem__(key, value)

    update = MutableMapping.update

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self


def with_assigning_dicts(state: Any) -> Any:
    """A copy of a state in which the hyperparameters that Optax injects are such dicts; other dicts are as they are."""

    def is_injected(node: Any) -> bool:
        return {"hyperparams", "inner_state"}.issubset(getattr(type(node), "_fields", ()))

    def copied(node: Any) -> Any:
        if not is_injected(node):
            return node
        hyperparams = registered(AssigningDict(node.hyperparams))
        return node._replace(hyperparams=hyperparams, inner_state=with_assigning_dicts(node.inner_state))

    return jax.tree_util.tree_map(copied, state, is_leaf=lambda node: is_injected(node) or is_leaf(node))
