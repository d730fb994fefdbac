"""``StrategyExtended``: the part of a strategy that library code uses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _jax, context
from replicax.communication import checked_options
from replicax.execution import across
from replicax.execution.cache import ProgramCache
from replicax.execution.described import described
from replicax.execution.destinations import destination, holds_variables
from replicax.execution.placing import devices_here
from replicax.execution.replicate import Executable
from replicax.execution.run import arguments_of, prepare
from replicax.execution.together import Calls
from replicax.locality import T
from replicax.nests import is_leaf, known
from replicax.reduction import ReduceOp
from replicax.topology.lockstep import Lockstep
from replicax.topology.mesh import replica_mesh
from replicax.topology.placement import put
from replicax.topology.workers import Alone, Workers
from replicax.values import PerReplica, container_of
from replicax.variables import Variable
from replicax.variables.layout import Central, Layout, Mirrored
from replicax.variables.partitioners import Partitioner, checked_partitioner
from replicax.variables.register import Register
from replicax.variables.store import check_owner, current_store

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from replicax.strategy import Strategy


class StrategyExtended:
    """The part of a strategy that library code uses: its devices, and a closer look at its programs.

    A strategy subclasses nothing but its own constructor: it makes one of these from the devices it chose.

    Args:
      devices: one for each replica, or ``[replicas, logical devices]`` for replicas that run on several.
      partitioner: splits on-write variables over the replicas.
      parameter_device: has the on-write variables, if the replicas are not to have them.

    Attributes:
      strategy: the strategy that this is the lower level of.
      logical_devices: the devices that each replica runs on: ``[replicas, logical devices]``.
      worker_devices: the first device of each replica, in the order of the replicas.
      num_logical_devices: how many devices each replica runs on.
      mesh: the device mesh, with an axis along which the replicas lie, and others for the logical devices of each.
      is_absent: whether the devices are only described, so that steps can be compiled for them and not run: plan mode.
      programs: the strategy's cache of compiled steps.
      partitioner: into how many pieces on-write variables are split; ``None`` if they are not.
      default_layout: of on-write variables that are not split.
      lockstep: what they tell each other to stay together.
      local_replicas: the numbers of this worker's replicas.
      register: numbers variables, alike on all workers.
      calls: counts the calls of compiled steps.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> [d.id for d in strategy.extended.worker_devices]
    [0, 1]

    Two replicas of two logical devices each:

    >>> import jax, numpy as np
    >>> devices = np.array(jax.devices()[:4]).reshape(2, 2)
    >>> replicax.Strategy(replicax.StrategyExtended(devices))
    Strategy([cpu:0, cpu:2], 2 logical devices each)
    """

    strategy: Strategy

    def __init__(
        self,
        devices: Sequence[jax.Device] | np.ndarray,
        partitioner: Partitioner | None = None,
        parameter_device: jax.Device | None = None,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.lockstep = Lockstep(Alone()) if lockstep is None else lockstep
        self.partitioner = checked_partitioner(partitioner)
        self.default_layout: Layout = Mirrored() if parameter_device is None else Central(parameter_device)
        self.logical_devices: np.ndarray = np.array(devices, dtype=object).reshape(len(devices), -1)
        self.worker_devices: tuple[jax.Device, ...] = tuple(self.logical_devices[:, 0])
        self.mesh: Mesh = replica_mesh(self.logical_devices)
        self.is_absent = _jax.is_absent(self.worker_devices[0])
        self.num_replicas, self.num_logical_devices = map(int, self.logical_devices.shape)
        self.local_replicas = tuple(devices_here(self.mesh))
        self.programs = ProgramCache()
        self.register = Register()
        self.calls = Calls()

    def another(self, strategy: Strategy) -> StrategyExtended:
        """The same for another strategy, on the same devices."""
        twin = copy.copy(self)
        twin.strategy = strategy
        twin.programs = ProgramCache()
        twin.register = Register()
        return twin

    @property
    def workers(self) -> Workers:
        """The processes that the replicas are spread over, and how they exchange bytes."""
        return self.lockstep.workers

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices that hold variables, but for those that are on-read or split."""
        home = self.default_layout.home
        return self.worker_devices if home is None else (home,)

    @property
    def should_init(self) -> bool:
        """Whether this worker should initialise variables: each does."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker should write checkpoints: the chief."""
        return self.workers.index == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker should write summaries: the chief."""
        return self.workers.index == 0

    @property
    def between_graph(self) -> bool:
        """Whether each worker builds a program of its own: no, one program runs for all replicas."""
        return False

    # --- reducing to somewhere --------------------------------------------------------------------------

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: context.Options = None
    ) -> Any:
        """Combine a value across replicas, and put the result somewhere.

        Args:
          reduce_op: ``"sum"``, ``"mean"`` or a :class:`ReduceOp`.
          value: a pytree with ``PerReplica`` leaves, of components of one shape. T.
          destinations: where the result is wanted: a variable or a ``PerReplica`` (on all devices it lies on), a
            device, its name, a list of these, or ``None`` for all replicas' devices.
          options: :class:`CommunicationOptions`.

        Returns:
          The pytree of plain arrays: M, or V(v) if ``destinations`` is a variable v.

        Raises:
          ValueError: as :meth:`Strategy.reduce`; inside a step, other devices than the replicas'.
          ContextError: called inside a replica.

        One fused all-reduce.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
        >>> strategy.extended.reduce_to("sum", x, destinations="cpu:3").devices()
        {CpuDevice(id=3)}
        """
        return self._reduce_to("extended.reduce_to", reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: context.Options = None,
    ) -> list[Any]:
        """Several :meth:`reduce_to` at once, as one fused all-reduce if ``options`` say nothing else.

        Args:
          reduce_op: ``"sum"``, ``"mean"`` or a :class:`ReduceOp`.
          value_destination_pairs: pairs ``(value, destinations)``; see :meth:`reduce_to`, also for what it raises.
          options: :class:`CommunicationOptions`.

        Returns:
          A list with a result for each pair.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
        >>> [float(v) for v in strategy.extended.batch_reduce_to("mean", [(x, None), (x, "cpu:0")])]
        [1.5, 1.5]
        """
        return self._reduce_to("extended.batch_reduce_to", reduce_op, list(value_destination_pairs), options)

    def _reduce_to(
        self, method: str, reduce_op: ReduceOp | str, pairs: Sequence[tuple[Any, Any]], options: context.Options
    ) -> list[Any]:
        context.check_cross_replica(self.strategy, method)
        options = checked_options(options, self.worker_devices[0].platform, method)
        wanted = [destination(self.strategy, d) for _, d in pairs]
        reduced = across.reduce(self.strategy, ReduceOp.parse(reduce_op), [value for value, _ in pairs], None, options)
        return [
            v if where is None else jax.tree_util.tree_map(lambda leaf, where=where: put(leaf, where), v)
            for v, where in zip(reduced, wanted, strict=True)
        ]

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """Put a plain value on all devices of ``destinations``.

        Args:
          tensor: an array or number, or a pytree of them. M.
          destinations: as in :meth:`reduce_to`; by default all replicas' devices.

        Returns:
          The pytree of arrays: M, or V(v) if ``destinations`` is a variable v.

        Raises:
          TypeError: ``tensor`` is a ``PerReplica`` value, which has no one value to put anywhere.
          ContextError: called inside a replica.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> sorted(d.id for d in strategy.extended.broadcast_to(1.0).devices())
        [0, 1]
        """
        context.check_cross_replica(self.strategy, "extended.broadcast_to")
        self._check_mirrored(tensor, "extended.broadcast_to")
        where = destination(self.strategy, destinations)
        if context.in_step():
            return tensor
        context.check_present(self.strategy, "extended.broadcast_to")
        where = NamedSharding(self.mesh, PartitionSpec()) if where is None else where
        return jax.tree_util.tree_map(lambda leaf: put(leaf, where), known(tensor))

    # --- updating ---------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``fn`` once on each replica: the same as :meth:`Strategy.run`.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> float(strategy.extended.call_for_each_replica(lambda x: x + 1, args=(1.0,)))
        2.0
        """
        return self.strategy.run(fn, args, kwargs)

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
        args, kwargs = self._check_mirrored((tuple(args), dict(kwargs or {})), method)
        with context.cross_replica(self.strategy):
            result = fn(*args, **kwargs)
        if group:
            return result
        n = len(self.parameter_devices)
        return jax.tree_util.tree_map(lambda leaf: [leaf] * n, known(result), is_leaf=is_leaf)

    def _check_mirrored(self, tree: Any, method: str) -> Any:
        """The pytree, after making sure that all replicas agree on its leaves."""
        store = current_store()

        def one(path: Any, leaf: Any) -> Any:
            name = f"argument {jax.tree_util.keystr(path)}" if path else "the value"
            if isinstance(leaf, PerReplica):
                raise TypeError(f"{method}: {name} is {leaf!r}, one value for each replica: reduce it first")
            if isinstance(leaf, jax.core.Tracer):
                [leaf] = store.expect(
                    [leaf], frozenset({T}), f"{method}: {name} differs between replicas: reduce it first"
                )
            return leaf

        return jax.tree_util.tree_map_with_path(one, known(tree), is_leaf=is_leaf)

    # --- variables --------------------------------------------------------------------------------------

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

    def read_var(self, v: Variable) -> Any:
        """The value of a variable; of an on-read one, its copies combined. The same as ``v.read_value()``."""
        return v.read_value()

    def value_container(self, value: Any) -> Any:
        """The ``PerReplica`` that ``value`` is a component of; ``value`` itself if there is none any more.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
        >>> strategy.extended.value_container(strategy.local_results(x)[1]) is x
        True
        """
        return container_of(value)

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

        Args:
          fn: the step.
          args: its arguments. Where a ``jax.ShapeDtypeStruct`` stands, with one replica's shape, the program is one for
            an element of a dataset: trace with ``dataset.element_spec`` before the first element is there.
          kwargs: the same, by name.

        Returns:
          An :class:`Executable`: ``localities`` of the results, ``compiled()``, ``compiled_text()``, ``collectives()``.
          Neither tracing nor compiling is done again when the step is run.

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
        args, kwargs = described((tuple(args), dict(kwargs or {})), self.mesh)
        return prepare(self.strategy, fn, arguments_of(self.strategy, fn, args, kwargs))

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

    experimental_should_init = should_init
    experimental_between_graph = between_graph
