"""Changes variables in cross-replica context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from replicax import _jax, context
from replicax.devices.arrays import put
from replicax.devices.mesh import mirrored_sharding
from replicax.errors import ContextError
from replicax.extended.locations import holds_variables
from replicax.extended.mirrored_values import mirrored
from replicax.pytrees import is_leaf, registered
from replicax.user_functions import checked_args, checked_function, checked_kwargs, checked_result
from replicax.variables import Variable
from replicax.variables.initial_layout import colocated
from replicax.variables.layout import Layout
from replicax.variables.store import check_owner
from replicax.workers.replicas import Replicas


class Updating:
    """The methods of :class:`StrategyExtended` that change variables."""

    worker_devices: tuple[jax.Device, ...]
    replicas: Replicas
    default_layout: Layout

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that have the variables, except on-read and split variables."""
        home = self.default_layout.home
        return tuple(dict.fromkeys(self.worker_devices)) if home is None else (home,)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[jax.Device, ...]:
        """The devices for non-slot variables: those that belong to no other variable, such as counters.

        Args:
          var_list: the variables to optimise.

        Raises:
          TypeError: ``var_list`` is not a list of variables.
          ContextError: a variable of another strategy.
        """
        what = "extended.non_slot_devices(var_list)"
        if isinstance(var_list, Variable) or not isinstance(var_list, Iterable):
            raise TypeError(f"{what}: expected a list of variables, got {var_list!r}; of one: [v]")
        for v in var_list:
            if not isinstance(v, Variable):
                raise TypeError(f"{what}: expected variables, got {v!r}")
            check_owner(v, self.replicas, "this is")
        return self.parameter_devices

    def colocate_vars_with(self, variable: Any) -> contextlib.AbstractContextManager[None]:
        """Create variables with the devices of ``variable``: their locality is V(variable), placed like ``variable``.

        Args:
          variable: a variable of this strategy, or the result of :meth:`non_slot_devices`.

        Returns:
          A context manager. Variables created inside are placed like ``variable``: on its logical device or its
          parameter device, in the same parts if the shape allows it, and in as many pieces along the same dim if they
          have that dim; otherwise whole on the same devices. For the result of :meth:`non_slot_devices` their locality
          is N, placed like the non-slot variables: whole on those devices, even if the strategy splits other variables.

        Raises:
          ContextError: called outside this strategy's scope and steps; or another strategy's variable.
          ValueError: ``variable`` names devices where the strategy has no variables.

        >>> import replicax, jax.numpy as jnp
        >>> strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = replicax.Variable(jnp.zeros((512, 4)), name="v")
        ...     with strategy.extended.colocate_vars_with(v):
        ...         slot = replicax.Variable(jnp.zeros(512), name="slot")
        >>> slot.layout
        Split(dim=0, size=512, piece=256, replicas=2, groups=1, logical_parts=1)
        """
        what = "extended.colocate_vars_with"
        if context.current_replicas() is not self.replicas:
            raise ContextError(
                f"{what} of {self.replicas!r} was called outside its scope: call it inside, where variables are created"
            )
        if isinstance(variable, Variable):
            check_owner(variable, self.replicas, f"{what} is called on")
            return colocated(self.replicas, variable.layout, variable.describe())
        if not holds_variables(self.replicas, self.parameter_devices, variable):
            raise ValueError(
                f"{what}: expected a variable of {self.replicas!r}, or the result of its non_slot_devices; "
                f"its variables are not on {variable!r}"
            )
        return colocated(self.replicas, self.default_layout, "a non-slot variable")

    @_jax.public_call
    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Change a variable: call ``fn(var, *args, **kwargs)`` in cross-replica context, where all copies change alike.

        Args:
          var: a variable of this strategy.
          fn: gets the variable and the arguments, and assigns.
          args: a tuple of pytrees of plain values. Locality V(var), placed like ``var``: the same on all its devices.
            Outside a step arrays on other devices are copied there.
          kwargs: the same, by name.
          group: whether to return the result once; otherwise a pytree with a list at each leaf, with an entry for
            each device of the variable.

        Returns:
          The result of ``fn``. Locality V(var): its arrays are on the variable's devices.

        Raises:
          TypeError: an argument is ``PerReplica``: reduce it first; ``var`` is not a variable, ``fn`` not callable,
            ``args`` not a tuple, or ``kwargs`` not a dict.
          LocalityError: inside a step, an argument that differs between replicas.
          ContextError: called inside a replica; or another strategy's variable.

        No collective.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = replicax.Variable(1.0, name="v")
        ...     strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(2.0,))
        <Variable 'v' float32[] mirrored on 2 replicas: 3.>
        """
        if not isinstance(var, Variable):
            raise TypeError(f"extended.update(var, fn): expected a Variable, got {var!r}")
        check_owner(var, self.replicas, "this is")
        return self._update("extended.update(var, fn, args)", var, fn, args, kwargs, group)

    @_jax.public_call
    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` in cross-replica context, to change non-slot variables.

        Args:
          colocate_with: the result of :meth:`non_slot_devices`.
          fn: assigns to variables that belong to no other, such as counters.
          args: a tuple of pytrees of plain values. Locality N: placed like the non-slot variables.
          kwargs: the same, by name.
          group: as in :meth:`update`, with an entry for each of the :meth:`non_slot_devices`; also for the errors.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     count = replicax.Variable(0, name="count")
        ...     devices = strategy.extended.non_slot_devices([count])
        ...     strategy.extended.update_non_slot(devices, lambda: count.assign_add(1), group=False)
        [<Variable 'count' int32[] mirrored on 2 replicas: 1>, <Variable 'count' int32[] mirrored on 2 replicas: 1>]
        """
        if not holds_variables(self.replicas, self.parameter_devices, colocate_with):
            raise ValueError(
                "extended.update_non_slot(colocate_with, fn): expected the result of non_slot_devices, got "
                f"{colocate_with!r}"
            )
        return self._update("extended.update_non_slot(colocate_with, fn, args)", None, fn, args, kwargs, group)

    def _laid(self, layout: Layout, tree: Any) -> Any:
        """A pytree with its arrays on the devices of a variable with this layout; in a step they are there already."""
        if context.in_step() or self.replicas.is_absent:
            return tree
        where = layout.sharding(self.replicas.mesh)
        if layout.home is None:
            where = mirrored_sharding(layout.mesh(self.replicas.mesh))

        def laid(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
                return leaf
            return leaf if leaf.sharding.device_set == where.device_set else put(leaf, where)

        return jax.tree_util.tree_map(laid, registered(tree), is_leaf=is_leaf)

    def _update(
        self,
        method: str,
        var: Variable | None,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        group: bool,
    ) -> Any:
        name = method.split("(")[0]
        context.check_cross_replica(self.replicas, name)
        checked_function(fn, method)
        args = mirrored(checked_args(args, method), name, "args")
        named = mirrored(checked_kwargs(kwargs, method), name, "kwargs")
        layout = self.default_layout if var is None else var.layout
        args, named = self._laid(layout, (args, named))
        with context.cross_replica(self.replicas):
            result = checked_result(fn(*([] if var is None else [var]), *args, **named), fn, method)
        result = self._laid(layout, result)
        if group:
            return result
        n = len(self.parameter_devices if var is None else layout.sharding(self.replicas.mesh).device_set)
        return jax.tree_util.tree_map(lambda leaf: [leaf] * n, registered(result), is_leaf=is_leaf)
