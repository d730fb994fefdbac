"""Precision: a step that computes in bfloat16 or float16, while its parameters stay float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax, context
from replicax.argument_checks import as_keys
from replicax.errors import ContextError, warn
from replicax.execution.tracing.function_key import Wrapper
from replicax.execution.tracing.stateful_arguments import cells_in
from replicax.execution.tracing.step_call import check_changes_leave, mutable_objects
from replicax.loop.step_metrics import step_outcome
from replicax.loop.step_objects import is_whole
from replicax.pytrees import registered
from replicax.training.step_hooks import gradient_hook, update_hook, using
from replicax.user_functions import checked_function, checked_result
from replicax.values import PerReplica
from replicax.variables import Variable, as_arrays
from replicax.variables.store import DerivedStore, Store, current_store, use_store

DTYPES = {"bf16": jnp.bfloat16, "bfloat16": jnp.bfloat16, "fp16": jnp.float16, "float16": jnp.float16}
FIRST = 2.0**15
"""The loss scale that a run begins with, about half of what float16 can hold. If it is too high, it is soon halved."""
LARGEST = 2.0**24
"""The largest loss scale. Where gradients are 0, it would grow for ever."""
PERIOD = 2000
"""After how many steps in a row without an overflow the scale is doubled."""


class Precision:
    """Makes steps that compute in bfloat16 or float16, while parameters, optimizer state and sums stay float32.

    ``replicax.train(precision="bf16")`` makes one by itself. In a loop of your own, wrap the step with it:
    ``strategy.run(precision(step), args=(batch,))``. In the wrapped step

    - float32 arrays of the batch are cast when they come in;
    - the function that ``replicax.value_and_grad`` differentiates sees trainable float32 variables cast; others, such
      as batch statistics, stay as they are;
    - losses, gradients and what the step returns are float32.

    float16 holds no number above 65504, and rounds those below 6e-8 to 0. So the loss is multiplied before it is
    differentiated, and the gradients are divided by the same *loss scale*. If a gradient overflows on any replica, the
    step changes nothing on any replica, and the scale is halved; it is doubled after 2000 steps without an overflow.
    That takes one all-reduce of a scalar in each step. The scale consists of two variables, so make the object in the
    strategy's scope, and save it with the others: ``Checkpoint(model=…, precision=precision)``.

    Args:
      kind: ``"bf16"`` (``"bfloat16"``) or ``"fp16"`` (``"float16"``).
      loss_scale: ``"auto"``: dynamic for float16, none for bfloat16. A number: that scale always; steps that overflow
        are skipped, too. ``None``: none, which for float16 is a warning.
      keep: keys of the batch, a dict, whose arrays are not cast, such as the targets of a regression.

    Attributes:
      dtype: what is computed in.

    Raises:
      ValueError: another ``kind``; a ``loss_scale`` that is not positive.
      TypeError: ``keep`` is no list of strings.

    >>> import replicax, optax, jax.numpy as jnp, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     w = replicax.Variable(np.ones((4, 1), np.float32), name="w")
    ...     optimizer = replicax.Optimizer(optax.sgd(0.1))
    >>> def step(x):
    ...     loss_of = lambda: replicax.compute_average_loss(jnp.square(x @ w)[:, 0])
    ...     loss, gradients = replicax.value_and_grad(loss_of, [w])()
    ...     optimizer.apply_gradients(zip(gradients, [w]))
    ...     return loss, (x @ w.value.astype(x.dtype)).astype(jnp.float32).dtype.name, x.dtype.name
    >>> precision = replicax.loop.Precision("bf16")
    >>> for batch in strategy.distribute_dataset([np.ones((8, 4), np.float32)]):
    ...     loss, _, inside = strategy.run(precision(step), args=(batch,))
    >>> float(strategy.reduce("sum", loss)), inside, w.dtype.name
    (16.0, 'bfloat16', 'float32')
    """

    def __init__(
        self,
        kind: str,
        *,
        loss_scale: float | Literal["auto"] | None = "auto",
        keep: Sequence[str] = (),
    ) -> None:
        if not isinstance(kind, str) or kind not in DTYPES:
            raise ValueError(f"Precision: kind must be 'bf16' or 'fp16', got {kind!r}")
        keys = as_keys(keep)
        if keys is None:
            raise TypeError(f"Precision: keep must be a list of keys of the batch, got {keep!r}; for one: keep=[key]")
        self.dtype = jnp.dtype(DTYPES[kind])
        self._keep = keys
        self._is_dynamic = loss_scale == "auto" and self.dtype == jnp.float16
        first = FIRST if self._is_dynamic else None if loss_scale == "auto" else loss_scale
        if first is not None and (
            isinstance(first, bool) or not isinstance(first, int | float) or not 0 < first < math.inf
        ):
            raise ValueError(f"Precision: loss_scale must be 'auto', a positive number, or None, got {loss_scale!r}")
        if first is None and self.dtype == jnp.float16:
            warn(
                "Precision('fp16', loss_scale=None): gradients below 6e-8 become 0 in float16, so small ones are lost. "
                "Leave loss_scale out to have the loss scaled, or compute in 'bf16', which needs no scaling.",
                UserWarning,
            )
        self._scale = self._steps = None
        if first is not None:
            self._scale = Variable(jnp.float32(first), name="precision/loss_scale", trainable=False)
            self._steps = Variable(jnp.int32(0), name="precision/steps_without_overflow", trainable=False)

    @property
    def variables(self) -> dict[str, Variable]:
        """The loss scale, and how many steps in a row had no overflow; empty without a loss scale."""
        if self._scale is None or self._steps is None:
            return {}
        return {"scale": self._scale, "steps_without_overflow": self._steps}

    @property
    def loss_scale(self) -> float | None:
        """The present loss scale; ``None`` without one. Reading it waits for the steps before."""
        return None if self._scale is None else float(self._scale)

    def __call__(self, step: Callable[..., Any]) -> PreciseStep:
        """``step``, computed in this precision: for ``strategy.run``, ``run_steps`` and ``replicax.train``."""
        return PreciseStep(checked_function(step, "Precision(…)(step)", "step"), self)

    def cast(self, tree: Any) -> Any:
        """``tree`` with its float32 arrays, and those of its variables, in :attr:`dtype`.

        Gradients that come back through it are float32.
        """
        _in_use().is_used = True
        return _cast_tree(as_arrays(tree), self.dtype)

    def scale(self, loss: Any) -> Any:
        """``loss`` times the loss scale, in float32: what ``jax.grad`` or ``nnx.grad`` is to differentiate.

        Only for steps that don't use ``replicax.value_and_grad``, which scales by itself; see :meth:`unscale`.
        """
        return _in_use().before(loss)

    def unscale(self, gradients: Any) -> Any:
        """Gradients of a loss of :meth:`scale`, divided by the loss scale; one that overflowed skips the step."""
        use = _in_use()
        leaves, tree = jax.tree_util.tree_flatten(gradients)
        _, leaves = use.after(None, leaves)
        if update_hook.get() is use:  # otherwise they are of one micro-batch, and their sum is noted
            use.note(leaves)
        return jax.tree_util.tree_unflatten(tree, leaves)

    def __repr__(self) -> str:
        return f"Precision({self.dtype.name!r})"


class PreciseStep(Wrapper):
    """A step in some precision; see :class:`Precision`."""

    def __init__(self, fn: Callable[..., Any], precision: Precision) -> None:
        state = _jax.ById(precision) if precision.variables else None
        super().__init__(fn, precision.dtype.name, precision._keep, state)
        self.precision = precision

    def __copy__(self) -> PreciseStep:
        return PreciseStep(self.fn, self.precision)

    def __reduce__(self) -> Any:
        if self.precision.variables:
            raise TypeError(
                f"{self.__name__}: a step with a loss scale stays in the process that has the scale. On parameter "
                "servers compute in 'bf16', which needs none"
            )
        return PreciseStep, (self.fn, self.precision)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        precision = self.precision
        if context.get_replica_context() is None:
            raise ContextError(f"{self.__name__} is a step: call it by strategy.run(precision(step), args=(batch,))")
        if gradient_hook.get() is not None:
            raise ValueError(
                f"{self.__name__} has a precision already: wrap it once, and leave it out of replicax.train"
            )
        outer, updates = current_store(), update_hook.get()
        if precision.variables and updates is not None:
            raise ValueError(
                f"{self.__name__} has a loss scale, and is accumulated: an overflow in one micro-batch is to skip the "
                "update with the sum of all. Wrap the other way round: precision(accumulated(step, 4)); for "
                "replicax.train pass the step itself, with precision=… and accumulate=…"
            )
        args, kwargs = _cast_tree((args, kwargs), precision.dtype, precision._keep)
        objects = mutable_objects(self.fn, self.fn, args, kwargs)
        scale = None if precision._scale is None else outer.read(precision._scale)
        use = _Use(precision.dtype, scale)
        store = None if scale is None else DerivedStore(outer, {})
        cells = [] if scale is None else [(cell, cell.get_raw_value()) for cell in cells_in(self.fn, args, kwargs)]
        with using(gradient_hook, use), using(update_hook, use if store else updates), use_store(store or outer):
            returned = checked_result(self.fn(*args, **kwargs), self.fn, "Precision(…)(step)")
        check_changes_leave(objects, set(map(id, jax.tree_util.tree_leaves(registered(returned), is_leaf=is_whole))))
        if not use.is_used:
            raise ValueError(
                f"{self.__name__}: the step calls no replicax.value_and_grad, so its parameters would stay float32. "
                "Let it differentiate the loss, or cast what it computes with: precision.cast(parameters). Layers of "
                "Flax NNX are made with dtype=jnp.bfloat16, and need no Precision."
            )
        if store:
            self._finish(store, use, cells)
        return _widened_tree(returned)

    def _finish(self, store: DerivedStore, use: _Use, cells: Sequence[tuple[Any, Any]]) -> None:
        """Let the step change its variables, unless a gradient of any replica has overflowed; then, the scale."""
        outer = store.outer
        scale, steps = self.precision._scale, self.precision._steps
        assert scale is not None
        assert steps is not None
        if not use.overflows:
            raise ValueError(
                f"{self.__name__}: the loss is scaled, and the step calls no apply_gradients, so an overflow would not "
                "be noticed: update by replicax.Optimizer, or pass the gradients through precision.unscale"
            )
        overflows = jnp.sum(jnp.stack(use.overflows).astype(jnp.int32))
        is_good = context.current_replica().all_reduce("sum", overflows) == 0
        outcome = step_outcome.get()
        if outcome is not None:
            outcome.append(is_good)
        for variable, error_unless_mirrored in store.written.items():
            value = jnp.where(is_good, store.values[variable], outer.read(variable))
            outer.write(variable, value, error_unless_mirrored)
        for cell, old in cells:
            if cell.get_raw_value() is not old:
                cell.set_raw_value(jnp.where(is_good, cell.get_raw_value(), old))
        if self.precision._is_dynamic:
            now, counted = outer.read(scale), outer.read(steps) + 1
            is_full = counted >= PERIOD
            larger = jnp.where(is_full, jnp.minimum(now * 2, LARGEST), now)
            differs = "the loss scale differs between replicas"
            outer.write(scale, jnp.where(is_good, larger, jnp.maximum(now / 2, 1.0)), differs)
            outer.write(steps, jnp.where(is_good & ~is_full, counted, 0), differs)


class _Use:
    """One run of a step, with casts around its gradients and updates."""

    def __init__(self, dtype: Any, scale: Any) -> None:
        self._dtype = dtype
        self._scale = scale
        self.is_used = False
        self.overflows: list[Any] = []

    def reading(self, store: Store) -> Store:
        self.is_used = True
        return _CastStore(store, self._dtype)

    def before(self, loss: Any) -> Any:
        self.is_used = True
        loss = loss.astype(jnp.promote_types(loss.dtype, jnp.float32))
        return loss if self._scale is None else loss * self._scale.astype(loss.dtype)

    def after(self, loss: Any, gradients: list[Any]) -> tuple[Any, list[Any]]:
        if self._scale is None:
            return loss, gradients
        inverse = 1.0 / self._scale

        def unscaled(gradient: Any) -> Any:
            if not jnp.issubdtype(gradient.dtype, jnp.inexact):  # the indices of rows; a gradient of integers
                return gradient
            wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
            return wide * inverse.astype(wide.dtype)

        return None if loss is None else loss * inverse.astype(loss.dtype), list(map(unscaled, gradients))

    def update(
        self,
        gradients: list[Any],
        variables: Sequence[Variable],
        extra: Mapping[str, Any],
        apply: Callable[[list[Any]], None],
    ) -> None:
        self.note(gradients)
        apply(gradients)

    def note(self, gradients: Sequence[Any]) -> None:
        """Note whether one of these is not finite."""
        floats = [g for g in jax.tree_util.tree_leaves(gradients) if jnp.issubdtype(g.dtype, jnp.inexact)]
        finite = [jnp.all(jnp.isfinite(g)) for g in floats]
        self.overflows.append(~jnp.all(jnp.stack(finite)) if finite else jnp.bool_(False))


class _CastStore:
    """A store in which trainable float32 variables read as another dtype."""

    def __init__(self, outer: Store, dtype: Any) -> None:
        self._outer = outer
        self._dtype = dtype
        self.create = outer.create
        self.write = outer.write
        self.copies = outer.copies
        self.expect = outer.expect
        self.if_it_fails = outer.if_it_fails

    def read(self, variable: Variable) -> Any:
        value = self._outer.read(variable)
        return value.astype(self._dtype) if variable.trainable and variable.dtype == jnp.float32 else value


def _in_use() -> _Use:
    use = gradient_hook.get()
    if not isinstance(use, _Use):
        raise ContextError(
            "Precision.cast, scale and unscale are for inside a step that is wrapped with the precision: "
            "strategy.run(precision(step), args=(batch,))"
        )
    return use


def _cast_tree(tree: Any, dtype: Any, keep: frozenset[str] = frozenset()) -> Any:
    """``tree`` with its float32 arrays in ``dtype``, but for those under the keys ``keep``."""

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray) or leaf.dtype != jnp.float32:
            return leaf
        kept = any(getattr(part, "key", getattr(part, "name", None)) in keep for part in path)
        return leaf if kept else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, registered(tree), is_leaf=is_whole)


def _widened_tree(tree: Any) -> Any:
    """``tree`` with half-precision arrays as float32."""

    def one(leaf: Any) -> Any:
        is_half = isinstance(leaf, jax.Array) and leaf.dtype in (jnp.float16, jnp.bfloat16)
        return leaf.astype(jnp.float32) if is_half and not isinstance(leaf, PerReplica) else leaf

    return jax.tree_util.tree_map(one, registered(tree), is_leaf=is_whole)
