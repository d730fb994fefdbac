"""Variables by name, created and found by ``get_variable``."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import context
from replicax.compat.v1.aggregation import VariableAggregation, parse
from replicax.execution.tracing.function_key import Wrapper
from replicax.name_hints import refusing
from replicax.strategy import Strategy
from replicax.user_functions import without_partials
from replicax.variables.aggregation import Synchronization
from replicax.variables.partitioners import Partitioner
from replicax.variables.store import Creations
from replicax.variables.variable import Variable

AUTO_REUSE = "auto_reuse"
"""For ``reuse=``: an existing variable is found, and a missing one is created."""


@dataclasses.dataclass
class VariableScope:
    """The result of :func:`variable_scope`; in Replicax pass :class:`replicax.Variable` objects around instead.

    It has a prefix of names, and decides whether :func:`get_variable` finds existing variables.

    Attributes:
      name: the prefix.
      reuse: ``False`` (names are new), ``True`` (they exist), or :data:`AUTO_REUSE`.
    """

    name: str = ""
    reuse: bool | str = False

    def reuse_variables(self) -> None:
        """Make names refer to existing variables from here on; keep the ``replicax.Variable`` instead."""
        self.reuse = True


class _Names:
    """The variables of a strategy by name, each with the step that created it, if any."""

    def __init__(self) -> None:
        self.variables: dict[str, tuple[Variable, Any]] = {}

    def __deepcopy__(self, memo: Any) -> _Names:
        return _Names()  # a copy of a strategy has no variables


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[VariableScope] = [VariableScope()]
        self.tower_local: list[VariableAggregation] = []
        self.step: Any = None
        self.asked: set[str] = set()


_scopes = _Scopes()


def _names_of(strategy: Strategy) -> dict[str, tuple[Variable, Any]]:
    # Stored in the strategy, like its API with towers: the names live as long as the strategy.
    names: _Names = vars(strategy).setdefault("_names_of_towers", _Names())
    return names.variables


def get_variable_scope() -> VariableScope:
    """The innermost :class:`VariableScope` of this thread; a ``replicax.Variable`` needs none."""
    return _scopes.stack[-1]


@contextlib.contextmanager
def variable_scope(name_or_scope: str | VariableScope, reuse: bool | str | None = None) -> Iterator[VariableScope]:
    """Add a prefix to names, and set whether they are new; in Replicax pass ``replicax.Variable`` objects around.

    Args:
      name_or_scope: a name to append to the prefix; or a scope, to enter it again.
      reuse: ``True``: names exist; :data:`AUTO_REUSE`: they may exist; ``None``: as in the enclosing scope.

    >>> from replicax.compat import v1
    >>> with v1.variable_scope("layer"):
    ...     w = v1.get_variable("w", shape=[2])
    >>> with v1.variable_scope("layer", reuse=True):
    ...     w.name, v1.get_variable("w") is w
    ('layer/w', True)
    """
    outer = _scopes.stack[-1]
    if isinstance(name_or_scope, VariableScope):
        name = name_or_scope.name
        inherited = name_or_scope.reuse or outer.reuse
    elif isinstance(name_or_scope, str):
        name = f"{outer.name}/{name_or_scope}" if outer.name else name_or_scope
        inherited = outer.reuse
    else:
        raise TypeError(f"variable_scope: expected a name or a VariableScope, got {name_or_scope!r}")
    if reuse not in (None, True, False, AUTO_REUSE):
        raise ValueError(f"variable_scope: reuse must be True, False, AUTO_REUSE or None, got {reuse!r}")
    _scopes.stack.append(VariableScope(name, reuse or inherited))
    try:
        yield _scopes.stack[-1]
    finally:
        _scopes.stack.pop()


@contextlib.contextmanager
def tower_local(reduce_method: Any) -> Iterator[None]:
    """New variables are tower-local, and combined by ``reduce_method`` in cross-tower context."""
    _scopes.tower_local.append(parse(reduce_method, "tower_local_var_scope(reduce_method)"))
    try:
        yield
    finally:
        _scopes.tower_local.pop()


class TowerStep(Wrapper):
    """A tower's function as a step: its new variables are registered as its own, under this thread's scopes.

    In the per-replica executor each tower has a thread, which has its own scopes.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._scope = _scopes.stack[-1].name, _scopes.stack[-1].reuse
        self._tower_local = tuple(_scopes.tower_local)
        super().__init__(fn, *self._scope, *self._tower_local)
        inner = without_partials(fn)
        self._code = getattr(inner, "__code__", inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = vars(_scopes).copy()
        _scopes.stack = [VariableScope(*self._scope)]
        _scopes.tower_local = list(self._tower_local)
        _scopes.step = self._code
        _scopes.asked = set()
        try:
            return self.fn(*args, **kwargs)
        finally:
            vars(_scopes).update(outer)


@refusing(
    "get_variable",
    {
        "regularizer": "add what it makes of the variable to the loss",
        "collections": "keep variables in a pytree of your own",
        "caching_device": "leave it out: programs keep what they read",
        "validate_shape": "leave it out: a variable keeps its shape",
        "use_resource": "leave it out",
        "custom_getter": "make the variable by a function of your own",
        "constraint": "assign what the constraint makes of the value, after the update",
    },
)
def get_variable(
    name: str,
    shape: Sequence[int] | int | None = None,
    dtype: Any = None,
    initializer: Any = None,
    trainable: bool | None = None,
    partitioner: Partitioner | None = None,
    synchronization: Synchronization | str = "auto",
    aggregation: VariableAggregation | str = VariableAggregation.NONE,
) -> Variable:
    """The variable of that name under the current strategy, new or existing: a :class:`replicax.Variable`.

    Args:
      name: follows the prefix of :func:`variable_scope`, whose ``reuse`` says whether such a variable exists.
      shape: the shape of a new variable; a number is that of a vector.
      dtype: the dtype of a new variable; by default that of the initial value, or float32.
      initializer: the initial value; or a function of ``(shape, dtype)``, such as ``jnp.zeros``, of ``(key, shape,
        dtype)``, such as ``jax.nn.initializers.he_normal()``, or without arguments; by default Glorot's uniform one,
        and zeros for integers.
      trainable: see :class:`replicax.Variable`, as for ``partitioner``, ``synchronization`` and ``aggregation``.
      partitioner: likewise.
      synchronization: likewise.
      aggregation: likewise; for a tower-local variable that of ``tower_local_var_scope``.

    Raises:
      ValueError: the variable exists already, or there is none to reuse; it has another shape or dtype; its shape is
        unknown.

    >>> import jax.numpy as jnp
    >>> from replicax.compat import v1
    >>> with v1.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     v1.get_variable("v", shape=[2], initializer=jnp.zeros)
    <Variable 'v' float32[2] mirrored on 2 replicas: [0. 0.]>
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"get_variable(name): expected a name, got {name!r}")
    shape = (shape,) if isinstance(shape, int) else shape
    scope = _scopes.stack[-1]
    name = f"{scope.name}/{name}" if scope.name else name
    strategy = context.get_strategy()
    names = _names_of(strategy)
    existing, creator = names.get(name, (None, None))
    step = _scopes.step if context.in_step() else None
    # The code that created a variable reaches it at each run again, by any route; once in each run.
    is_own = step is not None and step == creator and name not in _scopes.asked
    _scopes.asked.add(name)
    if existing is not None and (scope.reuse or is_own):
        _check_same(existing, name, shape, dtype)
        return existing
    if existing is not None:
        raise ValueError(
            f"get_variable: there is a variable {name!r} already: to have it again, use "
            "variable_scope(…, reuse=True), or AUTO_REUSE"
        )
    if existing is None and scope.reuse is True:
        raise ValueError(f"get_variable: there is no variable {name!r} to reuse; known are {sorted(names)}")
    combined = parse(aggregation, f"get_variable({name!r}): aggregation", none=True)
    if _scopes.tower_local:
        synchronization, combined, trainable = "on_read", _scopes.tower_local[-1], False

    def make() -> Variable:
        return Variable(
            _initial(name, shape, dtype, initializer),
            trainable=trainable,
            name=name,
            dtype=dtype,
            partitioner=partitioner,
            synchronization=synchronization,
            aggregation=combined.aggregation,
        )

    # Found by its name from now on, it is not one of those that the step in progress gets again by their order.
    variable = Creations(strategy.extended.replicas, []).create(make) if context.in_step() else make()
    names[name] = variable, step
    return variable


def trainable_variables() -> list[Variable]:
    """The trainable variables of the current strategy that :func:`get_variable` has made: ``replicax.Variable`` s."""
    return [v for v, _ in _names_of(context.get_strategy()).values() if v.trainable]


def _check_same(known: Variable, name: str, shape: Sequence[int] | None, dtype: Any) -> None:
    if shape is not None and tuple(shape) != known.shape:
        raise ValueError(f"get_variable: variable {name!r} has shape {known.shape}, and not {tuple(shape)}")
    if dtype is not None and jnp.dtype(dtype) != known.dtype:
        raise ValueError(f"get_variable: variable {name!r} has dtype {known.dtype}, and not {jnp.dtype(dtype)}")


def _initial(name: str, shape: Sequence[int] | None, dtype: Any, initializer: Any) -> Any:
    """The initial value for ``replicax.Variable``."""
    seed = zlib.crc32(name.encode())  # the same in every process
    if callable(initializer):
        parameters = inspect.signature(initializer).parameters.values()
        takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if shape is None or not takes:
            return initializer
        if takes[0] == "key":  # as those of jax.nn.initializers
            return lambda: initializer(jax.random.key(seed), tuple(shape), dtype or jnp.float32)
        return lambda: initializer(tuple(shape), dtype or jnp.float32)
    if initializer is not None:
        if shape is None:
            return initializer
        return lambda: jnp.broadcast_to(jnp.asarray(initializer, dtype), tuple(shape))
    if shape is None:
        raise ValueError(f"get_variable: a new variable {name!r} needs a shape, or an initializer that is a value")
    kind = jnp.dtype(dtype or jnp.float32)
    if not jnp.issubdtype(kind, jnp.floating):
        return lambda: jnp.zeros(tuple(shape), kind)
    if len(shape) < 2:
        limit = (6 / (1 + sum(shape))) ** 0.5
        return lambda: jax.random.uniform(jax.random.key(seed), tuple(shape), kind, -limit, limit)
    return lambda: jax.nn.initializers.glorot_uniform()(jax.random.key(seed), tuple(shape), kind)


# --- the global step ------------------------------------------------------------------------------------

_GLOBAL_STEP = "global_step"


def get_global_step() -> Variable | None:
    """The number of updates so far, if it is counted; in Replicax use a ``replicax.Variable`` of your own."""
    return _names_of(context.get_strategy()).get(_GLOBAL_STEP, (None, None))[0]


def create_global_step() -> Variable:
    """A variable that counts updates: ``replicax.Variable(0, aggregation="only_first_replica")``.

    Raises:
      ValueError: it exists already.
    """
    return _global_step(False)


def get_or_create_global_step() -> Variable:
    """The variable that counts updates; ``replicax.Variable(0, aggregation="only_first_replica")``.

    >>> from replicax.compat import v1
    >>> with v1.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     v1.get_or_create_global_step() is v1.get_global_step()
    True
    """
    return _global_step(AUTO_REUSE)


def _global_step(reuse: bool | str) -> Variable:
    first = VariableAggregation.ONLY_FIRST_TOWER
    with variable_scope(VariableScope(reuse=reuse)):
        return get_variable(_GLOBAL_STEP, initializer=0, trainable=False, aggregation=first)
