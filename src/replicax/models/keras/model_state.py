"""The state of a Keras model under a strategy: each of its variables has one of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from replicax.strategy import Strategy
from replicax.variables import Variable
from replicax.variables.layout import Mirrored


class StateCell:
    """The variable that a Keras variable has, and the array of it that Keras' loop has.

    Keras' loop passes arrays from step to step, and gives its variables theirs back when somebody wants to see them. So
    an array that comes back is the one that went out, or else somebody has assigned another.
    """

    __slots__ = ("_shown", "_stored", "keras", "variable")

    def __init__(self, keras: Any, value: Any) -> None:
        self.keras = keras
        self.variable = Variable(value, name=keras.path, trainable=bool(keras.trainable))
        self._shown: Any = None
        self._stored: Any = None

    def take(self, array: Any) -> None:
        """Before a step: ``array`` is the variable's value."""
        if array is not self.show():
            self.variable.assign(array)

    def show(self) -> Any:
        """The variable's value, as one array. The next program may overwrite it, as Keras' own do."""
        array, layout = self.variable.slot.array, self.variable.layout
        if type(layout) is Mirrored or not isinstance(array, jax.Array):
            return array
        if array is not self._stored:
            self._stored, self._shown = array, layout.whole(layout.from_stored(array, self.variable.replicas.mesh))
        return self._shown


class ModelState:
    """The cells of a model's variables."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._cells: dict[int, StateCell] = {}
        self._shown: Any = None

    def take(self, keras_variables: Sequence[Sequence[Any]], state: Sequence[Sequence[Any]]) -> list[list[StateCell]]:
        """The cells of these variables of Keras, whose values are ``state``."""
        return [
            [self._taken(keras, array) for keras, array in zip(variables, arrays, strict=True)]
            for variables, arrays in zip(keras_variables, state, strict=True)
        ]

    def show(self, cells: Sequence[Sequence[StateCell]]) -> tuple[list[Any], ...]:
        """The values of all cells, for Keras' loop."""
        self._shown = tuple([cell.show() for cell in group] for group in cells)
        return self._shown

    def is_shown(self, state: Any) -> bool:
        """Whether ``state`` is what was shown last, so that it need not be taken."""
        return state is self._shown

    def _taken(self, keras: Any, array: Any) -> StateCell:
        cell = self._cells.get(id(keras))
        if cell is None:
            with self._strategy.scope():
                cell = self._cells[id(keras)] = StateCell(keras, array)
        else:
            cell.take(array)
        return cell
