"""``Strategy``: the interface of all strategies, with its full documentation."""

from __future__ import annotations

import base64
import contextlib
import copy
import html
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, NoReturn

from replicax import _jax, context, data
from replicax.argument_checks import checked_integer
from replicax.collectives import ReduceOp, checked_axis, parse_axis
from replicax.data.strategy_mixin import InputMixin
from replicax.errors import cant_be_pickled
from replicax.execution import cross_replica
from replicax.execution.logical_devices import LogicalDevices
from replicax.execution.many_steps.loop import run_steps
from replicax.execution.many_steps.step_outputs import MultiStepContext
from replicax.execution.run import COMPILED, RunOptions, cached_dispatch, check_call, default_options, run
from replicax.execution.tracing.stateful_arguments import LIBRARY, stateful_call
from replicax.extended import StrategyExtended
from replicax.name_hints import NameHints
from replicax.user_functions import in_args_and_kwargs
from replicax.workers.replicas import Replicas


class Strategy(InputMixin, LogicalDevices, NameHints):
    """A placement: where the replicas of a step run, and where its variables live.

    Write the step for one replica, choose a strategy, and run it::

        strategy = replicax.MirroredStrategy()
        with strategy.scope():
            w = replicax.Variable(jnp.zeros(3), name="w")


        def step(x):  # one replica's slice of the batch
            ...


        for batch in strategy.distribute_dataset(dataset):
            result = strategy.run(step, args=(batch,))

    A strategy is a *placement*: it chooses devices. How steps run is the same for all of them.

    There are two contexts. Inside ``scope()`` but outside ``run`` code is in *cross-replica context*: variables
    are created there, and ``reduce``, ``gather`` and ``local_results`` see all replicas at once. Inside
    ``run`` code is in a *replica context*: it sees one replica's values. ``merge_call`` enters cross-replica
    context from there.

    A value's *locality* says whether replicas may differ in it: it is *per-replica*, or *mirrored* (the
    same on every replica). Replicax infers it from the traced step, without annotations.

    With several workers (processes; see :class:`replicax.MultiWorkerMirroredStrategy`) all run the same program.
    Replicas, variables and the results of reductions and gathers are global. ``local_results`` and ``PerReplica``
    values have the components of this worker's replicas. Plain values are this worker's own, and must be the same on
    all workers.

    Attributes:
      extended: further methods and properties, for library code; see :class:`StrategyExtended`.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        if not isinstance(extended, StrategyExtended):
            raise TypeError(
                f"Strategy(extended): expected a replicax.StrategyExtended, got {extended!r}; for a list of devices "
                "use replicax.MirroredStrategy(devices)"
            )
        if getattr(extended, "strategy", self) is not self:
            raise ValueError(
                f"Strategy(extended): this StrategyExtended belongs to {extended.strategy!r} already: make a new one, "
                "because two strategies can't share variables and programs"
            )
        self.extended = extended
        extended.belong_to(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _jax.hiding_frames(vars(cls)["__init__"])  # type: ignore[method-assign]

    def __copy__(self) -> NoReturn:
        raise RuntimeError(f"{self!r} can't be copied, as two strategies would share one state; use copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise cant_be_pickled(repr(self), "make another strategy in the other process")

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """Another strategy on the same devices, without this one's variables and programs."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        extended = self.extended
        twin.__dict__.update(copy.deepcopy({k: v for k, v in vars(self).items() if v is not extended}, memo))
        twin.extended = extended.another(twin)
        return twin

    def __repr__(self) -> str:
        replicas = self._replicas
        devices = self.extended.worker_devices[:: replicas.per_device]
        names = ", ".join(f"{d.platform}:{d.id}" for d in devices[:8])
        logical = self.extended.num_logical_devices
        each = f", {logical} logical devices each" if logical > 1 else ""
        each += f", {replicas.per_device} replicas on each" if replicas.per_device > 1 else ""
        return f"{type(self).__name__}([{names}{', …' if len(devices) > 8 else ''}]{each})"

    def _repr_html_(self) -> str:
        """The picture of ``extended.plot``, with all variables, for notebooks."""
        from replicax.drawing.placement_picture import picture_of  # loaded when it is used

        extended = self.extended
        picture = base64.b64encode(
            picture_of(extended.replicas, extended.partitioner, list(extended.variables)).encode()
        )
        # A separate image, because the styles of an inline SVG apply to the whole page.
        return f'<code>{html.escape(repr(self))}</code><br><img src="data:image/svg+xml;base64,{picture.decode()}">'

    @property
    def _replicas(self) -> Replicas:
        return self.extended.replicas

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run a step and divide each global batch (a Python int)."""
        context.note_asked_for_count()
        return self._replicas.in_sync

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Make this the current strategy, and enter its cross-replica context.

        Variables created inside belong to this strategy. ``run`` enters the scope itself.

        Raises:
          ContextError: entered inside a step or another strategy's scope; or left in the wrong order.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     w = replicax.Variable([1.0, 2.0], name="w")
        >>> w
        <Variable 'w' float32[2] mirrored on 2 replicas: [1. 2.]>
        """
        return context.Scope(self._replicas)

    # --- running ----------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *more: Never,
        **named: Never,
    ) -> Any:
        """Run ``fn`` once on each replica, as one compiled program for all of them.

        The Python of ``fn`` runs once, to be traced; later calls with arguments of the same structure, shapes,
        dtypes and localities reuse the program. A new lambda with the same code and the same captured values
        reuses it, too.

        Args:
          fn: the step, written for one replica.
          args: a tuple of pytrees. Each replica gets its own component of a ``PerReplica``. Arrays, ints and
            floats are traced and the same for all replicas. Bools, strings and other Python objects are static:
            the step sees the objects themselves, and is traced again if what it reads of one has changed. Variables
            arrive as themselves. Modules, optimizers, metrics and random streams of Flax NNX are changed in place, as
            by ``nnx.jit``; see ``docs/models.md``. So are those that a ``functools.partial`` gives to ``fn``.
          kwargs: the same, by name.
          options: the executor to use; ``None`` means the compiled one, and inside :func:`replicax.debug` the
            per-replica executor. If components differ in size, the Python of ``fn`` runs once for each size, and all
            is one compiled program. If the step can't be one compiled program, as with components of different dtypes,
            it runs on the per-replica executor when ``options`` is ``None``, and an :class:`ExecutorWarning` says why.
          more: refused: arguments of the step go into ``args``.
          named: refused: arguments of the step by name go into ``kwargs``.

        Returns:
          The result of ``fn``, with a ``PerReplica`` for each array that differs between replicas, and a plain
          array for each that does not. Python objects and variables are returned as themselves. With one replica
          all arrays are plain.

        Raises:
          LocalityError: replicas must agree on a value, and may not (or the reverse); or workers must agree on a plain
            value, and do not.
          DeadlockError: a collective in a loop or branch on which replicas may disagree; workers run different steps.
          ContextError: called inside a step or another strategy's scope, or with another strategy's variables.
          AbsentDeviceError: the strategy's devices are only described; see :func:`replicax.plan`.
          ValueError: the step can't be one compiled program, and ``options`` ask for one.

        All of these are raised before anything runs, with every variable as it was. Issues the collectives that ``fn``
        calls, and those that split variables need (:class:`ShardedVariable`).

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: 10.0 * ctx.replica_id_in_sync_group)
        >>> strategy.run(lambda x, y: (x + y, y * 2), args=(x, 1.0))
        (PerReplica(float32[], 2 replicas: 1.0, 11.0), Array(2., dtype=float32, weak_type=True))
        """
        try:
            if more or named:
                raise TypeError(in_args_and_kwargs("strategy.run(fn, args, kwargs, options)", named))
            # Inline, as each Python function that a call enters costs a microsecond.
            if LIBRARY in sys.modules:
                call = stateful_call(self.extended.replicas, fn, args, kwargs)
                if call is not None:
                    fn, args, kwargs = call  # its objects are leaves now
            if options is None and default_options() is COMPILED:
                dispatch = cached_dispatch(self.extended.programs, fn, args, kwargs)
                if dispatch is not None:
                    return dispatch.launch()
            return self._run(fn, args, kwargs, options)
        except BaseException as error:
            _jax.hide_frames(error)  # as hiding_frames does, without a wrapper
            raise

    @_jax.public_call
    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: RunOptions | None,
    ) -> Any:
        context.check_present(self._replicas, "strategy.run")
        if options is not None and not isinstance(options, RunOptions):
            raise TypeError(
                f"strategy.run(fn, args, kwargs, options): options must be RunOptions or None, got {options!r}; "
                "arguments of fn go into one tuple, args=(x, y)"
            )
        return run(self.extended.programs, fn, args, kwargs, options)

    @_jax.public_call
    def run_steps(
        self, fn: Callable[..., Any], iterator: data.DistributedIterator, steps: int, initial_loop_values: Any = None
    ) -> MultiStepContext:
        """Run ``fn`` for the next ``steps`` elements of ``iterator``, as one compiled program with a loop inside.

        The same result as ``strategy.run`` for one element after the other, at the cost of one dispatch. While the loop
        runs, the next ``steps`` elements are read and put on the devices, so ask for the same number each time. The
        iterator's ``InputOptions.prefetch`` is then a number of such groups.

        Args:
          fn: ``fn(ctx, *inputs)``, the step, written for one replica. ``ctx`` is a :class:`MultiStepContext`;
            ``inputs`` are the element, with a tuple unpacked. Its result is ignored: pass outputs to ``ctx``. For
            objects of Flax NNX, ``functools.partial(fn, model)``.
          iterator: ``iter(strategy.distribute_dataset(…))``.
          steps: how many, at least 1. At the end of the pass the remaining elements are run.
          initial_loop_values: not needed. If given, a dict with a value for each output: kind and shape are checked.

        Returns:
          The :class:`MultiStepContext`, with the outputs of the last step, and the number of steps that have run.

        Raises:
          StopIteration: the iterator has no more elements.
          TypeError, ValueError: not an iterator of this strategy; ``steps`` less than 1; outputs that differ in shape
            from step to step or from ``initial_loop_values``.
          LocalityError, DeadlockError, ContextError: as :meth:`run`. All of these are raised before anything runs, with
            every variable as it was, and no element consumed.
          Exception: any exception of the dataset, after the steps on the elements before have run.

        An element whose replicas differ in size is a separate step; elements of another shape get a separate loop.
        Inside :func:`replicax.debug` each step runs on the per-replica executor. A step that assigns values to logical
        devices is many programs, which are launched for one element after the other.

        >>> import replicax, numpy as np
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     total = replicax.Variable(0.0, name="total", aggregation="sum")
        >>> def step(ctx, x):
        ...     total.assign_add(x.sum())
        ...     ctx.set_last_step_output("sum", x.sum(), "sum")
        >>> batches = iter(strategy.distribute_dataset([np.full(4, float(i)) for i in range(5)]))
        >>> strategy.run_steps(step, batches, steps=3).last_step_outputs, float(total)
        ({'sum': Array(8., dtype=float32)}, 12.0)
        >>> strategy.run_steps(step, batches, steps=3).steps, float(total)  # the last two
        (2, 40.0)
        """
        check_call(self._replicas, fn, (), method="strategy.run_steps")
        take = data.reader_of(iterator, self._replicas).take
        count = checked_integer(steps, "strategy.run_steps(fn, iterator, steps): steps")
        return run_steps(self.extended.programs, fn, take, count, initial_loop_values)

    # --- across replicas --------------------------------------------------------------------------------

    @_jax.public_call
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """Combine a value across replicas, and also along ``axis`` if one is given.

        Args:
          reduce_op: ``"sum"``, ``"mean"`` or a :class:`ReduceOp`.
          value: a pytree with ``PerReplica`` leaves, such as ``run`` returns.
          axis: dims of one replica's array to reduce along as well, usually 0, the batch. MEAN is then the sum
            of all entries divided by their number: batches of 4 and 2 are divided by 6; without entries it is 0.
            ``None`` reduces across replicas only, and needs components of one shape.

        Returns:
          The same pytree of plain arrays. The mean of integers is a float.

        A leaf that is not ``PerReplica`` is shared by all n replicas. With several replicas MEAN returns it and SUM
        is an error, since it is not clear whether it counts once or n times; with one replica it is that replica's.

        Raises:
          ValueError: unknown op; an axis out of range; a shared value with SUM; different shapes that ``axis`` leaves.
          ContextError: called inside a replica.

        One fused all-reduce for all leaves.

        >>> import replicax, jax.numpy as jnp
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: jnp.arange(4 - 2 * ctx.replica_id_in_sync_group))
        >>> round(float(strategy.reduce("mean", x, axis=0)), 4)  # (0 + 1 + 2 + 3 + 0 + 1) / 6
        1.1667
        """
        context.check_cross_replica(self._replicas, "strategy.reduce")
        return cross_replica.reduce(self.extended.programs, ReduceOp.parse(reduce_op), value, parse_axis(axis))

    @_jax.public_call
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of a value along ``axis``, in the order of the replicas.

        Args:
          value: a pytree of ``PerReplica`` values, with components of rank at least 1.
          axis: the dim to concatenate along; negative counts from the end. Components may differ in it.

        Returns:
          The same pytree of plain arrays.

        Raises:
          ValueError: a scalar; an axis out of range; with several replicas, a value that all of them share.
          ContextError: called inside a replica.

        One all-gather for each leaf.

        >>> import replicax, jax.numpy as jnp
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: jnp.full(2, ctx.replica_id_in_sync_group))
        >>> strategy.gather(x, axis=0).tolist()
        [0, 0, 1, 1]
        """
        context.check_cross_replica(self._replicas, "strategy.gather")
        return cross_replica.gather(self.extended.programs, value, checked_axis(axis, "strategy.gather"))

    @_jax.public_call
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a value, as a tuple.

        Args:
          value: a ``PerReplica``, a variable, an array that all replicas have computed, or a pytree of any leaves.
            Any other single value gives ``(value,)``.

        Returns:
          A tuple with an entry for each replica of this worker. For a pytree each entry is a pytree, in which leaves
          that all replicas share are repeated: they stay on all devices, and JAX computes with one and a component,
          which is on one device, only after ``np.asarray``. Inside a ``merge_fn`` each replica has the components of
          all replicas, also of those on other workers.

        Raises:
          ContextError: called inside a replica.

        No collective outside a step; inside a ``merge_fn`` one all-gather for each leaf.

        >>> import replicax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
        >>> [int(v) for v in strategy.local_results(x)]
        [0, 1]
        >>> strategy.local_results("anything else")
        ('anything else',)
        """
        context.check_cross_replica(self._replicas, "strategy.local_results")
        return cross_replica.local_results(self._replicas, value)

    experimental_local_results = local_results
