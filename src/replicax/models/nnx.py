"""Flax NNX: modules, optimizers, metrics and random streams are the state of a step, as they are of ``nnx.jit``.

Each ``nnx.Variable`` of such an object has a :class:`~replicax.Variable`, which the strategy places, and programs read
and write. Between steps the object has ordinary arrays: those of the variables, or arrays that were assigned since,
which the next step takes over.

The next program may overwrite an array that only the object and its variable hold. If other code holds it, because it
has read it or made a snapshot (``nnx.state``), the program gets a copy.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from replicax import _jax
from replicax.devices.mesh import logical_device_mesh
from replicax.models.nnx_parts import NNXParts
from replicax.models.nnx_step import NNXStep, name_of_leaf, value_of
from replicax.pipeline.dispatch import moved
from replicax.pytrees import Contents, are_unchanged
from replicax.variables import Variable
from replicax.variables.layout import Mirrored
from replicax.variables.slots import escaped, exchanging
from replicax.variables.store import outside_steps
from replicax.workers.replicas import Replicas

_ARRAYS = (jax.Array, np.ndarray, np.generic, int, float, complex)


def _references(cell: Any) -> int:
    """Count the references to the array of an ``nnx.Variable``, as this interpreter does."""
    return sys.getrefcount(cell.get_raw_value())


class _Probe:
    """Mimics an ``nnx.Variable`` whose array has known references only."""

    def __init__(self) -> None:
        self._raw_value = object()

    def get_raw_value(self) -> object:
        return self._raw_value


def _references_if(others: int) -> int:
    """The result of :func:`_references` if ``others`` places besides the variable refer to the array.

    It is measured, because interpreters count differently. It is 0 for an interpreter with delayed counts: then every
    array counts as held by other code, and is copied.
    """
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return 0
    probe = _Probe()
    held = [probe.get_raw_value()] * others
    found = _references(probe)
    del held
    return found


# Besides the nnx.Variable, a cell's record refers to the array twice and a slot once; only the record refers to a view
# of the stored array, once.
_OWN_REFERENCES, _OWN_REFERENCES_TO_VIEW = _references_if(3), _references_if(1)


_set = object.__setattr__


class Cell:
    """An ``nnx.Variable``, the ``cell``, and its variable under one strategy, whose value it shows."""

    __slots__ = ("__weakref__", "_references", "_seen", "_stored", "cell", "variable")

    def __init__(self, cell: Any, variable: Variable) -> None:
        self.cell = cell
        self.variable = variable
        variable.slot.view = weakref.ref(self)
        self._take_note(cell.get_raw_value())

    def _take_note(self, seen: Any) -> None:
        """Record the cell's present array, while the variable has its present one."""
        self._seen, self._stored = seen, self.variable.slot.array
        # For arrays that share memory: the number of references if no other code holds the one in the cell.
        self._references: int | None = None

    def take(self) -> None:
        """Assign to the variable, before a step, what was assigned to the cell."""
        seen = self.cell.get_raw_value()
        if seen is not self._seen or isinstance(seen, np.ndarray):  # which may be changed in place
            self.variable.assign(seen)
            self._take_note(seen)
            return
        del seen  # it would count as a reference
        if self._references is not None and _references(self.cell) > self._references:
            with exchanging():
                escaped.add(self.variable.slot)

    def show(self) -> None:
        """See :class:`replicax.variables.slots.View`."""
        array = self.variable.slot.array
        if array is self._stored or not isinstance(array, jax.Array):
            return
        shown, layout, mesh = array, self.variable.layout, self.variable.replicas.mesh
        if type(layout) is not Mirrored:
            shown = layout.whole(layout.from_stored(array, mesh))
        elif layout.logical_device and isinstance(self.cell, nnx.metrics.MetricState):
            # A metric computes with all of its state, which a pipeline may have put on several logical devices.
            [shown] = moved([array], [NamedSharding(logical_device_mesh(mesh, 0), layout.spec)])
        _set(self.cell, "_raw_value", shown)  # NNX's own hooks are for assignments by users
        self._seen, self._stored = shown, array
        self._references = _OWN_REFERENCES if shown is array else _OWN_REFERENCES_TO_VIEW


class Cells:
    """The cells of live objects, under each strategy.

    An ``nnx.Variable`` does not support weak references. So its cell lives as long as one of the objects that were
    arguments of a step.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakKeyDictionary[Replicas, weakref.WeakValueDictionary[int, Cell]]
        self._all = weakref.WeakKeyDictionary()
        self._kept: dict[int, set[Cell]] = {}

    def of(self, named_cells: Sequence[tuple[str, Any]], replicas: Replicas) -> list[Cell]:
        """The cells of these ``nnx.Variable`` objects; the names are for new ones."""
        cells_by_id = self._all.setdefault(replicas, weakref.WeakValueDictionary())
        cells = [cells_by_id.get(id(cell)) for _, cell in named_cells]
        if None in cells:
            with outside_steps(replicas):
                new_cells = [
                    Cell(cell, _new(name, cell)) if present is None else present
                    for present, (name, cell) in zip(cells, named_cells, strict=True)
                ]
            for cell in new_cells:
                cells_by_id[id(cell.cell)] = cell
            return new_cells
        return [cell for cell in cells if cell is not None]

    def keep(self, owner: Any, cells: Sequence[Cell]) -> None:
        """Keep cells as long as their ``owner`` lives."""
        if id(owner) not in self._kept:
            self._kept[id(owner)] = set()
            weakref.finalize(owner, self._kept.pop, id(owner), None).atexit = False
        self._kept[id(owner)].update(cells)


def _new(name: str, cell: Any) -> Variable:
    return Variable(cell.get_raw_value(), name=name, trainable=isinstance(cell, nnx.Param))


def _watched(objects: tuple[Any, ...]) -> list[Contents] | None:
    """The containers of the objects' parts, each with its content; ``None`` if some are unknown."""
    containers: list[Contents] = []
    seen: set[int] = set()
    nodes: list[Any] = list(objects)
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        container: Any = node
        if isinstance(node, nnx.Variable):
            container = node._var_metadata
        elif isinstance(node, nnx.Pytree | nnx.State):
            container = vars(node)
        elif isinstance(node, tuple):
            nodes += node
            continue
        elif type(node) not in (list, dict):
            if node is not None and nnx.graphlib.is_node(node):
                return None
            continue
        containers.append(Contents(container))
        if isinstance(node, nnx.Pytree):
            nodes += (value for name, value in container.items() if not name.startswith("_pytree__"))  # NNX's own
        elif not isinstance(node, nnx.Variable):
            nodes += container.values() if isinstance(container, dict) else container
    return containers


class Key(_jax.Hashed):
    """Equal for objects of the same structure with the same variables."""

    __slots__ = ()

    def __init__(self, graphdef: Any, variables: Sequence[Variable], others: Sequence[Any]) -> None:
        super().__init__(tuple(v.slot for v in variables), tuple(map(_jax.ById, others)), graphdef)


class NNXState:
    """The state of some objects under one strategy: an ``ObjectsState`` of ``execution.tracing.stateful_arguments``."""

    def __init__(self, objects: tuple[Any, ...], replicas: Replicas) -> None:
        self._graphdef, flat = nnx.graphlib.flatten(objects, graph=True)
        paths, self._leaves = [path for path, _ in flat], [leaf for _, leaf in flat]
        self.names = [name_of_leaf(path, objects) for path in paths]
        for name, leaf in zip(self.names, self._leaves, strict=True):
            if isinstance(leaf, nnx.Variable) and (leaf.hijax or leaf.ref):
                raise TypeError(
                    f"{name} is an nnx.Variable with hijax=True or ref=True, which a step can't take: make the model "
                    "without (with nnx.var_defaults(hijax=False, ref=False): …)"
                )
        self._watched = _watched(objects)
        self._with_cells = [i for i, leaf in enumerate(self._leaves) if _is_cell(leaf)]
        self.cells = _cells.of([(self.names[i], self._leaves[i]) for i in self._with_cells], replicas)
        for number, owner in enumerate(objects):
            mine = zip(self._with_cells, self.cells, strict=True)
            _cells.keep(owner, [cell for i, cell in mine if paths[i][0] == number])
        self.variables = [cell.variable for cell in self.cells]
        others = [value_of(leaf) for leaf in self._leaves if not _is_cell(leaf)]
        self.key: Hashable = Key(self._graphdef, self.variables, others)

    @property
    def is_as_it_was(self) -> bool:
        """Return whether nothing has changed in the objects except the values of their variables; false if unknown."""
        return self._watched is not None and are_unchanged(self._watched)

    def take(self) -> None:
        """Assign to the variables what was assigned to the objects."""
        for cell in self.cells:
            cell.take()

    def opened(self, has_rows: bool) -> tuple[Sequence[Any], Callable[[], None]]:
        values = [value_of(leaf) for leaf in self._leaves]
        variables = dict(zip(self._with_cells, self.variables, strict=True))
        for i, variable in variables.items():
            values[i] = variable.value
        step = NNXStep(self._graphdef, values, self.names, has_rows)
        return step.objects, lambda: step.close(variables)


def _is_cell(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable) and isinstance(leaf.get_raw_value(), _ARRAYS)


class NNXAdapter:
    """See :class:`replicax.execution.tracing.stateful_arguments.Adapter`."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Replicas, dict[tuple[int, ...], NNXState]] = weakref.WeakKeyDictionary()

    def holds(self, cls: type) -> bool:
        return issubclass(cls, nnx.Pytree)

    def state_of(self, objects: tuple[Any, ...], replicas: Replicas) -> NNXState:
        known = self._known.setdefault(replicas, {})
        numbers = tuple(map(id, objects))
        state = known.get(numbers)
        if state is None or not state.is_as_it_was:
            for owner in objects if state is None else ():
                weakref.finalize(owner, known.pop, numbers, None).atexit = False
            state = known[numbers] = NNXState(objects, replicas)
        state.take()
        return state

    def updates(self, cls: type) -> bool:
        return issubclass(cls, nnx.Pytree | nnx.Variable)

    def update(self, value: Any, other: Any) -> None:
        if isinstance(value, nnx.Variable):
            value.set_raw_value(other.get_raw_value())
        else:
            nnx.update(value, nnx.state(other, graph=True))

    def parts(self, objects: tuple[Any, ...]) -> NNXParts:
        return NNXParts(objects)

    def cells(self, value: Any) -> list[Any]:
        return [leaf for _, leaf in nnx.graphlib.flatten(value, graph=True)[1] if _is_cell(leaf)]


_cells = Cells()
adapter = NNXAdapter()
