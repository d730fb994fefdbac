"""NNX objects in a loop over the parts of a batch: a turn gets copies, and its changes go on to the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from replicax.models.nnx_step import nodes_in, value_of

Collect = Callable[[list[Any], dict[str, Any], Callable[[list[Any]], None]], None]
"""Takes the gradients of an optimizer, further arguments, and what applies gradients to the objects themselves."""


class NNXParts:
    """One replica's objects, of which each turn of a loop gets copies."""

    def __init__(self, objects: tuple[Any, ...]) -> None:
        self._objects = objects
        self._graphdef, flat = nnx.graphlib.flatten(objects, graph=True)
        self._leaves = [leaf for _, leaf in flat]

    @property
    def values(self) -> list[Any]:
        """The arrays in the objects."""
        return [value_of(leaf) for leaf in self._leaves]

    def copies(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Objects with these arrays."""
        made: tuple[Any, ...] = nnx.graphlib.unflatten(self._graphdef, list(values))
        return made

    @contextlib.contextmanager
    def collecting(self, copies: tuple[Any, ...], collect: Collect) -> Iterator[None]:
        """Give the gradients that the optimizers among ``copies`` get to ``collect``, and change nothing by them."""
        originals, made = list(nodes_in(self._objects)), list(nodes_in(copies))

        def original(node: Any) -> Any:
            found = [theirs for theirs, mine in zip(originals, made, strict=True) if mine is node]
            if not found:
                raise TypeError(
                    "nnx.Optimizer.update, in a step whose gradients are accumulated: the model must be an argument of "
                    f"the step, or a part of one, got a {type(node).__name__} that the step has made"
                )
            return found[0]

        optimizers = [node for node in made if isinstance(node, nnx.Optimizer)]

        def update_of(optimizer: Any) -> Callable[..., None]:
            def update(model: Any, grads: Any, /, **extra: Any) -> None:
                gradients, tree = jax.tree_util.tree_flatten(grads)
                theirs, mine = original(optimizer), original(model)  # the copies end with this turn

                def apply(gradients: list[Any]) -> None:
                    theirs.update(mine, jax.tree_util.tree_unflatten(tree, gradients))

                collect(gradients, extra, apply)

            return update

        for optimizer in optimizers:
            vars(optimizer)["update"] = update_of(optimizer)
        try:
            yield
        finally:
            for optimizer in optimizers:
                del vars(optimizer)["update"]

    def values_of(self, copies: tuple[Any, ...]) -> list[Any]:
        """The arrays that a turn has left in its copies.

        Raises:
          TypeError: it has changed more than arrays.
        """
        graphdef, flat = nnx.graphlib.flatten(copies, graph=True)
        if graphdef != self._graphdef:
            raise TypeError(
                "a step whose gradients are accumulated has changed the structure of an NNX object: only values of "
                "nnx.Variables can go from one micro-batch to the next"
            )
        return [value_of(leaf) for _, leaf in flat]

    def put_back(self, values: Sequence[Any]) -> None:
        """Give the objects the arrays that the last turn has left."""
        for leaf, value in zip(self._leaves, values, strict=True):
            if isinstance(leaf, nnx.Variable) and value is not leaf.get_raw_value():
                leaf.set_raw_value(value)
