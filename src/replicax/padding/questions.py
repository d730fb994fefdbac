"""Questions about padding, asked while a step's Python runs and answered when its program is known.

Whether a dim that a ``merge_fn`` reduces along is that of the examples is unknown while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from replicax.execution.replica_values import cant_be_told
from replicax.padding.example_places import Place, Rows, Untraceable


class Question:
    """Whether the examples lie along a dim of a value; its ``answer`` is ``None`` until it is known."""

    def __init__(
        self,
        dim: int,  # which one
        what: str,  # the operation that asks, for the error's text
        rows: int,  # how many rows a replica has
        # Finds the examples in a concrete array; for the per-replica executor.
        look: Callable[[Any], Place] | None = None,
        error_if_so: str | None = None,  # the error's text if they do; ``None`` if they may
        # The error's text if they surely don't, each in its row; the answer is then yes in all other cases. ``None``:
        # they need not.
        error_if_not: str | None = None,
    ) -> None:
        self.dim, self.what, self.rows, self.look = dim, what, rows, look
        self.error_if_so, self.error_if_not = error_if_so, error_if_not
        self.answer: bool | None = None if error_if_not is None else True

    def resolve(self, place: Place, shape: tuple[int, ...]) -> bool:
        """The answer, from where the examples are."""
        lies_along = place.dim if isinstance(place, Rows | Untraceable) else None
        if self.error_if_not is not None:
            if self.rows > 1 and lies_along is not None and place != Rows(self.dim):
                raise ValueError(self.error_if_not)
            return True
        dim, unclear = dim_of_examples(place, shape, self.rows)
        if unclear and lies_along in (None, self.dim):
            raise cant_be_told(self.what, self.dim, shape)
        if dim == self.dim and self.error_if_so is not None:
            raise ValueError(self.error_if_so)
        if self.answer not in (None, dim == self.dim):
            raise cant_be_told(self.what, self.dim, shape)  # it stands in two places
        self.answer = dim == self.dim
        return self.answer

    def ask(self, value: Any) -> jax.Array:
        """The answer about a value that is computed."""
        if self.look is not None:
            return jax.numpy.asarray(self.resolve(self.look(value), value.shape))
        return jax.numpy.asarray(bool(self.answer))


def dim_of_examples(place: Place, shape: tuple[int, ...], rows: int) -> tuple[int | None, bool]:
    """The dim of a value along which the examples lie; and whether they are in it, but along no known dim."""
    if isinstance(place, Rows):
        return (place.dim, False) if place.outer == place.inner == 1 else (None, True)
    if not isinstance(place, Untraceable):
        return None, False
    return None, any(size and (dim == place.dim or size % rows == 0) for dim, size in enumerate(shape))
