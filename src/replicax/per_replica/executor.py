"""The per-replica executor: runs the step as plain Python, once for each replica, on that replica's device.

Nothing is compiled. Loops and branches run as Python, with concrete values, so that ``print``, ``breakpoint()``
and ``if`` work, and replicas may have different shapes. Collectives go through the
:class:`~replicax.per_replica.rendezvous.Rendezvous`. The localities of values are inferred operation by operation, by
the rules of :mod:`replicax.execution.program.infer`, so that results and errors are those of the compiled program.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from replicax import _jax, context
from replicax.collectives import ReplicaExamples
from replicax.devices.arrays import local_array
from replicax.devices.host_values import as_array, check_integers
from replicax.errors import DeadlockError, ExecutorWarning, warn
from replicax.execution.cache import ProgramCache
from replicax.execution.replica_values import ARRAYS
from replicax.execution.signals import hold_signals
from replicax.execution.step_agreement import check_same_step
from replicax.execution.tracing.arguments import (
    NotOneProgramError,
    common_mask,
    is_a_mutable_array,
    of_another_strategy,
    path_of,
)
from replicax.execution.tracing.function_key import captured_by, function_key, key_after_tracing, module_of
from replicax.execution.tracing.module_numbers import module_numbers
from replicax.execution.tracing.object_attributes import ObjectKey, may_change, object_keys_in, recording_reads
from replicax.execution.tracing.step_call import call_step, check_attributes_stay
from replicax.execution.tracing.step_errors import explaining
from replicax.locality import Locality, M, T
from replicax.padding.example_places import UNKNOWN, Place, Rows
from replicax.per_replica.array_facts import Localities, Places
from replicax.per_replica.collectives import PerReplicaCommunicator
from replicax.per_replica.eager.derivatives import tracing_rules_once
from replicax.per_replica.rendezvous import Rendezvous
from replicax.per_replica.replica_store import PerReplicaStore
from replicax.per_replica.results import check_expectations, merged, new_arrays, outcomes
from replicax.pytrees import is_leaf, registered
from replicax.values import ExampleMask, Local, PerReplica, component
from replicax.variables.slots import store_all
from replicax.variables.store import Creations, use_store
from replicax.variables.variable import Variable
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase
from replicax.workers.replicas import Replicas


@heartbeat.phase(Phase.PER_REPLICA)
def run_per_replica(
    programs: ProgramCache,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    why: NotOneProgramError | None = None,
    stores: bool = True,
    launched: list[Any] | None = None,
) -> Any:
    """Run ``fn`` once for each replica; see :meth:`replicax.Strategy.run`, and :func:`launch` for ``launched``.

    If it fails, or is not to store anything, no variable has changed. If ``why`` says that it can't be one compiled
    program, warn once of each reason, or add it to the error.
    """
    mask = _check_components(args, kwargs, programs.replicas)
    with contextlib.nullcontext() if context.in_step() else _locks.setdefault(programs, threading.RLock()):
        return _run_and_store(programs, fn, args, kwargs, mask, why, stores, [] if launched is None else launched)


def _warn_once(programs: ProgramCache, why: NotOneProgramError) -> None:
    if str(why) not in (said := _warned.setdefault(programs, set())):
        said.add(str(why))
        warn(
            f"{why} So it does now, and so will others like it: right, but much slower than one compiled program.",
            ExecutorWarning,
        )


_warned: weakref.WeakKeyDictionary[ProgramCache, set[str]] = weakref.WeakKeyDictionary()
_locks: weakref.WeakKeyDictionary[ProgramCache, threading.RLock] = weakref.WeakKeyDictionary()
"""A thread's step begins when that of another thread with the same variables has stored its results.

A signal's handler may run a step on the thread that already has the lock.
"""


def _run_and_store(
    programs: ProgramCache,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    mask: ExampleMask | None,
    why: NotOneProgramError | None,
    stores: bool,
    launched: list[Any],
) -> Any:
    replicas, key = programs.replicas, function_key(fn)
    check_same_step(replicas.lockstep, fn, args, kwargs, "on the per-replica executor")
    variables = programs.created_by(fn, key)
    known_before = len(variables)
    created = Creations(replicas, variables)
    try:
        results, new = _run(programs, fn, (tuple(args), dict(kwargs or {})), mask, created)
        if not stores:
            created.undo()
            return None
        if why is not None:
            _warn_once(programs, why)
    except BaseException as error:
        created.undo()
        if why is not None and not isinstance(error, ExecutorWarning):
            error.add_note(f"(raised on the per-replica executor: {why})")
        raise
    finally:
        programs.keep_created(variables, fn, key)
    release = hold_signals()
    try:
        store_all({variable.slot: array for variable, array in new})  # nothing can fail any more
        launched.append(True)
    finally:
        release()
    if replicas.remote_variables is not None:
        replicas.remote_variables.send([variable.slot for variable, _ in new])
    if len(variables) > known_before:  # the next call must find them, even if the function has changed what it captures
        programs.keep_created(variables, fn, key_after_tracing(fn, key))
    return results


def _run(
    programs: ProgramCache, fn: Callable[..., Any], arguments: Any, mask: ExampleMask | None, created: Creations
) -> tuple[Any, list[tuple[Variable, jax.Array]]]:
    """The result of the step, and the new arrays of the variables that it writes."""
    replicas = programs.replicas
    adopt = _jax.settings_of_this_thread()
    local, fetch = [], _fetch_function(replicas)
    without_rows = False
    for i in replicas.local_replicas:
        inputs = _inputs(arguments, i, replicas.worker_devices[i])
        without_rows = without_rows or any(array.size == 0 for array, _, _ in inputs[1])
        local.append(_Replica(replicas, i, fn, adopt, created.for_replica(), fetch, *inputs, mask))
    rendezvous = Rendezvous({r.communicator.replica: r.run for r in local}, replicas.num_replicas, replicas.lockstep)
    for replica in local:
        replica.communicator.rendezvous = rendezvous
    stores = [r.store for r in local]
    try:
        with tracing_rules_once():
            returned = rendezvous.run() if len(local) == 1 else _run_beside_others(fn, arguments, local, rendezvous)
    except DeadlockError as error:
        if without_rows:
            error.add_note(_NO_ROWS)
        raise
    except ValueError as error:
        if "zero-length scan" in str(error):
            error.add_note(_NO_ITERATION)
        raise
    finally:
        for store in stores:
            store.end()
    everyone = outcomes(returned, stores, replicas)
    if replicas.num_replicas > 1:
        check_expectations(everyone)
    return merged(returned, everyone, replicas, mask), new_arrays(stores, everyone, programs.variables)


def _run_beside_others(fn: Callable[..., Any], arguments: Any, local: list[_Replica], rendezvous: Rendezvous) -> Any:
    """Run the replicas; raise if one has replaced an array of an object that the others compute with, too."""
    step = function_key(fn)
    objects = [key.value for key in object_keys_in(step.captured)]
    objects += jax.tree_util.tree_leaves(arguments, is_leaf=is_leaf)
    of_objects = tuple(ObjectKey(x) for x in objects if may_change(x.__class__))
    localities = [replica.store.localities for replica in local]

    def is_of_step(value: Any) -> bool:
        return any(of_one.is_of_step(value) for of_one in localities)

    @functools.cache  # asked only after the step
    def used() -> set[int]:
        return set[int]().union(*(of_one.used for of_one in localities))

    with recording_reads(of_objects, step.code, module_of(fn), captured_by(fn), is_of_step, used) as threads:
        for replica in local:
            replica.threads = threads
        returned = rendezvous.run()
        check_attributes_stay(used)
    return returned


_NO_ROWS = (
    "(Some replicas get no example of this batch. JAX drops the gradients of operations such as jnp.where and x[i] if "
    "their results have no elements, so these replicas may leave out the gradient of a collective. Have small batches "
    "padded: strategy.distribute_dataset(dataset, replicax.InputOptions(partial_batch='pad')), or 'drop')"
)


_NO_ITERATION = (
    "(As plain Python, on the per-replica executor, a loop of jax.lax over 0 rows has no result whose shape could be "
    "known. Run the step compiled, or have small batches padded.)"
)


class _Replica:
    """One replica of a step."""

    def __init__(
        self,
        replicas: Replicas,
        index: int,
        fn: Callable[..., Any],
        adopt: Callable[[], None],
        creations: Creations,
        fetch: Callable[[Variable], None],
        arguments: Callable[[], Any],
        arrays: Sequence[tuple[Any, Locality, Place]],
        mask: ExampleMask | None,
    ) -> None:
        localities, places, examples = Localities(), None, None
        device = replicas.worker_devices[index]
        if mask is not None:
            examples = ReplicaExamples(*jax.device_put((mask.host[index], local_array(mask.count)), device))
            places = Places(mask.host.shape[1])
            arrays = [*arrays, (examples.mask, T, Rows(0)), (examples.count, M, None)]
        for array, locality, place in arrays:
            localities.note(array, locality)
            if places is not None:
                places.note(array, place)
        self.communicator = PerReplicaCommunicator(
            index,
            device,
            localities,
            places,
            examples,
            replicas.communication_options,
        )
        remote = replicas.remote_variables
        communicator: Any = self.communicator
        if remote is not None:
            communicator = remote.communicator(communicator, replicas.num_replicas)
        self.store = PerReplicaStore(replicas, communicator, localities, places, creations, fetch)
        self._trace = self.store.trace
        self._context = context.ReplicaContext(replicas, communicator)
        self._device = device
        self._fn = fn
        self._arguments = arguments
        self._adopt = adopt
        self.threads = set[int]()

    def run(self) -> Any:
        self._adopt()
        self.threads.add(threading.get_ident())
        with (
            jax.disable_jit(),
            _jax.kept_programs(),
            jax.default_device(self._device),
            _jax.set_current_trace(self._trace),
            context.replica(self._context),
            use_store(self.store),
        ):
            args, kwargs = self._arguments()
            with explaining(self._fn, tuple, lambda: [v.name for v in self.store.values]):
                return call_step(self._fn, args, kwargs, self.store.values)


def _fetch_function(replicas: Replicas) -> Callable[[Variable], None]:
    """A function that fetches a variable that lives elsewhere: once in a step, so that all replicas read the same."""
    remote, fetched = replicas.remote_variables, set[Variable]()

    def fetch(variable: Variable) -> None:
        if remote is not None and variable not in fetched:
            fetched.add(variable)
            remote.bring([variable.slot])

    return fetch


def _inputs(tree: Any, replica: int, device: jax.Device) -> tuple[Callable[[], Any], list[tuple[Any, Locality, Place]]]:
    """A function that makes one replica's ``(args, kwargs)``, and its arrays with their localities and places."""
    arrays: list[tuple[Any, Locality, Place]] = []

    def one(leaf: Any) -> Any:
        locality = T if isinstance(leaf, PerReplica) else M
        value = component(leaf, replica) if isinstance(leaf, PerReplica) else leaf
        if not isinstance(value, ARRAYS) or (locality is M and isinstance(value, bool)):
            return value
        array = as_array(value, "an argument")
        if not isinstance(array, jax.Array):
            return array  # a gradient of integers, which lies on no device
        arrays.append((_jax.copy_on(device, local_array(array)), locality, _place(leaf)))
        return arrays[-1][0]

    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_leaf)
    settings = module_numbers(treedef)
    leaves = [
        leaf if i in settings and type(leaf) in (int, float, complex) else one(leaf) for i, leaf in enumerate(leaves)
    ]
    # The replica builds the containers: some remember the trace in which they were made.
    return lambda: jax.tree_util.tree_unflatten(treedef, leaves), arrays


def _place(value: Any) -> Place:
    """The place of the examples in an argument."""
    if not isinstance(value, PerReplica) or value.mask is None:
        return None
    return UNKNOWN if value.dim is None else Rows(value.dim)


def _check_components(args: Sequence[Any], kwargs: Mapping[str, Any] | None, replicas: Replicas) -> ExampleMask | None:
    """Check that ``PerReplica`` arguments have a component for each replica; return the mask of padded ones."""
    padded: list[tuple[int, ExampleMask, int | None]] = []
    leaves, tree = jax.tree_util.tree_flatten(registered((tuple(args), dict(kwargs or {}))), is_leaf=is_leaf)
    for position, leaf in enumerate(leaves):
        if _jax.is_mutable(leaf):
            raise is_a_mutable_array(tree, position)
        if not isinstance(leaf, PerReplica) or isinstance(leaf.form, Local):
            check_integers(leaf, functools.partial(path_of, tree, position))
            continue
        if leaf.count != replicas.num_replicas or leaf.replicas != replicas.local_replicas:
            raise of_another_strategy(tree, position, leaf.count, replicas.num_replicas)
        if leaf.mask is not None:
            padded.append((position, leaf.mask, leaf.dim))
    return common_mask(padded, tree) if padded else None
