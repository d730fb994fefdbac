"""Reduces values to destinations, and copies values to destinations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from replicax import _jax, context
from replicax.collectives import ReduceOp
from replicax.communication import CommunicationOptions, checked_options
from replicax.devices.arrays import put
from replicax.devices.host_values import as_array
from replicax.devices.mesh import mirrored_sharding
from replicax.execution import cross_replica
from replicax.execution.cache import ProgramCache
from replicax.extended.locations import destination
from replicax.extended.mirrored_values import mirrored
from replicax.pytrees import registered
from replicax.variables.aggregation import Aggregation
from replicax.workers.replicas import Replicas


class Reducing:
    """The methods of :class:`StrategyExtended` that reduce values to destinations."""

    replicas: Replicas
    programs: ProgramCache

    @_jax.public_call
    def reduce_to(
        self,
        reduce_op: ReduceOp | Aggregation | str,
        value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a value across replicas, and put the result on ``destinations``.

        Args:
          reduce_op: ``"sum"``, ``"mean"`` or a :class:`ReduceOp`; or ``"only_first_replica"``, for replica 0's value.
          value: a pytree with ``PerReplica`` leaves, with components of one shape.
          destinations: a device, its name, a list of these, or a variable (for its parameter device, if it has one);
            ``None``, another variable or a ``PerReplica`` for all replicas' devices.
          options: :class:`CommunicationOptions`.

        Returns:
          The pytree of plain arrays, mirrored.

        Raises:
          ValueError: as :meth:`Strategy.reduce`; inside a step, other devices than the replicas'.
          ContextError: called inside a replica.

        One fused all-reduce; for ``"only_first_replica"`` one for each leaf.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
        >>> strategy.extended.reduce_to("sum", x, destinations="cpu:3").devices()
        {CpuDevice(id=3)}
        """
        return self._reduce_to("extended.reduce_to", reduce_op, [(value, destinations)], options)[0]

    @_jax.public_call
    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | Aggregation | str,
        value_destination_pairs: Sequence[tuple[Any, ...]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Several :meth:`reduce_to` at once, as one fused all-reduce unless ``options`` say otherwise.

        Args:
          reduce_op: as in :meth:`reduce_to`.
          value_destination_pairs: pairs ``(value, destinations)``, or ``(value,)``; see :meth:`reduce_to`, also for
            the errors.
          options: :class:`CommunicationOptions`.

        Returns:
          A list with a result for each pair.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
        >>> [float(v) for v in strategy.extended.batch_reduce_to("mean", [(x, None), (x, "cpu:0")])]
        [1.5, 1.5]
        """
        method = "extended.batch_reduce_to"
        if not isinstance(value_destination_pairs, Iterable):
            raise TypeError(
                f"{method}: expected a list of pairs (value, destinations), got {value_destination_pairs!r}"
            )
        pairs = list(value_destination_pairs)
        for i, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) not in (1, 2):
                raise TypeError(
                    f"{method}: value_destination_pairs[{i}] must be a pair (value, destinations), got {pair!r}"
                )
        return self._reduce_to(method, reduce_op, [(*pair, None)[:2] for pair in pairs], options)

    def _reduce_to(
        self,
        method: str,
        reduce_op: ReduceOp | Aggregation | str,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        context.check_cross_replica(self.replicas, method)
        options = checked_options(options, self.replicas.worker_devices[0].platform, method)
        name = f"{method}: the value"
        shardings = [destination(self.replicas, d, method) for _, d in pairs]
        values = [value for value, _ in pairs]
        choice = reduce_op.value if isinstance(reduce_op, Aggregation) else reduce_op
        if isinstance(choice, str) and choice.lower() == Aggregation.ONLY_FIRST_REPLICA.value:
            reduced = cross_replica.first(self.programs, values)
        else:
            reduced = cross_replica.reduce(self.programs, ReduceOp.parse(choice), values, None, options, method)
        return [
            v if where is None else jax.tree_util.tree_map(lambda leaf, where=where: put(leaf, where, where=name), v)
            for v, where in zip(reduced, shardings, strict=True)
        ]

    @_jax.public_call
    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """Put a plain value on all devices of ``destinations``.

        Args:
          tensor: an array or number, or a pytree of them, mirrored.
          destinations: as in :meth:`reduce_to`; by default all replicas' devices.

        Returns:
          The pytree of arrays, mirrored.

        Raises:
          TypeError: ``tensor`` is a ``PerReplica`` value, which has a value for each replica.
          LocalityError: inside a step, a value that differs between replicas.
          ContextError: called inside a replica.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> sorted(d.id for d in strategy.extended.broadcast_to(1.0).devices())
        [0, 1]
        """
        context.check_cross_replica(self.replicas, "extended.broadcast_to")
        tensor = mirrored(tensor, "extended.broadcast_to")
        where = destination(self.replicas, destinations, "extended.broadcast_to")
        in_step = context.in_step()
        if not in_step:
            context.check_present(self.replicas, "extended.broadcast_to")
        where = mirrored_sharding(self.replicas.mesh) if where is None else where

        def placed(path: Any, leaf: Any) -> Any:
            name = f"extended.broadcast_to: tensor{jax.tree_util.keystr(path)}"
            return as_array(leaf, name) if in_step else put(leaf, where, where=name)

        return jax.tree_util.tree_map_with_path(placed, registered(tensor))
