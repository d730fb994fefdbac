"""Capture: run a step's Python once, and record the program that it is.

The step runs inside the replica axis, on traced values, with its variables lifted: reading one for the first time adds
an input to the program, and the last value written becomes an output. Nothing is computed, and whatever goes wrong
leaves every variable as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _jax, context
from replicax.collectives import ReplicaExamples
from replicax.devices.arrays import put
from replicax.devices.host_values import check_x64
from replicax.devices.mesh import REPLICA_AXIS, mirrored_sharding
from replicax.errors import TraceError
from replicax.execution.program.collective_operations import would_meet
from replicax.execution.program.infer import with_all_reduces
from replicax.execution.program.marks import Obligation, mark_p, variable_p
from replicax.execution.program.program import Program, Result, Use, VariableRef
from replicax.execution.tracing.communicator import SpmdCommunicator
from replicax.execution.tracing.step_call import call_step, check_attributes_stay
from replicax.execution.tracing.step_errors import as_written, check_meshes, explaining
from replicax.locality import Locality, T
from replicax.pytrees import check_no_traced_fields, is_leaf, registered
from replicax.system import registry
from replicax.user_functions import function_name
from replicax.values import Local, PerReplica
from replicax.variables.store import (
    Creations,
    check_owner,
    check_write_trace,
    split_like,
    state_of_stores,
    use_store,
)
from replicax.variables.variable import Variable
from replicax.workers.replicas import Replicas


class TracedStore:
    """The store of a step that is being captured; see :class:`replicax.variables.store.Store`."""

    def __init__(self, replicas: Replicas, communicator: SpmdCommunicator, creations: Creations) -> None:
        self.replicas = replicas
        self.create = creations.create
        self.if_it_fails = creations.if_it_fails
        self.communicator = communicator
        self.values: dict[Variable, Any] = {}
        self.reads: list[Variable] = []
        self.writes: dict[Variable, None] = {}
        self.obligations: dict[int, Obligation] = {}
        self._trace = _jax.current_trace()

    def read(self, variable: Variable) -> Any:
        check_owner(variable, self.replicas)
        if variable not in self.values:
            check_x64(variable.dtype, variable.describe)
            aval = _jax.ShapedArray(variable.shape, variable.dtype)
            with _jax.set_current_trace(self._trace):
                self.values[variable] = variable_p.bind(aval=aval, index=len(self.reads))
            self.reads.append(variable)
        _jax.note_read(self._trace)
        return split_like(variable, self.values[variable])

    def write(self, variable: Variable, value: Any, error_unless_mirrored: str | None) -> None:
        check_owner(variable, self.replicas)
        check_write_trace(variable, self._trace)
        if error_unless_mirrored is not None:
            [value] = self.expect([value], frozenset({T}), error_unless_mirrored)
        self.values[variable] = value
        _jax.renew_kept_programs()
        # One without elements never changes; and XLA gives each device all of an empty output, also if it is split.
        if variable.size:
            self.writes.setdefault(variable)

    def copies(self, variable: Variable) -> PerReplica:
        return PerReplica(Local(self.read(variable), self.communicator))

    def expect(
        self, values: Sequence[Any], refused: frozenset[Locality], message: str, *, is_loss: bool = False
    ) -> list[Any]:
        mark_id = len(self.obligations)
        self.obligations[mark_id] = Obligation(refused, message, is_loss)
        return mark_p.bind(*map(jnp.asarray, values), mark_id=mark_id)


def capture(
    replicas: Replicas,
    fn: Callable[..., Any],
    arguments: Sequence[tuple[jax.ShapeDtypeStruct, Locality]],
    rebuild: Callable[[Sequence[Any]], tuple[Any, Any]],
    creations: Creations,
    paths: Callable[[], Sequence[str]],
    example_dims: Sequence[Any] | None = None,
    communicator: SpmdCommunicator | None = None,
) -> Program:
    """Trace ``fn`` for one of ``replicas``.

    ``arguments`` has one replica's shape and dtype, and the locality, of each traced argument; ``paths`` returns where
    each stands, for messages, and ``rebuild`` makes ``(args, kwargs)`` of them. ``creations`` are the variables that
    the step creates. ``example_dims`` says where the examples are in padded arguments (:meth:`Arguments.example_dims`);
    the last two arguments are then the mask, and the number of examples on all replicas. The replica reaches the others
    by the ``communicator``, if not in the usual way.
    """
    name = function_name(fn)
    for number, (aval, _) in enumerate(arguments):
        check_x64(aval.dtype, lambda number=number: paths()[number])  # type: ignore[misc]
    store: TracedStore | None = None
    asked_for_count = False
    results: list[Result] = []
    result_tree: Any = None

    def body(*values: Any) -> tuple[list[Any], list[Any]]:
        nonlocal store, result_tree, asked_for_count
        examples = None if example_dims is None else ReplicaExamples(*values[-2:])
        of_group = communicator or SpmdCommunicator(examples, replicas.communication_options)
        remote = replicas.remote_variables
        of_replica = of_group if remote is None else remote.communicator(of_group, replicas.num_replicas)
        results.clear()
        store = TracedStore(replicas, of_replica, creations.for_replica())
        replica = context.ReplicaContext(replicas, of_replica)
        args, kwargs = rebuild(values)
        reads = store.reads
        with context.replica(replica), use_store(store), explaining(fn, paths, lambda: [v.name for v in reads]):
            returned = call_step(fn, args, kwargs, store.values)
        asked_for_count = replica.asked_for_count
        leaves, result_tree = jax.tree_util.tree_flatten(registered(returned), is_leaf=is_leaf)
        computed: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, PerReplica) and isinstance(leaf.form, Local):
                raise ValueError(
                    "a step returned a PerReplica that it got in a merge_fn: return it from the merge_fn, which gives "
                    "each replica its component"
                )
            if isinstance(leaf, jax.Array):
                results.append(Result(len(computed)))
                computed.append(leaf)
            else:
                check_no_traced_fields(leaf)
                results.append(Result(None, VariableRef(leaf) if isinstance(leaf, Variable) else leaf))
        written = [store.values[v] for v in store.writes]
        store.values.clear()  # traced values end here
        of_group.examples = None
        return written, computed

    body.__name__ = body.__qualname__ = name  # as which profilers and JAX's errors show it
    with _jax.kept_programs():
        jaxpr, closed_over = traced_inside(replicas, body, [aval for aval, _ in arguments])
    assert store is not None
    check_attributes_stay(functools.cache(lambda: set(map(id, _jax.constants(jaxpr, closed_over)))))
    if any(map(_jax.is_mutable, jaxpr.invars)):
        raise TypeError(
            f"{name} uses a mutable array (jax.new_ref) that was made outside of it: make it inside, pass its value, "
            "ref[...], as an argument, or keep the state in a replicax.Variable. (JAX's options "
            "jax_error_checking_behavior_… use one: leave them at 'ignore', and take jax.experimental.checkify.)"
        )
    check_meshes(name, jaxpr, replicas.mesh)
    lost = _jax.leaked_tracer(jaxpr, closed_over)
    if lost is not None:
        raise TraceError(
            f"step {name!r} uses at {lost[1]} a value ({lost[0]}) that another step, or a function that JAX traced, "
            "has left behind, in a list, say: return it from there and pass it on in args, or assign it to a "
            "replicax.Variable. In jax.custom_vjp and custom_jvp, pass what is differentiated as an argument."
        )
    _jax.check_freed_once(jaxpr)
    inputs, equations = _lift(jaxpr, len(store.reads))
    with _jax.enable_x64_as_in(jaxpr):
        constants = [put(value, mirrored_sharding(replicas.mesh)) for value in closed_over]
    program = Program(
        name=name,
        replicas=replicas.num_replicas,
        replicas_at_once=replicas.replicas_at_once,
        reproducible=replicas.reproducible,
        jaxpr=_jax.replace_inputs(jaxpr, [*inputs, *jaxpr.invars], equations, jaxpr.outvars),
        reads=tuple(map(_use, store.reads)),
        arguments=tuple(arguments),
        constants=constants,
        writes=tuple(map(_use, store.writes)),
        results=tuple(results),
        result_tree=result_tree,
        obligations=store.obligations,
        timeout=store.communicator.timeout,
        asked_for_count=asked_for_count,
        example_dims=None if example_dims is None else tuple(example_dims),
    )
    if store.communicator.sums_own:
        program = dataclasses.replace(program, jaxpr=with_all_reduces(program.jaxpr, program.input_localities))
    return program


def checked_programs(
    programs: list[Program], replicas: Replicas, fn: Callable[..., Any], paths: Callable[[], Sequence[str]]
) -> list[Program]:
    """The programs of a new step, one for each size, after the registered checks have warned of mistakes in them."""
    if replicas.num_replicas > 1:
        names = [as_written(path, fn) for path in paths()]
        for load in registry.step_checks:
            programs = load()(programs, names, replicas.remote_variables is not None)
    return programs


def state_of_this_thread() -> Callable[[], None]:
    """A function that restores the present contexts, stores and traces of this thread.

    For use after an exception. A ``with`` block restores them when it is left, but an interrupt may come just when one
    is entered or left. The step would then seem to be running still.
    """
    parts = (context.state_of_contexts(), state_of_stores(), _jax.trace_of_this_thread())

    def put_back() -> None:
        for part in parts:
            part()

    return put_back


def traced_inside(
    replicas: Replicas, body: Callable[..., Any], avals: Sequence[Any]
) -> tuple[_jax.Jaxpr, Sequence[Any]]:
    """``body``, a function of one replica's values, as a program; and the arrays that it closes over.

    These are the program's last inputs. It is traced inside the replica axis, which has an entry for each replica, also
    where several share a device, but in no mesh: there, values that are computed are of another type than constants
    and arguments, and libraries compare types. The mesh comes in when the program is replicated.

    A step with logical devices needs a mesh, because it names their axes. So does one that calls ``jax.lax.pcast``:
    tracing fails, and is repeated with a mesh.
    """
    axis_env = [(REPLICA_AXIS, replicas.num_replicas)]

    def traced(mesh: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.make_jaxpr(body, axis_env=axis_env)(*avals)

    inside = _jax.abstract_mesh(replicas.mesh, {REPLICA_AXIS})
    try:
        closed = traced(inside if replicas.num_logical_devices > 1 else _jax.NO_MESH)
    except AssertionError as error:
        if not _jax.missed_axis_types(error):
            raise
        closed = traced(inside)
    jaxpr = _jax.opened(closed.jaxpr)
    n = len(closed.consts)
    jaxpr = jaxpr.replace(invars=[*jaxpr.invars[n:], *jaxpr.invars[:n]])
    return _jax.with_calls_for_solves(jaxpr, would_meet, axis_env), closed.consts


def _lift(jaxpr: _jax.Jaxpr, n_variables: int) -> tuple[list[Any], list[Any]]:
    """Split off the equations that stand for variables: their results, in order, and the other equations.

    A mark without a line of the user's gets the line that computes its value.
    """
    inputs: list[Any] = [None] * n_variables
    others, computed_by = [], {id(v): equation for equation in jaxpr.eqns for v in equation.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive is variable_p:
            inputs[equation.params["index"]] = equation.outvars[0]
        elif equation.primitive is mark_p:
            others.append(_jax.located(equation, _jax.computing(equation.invars[0], computed_by)))
        else:
            others.append(equation)
    return inputs, others


def _use(variable: Variable) -> Use:
    aval = jax.ShapeDtypeStruct(variable.shape, variable.dtype)
    return Use(variable.slot, variable.layout, aval, variable.name, weakref.ref(variable))
