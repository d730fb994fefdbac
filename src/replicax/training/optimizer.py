"""``Optimizer``: any Optax transformation, applied to variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from replicax import _jax, context
from replicax.errors import ContextError
from replicax.indexed_slices import is_slices
from replicax.locality import R, T
from replicax.nests import is_leaf
from replicax.topology.placement import compute, put, put_among
from replicax.training.pairs import pairs_of
from replicax.variables import Variable
from replicax.variables.layout import Layout
from replicax.variables.placement import Stored
from replicax.variables.store import ConcreteStore, current_store, use_store

if TYPE_CHECKING:
    import optax


class Optimizer:
    """Changes variables by their gradients, with the rule of an Optax transformation.

    Its state is made of variables too (*slots*, such as momenta, and counters), which live where the variables
    that they belong to live. They are created when the optimizer first meets its variables: by :meth:`build`, or
    in the first step.

    Args:
      tx: an ``optax.GradientTransformation``.

    Raises:
      TypeError: ``tx`` is something else.

    >>> import replicax, optax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     w = replicax.Variable([1.0, 1.0], name="w")
    ...     optimizer = replicax.Optimizer(optax.sgd(0.1))
    >>> def step(x):
    ...     loss, grads = replicax.value_and_grad(lambda: (x * w).sum(), [w])()
    ...     optimizer.apply_gradients(zip(grads, [w]))
    >>> x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    >>> strategy.run(step, args=(x,))
    >>> w
    <Variable 'w' float32[2] mirrored on 2 replicas: [0.7 0.7]>
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(f"Optimizer(tx): expected an optax.GradientTransformation, got {tx!r}")
        self.tx = tx
        self._variables: list[Variable] = []
        self._state: Any = None

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's own state, as variables; empty before it is built."""
        return [s for s in jax.tree_util.tree_leaves(self._state, is_leaf=is_leaf) if isinstance(s, Variable)]

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the state for ``variables``; a second call for the same variables does nothing.

        Args:
          variables: those that the optimizer is to change, of one strategy.

        Raises:
          ValueError: there are none, one is listed twice, or the optimizer has been built for others.
          TypeError: one of them is on-read or not a float, so that no gradient could change it.
        """
        variables = list(variables)
        if self._variables:
            self._check_same(variables)
            return
        if not variables:
            raise ValueError("Optimizer: there are no variables to optimise")
        for v in variables:
            if not isinstance(v, Variable):
                raise TypeError(f"Optimizer: expected Variables, got {v!r}")
        strategy = variables[0].strategy
        for i, v in enumerate(variables):
            if v.is_stacked or not jnp.issubdtype(v.dtype, jnp.inexact):
                raise TypeError(f"Optimizer: {v.describe()} can't be optimised; it must be a float, and on-write")
            if v.strategy is not strategy:
                raise ValueError(
                    f"Optimizer: {variables[0].describe()} belongs to {strategy!r}, {v.describe()} to {v.strategy!r}"
                )
            if any(v is other for other in variables[:i]):
                raise ValueError(f"Optimizer: {v.describe()} is listed twice")
        with (
            _jax.outside_tracing(),
            jax.disable_jit(False),
            context.cross_replica(strategy),
            use_store(ConcreteStore()),
        ):
            slots, tree = self._slots(variables)
        self._state = jax.tree_util.tree_unflatten(tree, slots)
        self._variables = variables
        current_store().if_it_fails(self._reset)

    def _slots(self, variables: list[Variable]) -> tuple[list[Variable], Any]:
        """The variables of the state: one of a parameter's shape lies as the parameter does."""

        def initial(stored: list[Any]) -> Any:
            return self.tx.init([v.layout.whole(array) for v, array in zip(variables, stored, strict=True)])

        mesh = variables[0].strategy.extended.mesh
        present = [v.stored() for v in variables]
        avals = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in present]
        paths, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(initial, avals))
        layouts = [_layout_of_slot(path, leaf.shape, variables) for path, leaf in paths]

        def stored(*arrays: Any) -> list[Any]:
            leaves = jax.tree_util.tree_leaves(initial(list(arrays)))
            return [layout.stored(leaf) for layout, leaf in zip(layouts, leaves, strict=True)]

        values: list[Any] = [None] * len(layouts)
        for device in {layout.logical_device: None for layout in layouts}:
            # Each logical device makes its own slots, and sees no others.
            own = [i for i, layout in enumerate(layouts) if layout.logical_device == device]
            where = layouts[own[0]].mesh(mesh)
            make, needed = _jax.partly(stored, avals, own)
            operands = [put_among(present[i], NamedSharding(where, variables[i].layout.spec)) for i in needed]
            made = compute(make, operands, [NamedSharding(where, layouts[i].spec) for i in own])
            for i, value in zip(own, made, strict=True):
                values[i] = put(value, layouts[i].sharding(mesh))
        slots = [
            Variable(Stored(value, layout, leaf.shape), name=f"optimizer{jax.tree_util.keystr(path)}", trainable=False)
            for value, layout, (path, leaf) in zip(values, layouts, paths, strict=True)
        ]
        return slots, tree

    def _reset(self) -> None:
        self._variables, self._state = [], None

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]], aggregate: bool = True) -> None:
        """Change each variable by its gradient.

        Args:
          grads_and_vars: pairs of a gradient, of its variable's shape, and the variable, as from
            ``zip(gradients, variables)``. A gradient may be :class:`IndexedSlices`: it is summed as such, and becomes
            an array where the transformation is applied. Pairs whose gradient is ``None`` are left out. Each call
            must name the same variables.
          aggregate: whether the gradients are this replica's own (T) and must be summed over the replicas. With
            ``False`` they have been reduced already (M).

        Raises:
          LocalityError: with ``aggregate``, a gradient that has been all-reduced already, and would be counted n
            times; without, one that differs between replicas.
          ValueError: a gradient of another shape; other variables than before; no gradient at all.
          TypeError: no pairs, or pairs of something else.
          ContextError: called in cross-replica context.

        With ``aggregate``, one fused all-reduce for all gradients.
        """
        import optax  # a tenth of a second, and whoever gets here has loaded it

        replica = context.get_replica_context()
        if replica is None:
            raise ContextError("apply_gradients takes one replica's gradients: call it inside a step (strategy.run)")
        pairs = [(g if is_slices(g) else jnp.asarray(g), v) for g, v in pairs_of(grads_and_vars) if g is not None]
        store = current_store()
        for gradient, v in pairs:
            if isinstance(v, Variable) and gradient.shape != v.shape:
                raise ValueError(
                    f"apply_gradients: the gradient of {v.describe()} has shape {gradient.shape}; expected {v.shape}"
                )
        self.build(v for _, v in pairs)
        refused, problem = (frozenset({R}), _ALREADY_REDUCED) if aggregate else (frozenset({T}), _NOT_REDUCED)
        gradients: list[Any] = []
        for g, v in pairs:
            leaves, tree = jax.tree_util.tree_flatten(g)  # one, or those of IndexedSlices
            leaves = store.expect(leaves, refused, f"apply_gradients: the gradient of {v.describe()} {problem}")
            gradients.append(jax.tree_util.tree_unflatten(tree, leaves))
        if aggregate:
            gradients = replica.all_reduce("sum", gradients)
        dense = [g.to_dense() if is_slices(g) else g for g in gradients]
        by_variable = {v: g.astype(v.dtype) for g, (_, v) in zip(dense, pairs, strict=True)}

        values = [store.read(v) for v in self._variables]
        state = jax.tree_util.tree_map(store.read, self._state, is_leaf=is_leaf)
        updates, state = self.tx.update([by_variable[v] for v in self._variables], state, values)
        new_slots, tree = jax.tree_util.tree_flatten(state)
        built: Any = jax.tree_util.tree_structure(self._state, is_leaf=is_leaf)
        if tree != built:
            raise ValueError(f"Optimizer: tx.update changed the structure of its state from {built} to {tree}")
        written = [*self._variables, *self.variables]
        for v, value in zip(written, [*optax.apply_updates(values, updates), *new_slots], strict=True):
            store.write(v, v.checked(value), f"{v.describe()}: its update differs between replicas")

    def _check_same(self, variables: list[Variable]) -> None:
        if len(variables) == len(self._variables) and set(map(id, variables)) == set(map(id, self._variables)):
            return
        ours, theirs = ([f"{v.name} of {v.strategy!r}" for v in vs] for vs in (self._variables, variables))
        raise ValueError(
            f"Optimizer: built for the variables {ours}, but got gradients of {theirs}. Each call must name the same "
            "variables, each once; use an optimizer for each group."
        )


def _layout_of_slot(path: Any, shape: tuple[int, ...], variables: list[Variable]) -> Layout:
    """That of the variable whose slot it is, as far as can be told: by its place in the state, or else its shape."""
    place = getattr(path[-1], "idx", None) if path else None
    named = variables[place : place + 1] if isinstance(place, int) else []
    default = variables[0].strategy.extended.default_layout
    return next((v.layout for v in [*named, *variables] if v.shape == shape), default)


_ALREADY_REDUCED = (
    "has been all-reduced, and is already the same on every replica, so summing it would count it once for every "
    "replica: pass aggregate=False, or pass this replica's own gradient"
)
_NOT_REDUCED = "differs between replicas, and aggregate=False says that it has been reduced: pass aggregate=True"
