"""Where the examples of a batch are in a value.

A padded batch has rows that are no examples. To leave them out of a reduction of a step's result, the dim of the
examples must be known, and sizes do not tell it: there may be as many classes as rows. So this is followed from the
arguments on, operation by operation, by the rules of :mod:`replicax.padding.example_rules`. A value has one of these
*places*:

* ``None``: it has no dim along which examples lie (a parameter, a sum over the examples, a number);
* ``Rows(dim)``: row ``i`` along ``dim`` is about example ``i``. ``Rows(dim, outer, inner)``: they are in the middle of
  a dim that a reshape has made of several;
* ``UNKNOWN``: examples may be anywhere in it, such as in their products; ``PART``: some of them, such as the first.
  ``Untraceable(…, dim)``: they lie along ``dim``, but not each in its row, such as sorted, or without the last;
* ``Index`` and ``Columns``: no examples, but the numbers of rows, as in ``scores[jnp.arange(rows), labels]``;
* ``UNPADDED``: no examples, but rows of an argument that has as many, and is not padded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from replicax.workers.codec import declared

Shape = tuple[int, ...]


@declared
@dataclasses.dataclass(frozen=True, slots=True)
class Untraceable:
    """Examples that can't be told from padding any more."""

    is_part: bool
    dim: int | None = None
    """The dim along which they surely lie, but not each in its row."""


UNKNOWN, PART = Untraceable(False), Untraceable(True)


@declared
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The examples lie along ``dim``, of size ``outer`` × rows × ``inner``."""

    dim: int
    outer: int = 1
    inner: int = 1

    def moved(self, dim: int) -> Rows:
        """This place along another dim."""
        return dataclasses.replace(self, dim=dim)


@declared
@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """Each entry is its own position along ``dim`` (``kind`` "at"), that plus the size, or whether it is negative."""

    dim: int
    kind: str = "at"


@declared
@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The last dim is made of columns, each with a place of its own: what a gather looks rows up by."""

    places: tuple[Any, ...]


@declared
@dataclasses.dataclass(frozen=True, slots=True)
class Unpadded:
    """No examples, but perhaps the rows of an argument that has as many and is not padded."""


UNPADDED = Unpadded()

Place = Rows | Index | Columns | Untraceable | Unpadded | None


@dataclasses.dataclass(frozen=True, slots=True)
class OperationShapes:
    """One operation: what the rules look at."""

    name: str
    params: Mapping[str, Any]
    places: tuple[Place, ...]
    shapes: tuple[Shape, ...]
    results: tuple[Shape, ...]
    rows: int
    number: Callable[[int], Any]
    """The value of an operand that is a known number; ``None`` of any other."""

    def at(self, operand: int) -> Rows | None:
        """Where the examples of an operand are, if it has any."""
        place = self.places[operand]
        return place if isinstance(place, Rows) else None


def joined(places: Iterable[Place]) -> Place:
    """Where the examples are in what may be any of several values, or is made of all of them entry by entry."""
    common: Place = None
    for place in places:
        if isinstance(place, Rows | Untraceable):
            is_part = any(isinstance(p, Untraceable) and p.is_part for p in (common, place))
            common = place if common in (None, place) else Untraceable(is_part)
    return common


def reshaped(place: Rows, old: Shape, new: Shape) -> Place:
    """Where ``place`` is when an array of shape ``old`` gets the shape ``new``."""
    rows = old[place.dim] // (place.outer * place.inner)
    # In the flat order of elements: so many blocks of `rows` steps each.
    blocks = math.prod(old[: place.dim]) * place.outer
    candidates = []
    for dim, size in enumerate(new):
        before = math.prod(new[:dim])
        if before and rows and blocks % before == 0 and size and size % (blocks // before * rows) == 0:
            outer = blocks // before
            candidates.append(Rows(dim, outer, size // (outer * rows)))
    exact = [c for c in candidates if c.outer == c.inner == 1]
    if exact and old[place.dim] == rows and Rows(place.dim) in exact:
        return Rows(place.dim)  # with a single row others would do as well
    return next(iter(exact or candidates), UNKNOWN)
