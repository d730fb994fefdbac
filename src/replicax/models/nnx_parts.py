"""NNX objects in a loop over parts of a batch: an iteration gets copies, and its changes go to the next one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from replicax.models.nnx_step import (
    add_sums,
    leaves_left,
    name_of_leaf,
    names_taken,
    nodes_in,
    own_state,
    update_of_kind,
    value_of,
)

Collect = Callable[..., None]
"""Takes gradients (or sums for a metric), further arguments by name (then ``None``), what applies them to the objects,
and ``cells()``: those of the copies that change, by names and numbers among :attr:`NNXParts.values`."""


class NNXParts:
    """One replica's objects, of which each iteration of a loop gets copies."""

    def __init__(self, objects: tuple[Any, ...]) -> None:
        self._objects = objects
        self._graphdef, flat = nnx.graphlib.flatten(objects, graph=True)
        self._leaves = [leaf for _, leaf in flat]
        self._names = [name_of_leaf(path, objects) for path, _ in flat]
        # The others are constants, such as what optax.masked has in place of a state.
        self._arrays = [
            i
            for i, leaf in enumerate(self._leaves)
            if isinstance(leaf, nnx.Variable) and isinstance(value_of(leaf), jax.Array)
        ]

    @property
    def values(self) -> list[Any]:
        """The arrays in the objects."""
        return [value_of(self._leaves[i]) for i in self._arrays]

    def copies(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Objects with these arrays."""
        contents = list(map(value_of, self._leaves))
        for i, value in zip(self._arrays, values, strict=True):
            contents[i] = value
        return nnx.graphlib.unflatten(self._graphdef, contents)

    @contextlib.contextmanager
    def collecting(self, copies: tuple[Any, ...], collect: Collect) -> Iterator[None]:
        """Give ``collect`` the gradients of the optimizers, and the sums and numbers of the averages, among ``copies``.

        They change nothing until they are added up: a number is a share of the whole batch's, which counts once.
        """
        originals, copied = list(nodes_in(self._objects)), list(nodes_in(copies))

        def original(node: Any) -> Any:
            matches = [original_node for original_node, copy in zip(originals, copied, strict=True) if copy is node]
            if not matches:
                raise TypeError(
                    "nnx.Optimizer.update, in a step whose gradients are accumulated: the optimizer and its model must "
                    f"be arguments of the step, or parts of one, got a {type(node).__name__} that the step has made, "
                    "or nnx.jit, which you can leave out"
                )
            return matches[0]

        def named(cells: Sequence[Any]) -> dict[tuple[str, int], Any]:
            chosen, leaves = set(map(id, cells)), nnx.graphlib.flatten(copies, graph=True)[1]
            changing = [(number, i, leaves[i][1]) for number, i in enumerate(self._arrays)]
            return {(self._names[i], number): leaf for number, i, leaf in changing if id(leaf) in chosen}

        def update_of(optimizer: Any) -> Callable[..., None]:
            def update(*args: Any, **extra: Any) -> None:
                *models, grads = args  # an nnx.ModelAndOptimizer has its model
                gradients, tree = jax.tree_util.tree_flatten(grads)
                # The copies end with this iteration.
                users_optimizer, users_models = original(optimizer), [original(model) for model in models]

                def apply(gradients: list[Any]) -> None:
                    users_optimizer.update(*users_models, jax.tree_util.tree_unflatten(tree, gradients))

                def cells() -> dict[tuple[str, int], Any]:
                    is_trained = nnx.filterlib.to_predicate(optimizer.wrt)
                    model = models[0] if models else optimizer.model
                    parameters, state = (
                        nnx.graphlib.flatten(nodes, graph=True)[1]
                        for nodes in (model, (optimizer.step, optimizer.opt_state))
                    )
                    return named([x for path, x in parameters if is_trained(path, x)] + [x for _, x in state])

                collect(gradients, extra, apply, cells=cells)

            return update

        def update_of_metric(metric: Any) -> Callable[..., None]:
            def collected(*args: Any, **values: Any) -> None:
                numbers = _numbers_for(metric, args, values)
                if not numbers:
                    type(metric).update(metric, *args, **values)
                elif update_of_kind(metric) is nnx.metrics.Average.update and list(numbers) == [metric.argname]:
                    average = original(metric)
                    wait(metric, list(numbers.values()), lambda sums: average.update(**{average.argname: sums[0]}))
                else:
                    raise ValueError(
                        f"{type(metric).__name__}.update, in a step whose gradients are accumulated: "
                        f"{', '.join(numbers)} is a number of one micro-batch, and only nnx.metrics.Average adds up "
                        "such numbers: pass an array with a value for each example (the losses instead of the loss)"
                    )

            return collected

        def wait(metric: Any, sums: list[Any], add: Callable[[list[Any]], None]) -> None:
            collect(sums, None, add, cells=lambda: named(own_state(metric)))

        optimizers = [node for node in copied if isinstance(node, nnx.Optimizer)]
        metrics = [node for node in copied if isinstance(node, nnx.Metric) and own_state(node)]
        for optimizer in optimizers:
            vars(optimizer)["update"] = update_of(optimizer)
        for metric in metrics:
            vars(metric)["update"] = update_of_metric(metric)
            add = functools.partial(add_sums, original(metric))
            vars(metric)["_add_sums"] = functools.partial(wait, metric, add=add)
        try:
            yield
        finally:
            for node in [*optimizers, *metrics]:
                del vars(node)["update"]
                vars(node).pop("_add_sums", None)

    def values_of(self, copies: tuple[Any, ...]) -> list[Any]:
        """Return the arrays that an iteration has left in its copies.

        Raises a TypeError if it has changed more than arrays in variables.
        """
        constants = {i: value_of(leaf) for i, leaf in enumerate(self._leaves) if i not in self._arrays}
        left = leaves_left(copies, self._graphdef, self._names, constants)
        return [value_of(left[i]) for i in self._arrays]

    def put_back(self, values: Sequence[Any]) -> None:
        """Give the objects the arrays that the last iteration has left."""
        for i, value in zip(self._arrays, values, strict=True):
            if value is not value_of(self._leaves[i]):
                self._leaves[i].set_raw_value(value)


def _numbers_for(metric: Any, args: Sequence[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``metric.update`` that are arrays of no dims, without those that are for other metrics."""
    names = names_taken(metric)
    given = {f"argument {i}": value for i, value in enumerate(args)}
    given |= {name: value for name, value in values.items() if name in names or not names}
    return {name: value for name, value in given.items() if isinstance(value, jax.Array) and not value.ndim}
