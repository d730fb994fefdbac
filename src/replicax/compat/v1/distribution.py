"""``DistributionStrategy``: the public interface with towers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax

from replicax import context
from replicax.compat.v1.aggregation import VariableAggregation, parse
from replicax.compat.v1.datasets import PerDeviceDataset, PerDeviceIterator
from replicax.compat.v1.error_translation import also, translating_errors
from replicax.compat.v1.map import MapOutput, mapped
from replicax.compat.v1.steps import MultiStepContext
from replicax.compat.v1.towers import TowerContext, back_in
from replicax.compat.v1.variables import TowerStep, tower_local
from replicax.devices.arrays import put
from replicax.errors import ContextError, LocalityError
from replicax.execution.many_steps.step_outputs import MultiStepContext as StepOutputs
from replicax.execution.tracing.communicator import own_components
from replicax.execution.tracing.function_key import Wrapper
from replicax.extended.locations import destination as location
from replicax.extended.mirrored_values import mirrored
from replicax.locality import T
from replicax.pytrees import is_leaf, registered
from replicax.strategy import Strategy
from replicax.user_functions import checked_function
from replicax.values import PerReplica
from replicax.variables.store import check_owner, current_store
from replicax.variables.variable import Variable


class DistributionStrategy:
    """A placement of towers and variables; wraps a :class:`replicax.Strategy`, which is :attr:`strategy`.

    This one is the default: one tower. Others are created from devices, or by :meth:`of` from any other strategy.

    Attributes:
      strategy: the strategy of Replicax; both may be used at the same time.

    >>> import replicax
    >>> from replicax.compat import v1
    >>> distribution = v1.DistributionStrategy.of(replicax.ShardedStrategy(["cpu:0", "cpu:1"]))
    >>> distribution.num_towers, v1.DistributionStrategy().num_towers
    (2, 1)
    """

    strategy: Strategy
    _kinds: ClassVar[dict[type[Strategy], type[DistributionStrategy]]] = {}

    def __init__(self) -> None:
        self._begin(context.default_strategy())

    def _begin(self, strategy: Strategy) -> None:
        self.strategy = strategy
        # Stored in the strategy, so that both live equally long: the value of a weak dictionary would hold its key.
        vars(strategy).setdefault("_in_tower_words", self)

    @classmethod
    def of(cls, strategy: Strategy) -> DistributionStrategy:
        """The API with towers for any :class:`replicax.Strategy`; always the same object."""
        if not isinstance(strategy, Strategy):
            raise TypeError(f"DistributionStrategy.of: expected a replicax.Strategy, got {strategy!r}")
        found: DistributionStrategy | None = vars(strategy).get("_in_tower_words")
        if found is None:
            found = object.__new__(cls._kinds.get(type(strategy), DistributionStrategy))
            found._begin(strategy)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributionStrategy:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(vars(self))
        twin._begin(copy.deepcopy(self.strategy, memo))
        return twin

    def __repr__(self) -> str:
        return f"v1.{type(self).__name__}({self.strategy!r})"

    # --- properties -------------------------------------------------------------------------------------

    @property
    def num_towers(self) -> int:
        """The number of towers; ``replicax.Strategy.num_replicas_in_sync``."""
        return self.strategy.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Return whether there is only one tower: ``replicax.Strategy.num_replicas_in_sync == 1``."""
        return self.num_towers == 1

    @property
    def worker_devices(self) -> list[jax.Device]:
        """The devices of the towers; ``strategy.extended.worker_devices``."""
        return list(self.strategy.extended.worker_devices)

    @property
    def parameter_devices(self) -> list[jax.Device]:
        """The devices of variables; ``strategy.extended.parameter_devices``."""
        return list(self.strategy.extended.parameter_devices)

    @property
    def worker_device_index(self) -> Any:
        """Each tower's number, as an argument; ``replicax.ReplicaContext.replica_id_in_sync_group`` in a step."""
        if self.is_single_tower:
            return 0
        with contextlib.nullcontext() if context.in_step() else self.scope():
            return self.call_for_each_tower(_tower_id)

    @property
    def between_graph(self) -> bool:
        """Return whether each worker builds its own program: no; ``strategy.extended.between_graph``."""
        return self.strategy.extended.between_graph

    @property
    def should_init(self) -> bool:
        """Return whether this worker initialises variables; ``strategy.extended.should_init``."""
        return self.strategy.extended.should_init

    @property
    def should_checkpoint(self) -> bool:
        """Return whether this worker writes checkpoints; ``strategy.extended.should_checkpoint``."""
        return self.strategy.extended.should_checkpoint

    @property
    def should_save_summary(self) -> bool:
        """Return whether this worker writes summaries; ``strategy.extended.should_save_summary``."""
        return self.strategy.extended.should_save_summary

    def scope(self) -> contextlib.AbstractContextManager[DistributionStrategy]:
        """Enter the strategy's cross-tower context; ``replicax.Strategy.scope``."""
        return _TowerScope(self)

    def _check_across(self, method: str) -> None:
        """Raise unless the caller is in this strategy's cross-tower context."""
        if context.in_cross_replica_context():
            if context.get_strategy() is not self.strategy:
                raise ContextError(
                    f"mixing different strategies: {method} of {self!r} was called inside the scope of "
                    f"{self.of(context.get_strategy())!r}"
                )
        elif context.has_strategy() or context.in_step():
            raise ContextError(
                f"distribution.{method} is for cross-tower context, but was called in a tower context. There use "
                "get_tower_context().merge_call(lambda distribution, value: …, value)"
            )
        else:
            raise ContextError(
                f"distribution.{method} is for cross-tower context, but was called in the default tower context, "
                "outside every scope: call it inside `with distribution.scope():`"
            )

    # --- towers -----------------------------------------------------------------------------------------

    @translating_errors
    def call_for_each_tower(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn(*args, **kwargs)`` once in each tower; ``replicax.Strategy.run``.

        Ignores ``run_concurrently`` among ``kwargs``: all towers run in one program.
        """
        self._check_across("call_for_each_tower")
        kwargs.pop("run_concurrently", None)
        checked_function(fn, "call_for_each_tower(fn, *args)")
        step = TowerStep(fn)
        replica = context.merging_replica()
        if replica is not None:
            return back_in(replica, step, args, kwargs)
        return self.strategy.run(step, args, kwargs)

    @translating_errors
    def run_steps_on_dataset(
        self,
        fn: Callable[..., Any],
        iterator: PerDeviceIterator,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Run ``fn(ctx, *inputs)`` for ``iterations`` elements, in one dispatch; ``replicax.Strategy.run_steps``.

        ``fn`` is in cross-tower context, so it uses ``call_for_each_tower``. The steps have run when this returns.
        ``initial_loop_values`` is optional; the outputs must then have its structure, shapes and dtypes.
        """
        self._check_across("run_steps_on_dataset")
        if not isinstance(iterator, PerDeviceIterator):
            raise TypeError(
                "run_steps_on_dataset(fn, iterator): expected an iterator, "
                f"distribution.distribute_dataset(dataset_fn).make_one_shot_iterator(), got {iterator!r}"
            )
        checked_function(fn, "run_steps_on_dataset(fn, iterator)")
        step = _AcrossStep(TowerStep(fn))
        return MultiStepContext(self.strategy.run_steps(step, iterator.iterator, iterations, initial_loop_values))

    def distribute_dataset(self, dataset_fn: Any) -> PerDeviceDataset:
        """Feed the towers from a dataset, or a function that makes one: ``strategy.distribute_datasets_from_function``.

        Each tower gets a whole element, of arrays and numbers of any shape. A dataset is any argument of
        ``replicax.Strategy.distribute_dataset``.

        Raises:
          ValueError: it is not a dataset, and does not return one.
        """
        self._check_across("distribute_dataset")
        return PerDeviceDataset(self.strategy, dataset_fn)

    # --- values across towers ---------------------------------------------------------------------------

    @also(aggregation="method_string")
    @translating_errors
    def reduce(self, method_string: VariableAggregation | str, value: Any, destinations: Any = None) -> Any:
        """Combine the towers' values, mirrored to ``destinations``; ``strategy.extended.reduce_to``.

        For a value that is not PerDevice the mean is the value, and the sum is an error, as it could be each tower's
        value or the total; but 0 stays 0, and with one tower the sum is the value.
        """
        return self._reduce("reduce", method_string, [(value, destinations)])[0]

    @also(aggregation="method_string")
    @translating_errors
    def batch_reduce(
        self, method_string: VariableAggregation | str, value_destination_pairs: Iterable[tuple[Any, Any]]
    ) -> list[Any]:
        """Several ``reduce`` as one all-reduce; returns a list; ``strategy.extended.batch_reduce_to``."""
        pairs = list(value_destination_pairs) if isinstance(value_destination_pairs, Iterable) else [None]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise TypeError(
                f"batch_reduce: expected a list of pairs (value, destinations), got {value_destination_pairs!r}"
            )
        return self._reduce("batch_reduce", method_string, pairs)

    def _reduce(self, method: str, method_string: Any, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        self._check_across(method)
        how = parse(method_string, f"distribution.{method}")
        results: list[Any] = [None] * len(pairs)
        others = []
        for i, (value, destinations) in enumerate(pairs):
            if isinstance(value, MapOutput):
                results[i] = self.strategy.extended.broadcast_to(value.reduced(how), destinations)
            elif isinstance(value, int | float) and value == 0:
                results[i] = 0
            else:
                others.append(i)
        extended, rest = self.strategy.extended, [pairs[i] for i in others]
        if method == "reduce":
            reduced = [extended.reduce_to(how.aggregation, *pair) for pair in rest]
        else:
            reduced = extended.batch_reduce_to(how.aggregation, rest)
        for i, result in zip(others, reduced, strict=True):
            results[i] = result
        return results

    @translating_errors
    def broadcast(self, tensor: Any, destinations: Any = None) -> Any:
        """Mirror a plain value to ``destinations``; ``strategy.extended.broadcast_to``."""
        self._check_across("broadcast")
        return self.strategy.extended.broadcast_to(tensor, destinations)

    @translating_errors
    def map(self, map_over: Iterable[Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> MapOutput:
        """``fn(item, *args, **kwargs)`` for each item, on the towers in turn; ``replicax.Strategy.run`` for each round.

        ``fn`` must depend on its arguments only, and must not change variables. The result is PerDevice; its mean is
        over the items.

        Raises:
          TypeError, LocalityError: an argument differs between towers.
          ContextError: there are several workers.
        """
        self._check_across("map")
        checked_function(fn, "map(map_over, fn)")
        items, args, kwargs = _same_arguments("map", map_over=list(map_over), args=args, kwargs=kwargs)
        return mapped(self.strategy, items, fn, args, kwargs)

    @translating_errors
    def unwrap(self, value: Any) -> list[Any]:
        """The components of a value, in the towers' order; ``replicax.Strategy.local_results``."""
        if isinstance(value, MapOutput):
            return list(value.values)
        return list(self.strategy.local_results(value))

    def value_container(self, value: Any) -> Any:
        """The PerDevice value that ``value`` is a component of, or itself; ``strategy.extended.value_container``."""
        return self.strategy.extended.value_container(value)

    @translating_errors
    def group(self, value: Any, name: str | None = None) -> None:
        """Wait until ``value``, a result of ``replicax.Strategy.run``, is computed: ``jax.block_until_ready``."""
        if not context.in_step():
            jax.block_until_ready(self.unwrap(value))

    @translating_errors
    def fetch(self, val: Any, destination: Any = "/device:CPU:0", fn: Callable[[Any], Any] = (lambda x: x)) -> Any:
        """``fn(val)`` on a device: ``jax.device_put``, of a variable with ``replicax.Variable.read_value``.

        With several workers ``destination`` is a device of this worker, and each has a copy. Inside a step the result
        is on the devices of all towers.

        Raises:
          LocalityError: ``val`` is PerDevice, so it has no single value.
        """
        self._check_across("fetch")
        value = self.read_var(val) if isinstance(val, Variable) else val
        if context.in_step():
            [value] = _same_arguments("fetch", val=value)
        if any(isinstance(leaf, PerReplica) for leaf in jax.tree_util.tree_leaves(registered(value), is_leaf=is_leaf)):
            raise LocalityError(
                "distribution.fetch: a PerDevice value has no single value to copy: reduce it first, or take it apart "
                "with distribution.unwrap"
            )
        result = fn(value)
        if context.in_step():
            return result
        where = location(self.strategy.extended.replicas, destination, "distribution.fetch")
        if where is None:
            return self.strategy.extended.broadcast_to(result)
        return jax.tree_util.tree_map(
            lambda leaf: put(leaf, where, where="distribution.fetch: the value"), registered(result)
        )

    # --- variables --------------------------------------------------------------------------------------

    def tower_local_var_scope(self, reduce_method: Any) -> contextlib.AbstractContextManager[None]:
        """New variables are tower-local: ``replicax.Variable(…, synchronization="on_read", aggregation=…)``."""
        return tower_local(reduce_method)

    @translating_errors
    def colocate_vars_with(self, colocate_with_variable: Any) -> contextlib.AbstractContextManager[None]:
        """Create variables on another one's devices, with locality V(v); ``strategy.extended.colocate_vars_with``."""
        return self.strategy.extended.colocate_vars_with(colocate_with_variable)

    @translating_errors
    def non_slot_devices(self, var_list: Sequence[Variable]) -> Sequence[jax.Device]:
        """The devices of variables that belong to no other (locality N); ``strategy.extended.non_slot_devices``."""
        return self.strategy.extended.non_slot_devices(var_list)

    @also(tower_local_var="var")
    @translating_errors
    def read_var(self, var: Variable) -> Any:
        """The value of a variable, or the aggregate of a tower-local one; ``replicax.Variable.read_value``.

        Raises:
          ContextError: it is another strategy's variable, or a tower-local one in a tower, where it has no aggregate.
        """
        if isinstance(var, Variable):
            check_owner(var, self.strategy.extended.replicas, "distribution.read_var is called on")
            if var.is_on_read and context.in_step():
                self._check_across("read_var")
        return self.strategy.extended.read_var(var)

    @translating_errors
    def update(self, var: Variable, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Change ``var`` by ``fn(var, *args, **kwargs)``; ``strategy.extended.update``.

        With ``grouped=False`` among ``kwargs`` each leaf is a list of results. Inputs and results have locality V(var).
        """
        self._check_across("update")
        grouped = bool(kwargs.pop("grouped", True))
        args, kwargs = _same_arguments("update", args=args, kwargs=kwargs)
        return self.strategy.extended.update(var, fn, args, kwargs, grouped)

    @translating_errors
    def update_non_slot(self, colocate_with: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Update variables that belong to no other: ``fn(*args, **kwargs)``; ``extended.update_non_slot``."""
        self._check_across("update_non_slot")
        grouped = bool(kwargs.pop("grouped", True))
        args, kwargs = _same_arguments("update_non_slot", args=args, kwargs=kwargs)
        return self.strategy.extended.update_non_slot(colocate_with, fn, args, kwargs, grouped)

    # --- devices and clusters ---------------------------------------------------------------------------

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing: a ``replicax.Strategy`` has its devices from the start.

        Raises:
          ValueError: a cluster is given, which would be too late.
        """
        if cluster_spec:
            raise ValueError(
                "distribution.configure: a cluster is made by jax.distributed.initialize, at the top of each worker's "
                "program, and its strategy is replicax.MultiWorkerMirroredStrategy, which DistributionStrategy.of takes"
            )

    def initialize(self) -> None:
        """Return nothing, as when running eagerly; ``replicax.TPUStrategy.initialize`` checks the devices."""

    def finalize(self) -> None:
        """Wait for all work in progress; ``replicax.TPUStrategy.finalize``, or ``jax.effects_barrier``."""
        jax.effects_barrier()


class _TowerScope(context.Scope):
    """The scope of a strategy; entering it returns the strategy's API with towers."""

    def __init__(self, distribution: DistributionStrategy) -> None:
        super().__init__(distribution.strategy.extended.replicas)
        self._distribution = distribution

    @translating_errors
    def __enter__(self) -> DistributionStrategy:
        super().__enter__()
        return self._distribution


class _AcrossStep(Wrapper):
    """A step that enters cross-tower context at once."""

    def __call__(self, outputs: StepOutputs, *inputs: Any) -> None:
        tower = get_tower_context()
        assert tower is not None
        tower.merge_call(lambda _, *inputs: self.fn(MultiStepContext(outputs), *inputs), *inputs)


def _same_arguments(method: str, **arguments: Any) -> tuple[Any, ...]:
    """The arguments, after checking that all towers have the same; inside a step as this tower has them.

    A value that towers return there counts as PerDevice, even if all return the same; its locality is inferred.
    """

    def one(what: str, leaf: Any) -> Any:
        if isinstance(leaf, Variable) and leaf.is_on_read:
            raise TypeError(
                f"distribution.{method}: {what} is the tower-local {leaf.describe()}, of which each tower has a value "
                "of its own: pass distribution.read_var(variable)"
            )
        own_leaf = own_components(leaf)
        if own_leaf is not leaf:
            problem = f"distribution.{method}: {what} differs between towers: reduce it first"
            [own_leaf] = current_store().expect([own_leaf], frozenset({T}), problem)
        return own_leaf

    trees = [
        jax.tree_util.tree_map_with_path(
            lambda path, leaf, name=name: one(name + jax.tree_util.keystr(path), leaf),
            registered(tree),
            is_leaf=is_leaf,
        )
        for name, tree in arguments.items()
    ]
    if context.in_step():
        return tuple(trees)
    return tuple(mirrored(tree, f"distribution.{method}", name) for name, tree in zip(arguments, trees, strict=True))


def _tower_id() -> Any:
    return context.current_replica().replica_id_in_sync_group


# --- the current strategy or tower ----------------------------------------------------------------------


def get_distribution_strategy() -> DistributionStrategy:
    """The strategy of the present scope or step, or the default one; ``replicax.get_strategy``.

    >>> from replicax.compat import v1
    >>> v1.get_distribution_strategy().is_single_tower
    True
    """
    return DistributionStrategy.of(context.get_strategy())


def has_distribution_strategy() -> bool:
    """Return whether the current strategy is not the default one; ``replicax.has_strategy``.

    >>> from replicax.compat import v1
    >>> v1.has_distribution_strategy()
    False
    """
    return context.has_strategy()


def get_tower_context() -> TowerContext | Any:  # as replicax.get_replica_context
    """The current tower's context, or ``None`` in cross-tower context; ``replicax.get_replica_context``.

    >>> from replicax.compat import v1
    >>> v1.get_tower_context().num_towers  # outside every scope: the default one
    1
    """
    replica = context.get_replica_context()
    return None if replica is None else TowerContext(DistributionStrategy.of(replica.strategy), replica)


def get_cross_tower_context() -> DistributionStrategy | None:
    """The strategy in cross-tower context, or ``None`` in a tower; ``replicax.in_cross_replica_context``.

    >>> from replicax.compat import v1
    >>> with v1.MirroredStrategy(["cpu:0", "cpu:1"]).scope() as distribution:
    ...     v1.get_cross_tower_context() is distribution
    True
    """
    return get_distribution_strategy() if context.in_cross_replica_context() else None
