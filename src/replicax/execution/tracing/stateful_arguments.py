"""State that objects hold: the models of Flax NNX, as arguments of a step.

NNX keeps arrays in objects that steps change in place. An adapter takes such an argument of a step apart: each of its
arrays has a variable, so the program reads and writes variables as any other does. Below the strategy the object is one
leaf, a :class:`StatefulArgument`, which knows the key of its static parts. When the step's Python is called, each
replica gets a copy of the object with its own values; when it returns, its changes are assigned to the variables. After
a program has written these, the user's object shows the new arrays: it is a
:class:`~replicax.variables.slots.View` of each.

The adapter is loaded when the user has loaded NNX.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from replicax import _jax, context
from replicax.errors import ContextError
from replicax.execution.tracing.function_key import ByKey, Wrapper
from replicax.pytrees import is_leaf, register
from replicax.system import registry
from replicax.variables import Variable
from replicax.workers.replicas import Replicas

LIBRARY = "flax.nnx"
"""Its name in ``sys.modules``: unless it is there, nothing is held."""


class ObjectsState(Protocol):
    """The state of some objects, which may share parts, for the replicas of one strategy."""

    key: Hashable
    """Stands for what is static in them, and for their variables: equal keys mean the same program."""
    variables: Sequence[Variable]

    def opened(self, has_rows: bool) -> tuple[Sequence[Any], Callable[[], None]]:
        """Copies of the objects for the replica whose step is called, and a function that stores their changes.

        The replica ``has_rows`` unless another argument is an array of 0 rows.

        Raises:
          TypeError, ValueError, LocalityError: by the function, if a change can't leave the step.
        """


class Adapter(Protocol):
    """The interface to the objects of the library."""

    def holds(self, cls: type) -> bool:
        """Return whether objects of this class hold state that steps change in place."""

    def state_of(self, objects: tuple[Any, ...], replicas: Replicas) -> ObjectsState:
        """Their state, after what has been assigned to them since the last step is assigned to their variables."""

    def updates(self, cls: type) -> bool:
        """Return whether :meth:`update` takes objects of this class: those that it holds, and their cells."""

    def update(self, value: Any, other: Any) -> None:
        """Give an object, or a cell, the arrays of another of the same structure."""

    def cells(self, value: Any) -> Sequence[Any]:
        """Where an object keeps its arrays, also while a step runs."""

    def parts(self, objects: tuple[Any, ...]) -> Any:
        """The objects of a step, for a loop over the parts of its batch: see :mod:`replicax.models.nnx_parts`."""


class _Kind(NamedTuple):
    """What two objects that hold state must have in common to be the same to a step."""

    state: Hashable
    number: int
    cls: type

    def __repr__(self) -> str:
        return f"a {self.cls.__name__} (known by its structure and variables)"


class StatefulArgument(ByKey):
    """One object that holds state, as an argument of a step: number ``index`` of the objects of ``state``."""

    __slots__ = ("index", "state", "value")

    def __init__(self, value: Any, state: ObjectsState, index: int) -> None:
        super().__init__(_Kind(state.key, index, type(value)))
        self.value = value
        self.state = state
        self.index = index

    def __repr__(self) -> str:
        numbers = [v.number for v in self.state.variables]
        return f"a {type(self.value).__name__} with variables number {min(numbers, default=0)} and others"


class StatefulCall(NamedTuple):
    """A call of a step, with a :class:`StatefulArgument` in the place of each object that holds state.

    The step ``fn`` may also be a method of such an object, or a ``functools.partial`` with some.
    """

    fn: Any
    args: Any
    kwargs: Any


def stateful_call(replicas: Replicas, fn: Any, args: Any, kwargs: Any) -> StatefulCall | None:
    """The call ``fn(*args, **kwargs)`` on ``replicas``, if there are objects that hold state in it.

    ``None`` if there is no such object, or if a step can't run here; the caller then raises. On parameter servers a
    ContextError says what to do.
    """
    adapter = _adapter()
    if adapter is None or not (isinstance(args, tuple | list) and isinstance(kwargs, dict | None)):
        return None
    leaves, tree, places = _flattened(fn, args, kwargs)
    if any(map(register, leaves)):
        return stateful_call(replicas, fn, args, kwargs)  # again, now that its container is known
    if not places or _jax.current_trace() is not _jax.eval_trace() or not context.may_run_here(replicas):
        return None
    if replicas.remote_variables is not None:
        raise ContextError(
            f"strategy.run: an argument is a {type(leaves[places[0]]).__name__}, which would keep on this worker what "
            "the step changes. On parameter servers variables keep that, which are made in strategy.scope(), in the "
            "program that schedules: params = replicax.as_variables(state), with the state that the library splits off "
            "(in NNX: graphdef, state = nnx.split(model)). In the step put it together again (nnx.merge(graphdef, "
            "params)), in the function that replicax.value_and_grad differentiates, and update with a "
            "replicax.Optimizer."
        )
    state = adapter.state_of(tuple(leaves[i] for i in places), replicas)
    for index, i in enumerate(places):
        leaves[i] = StatefulArgument(leaves[i], state, index)
    return _call_of(fn, tree, leaves)


@contextlib.contextmanager
def opened(fn: Any, args: Any, kwargs: Any) -> Iterator[StatefulCall]:
    """A step and its arguments with a copy of each object that holds state, for this replica.

    When the context is left without an error, the changes of the step to them are assigned to their variables.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs, bound_arguments(fn)), is_leaf=is_leaf)
    state = next((leaf.state for leaf in leaves if isinstance(leaf, StatefulArgument)), None)
    if state is None:
        yield StatefulCall(fn, args, kwargs)
        return
    has_rows = all(leaf.shape[0] for leaf in leaves if isinstance(leaf, jax.Array) and leaf.ndim)
    copies, close = state.opened(has_rows)
    leaves = [copies[x.index] if isinstance(x, StatefulArgument) else x for x in leaves]
    yield _call_of(fn, tree, leaves)
    close()


def cells_in(fn: Any, args: Any, kwargs: Any) -> list[Any]:
    """The cells in which the objects of a running step keep their arrays."""
    adapter = _adapter()
    if adapter is None:
        return []
    leaves, _, places = _flattened(fn, args, kwargs)
    return [cell for i in places for cell in adapter.cells(leaves[i])]


def objects_in(fn: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], Any, Callable[..., Any]]:
    """The objects of a running step that hold state; their adapter, if there are any; and a function.

    The function takes other objects, and arguments with those of ``args`` and ``kwargs`` in their places, and returns
    the call with these.
    """

    def with_others(others: Sequence[Any], args: Any, kwargs: Any) -> StatefulCall:
        if not others:
            return StatefulCall(fn, args, kwargs)
        leaves, tree, places = _flattened(fn, args, kwargs)
        for i, other in zip(places, others, strict=True):
            leaves[i] = other
        return _call_of(fn, tree, leaves)

    if (adapter := _adapter()) is None:
        return (), None, with_others
    leaves, _, places = _flattened(fn, args, kwargs)
    return tuple(leaves[i] for i in places), adapter if places else None, with_others


def _flattened(fn: Any, args: Any, kwargs: Any) -> tuple[list[Any], Any, list[int]]:
    """The leaves of a call and their structure, and where the objects that hold state are among the leaves."""
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs, bound_arguments(fn)), is_leaf=stays_whole)
    return leaves, tree, [i for i, leaf in enumerate(leaves) if holds_state(leaf)]


def _call_of(fn: Any, tree: Any, leaves: Sequence[Any]) -> StatefulCall:
    """The call with other leaves."""
    args, kwargs, bound = jax.tree_util.tree_unflatten(tree, leaves)
    return StatefulCall(_with_bound(fn, bound), args, kwargs)


def updated(tree: Any, other: Any) -> Any:
    """``other``, a pytree of the structure of ``tree``, with the objects of ``tree`` that hold state, and their cells.

    These get the arrays of the objects in their places in ``other``.
    """
    adapter = _adapter()
    if adapter is None:
        return other

    def is_updated(value: Any) -> bool:
        return adapter.updates(type(value))

    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=lambda x: x is None or is_leaf(x) or is_updated(x))
    if not any(map(is_updated, leaves)):
        return other
    news = structure.flatten_up_to(other)
    for i, leaf in enumerate(leaves):
        if is_updated(leaf):
            adapter.update(leaf, news[i])
            news[i] = leaf
    return structure.unflatten(news)


def bound_arguments(fn: Any) -> Any:
    """The bound arguments of a step, which may be in wrappers; ``None`` if it can't have any."""
    while isinstance(fn, Wrapper):
        fn = fn.fn
    partial = _as_partial(fn)
    return None if partial is None else (partial.args, partial.keywords)


def _with_bound(fn: Any, bound: Any) -> Any:
    """``fn`` with other bound arguments."""
    if bound is None:
        return fn
    if isinstance(fn, Wrapper):
        other = copy.copy(fn)
        other.fn = _with_bound(fn.fn, bound)
        return other
    partial = _as_partial(fn)
    assert partial is not None
    return functools.partial(partial.func, *bound[0], **bound[1])


def _as_partial(fn: Any) -> functools.partial[Any] | None:
    """``fn`` as a ``functools.partial``, if it is one, or a method or a call of an object that holds state."""
    if isinstance(fn, functools.partial):
        inner = _as_partial(fn.func)
        return fn if inner is None else functools.partial(inner, *fn.args, **fn.keywords)
    if isinstance(fn, types.MethodType) and holds_state(fn.__self__):
        return functools.partial(fn.__func__, fn.__self__)
    if holds_state(fn) and callable(fn):
        return functools.partial(type(fn).__call__, fn)
    return None


_load_adapter: Callable[[], Adapter] = functools.cache(lambda: registry.object_adapter())


def _adapter() -> Adapter | None:
    """The adapter, if the user has loaded its library."""
    return _load_adapter() if LIBRARY in sys.modules else None


_is_held: Callable[[type], bool] = functools.cache(lambda cls: _load_adapter().holds(cls))


def holds_state(value: Any) -> bool:
    """Return whether a value is an object that steps change in place."""
    return LIBRARY in sys.modules and _is_held(type(value))


def stays_whole(value: Any) -> bool:
    """Return whether a value is a leaf here: also an object that holds state."""
    return is_leaf(value) or holds_state(value)
