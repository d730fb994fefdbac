"""The exact executor: the step as plain Python, once for each replica, on that replica's device.

Nothing is compiled. Loops and branches run as Python, with concrete values, so that ``print``, ``breakpoint()``
and ``if`` work, and replicas may have different shapes. Collectives meet through the
:class:`~replicax.execution.conductor.Conductor`. Which values replicas may differ in is followed from operation to
operation, by the same rules as in :mod:`replicax.execution.infer`, so that results and errors are those of the
compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax, context
from replicax.communication import Examples
from replicax.errors import ContextError, LocalityError
from replicax.execution.arguments import common_mask, of_another_strategy
from replicax.execution.conductor import Conductor
from replicax.execution.example_places import UNKNOWN, Place, Rows, joined
from replicax.execution.examples import dim_of_examples
from replicax.execution.function_key import function_key
from replicax.execution.marks import Obligation, mark_p
from replicax.execution.meetings import ExactCommunicator
from replicax.execution.placing import ARRAYS, mirror, place_components, stack
from replicax.execution.watching import Localities, Places
from replicax.locality import Locality, M, T
from replicax.nests import is_leaf, known
from replicax.values import Components, ExampleMask, Local, PerReplica
from replicax.variables.slots import launching, lent
from replicax.variables.store import Creations, check_owner, check_write_trace, use_store
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from replicax.strategy import Strategy


def run_per_replica(
    strategy: Strategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    """Run ``fn`` once for each replica; see :meth:`replicax.Strategy.run`.

    Raises:
      DeadlockError: replicas don't come to the same collectives.
      LocalityError: replicas would have to agree on a value, and do not (or the reverse).
      Exception: whatever ``fn`` raised, with a note that names the replica. Variables are as they were.
    """
    mask = check_components(args, kwargs, strategy)
    created = Creations(strategy, strategy.extended.programs.created_by(function_key(fn)))
    try:
        results, new = _run(strategy, fn, (tuple(args), dict(kwargs or {})), mask, created)
    except BaseException:
        created.undo()
        raise
    with launching:
        for variable, array in new:  # nothing can fail any more
            variable.slot.array = array
            lent.discard(variable.slot)
    return results


def _run(
    strategy: Strategy, fn: Callable[..., Any], arguments: Any, mask: ExampleMask | None, created: Creations
) -> tuple[Any, list[tuple[Variable, jax.Array]]]:
    """What the step returns, and the new arrays of the variables that it writes."""
    devices = strategy.extended.worker_devices
    adopt = _jax.settings_of_this_thread()
    replicas = [
        _Replica(strategy, i, device, fn, adopt, created.again(), *_inputs(arguments, i, device), mask)
        for i, device in enumerate(devices)
    ]
    conductor = Conductor([r.play for r in replicas])
    for replica in replicas:
        replica.communicator.conductor = conductor
    returned = conductor.run()
    several = len(devices) > 1
    if several:
        _check_expectations(replicas)
    results = _merge(returned, replicas, strategy, mask)
    written = {v: None for r in replicas for v in r.store.written}
    return results, [(v, _storage(v, replicas, several)) for v in written]


class ExactStore:
    """The store of one replica; see :class:`replicax.variables.store.Store`."""

    def __init__(
        self,
        strategy: Strategy,
        communicator: ExactCommunicator,
        localities: Localities,
        places: Places | None,
        creations: Creations,
    ) -> None:
        self.create = creations.create
        self.if_it_fails = creations.if_it_fails
        self.strategy = strategy
        self.communicator = communicator
        self.localities = localities
        self.places = places
        self.values: dict[Variable, Any] = {}
        self.written: dict[Variable, str | None] = {}
        self.mirrored: list[tuple[Any, frozenset[Locality], str]] = []
        self.differing: list[tuple[Any, frozenset[Locality], str]] = []
        self.obligations: list[Obligation] = []
        self.trace = _jax.WatchingTrace(self.watch)

    def read(self, variable: Variable) -> Any:
        check_owner(variable, self.strategy)
        if variable not in self.values:
            with _jax.outside_tracing():
                self.values[variable] = local_value(variable, self.communicator.replica)
            if variable.is_stacked:
                self.localities.note(self.values[variable])
        return self.values[variable]

    def write(self, variable: Variable, value: Any, must_be_mirrored: str | None) -> None:
        check_owner(variable, self.strategy)
        check_write_trace(variable, self.trace)
        if must_be_mirrored is not None:
            self.expect([value], frozenset({T}), must_be_mirrored)
        self.values[variable] = value
        self.written[variable] = must_be_mirrored

    def copies(self, variable: Variable) -> PerReplica:
        return PerReplica(Local(self.read(variable), self.communicator))

    def expect(self, values: Sequence[Any], refused: frozenset[Locality], otherwise: str) -> list[Any]:
        # Asked by the mark, as in a compiled step: inside value_and_grad it comes upon the values themselves.
        self.obligations.append(Obligation(refused, otherwise))
        return mark_p.bind(*map(jnp.asarray, values), mark_id=len(self.obligations) - 1)

    def answer(self, value: Any, mark_id: int) -> None:
        """A mark has come upon ``value``."""
        # What differs can be told at once; what does not differ only when all replicas are known.
        refused, otherwise = self.obligations[mark_id].refused, self.obligations[mark_id].otherwise
        found = self.localities.of(value)
        several = self.strategy.num_replicas_in_sync > 1
        if several and found in refused and (found is T or M not in refused):
            raise LocalityError(otherwise)
        (self.mirrored if T in refused else self.differing).append((value, refused, otherwise))

    def watch(self, primitive: Any, args: Sequence[Any], params: Any, results: Sequence[Any]) -> None:
        """An operation has been computed."""
        if primitive is mark_p:
            self.answer(args[0], params["mark_id"])
        else:
            self.localities.watch(primitive, args, params, results)
        if self.places is not None:
            self.places.watch(primitive, args, params, results)


class _Replica:
    """One replica of a step."""

    def __init__(
        self,
        strategy: Strategy,
        index: int,
        device: jax.Device,
        fn: Callable[..., Any],
        adopt: Callable[[], None],
        creations: Creations,
        arguments: Callable[[], Any],
        per_replica: Sequence[tuple[Any, Place]],
        mask: ExampleMask | None,
    ) -> None:
        self.localities = Localities()
        self.places: Places | None = None
        examples = None
        if mask is not None:
            examples = Examples(*(jax.device_put(x, device) for x in (mask.host[index], mask.count)))
            self.places = Places(mask.host.shape[1])
            per_replica = [*per_replica, (examples.mask, Rows(0))]
        for array, place in per_replica:
            self.localities.note(array)
            if self.places is not None:
                self.places.note(array, place)
        self.communicator = ExactCommunicator(index, device, self.localities.note, examples, self.places)
        self.store = ExactStore(strategy, self.communicator, self.localities, self.places, creations)
        self._trace = self.store.trace
        self._context = context.ReplicaContext(strategy, self.communicator)
        self._device = device
        self._fn = fn
        self._arguments = arguments
        self._adopt = adopt

    def play(self) -> Any:
        self._adopt()
        with (
            jax.disable_jit(),
            jax.default_device(self._device),
            _jax.set_current_trace(self._trace),
            context.replica(self._context),
            use_store(self.store),
        ):
            try:
                args, kwargs = self._arguments()
                return self._fn(*args, **kwargs)
            except NameError as error:
                if "axis name" in str(error):
                    raise ContextError(
                        "jax.lax collectives over the axis 'replica' exist in compiled steps only; "
                        "replicax.get_replica_context() has collectives for both executors"
                    ) from error
                raise


def local_value(variable: Variable, replica: int) -> jax.Array:
    """One replica's value of a variable, on its device."""
    device = variable.strategy.extended.worker_devices[replica]
    if not variable.is_stacked:
        return jax.device_put(variable.from_storage(), device, may_alias=False)
    [shard] = [s for s in variable.slot.array.addressable_shards if s.device == device]
    return jnp.squeeze(shard.data, 0)


def _inputs(tree: Any, replica: int, device: jax.Device) -> tuple[Callable[[], Any], list[tuple[Any, Place]]]:
    """What makes one replica's ``(args, kwargs)``; its arrays that came from a ``PerReplica``, and their examples."""
    own: list[tuple[Any, Place]] = []

    def one(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            component = leaf.values[replica]
            if not isinstance(component, ARRAYS):
                return component
            place = None if leaf.mask is None else UNKNOWN if leaf.dim is None else Rows(leaf.dim)
            own.append((jax.device_put(jnp.asarray(component), device, may_alias=False), place))
            return own[-1][0]
        if isinstance(leaf, ARRAYS) and not isinstance(leaf, bool):
            return jax.device_put(jnp.asarray(leaf), device)
        return leaf

    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_leaf)
    leaves = [one(leaf) for leaf in leaves]
    # Put together by the replica itself: some containers remember the trace that they were made in.
    return lambda: jax.tree_util.tree_unflatten(treedef, leaves), own


def check_components(args: Sequence[Any], kwargs: Mapping[str, Any] | None, strategy: Strategy) -> ExampleMask | None:
    """Raise unless ``PerReplica`` arguments have a component for each replica, and are of one batch.

    Returns:
      Which rows of padded arguments are examples; ``None`` if none is padded.

    Raises:
      ValueError: one has more or fewer, or another mask.
    """
    mask: ExampleMask | None = None
    num_replicas = strategy.num_replicas_in_sync
    leaves, tree = jax.tree_util.tree_flatten(known((tuple(args), dict(kwargs or {}))), is_leaf=is_leaf)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, PerReplica) and not isinstance(leaf.form, Local) and len(leaf.values) != num_replicas:
            raise of_another_strategy(tree, position, len(leaf.values), num_replicas)
        if isinstance(leaf, PerReplica):
            mask = common_mask(mask, leaf, tree, position)
    return mask


def _check_expectations(replicas: Sequence[_Replica]) -> None:
    """What could not be told from one replica alone."""
    for checks in zip(*(r.store.mirrored for r in replicas), strict=False):
        if not _equal([value for value, _, _ in checks]):
            raise LocalityError(checks[0][2])
    for checks in zip(*(r.store.differing for r in replicas), strict=False):
        values = [value for value, _, _ in checks]
        _, refused, otherwise = checks[0]
        found = {r.localities.of(v) for r, v in zip(replicas, values, strict=True)}
        if found <= refused and _equal(values):
            raise LocalityError(otherwise)


def _merge(returned: Sequence[Any], replicas: Sequence[_Replica], strategy: Strategy, mask: ExampleMask | None) -> Any:
    """What ``run`` returns: mirrored values plain, others as ``PerReplica``."""
    mesh = strategy.extended.mesh
    flat = [jax.tree_util.tree_flatten(known(tree), is_leaf=is_leaf) for tree in returned]
    tree: Any = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != tree:
            raise ValueError(f"replicas must return the same structure: replica 0 has {tree}, replica {i} has {other}")
    merged: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        first = leaves[0]
        padded = None if mask is None else _padded(leaves, replicas, mask, mesh)
        if padded is not None:
            merged.append(padded)
        elif len(leaves) == 1 or all(leaf is first for leaf in leaves):
            merged.append(first)
        elif all(isinstance(leaf, jax.Array) for leaf in leaves):
            is_mirrored = all(r.localities.of(v) is not T for r, v in zip(replicas, leaves, strict=True))
            if is_mirrored and _equal(leaves):
                placed = [jax.device_put(v, d) for v, d in zip(leaves, strategy.extended.worker_devices, strict=True)]
                merged.append(mirror(placed, mesh))
            else:
                merged.append(place_components(leaves, mesh))
        elif all(type(leaf) is type(first) and _same(leaf, first) for leaf in leaves):
            merged.append(first)
        else:
            merged.append(PerReplica(Components(tuple(leaves))))
    return jax.tree_util.tree_unflatten(tree, merged)


def _padded(leaves: Sequence[Any], replicas: Sequence[_Replica], mask: ExampleMask, mesh: Mesh) -> PerReplica | None:
    """A result that has rows that may be padding, as ``PerReplica``; ``None`` if it has none."""
    if not all(isinstance(v, jax.Array) and r.localities.of(v) is T for v, r in zip(leaves, replicas, strict=True)):
        return None
    place = joined([r.places.of(v) for v, r in zip(leaves, replicas, strict=True) if r.places is not None])
    dim, unclear = dim_of_examples(place, leaves[0].shape, mask.host.shape[1])
    if dim is None and not unclear:
        return None
    return PerReplica(place_components(leaves, mesh).form, mask, dim)


def _storage(variable: Variable, replicas: Sequence[_Replica], several: bool) -> jax.Array:
    """The array of a written variable."""
    devices = variable.strategy.extended.worker_devices
    values = [
        jax.device_put(r.store.values[variable] if variable in r.store.values else local_value(variable, i), devices[i])
        for i, r in enumerate(replicas)
    ]
    if variable.is_stacked:
        return stack(values, variable.strategy.extended.mesh)
    if several and not _equal(values):
        raise LocalityError(next(t for r in replicas if (t := r.store.written.get(variable)) is not None))
    return variable.to_storage(values[0])


def _equal(arrays: Sequence[Any]) -> bool:
    first = np.asarray(_plain(arrays[0]))
    return all(
        a.shape == arrays[0].shape
        and a.dtype == arrays[0].dtype
        and np.array_equal(first, np.asarray(_plain(a)), equal_nan=first.dtype.kind in "fc")
        for a in arrays[1:]
    )


def _plain(array: Any) -> Any:
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:
        return False
