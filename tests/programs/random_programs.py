"""Random steps, as data: what Hypothesis draws, and the one function that runs it inside a step.

A step is a list of statements, and works on pools of values, one pool for each kind: ``f`` and ``F`` are float32 of
shapes () and (3,), ``i`` and ``I`` int32. A statement names its operands by how many values of their kind are younger,
so that any list of statements is a well-typed program and stays one while it is shrunk. A statement with a body
(a loop, a branch, a differentiated function, …) runs it on copies of the pools.

Nothing is rounded or compared but integers, so that a float's last bit decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import replicax

FLOATS, INTS = "fF", "iI"
KINDS = FLOATS + INTS
SHAPES: dict[str, tuple[int, ...]] = {"f": (), "F": (3,), "i": (), "I": (3,)}
DTYPES: dict[str, Any] = {"f": jnp.float32, "F": jnp.float32, "i": jnp.int32, "I": jnp.int32}
BRANCHING = {"scan", "cond", "switch", "while"}

Statement = tuple[Any, ...]
Body = tuple[Statement, ...]


class VariableOf(NamedTuple):
    """What kind of variable."""

    kind: str
    synchronization: str
    aggregation: str


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """A step, its variables, and how its per-replica arguments differ."""

    variables: tuple[VariableOf, ...]
    data: str
    statements: Body

    def has(self, names: set[str]) -> bool:
        """Whether one of these statements is anywhere in it."""
        return _has(self.statements, names)

    def argument(self, kind: str, replica: int) -> np.ndarray[Any, Any]:
        """One replica's component of its per-replica argument of a kind."""
        number = {"differ": replica, "equal": 0, "last differs": int(replica > 0)}[self.data]
        return (np.ones(SHAPES[kind]) * (number + 1) * (0.5 if kind in FLOATS else 1)).astype(DTYPES[kind])


def _has(value: Any, names: set[str]) -> bool:
    return isinstance(value, tuple) and (
        bool(value and isinstance(value[0], str) and value[0] in names) or any(_has(v, names) for v in value)
    )


# --- running one ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A namedtuple, for nests."""

    left: Any
    right: Any


def kind_of(value: Any) -> str:
    """The kind of an array."""
    return next(k for k in KINDS if value.shape == SHAPES[k] and value.dtype == DTYPES[k])


@dataclasses.dataclass
class Scope:
    """What a statement sees, and where it leaves what it computes."""

    pools: dict[str, list[Any]]
    variables: Sequence[replicax.Variable]
    returned: list[Any]

    def inner(self) -> Scope:
        return Scope({k: list(pool) for k, pool in self.pools.items()}, self.variables, [])

    def get(self, kind: str, age: int = 0) -> Any:
        pool = self.pools[kind]
        return pool[-1 - age % len(pool)]

    def add(self, *values: Any) -> None:
        for value in values:
            self.pools[kind_of(value)].append(value)

    def variable(self, number: int) -> replicax.Variable:
        return self.variables[number % len(self.variables)]

    def run(self, body: Body, *values: Any) -> Scope:
        """The scope in which ``body`` has run, on ``values`` too."""
        inner = self.inner()
        inner.add(*values)
        for statement in body:
            OPERATIONS[statement[0]](inner, *statement[1:])
        return inner

    def function(self, body: Body, kind: str) -> Callable[..., Any]:
        """``body`` as a function that returns its youngest value of a kind."""
        return lambda *values: self.run(body, *values).get(kind)


def run_program(program: RandomProgram, variables: Sequence[replicax.Variable], *arguments: Any) -> Any:
    """The step itself.

    Args:
      program: what to run.
      variables: those of the program.
      *arguments: one mirrored and one per-replica array of each kind.
    """
    scope = Scope({k: [] for k in KINDS}, variables, [])
    scope.add(*arguments)
    for statement in program.statements:
        OPERATIONS[statement[0]](scope, *statement[1:])
    youngest = {k: Pair(scope.get(k, 0), scope.get(k, 1)) for k in KINDS}
    return youngest, tuple(scope.returned), [v.read_value() for v in variables], (variables[0], None, "text", True)


OPERATIONS: dict[str, Callable[..., None]] = {}


def operation(fn: Callable[..., None]) -> Callable[..., None]:
    """Register what a statement does, under its name."""
    OPERATIONS[fn.__name__.rstrip("_")] = fn
    return fn


def replica_context() -> replicax.ReplicaContext:
    found = replicax.get_replica_context()
    assert found is not None
    return found


@operation
def const(scope: Scope, kind: str, number: int) -> None:
    scope.add(jnp.full(SHAPES[kind], number, DTYPES[kind]))


@operation
def replica_id(scope: Scope) -> None:
    scope.add(jnp.asarray(replica_context().replica_id_in_sync_group, jnp.int32))


@operation
def unary(scope: Scope, kind: str, a: int) -> None:
    value = scope.get(kind, a)
    scope.add(jnp.tanh(value) if kind in FLOATS else 3 - value)


@operation
def binary(scope: Scope, kind: str, op: str, a: int, b: int) -> None:
    x, y = scope.get(kind, a), scope.get(kind, b)
    if op == "mul" and kind in FLOATS:
        y = jnp.tanh(y)  # numbers stay small
    scope.add({"add": x + y, "sub": x - y, "mul": x * y}[op])


@operation
def convert(scope: Scope, source: str, target: str, a: int) -> None:
    value = scope.get(source, a)
    if SHAPES[source] != SHAPES[target]:
        value = jnp.mean(value) if source == "F" else value[1] if source == "I" else jnp.stack([value] * 3)
    scope.add(value.astype(DTYPES[target]))


@operation
def where(scope: Scope, kind: str, predicate: int, limit: int, a: int, b: int) -> None:
    scope.add(jnp.where(scope.get("i", predicate) > limit, scope.get(kind, a), scope.get(kind, b)))


@operation
def read(scope: Scope, number: int) -> None:
    scope.add(scope.variable(number).read_value())


@operation
def assign(scope: Scope, method: str, number: int, a: int) -> None:
    variable = scope.variable(number)
    getattr(variable, method)(scope.get(kind_of(variable), a))


@operation
def all_reduce(scope: Scope, op: str, kind: str, nest: str, a: int, b: int) -> None:
    x, y = scope.get(kind, a), scope.get("f", b)
    value = {
        "array": x,
        "dict": {"x": x, "y": [y, None]},
        "tuple": (x, (), y),
        "namedtuple": Pair(y, {"deep": (x,)}),
        "none": None,
    }[nest]
    found = replica_context().all_reduce(op, value)
    scope.returned.append(found)
    scope.add(*jax.tree.leaves(found))


@operation
def all_gather(scope: Scope, kind: str, a: int) -> None:
    found = replica_context().all_gather({"x": scope.get(kind, a)}, 0)["x"]
    scope.returned.append(found)
    scope.add(found[:3] - found[-3:] * 2)


@operation
def merge(scope: Scope, what: str, kind: str, a: int, number: int) -> None:
    variable = scope.variable(number)
    if what in ("assign", "assign_add"):
        kind = kind_of(variable)

    def merge_fn(strategy: replicax.Strategy, x: Any) -> Any:
        match what:
            case "sum" | "mean":
                return strategy.reduce(what, x)
            case "sum along 0":
                return strategy.reduce("sum", x, axis=0)
            case "gather":
                return strategy.gather(x, 0)[-3:]
            case "local results":
                return strategy.local_results(x)[-1], x
            case "read":
                return variable.read_value()
            case _:
                total = strategy.reduce("sum", x)
                getattr(variable, what)(total)
                return total

    found = replica_context().merge_call(merge_fn, (scope.get(kind, a),))
    scope.returned.append(found)
    scope.add(*jax.tree.leaves(found))


# The bodies of loops and branches.


@operation
def scan(scope: Scope, kind: str, start: int, length: int, body: Body) -> None:
    def turn(carry: Any, x: Any) -> tuple[Any, Any]:
        inner = scope.run(body, carry, x)
        return inner.get(kind), (inner.get("i"), carry)

    init = jnp.full(SHAPES[kind], start, DTYPES[kind])
    last, (numbers, carries) = jax.lax.scan(turn, init, jnp.arange(length, dtype=jnp.int32) + 1)
    scope.returned.append((numbers, carries))
    scope.add(last)


@operation
def cond(scope: Scope, kind: str, predicate: int, limit: int, yes: Body, no: Body) -> None:
    scope.add(jax.lax.cond(scope.get("i", predicate) > limit, scope.function(yes, kind), scope.function(no, kind)))


@operation
def switch(scope: Scope, kind: str, index: int, *bodies: Body) -> None:
    branches = [scope.function(body, kind) for body in bodies]
    scope.add(jax.lax.switch(scope.get("i", index), branches, scope.get(kind)))


@operation
def while_(scope: Scope, kind: str, trips: int, body: Body) -> None:
    end = scope.get("i", trips) % 4
    init = jnp.zeros((), jnp.int32), scope.get(kind)

    def turn(carry: Any) -> Any:
        return carry[0] + 1, scope.run(body, carry[1]).get(kind)

    scope.add(*jax.lax.while_loop(lambda carry: carry[0] < end, turn, init))


# Functions that JAX transforms.


def _loss(scope: Scope) -> Any:
    return scope.get("f") + jnp.sum(scope.get("F"))


@operation
def grad(scope: Scope, kind: str, a: int, checkpointed: bool, body: Body) -> None:
    def loss(x: Any) -> Any:
        return _loss(scope.run(body, x))

    scope.add(jax.grad(jax.checkpoint(loss) if checkpointed else loss)(scope.get(kind, a)))


@operation
def value_and_grad(scope: Scope, numbers: tuple[int, ...], own: bool, body: Body) -> None:
    floats = [v for v in scope.variables if kind_of(v) in FLOATS]
    chosen = list({id(v): v for v in (floats[n % len(floats)] for n in numbers)}.values()) if floats else []

    def loss() -> Any:
        inner = scope.run(body)
        value = _loss(inner) + sum((jnp.sum(v.read_value()) ** 2 for v in chosen), jnp.float32(0))
        return value * scope.pools["f"][1] if own else value, (inner.get("I"), "aux")

    (value, aux), grads = replicax.value_and_grad(loss, chosen, has_aux=True)()
    scope.returned.append((aux, grads))
    scope.add(value, *grads)


@operation
def vmap(scope: Scope, kind: str, a: int, body: Body) -> None:
    scope.add(jnp.asarray(jax.vmap(scope.function(body, kind))(scope.get(kind.upper(), a))[:3]).reshape((3, -1))[:, 0])


@operation
def jit(scope: Scope, kind: str, a: int, body: Body) -> None:
    scope.add(jax.jit(scope.function(body, kind))(scope.get(kind, a)))


# What is wrong wherever it stands.


@operation
def fault(scope: Scope, which: str) -> None:
    variable = scope.variables[0]
    match which:
        case "shape":
            variable.assign(jnp.zeros((5,), variable.dtype))
        case "dtype":
            variable.assign(jnp.zeros(variable.shape, jnp.complex64))
        case "python":
            raise KeyError("mine")
        case "gather":
            replica_context().all_gather(jnp.float32(1), 0)
        case "reduce":
            replica_context().all_reduce("median", jnp.float32(1))
        case "context":
            replica_context().strategy.reduce("mean", jnp.float32(1))
        case "scope":
            with replica_context().strategy.scope():
                pass
        case "jax":
            jnp.ones(2) + jnp.ones(3)
        case "grad":
            jax.grad(lambda x: float(variable.assign(jnp.zeros(variable.shape, variable.dtype)) is None) * x)(1.0)
        case "vmap":
            jax.vmap(lambda x: variable.assign(jnp.zeros(variable.shape, variable.dtype)) and x)(jnp.ones(3))


# --- drawing one ----------------------------------------------------------------------------------------

Group = st.SearchStrategy[Statement]

_kind, _float, _age, _number = st.sampled_from(KINDS), st.sampled_from(FLOATS), st.integers(0, 3), st.integers(0, 2)
_limit = st.integers(0, 2)
_arithmetic = st.sampled_from(["add", "sub", "mul"])
_nest = st.sampled_from(["array", "dict", "tuple", "namedtuple", "none"])


def _of(name: str, *parts: Any) -> Group:
    return st.tuples(st.just(name), *parts)


def _any_of(*groups: Group) -> Group:
    """One of ``groups``, each as likely as it is often among them (``one_of`` would count each once)."""
    return st.sampled_from(groups).flatmap(lambda group: group)


def _body(*groups: Group) -> st.SearchStrategy[Body]:
    return st.lists(_any_of(*groups), min_size=1, max_size=3).map(tuple)


_SIMPLE = st.one_of(
    _of("const", _kind, st.integers(-2, 2)),
    _of("replica_id"),
    _of("unary", _kind, _age),
    _of("binary", _kind, _arithmetic, _age, _age),
    st.sampled_from(["fF", "Ff", "iI", "Ii", "if", "IF"]).flatmap(
        lambda both: _of("convert", st.just(both[0]), st.just(both[1]), _age)
    ),
    _of("where", _kind, _age, _limit, _age, _age),
    _of("read", _number),
)
_ALL_REDUCE = _of("all_reduce", st.sampled_from(["sum", "mean"]), _kind, _nest, _age, _age)
_COLLECTIVE = st.one_of(_ALL_REDUCE, _of("all_gather", st.sampled_from("FI"), _age))
_MERGE = st.one_of(
    _of("merge", st.sampled_from(["sum", "mean", "local results"]), _kind, _age, _number),
    _of("merge", st.sampled_from(["sum along 0", "gather"]), st.sampled_from("FI"), _age, _number),
    _of("merge", st.just("read"), _kind, _age, _number),
)
_ASSIGN = _of("assign", st.sampled_from(["assign", "assign_add", "assign_sub"]), _number, _age)
_WRITE = _any_of(
    _ASSIGN, _ASSIGN, _ASSIGN, _of("merge", st.sampled_from(["assign", "assign_add"]), _float, _age, _number)
)


def _branching(body: st.SearchStrategy[Body]) -> Group:
    return st.one_of(
        _of("scan", _kind, st.integers(0, 1), st.integers(1, 3), body),
        _of("cond", _kind, _age, _limit, body, body),
        _of("switch", _kind, _age, body, body, body),
    )


_LOOP = _of("while", _kind, _age, _body(_SIMPLE, _SIMPLE, _COLLECTIVE))
_INNER = _branching(_body(_SIMPLE, _SIMPLE, _SIMPLE, _COLLECTIVE))
_GRAD = st.one_of(
    _of("grad", _float, _age, st.just(False), _body(_SIMPLE, _COLLECTIVE, _MERGE, _INNER)),
    # Inside a checkpoint the per-replica executor traces too, so decisions have no values there.
    _of("grad", _float, _age, st.just(True), _body(_SIMPLE, _COLLECTIVE)),
)


def _value_and_grad(body: st.SearchStrategy[Body]) -> Group:
    some_variables = st.lists(_number, max_size=2).map(tuple)
    return _of("value_and_grad", some_variables, st.sampled_from([True, True, True, False]), body)


_WITHIN = _value_and_grad(_body(_SIMPLE, _WRITE))
_VALUE_AND_GRAD = _value_and_grad(_body(_SIMPLE, _SIMPLE, _COLLECTIVE, _MERGE, _WRITE, _WRITE, _INNER, _GRAD, _WITHIN))
_BRANCHING = _branching(_body(_SIMPLE, _SIMPLE, _SIMPLE, _COLLECTIVE, _MERGE, _INNER, _LOOP, _GRAD))
_OTHER = st.one_of(
    _LOOP,
    _of("vmap", st.sampled_from("fi"), _age, _body(_SIMPLE, _ALL_REDUCE)),
    _of("jit", _kind, _age, _body(_SIMPLE, _COLLECTIVE, _MERGE, _INNER)),
)
_STATEMENT = _any_of(
    *[_SIMPLE] * 4, *[_WRITE] * 4, *[_VALUE_AND_GRAD] * 2, _COLLECTIVE, _MERGE, _GRAD, _BRANCHING, _BRANCHING, _OTHER
)
_FAULT = _of(
    "fault",
    st.sampled_from(["shape", "dtype", "python", "gather", "reduce", "context", "scope", "jax", "grad", "vmap"]),
)
_VARIABLE = st.tuples(
    _kind, st.sampled_from(["on_write", "on_read"]), st.sampled_from(["none", "sum", "mean", "only_first_replica"])
).map(lambda v: VariableOf(*v) if v[0] in FLOATS or v[2] != "mean" else VariableOf(v[0], v[1], "sum"))


@st.composite
def random_programs(draw: st.DrawFn) -> RandomProgram:
    """A random program; in one of ten something is wrong somewhere."""
    statements = draw(st.lists(_STATEMENT, min_size=2, max_size=6))
    if draw(st.integers(0, 9)) == 9:
        statements.insert(draw(st.integers(0, len(statements))), draw(_FAULT))
    return RandomProgram(
        variables=tuple(draw(st.lists(_VARIABLE, min_size=1, max_size=3))),
        data=draw(st.sampled_from(["differ", "differ", "last differs", "equal"])),
        statements=tuple(statements),
    )
