"""Changing variables from across the replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax import context
from replicax.execution.destinations import holds_variables
from replicax.extended.mirrored import mirrored
from replicax.nests import is_leaf, known
from replicax.variables import Variable
from replicax.variables.layout import Layout
from replicax.variables.store import check_owner

if TYPE_CHECKING:
    from replicax.strategy import Strategy


class Updating:
    """The part of :class:`StrategyExtended` that changes variables."""

    strategy: Strategy
    worker_devices: tuple[jax.Device, ...]
    default_layout: Layout

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that hold variables, but for those that are on-read or split."""
        home = self.default_layout.home
        return self.worker_devices if home is None else (home,)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[jax.Device, ...]:
        """The devices for variables that belong to no other, given those that are optimised."""
        for v in var_list:
            check_owner(v, self.strategy, "this is")
        return self.parameter_devices

    @contextlib.contextmanager
    def colocate_vars_with(self, variable: Any) -> Iterator[None]:
        """Create variables where ``variable`` is, so that they have its locality V(variable).

        Args:
          variable: a variable of this strategy, or what :meth:`non_slot_devices` returned.

        Raises:
          ValueError, ContextError: ``variable`` lies elsewhere.
        """
        if not holds_variables(self.strategy, variable):
            raise ValueError(f"colocate_vars_with: {variable!r} is not where {self.strategy!r} keeps its variables")
        yield

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
          args: pytrees of plain values. Locality V(var): the same wherever the variable is.
          kwargs: the same, by name.
          group: whether to return the result once; otherwise a pytree with a list at each leaf, with an entry for
            each device of the variable.

        Raises:
          TypeError: an argument is ``PerReplica``: reduce it first; or ``var`` is no variable.
          LocalityError: inside a step, an argument in which replicas differ.
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
        check_owner(var, self.strategy, "this is")
        return self._update("extended.update", fn, (var, *args), kwargs, group)

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
          colocate_with: what :meth:`non_slot_devices` returned.
          fn: assigns to variables that belong to no other, such as counters.
          args: pytrees of plain values. Locality N.
          kwargs: the same, by name.
          group: as in :meth:`update`, also for what it raises.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     count = replicax.Variable(0, name="count")
        ...     devices = strategy.extended.non_slot_devices([count])
        ...     strategy.extended.update_non_slot(devices, lambda: count.assign_add(1), group=False)
        [<Variable 'count' int32[] mirrored on 2 replicas: 1>, <Variable 'count' int32[] mirrored on 2 replicas: 1>]
        """
        if not holds_variables(self.strategy, colocate_with):
            raise ValueError(
                "extended.update_non_slot(colocate_with, fn): expected what non_slot_devices returned, got "
                f"{colocate_with!r}"
            )
        return self._update("extended.update_non_slot", fn, args, kwargs, group)

    def _update(
        self, method: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, group: bool
    ) -> Any:
        context.check_cross_replica(self.strategy, method)
        args, kwargs = mirrored((tuple(args), dict(kwargs or {})), method)
        with context.cross_replica(self.strategy):
            result = fn(*args, **kwargs)
        if group:
            return result
        n = len(self.parameter_devices)
        return jax.tree_util.tree_map(lambda leaf: [leaf] * n, known(result), is_leaf=is_leaf)
