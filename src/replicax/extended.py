"""``StrategyExtended``: the part of a strategy that library code uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax.execution.cache import ProgramCache
from replicax.execution.replicate import Executable
from replicax.execution.run import prepare
from replicax.topology.mesh import REPLICA_AXIS, replica_mesh
from replicax.variables import Variable

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from replicax.strategy import Strategy


class StrategyExtended:
    """The part of a strategy that library code uses: its devices, and a closer look at its programs.

    A strategy subclasses nothing but its own constructor: it makes one of these from the devices it chose.

    Attributes:
      strategy: the strategy that this is the lower level of.
      worker_devices: the devices that replicas run on, in the order of the replicas.
      mesh: the device mesh, with an axis along which the replicas lie.
      programs: the strategy's cache of compiled steps.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> [d.id for d in strategy.extended.worker_devices]
    [0, 1]
    """

    strategy: Strategy

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.worker_devices: tuple[jax.Device, ...] = tuple(devices)
        self.mesh: Mesh = replica_mesh(self.worker_devices)
        self.num_replicas = int(self.mesh.shape[REPLICA_AXIS])
        self.programs = ProgramCache()

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that hold variables."""
        return self.worker_devices

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether ``v`` belongs to this strategy.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     v = replicax.Variable(1.0)
        >>> strategy.extended.variable_created_in_scope(v)
        True
        """
        return isinstance(v, Variable) and v.strategy.extended is self

    def trace(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Executable:
        """The program that ``strategy.run(fn, args, kwargs)`` would run, without running it.

        Returns:
          An :class:`Executable`: ``localities`` of the results, ``compiled_text()``, ``collectives()``.

        >>> import replicax, jax.numpy as jnp
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(x):
        ...     total = replicax.get_replica_context().all_reduce("sum", x)
        ...     return total, x * replicax.get_replica_context().replica_id_in_sync_group
        >>> program = strategy.extended.trace(step, args=(jnp.ones(8),))
        >>> program.localities
        (<Locality.MIRRORED: 'M'>, <Locality.PER_REPLICA: 'T'>)
        >>> program.collectives()
        [Collective(kind='all-reduce', bytes=32, arrays=1)]
        """
        return prepare(self.strategy, fn, args, kwargs)[0]

    def trace_count(self, fn: Callable[..., Any]) -> int:
        """How often the Python of ``fn`` has been run under this strategy to trace it.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> step = lambda x: x + 1
        >>> _ = strategy.run(step, args=(1,)), strategy.run(step, args=(2,)), strategy.run(step, args=(3.0,))
        >>> strategy.extended.trace_count(step)  # for an int, and for a float
        2
        """
        return self.programs.trace_count(fn)
