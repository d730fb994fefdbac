"""Variables whose array is gone: the object in its place, and the errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax

from replicax.errors import VariableLostError

if TYPE_CHECKING:
    from replicax.variables.slots import Slot

DELETED = (
    "the array of its .value has been deleted, by .delete() or because it was donated to a function "
    "(jax.jit with donate_argnums); pass a copy of it (jnp.copy) to such a function"
)


@dataclasses.dataclass(slots=True, eq=False)
class LostArray:
    """Replaces the array of a variable that has lost it."""

    reason: str  # why it is lost
    cause: BaseException | None = None  # the exception by which it was lost, if there was one
    # What to do about it.
    cure: str = "Assign it a new value, for example that of the last checkpoint; then it works again."

    def error(self, what: str) -> VariableLostError:
        """The error to raise when the value of ``what`` is read."""
        error = VariableLostError(f"{what} has no value any more: {self.reason}. {self.cure}")
        error.__cause__ = self.cause
        return error


FREED = LostArray(
    "nothing holds the variable, as the state of an Optimizer that a step makes for itself",
    cure="Make that once, outside of the step.",
)
"""In the place of the array of a variable that is gone."""


def present_array(slot: Slot, describe: Callable[[], str]) -> jax.Array:
    """The array of a variable; a VariableLostError if it is gone, or the program that was to compute it has failed."""
    array: Any = slot.array
    if isinstance(array, jax.Array):
        if array.is_deleted():
            slot.array = array = LostArray(DELETED)
        elif getattr(array, "is_ready", bool)():  # random keys have none, so bool() says False
            try:
                array.block_until_ready()
            except Exception as error:  # of the program that has computed it
                slot.array = array = LostArray(
                    f"the step that was to write it failed while it ran ({_line(error)})", error
                )
    if isinstance(array, LostArray):
        raise array.error(describe())
    return array


def note_lost(slots: Iterable[Slot], step: str, cause: BaseException) -> list[Slot]:
    """Mark the variables of ``slots`` whose arrays are lost, after a program that uses them has failed."""
    lost = [slot for slot in slots if isinstance(slot.array, jax.Array) and slot.array.is_deleted()]
    for slot in lost:
        slot.array = LostArray(f"the step {step} took its memory, and failed while it ran ({_line(cause)})", cause)
    return lost


def _line(error: BaseException) -> str:
    """The error as one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
