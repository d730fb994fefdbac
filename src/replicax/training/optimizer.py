"""``Optimizer``: any Optax transformation, applied to variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp

from replicax import _jax, context
from replicax.argument_checks import checked_name
from replicax.devices.arrays import compute, put, put_among
from replicax.devices.host_values import as_array
from replicax.errors import ContextError, cant_be_pickled
from replicax.indexed_slices import is_slices
from replicax.locality import R, T
from replicax.name_hints import NameHints
from replicax.pytrees import is_leaf, registered
from replicax.training.extra_arguments import SHARES, arrays_in, check_accepted, of_parameters, refused_of
from replicax.training.optimizer_state import layouts_of_slots, name_of_slot, owners_of, with_assigning_dicts
from replicax.training.pairs import differentiable, pairs_of
from replicax.training.step_hooks import update_hook
from replicax.variables import Variable
from replicax.variables.initial_layout import Stored
from replicax.variables.slots import launching, store_all
from replicax.variables.store import current_store, outside_steps

if TYPE_CHECKING:
    import optax


@_jax.hiding_frames_of
class Optimizer(NameHints):
    """Updates variables with the rule of an Optax transformation.

    Its state consists of variables, too: *slots*, such as momenta, and counters. A slot has the devices and the
    layout of its variable. :meth:`build` creates the state, or else the first step does.

    Args:
      tx: an ``optax.GradientTransformation``. It gets parameters and gradients as the pytree of variables that you
        pass, so write labels, masks and key paths for that tree.
      name: the prefix of its state's variables. If another optimizer of the strategy has this name already, a number is
        added.

    Raises:
      TypeError: ``tx`` is not a gradient transformation, or ``name`` not a string.

    >>> import replicax, optax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     w = replicax.Variable([1.0, 1.0], name="w")
    ...     optimizer = replicax.Optimizer(optax.sgd(0.1))
    >>> def step(x):
    ...     loss, grads = replicax.value_and_grad(lambda: (x * w).sum(), {"w": w})()
    ...     optimizer.apply_gradients(grads, {"w": w})
    >>> x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
    >>> strategy.run(step, args=(x,))
    >>> w
    <Variable 'w' float32[2] mirrored on 2 replicas: [0.7 0.7]>
    """

    def __init__(self, tx: optax.GradientTransformation, name: str = "optimizer") -> None:
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            hint = "; call it, as in optax.adam(0.001)" if callable(tx) else ""
            raise TypeError(f"Optimizer(tx): expected an optax.GradientTransformation, got {tx!r}{hint}")
        self._tx = tx
        self.name = checked_name(name, "Optimizer") or "optimizer"
        self._variables: list[Variable] = []
        self._tree: Any = None
        self._state: Any = None

    def __repr__(self) -> str:
        for_what = f"for {len(self._variables)} variables" if self._variables else "not built"
        return f"Optimizer({self.name!r}, {for_what})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise cant_be_pickled(
            f"Optimizer {self.name!r}",
            "save its state with replicax.Checkpoint(optimizer=optimizer), and make another one with the same "
            "transformation",
        )

    @property
    def tx(self) -> optax.GradientTransformation:
        """The transformation. It can't be replaced: steps that are traced already would go on with it."""
        return self._tx

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's state, as variables; empty before it is built."""
        return [s for s in jax.tree_util.tree_leaves(self._state, is_leaf=is_leaf) if isinstance(s, Variable)]

    @property
    def state(self) -> Any:
        """The transformation's state, a pytree of variables; ``None`` before it is built.

        Setting a hyperparameter that Optax injects assigns its variable:
        ``optimizer.state.hyperparams["learning_rate"] = 0.01``.
        """
        return with_assigning_dicts(self._state)

    @property
    def parameters(self) -> Any:
        """The variables for which it was built, as the original pytree; ``None`` before."""
        return None if self._tree is None else jax.tree_util.tree_unflatten(self._tree, self._variables)

    @_jax.public_call
    def build(self, variables: Any) -> None:
        """Create the state for ``variables``; a second call for the same variables does nothing.

        Args:
          variables: a pytree of the variables to optimise, all of one strategy (an iterator becomes a list). The
            transformation gets the parameters in this tree, and ``None`` for other leaves: functions, numbers,
            integer variables that are not trainable.

        Raises:
          ValueError: there are none, one is listed twice, or the optimizer was built for other variables.
          TypeError: a variable is on-read, or its dtype is not a float.
        """
        with launching:  # or each of two threads would make a state, and one be left with that of the other
            self._build(*_optimised_variables(variables))

    def _build(self, variables: list[Variable], tree_of_variables: Any) -> None:
        if self._variables:
            self._check_same(variables)
            return
        if not variables:
            raise ValueError("Optimizer: there are no variables to optimise")
        strategy = variables[0].strategy
        for v in variables:
            if v.is_on_read or not jnp.issubdtype(v.dtype, jnp.inexact):
                raise TypeError(f"Optimizer: {v.describe()} can't be optimised; it must be a float, and on-write")
            if v.strategy is not strategy:
                raise ValueError(
                    f"Optimizer: {variables[0].describe()} belongs to {strategy!r}, {v.describe()} to {v.strategy!r}"
                )
        self.name = strategy.extended.variables.named(self, self.name)
        with outside_steps(variables[0].replicas):
            initial, tree = self._slots(variables, tree_of_variables)
            slots = [Variable(stored, name=name, trainable=False) for name, stored in initial]
        self._state = jax.tree_util.tree_unflatten(tree, slots)
        self._variables, self._tree = variables, tree_of_variables
        current_store().if_it_fails(self.forget)

    def reset(self) -> None:
        """Reset the state to the transformation's initial state for the present values; before it is built, do nothing.

        Raises:
          ContextError: called in a step.
        """
        if context.in_step():
            raise ContextError("Optimizer.reset was called inside a step: call it outside")
        if self._tree is None:
            return
        with context.cross_replica(self._variables[0].replicas):
            slots, _ = self._slots(self._variables, self._tree)
        store_all({v.slot: stored.array for v, (_, stored) in zip(self.variables, slots, strict=True)})

    def _slots(self, variables: list[Variable], tree_of_variables: Any) -> tuple[list[tuple[str, Stored]], Any]:
        """Names and initial values of the state; a slot with the shape of its parameter has its layout."""

        def initial(laid_out: list[Any]) -> Any:
            whole = [v.layout.whole(array) for v, array in zip(variables, laid_out, strict=True)]
            return self.tx.init(jax.tree_util.tree_unflatten(tree_of_variables, whole))

        mesh = variables[0].strategy.extended.mesh
        present = [v.layout.from_stored(v.stored(), mesh) for v in variables]
        avals = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in present]
        paths, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(initial, avals))
        places, _ = jax.tree_util.tree_flatten_with_path(
            jax.tree_util.tree_unflatten(tree_of_variables, variables), is_leaf=is_leaf
        )
        owners = owners_of(paths, places)
        names = [name_of_slot(self.name, path, owner) for (path, _), owner in zip(paths, owners, strict=True)]
        layouts = layouts_of_slots([leaf.shape for _, leaf in paths], owners, variables)

        def laid_out(*arrays: Any) -> list[Any]:
            leaves = jax.tree_util.tree_leaves(initial(list(arrays)))
            return [layout.laid_out(leaf) for layout, leaf in zip(layouts, leaves, strict=True)]

        values: list[Any] = [None] * len(layouts)
        for device in {layout.logical_device: None for layout in layouts}:
            # Each logical device computes only its own slots.
            numbers = [i for i, layout in enumerate(layouts) if layout.logical_device == device]
            where = layouts[numbers[0]].mesh(mesh)
            make, needed = _jax.pruned_fn(laid_out, avals, numbers)
            operands = [put_among(present[i], variables[i].layout.laid_out_on(where)) for i in needed]
            arrays = compute(make, operands, [layouts[i].laid_out_on(where) for i in numbers])
            for i, value in zip(numbers, arrays, strict=True):
                values[i] = layouts[i].to_stored(put(value, layouts[i].laid_out_sharding(mesh)), mesh)
        slots = [
            (name, Stored(value, layout, leaf.shape))
            for value, layout, name, (_, leaf) in zip(values, layouts, names, paths, strict=True)
        ]
        return slots, tree

    def forget(self) -> None:
        """Return to the state before :meth:`build`."""
        self._variables, self._tree, self._state = [], None, None

    @_jax.public_call
    def apply_gradients(self, gradients: Any, variables: Any = None, aggregate: bool = True, **extra: Any) -> None:
        """Update each variable with its gradient.

        Args:
          gradients: a pytree like ``variables``, as ``value_and_grad`` returns it; or pairs of a gradient and its
            variable, as from ``zip(gradients, variables)``, without the argument ``variables``. Each gradient has its
            variable's shape. A gradient may be :class:`IndexedSlices`: its rows are gathered, and it becomes a dense
            array for the transformation. Variables whose gradient is ``None`` are skipped.
          variables: a pytree of variables. The transformation gets the parameters in the tree of the first call (for
            pairs: in a list). Each call must have the same variables. Other leaves, such as the functions of a
            module, have ``None`` as their gradient.
          aggregate: whether the gradients are this replica's own and must be summed over the replicas. With
            ``False`` they must be reduced already.
          **extra: further arguments of the transformation (``value=``, ``grad=``, ``value_fn=`` and others). With
            ``aggregate``, ``value`` and ``grad`` are this replica's shares, and are summed with the gradients, unless
            they have been all-reduced; so are the result of a function such as ``value_fn``, and its gradient.
            While such a function runs, the variables have the values of its parameters. Every other argument must be
            the same on every replica. Without ``aggregate`` all arguments must be.

        Raises:
          LocalityError: with ``aggregate``, a gradient that is all-reduced already, and would be counted n
            times on n replicas; without, a gradient that differs between replicas; a further argument that differs.
          ValueError: a gradient of another shape; gradients in another structure; other variables than before; no
            gradient at all.
          TypeError: not pairs of a gradient and a variable; a complex gradient of a real variable; the transformation
            does not take a further argument.
          ContextError: called in cross-replica context.

        With ``aggregate``, one fused all-reduce for all gradients; functions among the arguments take more.

        >>> import replicax, optax
        >>> w = replicax.Variable([1.0, 1.0])
        >>> optimizer = replicax.Optimizer(optax.polyak_sgd())
        >>> loss, grads = replicax.value_and_grad(lambda: (w * w).sum(), w)()
        >>> optimizer.apply_gradients(grads, w, value=loss)
        >>> w.numpy().tolist()
        [0.5, 0.5]
        """
        replica = context.get_replica_context()
        if replica is None:
            raise ContextError("apply_gradients takes one replica's gradients: call it inside a step (strategy.run)")
        if isinstance(variables, bool):  # with pairs, aggregate is the second argument
            variables, aggregate = None, variables
        check_accepted(self.tx, extra)
        pairs, chosen = _pairs(gradients, variables)
        for gradient, v in pairs:
            if gradient.shape != v.shape:
                raise ValueError(
                    f"apply_gradients: the gradient of {v.describe()} has shape {gradient.shape}; expected {v.shape}"
                )
        self.build(chosen)
        own, of = [g for g, _ in pairs], [v for _, v in pairs]
        apply = functools.partial(self._apply, of, replica, aggregate, extra)
        hook = update_hook.get()
        if hook is None:
            apply(own)
        else:
            hook.update(own, of, extra, apply)

    def _apply(
        self,
        variables: Sequence[Variable],
        replica: context.ReplicaContext,
        aggregate: bool,
        extra: Mapping[str, Any],
        gradients: Sequence[Any],
    ) -> None:
        store = current_store()
        refused, problem = (frozenset({R}), _ALREADY_REDUCED) if aggregate else (frozenset({T}), _NOT_REDUCED)
        checked: list[Any] = []
        for g, v in zip(gradients, variables, strict=True):
            leaves, tree = jax.tree_util.tree_flatten(g)  # one leaf, or the leaves of IndexedSlices
            leaves = store.expect(leaves, refused, f"apply_gradients: the gradient of {v.describe()} {problem}")
            checked.append(jax.tree_util.tree_unflatten(tree, leaves))
        arrays, put_back = arrays_in(extra)
        marked = [store.expect([a], *refused_of(name, where, aggregate))[0] for name, where, a in arrays]
        shares = [i for i, (name, _, _) in enumerate(arrays) if name in SHARES]
        if aggregate:
            total_of = replica._sum_unless_reduced if shares else functools.partial(replica.all_reduce, "sum")
            checked, summed = total_of((checked, [marked[i] for i in shares]))
            for i, total in zip(shares, summed, strict=True):
                marked[i] = total
        further = {
            name: of_parameters(value, name, self._variables, self._tree, aggregate) if callable(value) else value
            for name, value in put_back(marked).items()
        }
        self._change_by(dict(zip(variables, checked, strict=True)), further)

    def _change_by(self, by_variable: dict[Variable, Any], further: dict[str, Any]) -> None:
        """Update the variables with gradients that are the same on every replica."""
        store = current_store()
        dense = {v: (g.to_dense() if is_slices(g) else g).astype(v.dtype) for v, g in by_variable.items()}
        values = [store.read(v) for v in self._variables]
        state = jax.tree_util.tree_map(store.read, self._state, is_leaf=is_leaf)
        reduced, parameters = (
            jax.tree_util.tree_unflatten(self._tree, leaves) for leaves in ([dense[v] for v in self._variables], values)
        )
        new_parameters, state = self._change(reduced, state, parameters, further)
        new_slots, tree = jax.tree_util.tree_flatten(state)
        built: Any = jax.tree_util.tree_structure(self._state, is_leaf=is_leaf)
        if tree != built:
            raise ValueError(f"Optimizer: tx.update changed the structure of its state from {built} to {tree}")
        written = [*self._variables, *self.variables]
        new_values = jax.tree_util.tree_leaves(new_parameters)
        for v, value in zip(written, [*new_values, *new_slots], strict=True):
            store.write(v, v.checked(value), f"{v.describe()}: its update differs between replicas")

    @functools.cached_property
    def _change(self) -> Callable[..., tuple[Any, Any]]:
        """A function from ``(gradients, state, parameters, further arguments)`` to new parameters and state."""
        import optax  # takes 0.1 s; a user with a transformation has imported it already

        tx = self.tx

        def change(gradients: Any, state: Any, parameters: Any, further: Any) -> tuple[Any, Any]:
            updates, state = tx.update(gradients, state, parameters, **further)
            return optax.apply_updates(parameters, updates), state

        return _jax.as_one_program(change, tx.update)

    def _check_same(self, variables: list[Variable]) -> None:
        if len(variables) == len(self._variables) and set(map(id, variables)) == set(map(id, self._variables)):
            return
        ours, theirs = ([f"{v.name} of {v.strategy!r}" for v in vs] for vs in (self._variables, variables))
        raise ValueError(
            f"Optimizer: built for the variables {ours}, but got gradients of {theirs}. Each call must name the same "
            "variables, each once; use an optimizer for each group."
        )


def _taken_apart(variables: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure of a pytree of variables; an iterator or a view of a dict becomes a list."""
    leaves, tree = jax.tree_util.tree_flatten(registered(_as_tree(variables)), is_leaf=is_leaf)
    return leaves, tree


def _optimised_variables(variables: Any) -> tuple[list[Any], Any]:
    """The variables of a pytree that can be optimised, and their pytree, with ``None`` for other leaves."""
    leaves, tree = _taken_apart(variables)
    chosen = differentiable(leaves, "Optimizer")
    kept = set(chosen)
    others = [leaf if isinstance(leaf, Variable) and leaf in kept else None for leaf in leaves]
    return chosen, jax.tree_util.tree_structure(jax.tree_util.tree_unflatten(tree, others), is_leaf=is_leaf)


def _as_tree(values: Any) -> Any:
    return list(values) if isinstance(values, Iterator | ValuesView) else values


def _pairs(gradients: Any, variables: Any) -> tuple[list[tuple[Any, Variable]], Any]:
    """Gradients with their variables, and the tree of these variables, without those that have no gradient."""
    if variables is None:
        all_pairs = pairs_of(gradients)
        chosen: Any = [v for g, v in all_pairs if g is not None]
    else:
        leaves, tree = _taken_apart(variables)
        try:
            parts = tree.flatten_up_to(registered(_as_tree(gradients)))
        except (ValueError, TypeError):
            theirs = jax.tree_util.tree_structure(gradients, is_leaf=is_slices)
            raise ValueError(
                f"apply_gradients: gradients must have the structure of the variables, {tree}, but have {theirs}"
            ) from None
        pairs = [(g, v) for g, v in zip(parts, leaves, strict=True) if g is not None or isinstance(v, Variable)]
        all_pairs = pairs_of(pairs)
        chosen = jax.tree_util.tree_unflatten(
            tree, [None if g is None else v for g, v in zip(parts, leaves, strict=True)]
        )
    if all_pairs and all(g is None for g, _ in all_pairs):
        names = all_pairs[0][1].describe() + (f" and {len(all_pairs) - 1} more" if len(all_pairs) > 1 else "")
        raise ValueError(
            f"apply_gradients: every gradient is None, so no variable would change: {names}. "
            "Differentiate the loss by these variables: value_and_grad(loss, variables)"
        )
    what = "apply_gradients: the gradient of"
    present = [(g, v) for g, v in all_pairs if g is not None]
    arrays = [(g if is_slices(g) else as_array(g, f"{what} {v.describe()}"), v) for g, v in present]
    for g, v in arrays:
        if jnp.iscomplexobj(getattr(g, "values", g)) and not jnp.issubdtype(v.dtype, jnp.complexfloating):
            raise TypeError(
                f"{what} {v.describe()} is complex, and the variable is real: pass its real part, jnp.real(gradient)"
            )
    return arrays, chosen


_ALREADY_REDUCED = (
    "has been all-reduced, and is already the same on every replica, so summing it would count it once for every "
    "replica: pass aggregate=False, or pass this replica's own gradient"
)
_NOT_REDUCED = "differs between replicas, and aggregate=False says that it has been reduced: pass aggregate=True"
