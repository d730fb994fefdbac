"""A tower's view of a distributed step, and the way back into it from cross-tower context."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from replicax import context
from replicax.compat.v1.error_translation import translating_errors
from replicax.compat.v1.variables import tower_local
from replicax.errors import ContextError
from replicax.execution.tracing.communicator import own_components
from replicax.pytrees import registered
from replicax.user_functions import checked_function

if TYPE_CHECKING:
    from replicax.compat.v1.distribution import DistributionStrategy


class TowerContext:
    """One tower's view of a step; see :func:`get_tower_context`. Here it is :class:`replicax.ReplicaContext`.

    >>> from replicax.compat import v1
    >>> distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def fn(x):
    ...     tower = v1.get_tower_context()
    ...     return tower.merge_call(lambda d, v: d.reduce("sum", v), x + tower.tower_id)
    >>> with distribution.scope():
    ...     int(distribution.call_for_each_tower(fn, 1))
    3
    """

    def __init__(self, distribution: DistributionStrategy, replica: context.ReplicaContext) -> None:
        self._distribution = distribution
        self._replica = replica

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The strategy that runs this tower; ``replicax.ReplicaContext.strategy``."""
        return self._distribution

    @property
    def num_towers(self) -> int:
        """The number of towers of the step; ``replicax.ReplicaContext.num_replicas_in_sync``."""
        return self._replica.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Return whether there is only one tower: ``replicax.ReplicaContext.num_replicas_in_sync == 1``."""
        return self.num_towers == 1

    @property
    def tower_id(self) -> Any:
        """This tower's number, from 0; ``replicax.ReplicaContext.replica_id_in_sync_group``."""
        return self._replica.replica_id_in_sync_group

    @property
    def device(self) -> jax.Device:
        """The device of this tower; ``replicax.ReplicaContext.devices`` has those of all.

        Raises:
          ContextError: in a compiled step of several towers, which is one program for all of their devices.
        """
        if self.is_single_tower:
            return self._replica.devices[0]
        number = self.tower_id
        try:
            return self._replica.devices[int(number)]
        except jax.errors.ConcretizationTypeError:
            raise ContextError(
                "device: a compiled step is one program for the devices of all towers, which are "
                "distribution.worker_devices; inside replicax.debug() each tower has its own"
            ) from None

    @translating_errors
    def merge_call(self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``merge_fn(distribution, *args, **kwargs)`` across towers; ``replicax.ReplicaContext.merge_call``."""
        checked_function(merge_fn, "merge_call(merge_fn, *args)", "merge_fn")

        @functools.wraps(merge_fn)
        def across(_: Any, *args: Any, **kwargs: Any) -> Any:
            return merge_fn(self._distribution, *args, **kwargs)

        return self._replica.merge_call(across, args, kwargs)

    def tower_local_var_scope(self, reduce_method: Any) -> contextlib.AbstractContextManager[None]:
        """New variables are tower-local: ``replicax.Variable(…, synchronization="on_read", aggregation=…)``."""
        return tower_local(reduce_method)


# --- back into a tower ----------------------------------------------------------------------------------


def back_in(replica: context.ReplicaContext, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``fn`` in the tower that the merge call has left: ``call_for_each_tower`` inside a merge call."""
    results: list[Any] = []
    with context.replica(replica):
        result = fn(*own_components(registered(args)), **own_components(registered(kwargs)))
        # In cross-tower context a tower's value is PerDevice, a type that only merge_call handles.
        replica.merge_call(lambda _, seen: results.append(seen), (result,))
    return results[0]
