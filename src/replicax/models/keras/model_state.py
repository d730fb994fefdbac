"""The state of a Keras model under a strategy: each of its variables has a ``replicax.Variable``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from replicax.devices.arrays import local_array
from replicax.strategy import Strategy
from replicax.variables import Variable
from replicax.variables.layout import Mirrored
from replicax.variables.trees import assign_all

GROUPS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
"""The groups of variables in the state of a step, with Keras' names and order."""


def keras_variables(model: Any, group: str) -> Sequence[Any]:
    """The variables of a Keras model in one of the ``GROUPS``."""
    if group == "optimizer_variables":
        return model.optimizer.variables
    return getattr(model, group)


class StateCell:
    """The ``replicax.Variable`` of a Keras variable, and the array that Keras has of it.

    Keras' loop passes arrays from step to step, and restores its variables only when they are read. So an array
    that comes back is the one that went out, unless another one has been assigned.
    """

    __slots__ = ("_shown", "_stored", "keras", "variable")

    def __init__(self, keras: Any, value: Any) -> None:
        self.keras = keras
        self.variable = Variable(value, name=keras.path, trainable=bool(keras.trainable))
        self._shown: Any = None
        self._stored: Any = None

    def take(self, array: Any) -> bool:
        """Set the variable to ``array`` before a step. Returns whether the variable still has another value."""
        stored = self.variable.slot.array
        differs = array is not stored and (array is not self._shown or stored is not self._stored)
        self._shown = self._stored = None  # frees the gathered copy of a sharded variable
        return differs

    def show(self) -> Any:
        """The variable's value as one array of this worker. The next program may overwrite it, as Keras' own do."""
        stored = self.variable.stored()
        if self._shown is None or stored is not self._stored:
            self._stored, self._shown = stored, self._whole_value(stored)
        return self._shown

    def _whole_value(self, stored: jax.Array) -> Any:
        layout = self.variable.layout
        if type(layout) is Mirrored:
            return local_array(stored)
        if self.variable.is_spread:
            return local_array(self.variable.read_value())
        return layout.whole(layout.from_stored(stored, self.variable.replicas.mesh))


class ShownGroup(Sequence[Any]):
    """The arrays of some variables, as Keras' loop passes them from step to step.

    They are rarely read between two steps. So they are gathered only when they are read: variables stay sharded until
    then.
    """

    def __init__(self, cells: Sequence[StateCell]) -> None:
        self.cells = cells

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [cell.show() for cell in self.cells[index]]
        return self.cells[index].show()


class ModelState:
    """The cells of a model's variables."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._cells: dict[int, StateCell] = {}

    def take(self, keras_variables: Sequence[Sequence[Any]], state: Sequence[Sequence[Any]]) -> tuple[ShownGroup, ...]:
        """The cells of these Keras variables, whose values are ``state``."""
        changed: list[tuple[Variable, Any]] = []
        groups = tuple(
            ShownGroup([self._cell(keras, array, changed) for keras, array in zip(variables, arrays, strict=True)])
            for variables, arrays in zip(keras_variables, state, strict=True)
        )
        assign_all(changed)  # at the beginning of each epoch these are all metrics, which Keras has reset
        return groups

    def _cell(self, keras: Any, array: Any, changed: list[tuple[Variable, Any]]) -> StateCell:
        cell = self._cells.get(id(keras))
        if cell is None:
            with self._strategy.scope():
                cell = self._cells[id(keras)] = StateCell(keras, array)
        elif cell.take(array):
            changed.append((cell.variable, array))
        return cell
