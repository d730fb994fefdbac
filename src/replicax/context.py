"""Contexts: whether code runs inside one replica, or across all replicas.

Each thread, and each task of asyncio, has a stack of contexts. At its bottom is the default replica context, for code
outside every strategy. ``with strategy.scope():`` pushes that strategy's cross-replica context, ``run`` pushes a
replica context, and ``merge_call`` pushes a cross-replica context again.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax import _jax
from replicax.collectives import Communicator, ReduceOp, SingleReplica, checked_axis, divide, summable
from replicax.communication import CommunicationOptions, checked_options
from replicax.devices.host_values import check_integers, check_numbers, is_key
from replicax.errors import AbsentDeviceError, ContextError
from replicax.indexed_slices import IndexedSlices, is_slices
from replicax.name_hints import NameHints
from replicax.pytrees import registered
from replicax.system import registry
from replicax.user_functions import checked_args, checked_function, checked_kwargs, checked_result
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.strategy import Strategy


class ReplicaContext(NameHints):
    """The context of one replica inside a step; get it with :func:`get_replica_context`.

    Outside every strategy's ``run`` there is a default replica context with a single replica, so code that uses one
    works everywhere.

    >>> import replicax, jax.numpy as jnp
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step():
    ...     ctx = replicax.get_replica_context()
    ...     mine = jnp.float32(ctx.replica_id_in_sync_group + 1)
    ...     return ctx.all_reduce("sum", mine), ctx.all_gather(mine[None], axis=0)
    >>> total, everyone = strategy.run(step)
    >>> float(total), everyone.tolist()
    (3.0, [1.0, 2.0])
    """

    def __init__(self, replicas: Replicas, communicator: Communicator) -> None:
        self._replicas = replicas
        self._of_step = communicator
        self._trace = _jax.current_trace()
        self.asked_for_count = False  # whether the step may use the number of replicas in its computation

    @property
    def _communicator(self) -> Communicator:
        """The communicator with the other replicas. It answers by the sizes and the padding of this step's batch."""
        _jax.note_read(self._trace)
        return self._of_step

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._replicas.strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of the step (a Python int)."""
        self.asked_for_count = True
        return self._replicas.in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, from 0: an int32 scalar, per replica (with a single replica, 0)."""
        self._check_current("replica_id_in_sync_group", in_merge_fn=True)
        return self._communicator.replica_id()

    def random_key(self, key: jax.Array) -> jax.Array:
        """``key``, folded with this replica's number: random numbers drawn from it differ between replicas.

        For masks and noise on a replica's examples, such as dropout. Draw numbers that must be the same everywhere,
        such as initial parameters, from ``key`` itself. Where gradients are accumulated, the key of each micro-batch
        differs, too, as if further replicas had it.

        Args:
          key: a JAX random key that is the same on every replica, of the new or the raw kind; an array of keys of
            the new kind; or a variable of these.

        Returns:
          A key, or keys, of the same kind and shape, per replica. No collective.

        >>> import replicax, jax
        >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(key):
        ...     return jax.random.bits(replicax.get_replica_context().random_key(key))
        >>> mine = strategy.local_results(strategy.run(step, args=(jax.random.key(0),)))
        >>> [int(x) == int(jax.random.bits(jax.random.fold_in(jax.random.key(0), i))) for i, x in enumerate(mine)]
        [True, True]
        """
        self._check_current("random_key", in_merge_fn=True)
        keys = key if isinstance(key, jax.Array) else getattr(key, "__jax_array__", lambda: key)()  # of a variable
        fold, dtype = jax.random.fold_in, getattr(keys, "dtype", None)
        if is_key(dtype):
            for _ in range(keys.ndim):
                fold = jax.vmap(fold, (0, None))
        elif dtype != "uint32":
            raise TypeError(f"ReplicaContext.random_key: key must be a key, such as jax.random.key(0), got {key!r}")
        number, examples = self._communicator.replica_id(), self._communicator.examples
        if examples is not None and examples.parts > 1:
            number = number + self._replicas.in_sync * examples.part
        return fold(keys, number)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices that the step runs on. A compiled step is one program for all of them."""
        return self._replicas.worker_devices

    @property
    def example_mask(self) -> Any:
        """The rows of a padded batch that are examples, and not padding: bool ``[rows]``, per replica.

        ``None`` if no argument of the step is padded (see ``docs/uneven_batches.md``).

        >>> import replicax
        >>> replicax.get_replica_context().example_mask is None
        True
        """
        self._check_current("example_mask", in_merge_fn=True)
        examples = self._communicator.examples
        return None if examples is None else examples.mask

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Combine a value over all replicas; every replica gets the result.

        Differentiable: each replica differentiates its own loss, so the gradient of SUM is SUM, and the gradient of
        MEAN is MEAN. A value that is the same on all n replicas is still counted n times.

        Args:
          reduce_op: ``"sum"``, ``"mean"`` or a :class:`ReduceOp`.
          value: a pytree of arrays, each of one replica's shape, and of :class:`IndexedSlices`.
          options: :class:`CommunicationOptions`.

        Returns:
          The same pytree, mirrored. One fused all-reduce for all its leaves, unless ``options`` say otherwise; two
          all-gathers for each ``IndexedSlices``.

        Raises:
          ContextError: this is not the current replica's context.
          TypeError, ValueError: unknown op; ``options`` of another type, or not possible on these devices.
          DeadlockError: the timeout has passed, and replicas are missing.
        """
        self._check_current("all_reduce")
        options = checked_options(options, self.devices[0].platform, "ReplicaContext.all_reduce")
        op = ReduceOp.parse(reduce_op)
        _check_leaves(registered(value), "all_reduce")
        return self._reduced(op, value, options, lambda arrays: self._communicator.all_reduce(op, arrays, options))

    def _sum_unless_reduced(self, value: Any) -> Any:
        """The sum over the replicas of each array in ``value``; one that was reduced before is returned unchanged."""
        return self._reduced(ReduceOp.SUM, value, None, self._communicator.sum_unless_reduced)

    def _reduced(
        self, op: ReduceOp, value: Any, options: CommunicationOptions | None, reduce: Callable[..., Sequence[Any]]
    ) -> Any:
        """``value`` with its arrays reduced: slices one by one, all other arrays together by ``reduce``."""
        leaves, treedef = jax.tree_util.tree_flatten(registered(value), is_leaf=is_slices)
        dense = iter(reduce([x for x in leaves if not is_slices(x)]))
        reduced = [self._reduced_slices(op, x, options) if is_slices(x) else next(dense) for x in leaves]
        return jax.tree_util.tree_unflatten(treedef, reduced)

    def _reduced_slices(
        self, op: ReduceOp, slices: IndexedSlices, options: CommunicationOptions | None
    ) -> IndexedSlices:
        mine = summable(slices.values)
        mine = mine if op is ReduceOp.SUM else divide(mine, self._replicas.num_replicas)
        values, indices = (self._communicator.all_gather(x, 0, options) for x in (mine, slices.indices))
        return IndexedSlices(values, indices, slices.shape)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate a value of all replicas along ``axis``, in the order of the replicas.

        Differentiable; the gradient is the slice at this replica's place, summed over all replicas' losses.

        Args:
          value: a pytree of arrays of rank at least 1, each of one replica's shape ``[…, k, …]``.
          axis: the dim to concatenate along; negative counts from the end.
          options: :class:`CommunicationOptions`.

        Returns:
          The same pytree with arrays ``[…, n·k, …]`` for n replicas, mirrored. One all-gather for each leaf.

        Raises:
          ValueError: an array is a scalar, or ``axis`` is out of range.
          ContextError, TypeError, DeadlockError: see :meth:`all_reduce`.
        """
        self._check_current("all_gather")
        options = checked_options(options, self.devices[0].platform, "ReplicaContext.all_gather")
        axis = checked_axis(axis, "ReplicaContext.all_gather")
        _check_leaves(registered(value), "all_gather")
        return jax.tree_util.tree_map(lambda leaf: self._communicator.all_gather(leaf, axis, options), value)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` once, in cross-replica context.

        Computed values among the arguments arrive as :class:`PerReplica` (as plain arrays with one replica), so
        ``merge_fn`` can pass them to ``strategy.reduce`` or ``strategy.gather``. Variables and Python objects arrive
        unchanged. From the result of ``merge_fn`` each replica gets its own component of each ``PerReplica``, and
        all other values unchanged. In compiled code no thread waits: this is just tracing.

        Raises:
          ContextError: this is not the current replica's context.
          TypeError: ``merge_fn`` is not a function, ``args`` not a tuple, or ``kwargs`` not a dict.

        It adds no collectives.
        """
        self._check_current("merge_call")
        what = "ReplicaContext.merge_call(merge_fn, args)"
        checked_function(merge_fn, what, "merge_fn")

        def across(*args: Any, **kwargs: Any) -> Any:
            with cross_replica(self._replicas):
                return checked_result(merge_fn(self.strategy, *args, **kwargs), merge_fn, "merge_call")

        return self._communicator.merge(across, checked_args(args, what), checked_kwargs(kwargs, what))

    def _check_current(self, name: str, in_merge_fn: bool = False) -> None:
        current = get_replica_context()
        if current is None and in_merge_fn:
            below = reversed((_base.frame, *_frames.get()))
            current = next((frame.replica for frame in below if frame and frame.replica), None)
        if current is not self:
            where = "cross-replica context" if in_cross_replica_context() else "another replica context"
            raise ContextError(
                f"ReplicaContext.{name} was used in {where}, on a context that is no longer current: call "
                "replicax.get_replica_context() anew inside each step, in its own thread, not inside a merge_fn"
            )


def _check_leaves(tree: Any, method: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = f"ReplicaContext.{method}: the value{jax.tree_util.keystr(path)}"
        check_integers(leaf, name)
        if not isinstance(leaf, jax.Array):
            check_numbers(leaf, name)


# --- the stack ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    replicas: Replicas
    replica: ReplicaContext | None  # None: cross-replica context


_frames: contextvars.ContextVar[tuple[_Frame, ...]] = contextvars.ContextVar("frames", default=())


class _Base(threading.local):
    """The bottom of the stack: ``set_strategy`` applies to a thread, even if each of its functions is a task."""

    frame: _Frame | None = None


_base = _Base()


def default_strategy() -> Strategy:
    """The strategy of code outside every scope: one replica on JAX's default device."""
    strategy: Strategy = registry.default_strategy()()
    return strategy


def _innermost() -> _Frame | None:
    """The frame of the innermost scope or step, or of ``set_strategy``; ``None`` outside of all."""
    if frames := _frames.get():
        return frames[-1]
    return None if _base.frame is None or _base.frame.replica is not None else _base.frame


def _current() -> _Frame:
    if frames := _frames.get():
        return frames[-1]
    if _base.frame is None:
        replicas = default_strategy().extended.replicas
        _base.frame = _Frame(replicas, ReplicaContext(replicas, SingleReplica()))
    return _base.frame


@contextlib.contextmanager
def _pushed(frame: _Frame) -> Iterator[None]:
    try:
        try:
            _frames.set((*_frames.get(), frame))
            yield
            _pop(frame)
        finally:
            _pop(frame, is_failing=True)
    finally:  # an interrupt may have come just there
        _pop(frame, is_failing=True)


def _pop(frame: _Frame, is_failing: bool = False) -> None:
    frames = _frames.get()
    if frames and frames[-1] is frame:
        _frames.set(frames[:-1])
    elif is_failing:
        if frame in frames:  # and frames above it, left behind by an interrupt
            _frames.set(frames[: frames.index(frame)])
    else:
        _frames.set(tuple(other for other in frames if other is not frame))
        raise ContextError(
            "scopes were left in the wrong order, or in another thread or task: leave the innermost scope first"
        )


class Scope(contextlib.ContextDecorator):
    """The cross-replica context of a strategy, as users enter it. It may be entered again, and decorate a function.

    It lasts until it is left, even if nothing refers to it: a generator of ``contextmanager`` would be collected, and
    so leave it.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._entered: list[_Frame] = []

    def __enter__(self) -> Any:
        check_may_enter(self._replicas)
        _adapt_libraries(is_late=bool(_frames.get()))
        frame = _Frame(self._replicas, None)
        self._entered.append(frame)
        _frames.set((*_frames.get(), frame))
        return self._replicas.strategy

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self._entered:
            raise ContextError("this scope was left without having been entered")
        frame = self._entered.pop()
        try:
            _pop(frame, is_failing=kind is not None)
        finally:  # an interrupt may have come just there
            _pop(frame, is_failing=True)
        _adapt_libraries(is_late=True)


def _adapt_libraries(is_late: bool) -> None:
    """Make models of libraries such as Keras belong to strategies; warn if a scope may have created some already."""
    for library in registry.adapt_scoped_libraries():
        if is_late:
            warnings.warn(
                f"{library} was first imported inside a strategy's scope. Models that the scope has made up to now "
                "don't belong to the strategy: they train on one device. Import it before the scope.",
                UserWarning,
                stacklevel=3,
            )


def state_of_contexts() -> Callable[[], object]:
    """A function that restores the contexts of this thread or task.

    For use after an exception: if an interrupt comes just when a ``with`` block is entered or left, a context stays
    behind.
    """
    return functools.partial(_frames.set, _frames.get())


def cross_replica(replicas: Replicas) -> contextlib.AbstractContextManager[None]:
    """Enter the cross-replica context of ``replicas``."""
    return _pushed(_Frame(replicas, None))


def replica(context: ReplicaContext) -> contextlib.AbstractContextManager[None]:
    """Enter a replica context."""
    return _pushed(_Frame(context._replicas, context))


# --- public functions -----------------------------------------------------------------------------------


def current_replicas() -> Replicas:
    """The replicas of :func:`get_strategy`."""
    return _current().replicas


def get_strategy() -> Strategy:
    """The strategy of the current scope or step; outside of both, the default strategy.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     replicax.get_strategy() is strategy
    True
    """
    return _current().replicas.strategy


def has_strategy() -> bool:
    """Return whether the current strategy is not the default strategy.

    >>> import replicax
    >>> replicax.has_strategy()
    False
    """
    return get_strategy() is not default_strategy()


def in_cross_replica_context() -> bool:
    """Return whether this is cross-replica context: inside ``scope()`` or a ``merge_fn``, but not inside ``run``.

    >>> import replicax
    >>> replicax.in_cross_replica_context()
    False
    >>> with replicax.MirroredStrategy(["cpu:0"]).scope():
    ...     replicax.in_cross_replica_context()
    True
    """
    return _current().replica is None


def get_replica_context() -> ReplicaContext | Any:  # a step need not check for None
    """The current :class:`ReplicaContext`; ``None`` in cross-replica context.

    >>> import replicax
    >>> replicax.get_replica_context().num_replicas_in_sync  # outside every scope: the default one
    1
    """
    return _current().replica


def current_replica() -> ReplicaContext:
    """The current :class:`ReplicaContext`, for code that runs in replica context only."""
    replica = _current().replica
    assert replica is not None
    return replica


def is_in_replica(replicas: Replicas) -> bool:
    """Return whether a step runs on this thread as one of ``replicas``, outside a merge call.

    Code outside every scope and step counts as cross-replica code: the one replica of the default sees the same.
    """
    frame = _innermost()
    return frame is not None and frame.replica is not None and frame.replicas is replicas


def set_strategy(strategy: Strategy | None) -> None:
    """Make ``strategy`` this thread's current strategy, as if the rest of the program were inside its scope.

    Args:
      strategy: the strategy, or ``None`` to go back to the default.

    Raises:
      ContextError: called inside a scope or a step.
      TypeError: it is not a strategy.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> replicax.set_strategy(strategy)
    >>> replicax.get_strategy() is strategy
    True
    >>> replicax.set_strategy(None)
    """
    if _frames.get():
        raise ContextError("set_strategy must be called outside every strategy.scope() and step")
    if strategy is not None and not isinstance(strategy, registry.strategy_class()):
        raise TypeError(
            "set_strategy(strategy): expected a strategy, such as replicax.MirroredStrategy(), or None, got "
            f"{strategy!r}"
        )
    _adapt_libraries(is_late=False)
    _base.frame = (
        None if strategy is None or strategy is default_strategy() else _Frame(strategy.extended.replicas, None)
    )


def note_asked_for_count() -> None:
    """Note that the caller has asked a strategy for the number of replicas."""
    frame = _innermost()
    if frame is not None and frame.replica is not None:
        frame.replica.asked_for_count = True


def check_may_enter(replicas: Replicas) -> None:
    """Raise a ContextError unless the cross-replica context of ``replicas`` may be entered from here.

    It may not inside a step, or in another strategy's scope.
    """
    frame = _innermost()
    if frame is None:
        return
    if frame.replica is not None:
        raise ContextError(
            "strategy.scope() was entered inside a step: use get_replica_context().merge_call(fn) to act across "
            "replicas"
        )
    if frame.replicas is not replicas:
        raise ContextError(
            f"mixing different Strategy objects: the scope of {replicas!r} was entered inside that of "
            f"{frame.replicas!r}. Make one strategy and use it throughout."
        )


def in_step() -> bool:
    """Return whether a step is running on this thread, including its ``merge_fn``."""
    frames = _frames.get()
    return bool(frames) and any(frame.replica is not None for frame in frames)


def alone() -> contextlib.AbstractContextManager[None]:
    """Enter the context of the only replica of a step that belongs to no strategy, as an exported one does."""
    replicas = default_strategy().extended.replicas
    return replica(ReplicaContext(replicas, SingleReplica()))


def in_step_of_another(replicas: Replicas) -> bool:
    """Return whether a step is running on this thread that belongs to another strategy than that of ``replicas``."""
    frame = _current()
    is_alone = frame.replica is not None and isinstance(frame.replica._of_step, SingleReplica)
    return in_step() and frame.replicas is not replicas and not is_alone


def merging_replica() -> ReplicaContext | None:
    """For code across replicas: the replica that a ``merge_call`` has left; ``None`` outside merge calls."""
    return next((frame.replica for frame in reversed(_frames.get()) if frame.replica is not None), None)


def may_run_here(replicas: Replicas) -> bool:
    """Return whether the caller is outside every scope and step, or directly inside the scope of ``replicas``.

    Then :func:`check_cross_replica` does not raise, and :func:`in_step` is false; this is faster.
    """
    frames = _frames.get()
    if frames:
        return len(frames) == 1 and frames[0].replica is None and frames[0].replicas is replicas
    base = _base.frame
    return base is None or base.replica is not None or base.replicas is replicas


_USE_MERGE_CALL = (
    "Inside a step use replicax.get_replica_context().merge_call(lambda strategy, value: …, args=(value,)), or its "
    "all_reduce and all_gather."
)


def check_present(replicas: Replicas, what: str) -> None:
    """Raise an AbsentDeviceError if the devices of ``replicas``, which ``what`` needs, are only described."""
    if replicas.is_absent:
        raise AbsentDeviceError(
            f"{what} needs the devices of {replicas!r}, which are absent: they are described by a topology, and not "
            "attached to this process. In plan mode steps are compiled for them (replicax.plan, or "
            "strategy.extended.trace), and variables have shapes and no values. To run, make the strategy on devices "
            "that are there."
        )


def check_cross_replica(replicas: Replicas, method: str, instead: str = _USE_MERGE_CALL) -> None:
    """Raise a ContextError if ``method`` of these replicas was called in a replica, or in another strategy's scope."""
    frame = _innermost()
    if frame is None:
        return
    if frame.replica is not None:
        raise ContextError(f"{method} is for cross-replica context, but was called inside a replica. {instead}")
    if frame.replicas is not replicas:
        raise ContextError(
            f"mixing different Strategy objects: {method} of {replicas!r} was called inside the scope of "
            f"{frame.replicas!r}"
        )
