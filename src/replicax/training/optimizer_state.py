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


def owner_of(path: Path, shape: tuple[int, ...], variables: Sequence[tuple[Path, Variable]]) -> Variable | None:
    """The variable that a leaf of the state is a slot of, according to paths and shapes; ``None`` for a counter."""
    fitting = [(place, v) for place, v in variables if path[len(path) - len(place) :] == place]
    same_shape = [(place, v) for place, v in fitting if v.shape == shape]
    # A single variable that is not in a tree has the empty path: then its slots are the leaves of its shape.
    candidates = same_shape or [(place, v) for place, v in fitting if place]
    return max(candidates, key=lambda pair: len(pair[0]))[1] if candidates else None


def name_of_slot(optimizer: str, path: Path, owner: Variable | None, variables: Sequence[tuple[Path, Variable]]) -> str:
    """The name of a leaf of the state: the optimizer's name, the path, and the name of its variable."""
    if owner is None:
        return f"{optimizer}{jax.tree_util.keystr(path)}"
    place = next(place for place, v in variables if v is owner)
    return f"{optimizer}{jax.tree_util.keystr(path[: len(path) - len(place)])}/{owner.name}"


def layout_of_slot(shape: tuple[int, ...], owner: Variable | None, variables: Sequence[Variable]) -> Layout:
    """The layout of its variable if the shapes are the same; otherwise that of another variable with its shape."""
    candidates = variables if owner is None else [owner, *variables]
    default = variables[0].strategy.extended.default_layout
    return next((v.layout for v in candidates if v.shape == shape), default)


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
