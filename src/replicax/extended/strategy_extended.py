"""``StrategyExtended``: the part of a strategy for library code."""

from __future__ import annotations

import copy
import dataclasses
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import jax
import numpy as np

from replicax import _jax
from replicax.argument_checks import as_integer
from replicax.communication import CommunicationOptions
from replicax.devices.mesh import replica_mesh, slices_in_turn
from replicax.execution.cache import ProgramCache
from replicax.execution.compiled.replicate import Executable
from replicax.execution.run import check_call, run_compiled
from replicax.extended.described_arguments import traced_step
from replicax.extended.reducing import Reducing
from replicax.extended.reproducibility import warn_unless_fixed
from replicax.extended.updating import Updating
from replicax.name_hints import NameHints
from replicax.values import container_of
from replicax.variables import Variable
from replicax.variables.collection import VariableCollection
from replicax.variables.layout import Central, Layout, Mirrored
from replicax.variables.partitioners import GroupPartitioner, Partitioner, checked_partitioner
from replicax.workers.exchange import Alone, Workers
from replicax.workers.lockstep import Lockstep
from replicax.workers.replicas import RemoteVariables, Replicas

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from replicax.strategy import Strategy


class ReplicaOptions(TypedDict):
    """The options of a strategy that are about several replicas on a device; see :class:`StrategyExtended`."""

    num_replicas: int | None
    replicas_at_once: int
    reproducible: bool


def _of_replicas(name: str, doc: str) -> Any:
    """A property for the attribute ``name`` of ``self.replicas``."""
    return property(operator.attrgetter(f"replicas.{name}"), doc=doc)


class StrategyExtended(Reducing, Updating, NameHints):
    """The part of a strategy for library code: its devices, its variables and its programs.

    The constructor of a strategy makes one from the devices that it has chosen.

    Args:
      devices: one device for each replica, or ``[replicas, logical devices]`` for replicas with several devices.
      partitioner: splits on-write variables over the replicas, or over those of groups; over the devices if replicas
        share devices.
      parameter_device: the device of the on-write variables; by default each replica has them.
      lockstep: connects this worker with the others; by default there is one worker.
      communication_options: for collectives without their own.
      slices: the number of slices of the devices, one after the other, with as many replicas in each; by default the
        devices determine it. :class:`GroupPartitioner` makes a group of each.
      num_replicas: the number of replicas: a multiple of the number of devices, each of which runs as many, one after
        the other. ``None``: one for each device.
      replicas_at_once: how many of the replicas of a device run at the same time, at most; see
        :class:`MirroredStrategy`.
      reproducible: whether steps have the same bits on any number of devices; see :class:`MirroredStrategy`.

    Raises:
      ValueError: ``num_replicas`` is not a multiple of the devices; or ``reproducible`` comes with ``replicas_at_once``
        or several logical devices.

    Attributes:
      strategy: the strategy that it belongs to.
      replicas: the part of all this that lower packages use.
      programs: the strategy's cache of compiled steps.
      variables: of the strategy, by name and number, which are the same on all workers.
      partitioner: splits on-write variables over the replicas, or over those of groups; ``None`` if they are not split.
      default_layout: of on-write variables that are not split.
      collection: the class of ``variables``.
      remote_variables: where the variables live, if not on these devices.

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
    variables: VariableCollection
    collection: type[VariableCollection] = VariableCollection
    remote_variables: RemoteVariables | None = None

    logical_devices: np.ndarray = _of_replicas(
        "logical_devices", "The devices of each replica: ``[replicas, logical devices]``."
    )
    worker_devices: tuple[jax.Device, ...] = _of_replicas(
        "worker_devices", "The first device of each replica, in the order of the replicas."
    )
    num_replicas: int = _of_replicas("num_replicas", "The number of replicas.")
    num_logical_devices: int = _of_replicas("num_logical_devices", "The number of devices of each replica.")
    local_replicas: tuple[int, ...] = _of_replicas("local_replicas", "The numbers of this worker's replicas.")
    mesh: Mesh = _of_replicas(
        "mesh", "The device mesh: one axis for the replicas, and others for the logical devices of each replica."
    )
    slices: int = _of_replicas(
        "slices", "The number of slices of the devices; 1 if there are none, and 0 if they are arranged otherwise."
    )
    is_absent: bool = _of_replicas(
        "is_absent", "Whether the devices are only described, so that steps can be compiled but not run: plan mode."
    )
    lockstep: Lockstep = _of_replicas("lockstep", "The exchanges that keep the workers together.")
    communication_options: CommunicationOptions | None = _of_replicas(
        "communication_options", "For collectives without their own; ``None`` for the defaults."
    )
    reproducible: bool = _of_replicas("reproducible", "Whether steps have the same bits on any number of devices.")

    def __init__(
        self,
        devices: Sequence[jax.Device] | np.ndarray,
        partitioner: Partitioner | None = None,
        parameter_device: jax.Device | None = None,
        lockstep: Lockstep | None = None,
        communication_options: CommunicationOptions | None = None,
        slices: int | None = None,
        num_replicas: int | None = None,
        replicas_at_once: int = 1,
        reproducible: bool = False,
    ) -> None:
        self.partitioner = checked_partitioner(partitioner)
        self.default_layout: Layout = Mirrored() if parameter_device is None else Central(parameter_device)
        logical_devices = np.atleast_1d(np.array(devices, dtype=object))
        if not logical_devices.size or not all(isinstance(device, jax.Device) for device in logical_devices.flat):
            raise TypeError(
                f"StrategyExtended(devices): expected JAX devices, such as those of jax.devices(), got {devices!r}"
            )
        logical_devices = logical_devices.reshape(len(logical_devices), -1)
        mesh = replica_mesh(logical_devices)
        per_device = _per_device(num_replicas, *logical_devices.shape)
        at_once = _at_once(replicas_at_once, per_device)
        if per_device > 1:
            logical_devices = np.repeat(logical_devices, per_device, axis=0)
        worker_devices = tuple(logical_devices[:, 0])
        self.replicas = Replicas(
            strategy=None,  # type: ignore[arg-type]  # until belong_to
            num_replicas=len(logical_devices),
            local_replicas=tuple(
                i for i, d in enumerate(worker_devices) if d.process_index == d.client.process_index()
            ),
            worker_devices=worker_devices,
            logical_devices=logical_devices,
            slices=slices_in_turn(logical_devices) if slices is None else slices,
            mesh=mesh,
            is_absent=_jax.is_absent(worker_devices[0]),
            lockstep=Lockstep(Alone()) if lockstep is None else lockstep,
            communication_options=communication_options,
            replicas_at_once=at_once,
            reproducible=_reproducible(reproducible, at_once, logical_devices.shape[1]),
        )
        if self.reproducible and self.num_replicas > 1 and self.local_replicas and not self.is_absent:
            warn_unless_fixed(self.worker_devices[self.local_replicas[0]], self.num_replicas)
        if isinstance(partitioner, GroupPartitioner):
            partitioner.size(self.num_replicas // per_device, self.slices, per_device)  # raises if it does not fit

    def belong_to(self, strategy: Strategy) -> None:
        """Set the ``strategy``, which has no variables and programs yet."""
        self.strategy = strategy
        self.replicas = dataclasses.replace(self.replicas, strategy=strategy, remote_variables=self.remote_variables)
        self.variables = self.collection(
            self.replicas,
            self.partitioner,
            self.default_layout,
            lambda step, args: run_compiled(self.programs, step, args),
        )
        self.programs = ProgramCache(self.variables)

    def another(self, strategy: Strategy) -> StrategyExtended:
        """A copy for another strategy on the same devices."""
        twin = copy.copy(self)
        twin.belong_to(strategy)
        return twin

    @property
    def workers(self) -> Workers:
        """The processes of the replicas; exchanges bytes between them."""
        return self.lockstep.workers

    @property
    def should_init(self) -> bool:
        """Whether this worker should initialise variables: true on all workers."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker should write checkpoints: true on the chief."""
        return self.workers.index == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker should write summaries: true on the chief."""
        return self.workers.index == 0

    @property
    def between_graph(self) -> bool:
        """Whether each worker builds its own program: false, as one program runs for all replicas."""
        return False

    @_jax.public_call
    def read_var(self, v: Variable) -> Any:
        """The value of a variable, or the aggregate of an on-read variable's copies. The same as ``v.read_value()``.

        Raises:
          TypeError: ``v`` is not a variable.
        """
        if not isinstance(v, Variable):
            raise TypeError(f"extended.read_var(v): expected a Variable, got {v!r}")
        return v.read_value()

    def value_container(self, value: Any) -> Any:
        """The ``PerReplica`` that ``value`` is a component of, if it still exists; otherwise ``value`` itself.

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
        return isinstance(v, Variable) and v.replicas is self.replicas

    @_jax.public_call
    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``fn`` once on each replica: the same as :meth:`Strategy.run`.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> float(strategy.extended.call_for_each_replica(lambda x: x + 1, args=(1.0,)))
        2.0
        """
        check_call(self.replicas, fn, args, kwargs, "extended.call_for_each_replica")
        return self.strategy.run(fn, args, kwargs)

    @_jax.public_call
    def trace(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Executable:
        """The program that ``strategy.run(fn, args, kwargs)`` would run, without running it.

        Args:
          fn: the step.
          args: its arguments. A ``jax.ShapeDtypeStruct`` with one replica's shape stands for an element of a dataset:
            with ``dataset.element_spec`` you can trace before the first element is read.
          kwargs: the same, by name.

        Returns:
          An :class:`Executable`: ``localities`` of the results, ``compiled()``, ``compiled_text()``, ``collectives()``.
          A later run of the step is not traced or compiled again.

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
        return traced_step(self.programs, fn, args, kwargs, "extended.trace")[0]

    def trace_count(self, fn: Callable[..., Any]) -> int:
        """How often this strategy has traced ``fn``, that is, run its Python.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> step = lambda x: x + 1
        >>> _ = strategy.run(step, args=(1,)), strategy.run(step, args=(2,)), strategy.run(step, args=(3.0,))
        >>> strategy.extended.trace_count(step)  # for an int, and for a float
        2
        """
        return self.programs.trace_count(fn)

    def plot(
        self,
        path: str | os.PathLike[str],
        program: Executable | None = None,
        variables: Sequence[Variable] | None = None,
    ) -> None:
        """Draw which part of each variable each device holds, and the communication of a step.

        Parts come from the variables' arrays, and collectives from the compiled program. The picture has
        a column for each of the first 16 devices, and a row for each of the 12 largest variables. Any worker may draw
        it alone.

        Args:
          path: of an SVG file to write.
          program: a step, as :meth:`trace` returns it; by default no collectives are drawn.
          variables: the variables to draw; by default all of this strategy.

        Raises:
          TypeError: it is not a path, or ``program`` not a traced step.
          ValueError: the path does not end in ``.svg``; a variable belongs to another strategy; or the step assigns
            values to logical devices.

        >>> import pathlib, replicax, tempfile
        >>> strategy = replicax.ShardedStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     w = replicax.Variable([0.0] * 512, name="w")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     strategy.extended.plot(
        ...         f"{folder}/placement.svg", strategy.extended.trace(lambda x: x @ w, args=(w.value,))
        ...     )
        ...     pathlib.Path(f"{folder}/placement.svg").read_text().count("all-gather")
        1
        """
        variables = list(self.variables if variables is None else variables)
        for variable in variables:
            if not self.variable_created_in_scope(variable):
                raise ValueError(f"extended.plot: {variable!r} is no variable of {self.strategy!r}")
        from replicax.drawing.placement_picture import plot  # loaded on demand

        plot(path, self.replicas, self.partitioner, variables, program)

    experimental_should_init = should_init
    experimental_between_graph = between_graph


def _per_device(num_replicas: int | None, devices: int, logical_devices: int) -> int:
    """The number of replicas of each device, or of each group of logical devices."""
    if num_replicas is None:
        return 1
    if as_integer(num_replicas) is None:
        raise TypeError(f"num_replicas must be an int or None, got {num_replicas!r}")
    if num_replicas < 1 or num_replicas % devices:
        of = "devices" if logical_devices == 1 else "groups of logical devices"
        there = f"{devices} device(s)" if logical_devices == 1 else f"{devices} group(s) of {logical_devices} devices"
        raise ValueError(
            f"num_replicas must be a multiple of the number of {of}, so that each runs as many: got {num_replicas} "
            f"replica(s) for {there}"
        )
    return int(num_replicas) // devices


def _reproducible(reproducible: bool, at_once: int, logical_devices: int) -> bool:
    """Check ``reproducible``: whether steps must have the same bits on any number of devices."""
    if not isinstance(reproducible, bool):
        raise TypeError(f"reproducible must be True or False, got {reproducible!r}")
    if reproducible and at_once > 1:
        raise ValueError(
            f"reproducible=True has the replicas of a device run one after the other, but {at_once} of them would run "
            "at the same time: leave replicas_at_once out"
        )
    if reproducible and logical_devices > 1:
        raise ValueError(
            f"reproducible=True is for replicas of one device each, but each has {logical_devices} logical devices, "
            "over which the compiler takes sums in an order of its own: leave one of the two out"
        )
    return reproducible


def _at_once(replicas_at_once: int, per_device: int) -> int:
    """How many of a device's replicas run at the same time: as many as requested if these divide evenly, or fewer."""
    if as_integer(replicas_at_once) is None:
        raise TypeError(f"replicas_at_once must be an int, got {replicas_at_once!r}")
    if replicas_at_once < 1:
        raise ValueError(
            f"replicas_at_once must be at least 1, got {replicas_at_once}: with num_replicas=64 on one "
            "device, 1 runs them one after the other, and 8 eight at the same time"
        )
    return max(n for n in range(1, min(replicas_at_once, per_device) + 1) if per_device % n == 0)
