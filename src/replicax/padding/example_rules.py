"""The rules that say where the examples are in the results of operations.

The column ``examples`` of :mod:`replicax._jax.primitive_table` names the rule of each operation. Both executors use
them: :mod:`replicax.padding.examples` for a program, and the per-replica executor as it goes along. An operation
without a rule gives ``UNKNOWN``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicax._jax import primitive_families as families
from replicax._jax.contractions import convolution_dimensions
from replicax._jax.operation_params import dims_along, dot_dimensions, moved_dims, untouched_dims
from replicax._jax.primitive_table import column
from replicax.collectives import all_reduce_p, alone_p, gathered_p, share_back_p, share_p
from replicax.execution.program.collective_operations import over_replicas
from replicax.execution.program.marks import asks_p, assign_p, mark_p
from replicax.padding.example_places import (
    PART,
    UNKNOWN,
    Columns,
    OperationShapes,
    Place,
    Rows,
    Untraceable,
    joined,
    reshaped,
)
from replicax.padding.lookup_rules import NUMBERING, gather, scatter


def result_places(operation: OperationShapes) -> list[Place]:
    """Where the examples are in each result of an operation without programs inside."""
    kind = _KINDS.get(operation.name)
    if kind == "reference":
        places: Sequence[Place] = [UNKNOWN] * len(operation.results)
    elif kind == "asks" or (kind == "together" and over_replicas(operation.params)):
        places = [None] * len(operation.results)  # these are of all replicas, not a replica's own examples
    elif operation.name in NUMBERING and (number := NUMBERING[operation.name](operation)) is not None:
        places = [number]
    elif kind == "each":
        places = [p if isinstance(p, Rows | Untraceable) else None for p in operation.places]
    elif any(isinstance(p, Untraceable) for p in operation.places):
        places = _followed(operation, kind)
    elif not any(isinstance(p, Rows | Columns) for p in operation.places):
        places = [None] * len(operation.results)
    elif kind in _RULES:
        place = _RULES[kind](operation)
        places = place if isinstance(place, list) else [place] * len(operation.results)
    else:
        places = [UNKNOWN] * len(operation.results)
    if operation.name in families.CUTTING:
        places = [Untraceable(True, p.dim) if isinstance(p, Untraceable) else p for p in places]
    # A number is of all examples or of none, unless some have been left out before.
    return [p if shape or p == PART else None for p, shape in zip(places, operation.results, strict=True)]


def _followed(o: OperationShapes, kind: str | None) -> Sequence[Place]:
    """The places of the results, if an operand has examples that can't be told from padding."""
    place, rule = joined(o.places), _RULES.get("elementwise" if kind == "reversed" else kind)
    assert isinstance(place, Untraceable)
    dims: Sequence[int | None] = [None] * len(o.results)
    if kind == "lookup" and isinstance(o.places[0], Rows):  # by numbers in any order
        places: Any = gather(dataclasses.replace(o, places=(o.places[0], None)))
        return [places if isinstance(places, Untraceable) else Untraceable(place.is_part)]
    if place.dim is not None and rule is not None:
        rows = [Rows(p.dim) if isinstance(p, Untraceable) and p.dim is not None else p for p in o.places]
        places = rule(dataclasses.replace(o, places=tuple(rows)))
        places = places if isinstance(places, list) else [places] * len(o.results)
        # What is mixed again, and has as many rows as the batch, may be in order.
        dims = [
            p.dim if isinstance(p, Rows) or (p is not None and p.dim is not None and shape[p.dim] != o.rows) else None
            for p, shape in zip(places, o.results, strict=True)
        ]
    return [Untraceable(place.is_part, dim) for dim in dims]


def _of_rows(rule: Callable[[OperationShapes, Rows], Any]) -> Callable[[OperationShapes], Any]:
    """A rule for operations whose operands have their examples in one place, if they have any."""

    def applied(o: OperationShapes) -> Any:
        place = joined(o.places)
        return rule(o, place) if isinstance(place, Rows) else place

    return applied


def _along_others(o: OperationShapes, place: Rows) -> Any:
    """The examples stay where they are, unless their dim is one that the operation goes along: then they are mixed."""
    return _mixed(o, place.dim) if place.dim in dims_along(o.params, len(o.shapes[0])) else place


def _reordered(o: OperationShapes, place: Rows) -> Place:
    return Untraceable(False, place.dim) if place.dim in dims_along(o.params, len(o.shapes[0])) else place


def _mixed(o: OperationShapes, dim: int) -> list[Place]:
    """The examples are mixed along ``dim``; in a running sum, with as many rows as before, each may be in its own."""
    return [Untraceable(False, None if shape[dim : dim + 1] in ((), (o.rows,)) else dim) for shape in o.results]


def _reduced(o: OperationShapes, place: Rows) -> Place:
    """The examples are reduced away, or their dim moves up."""
    dims = dims_along(o.params, len(o.shapes[0]))
    return None if place.dim in dims else place.moved(place.dim - sum(d < place.dim for d in dims))


def _added(o: OperationShapes, place: Rows) -> Place:
    [dim] = dims_along(o.params, len(o.results[0]))
    return place.moved(place.dim + (place.dim >= dim))


def _moved(o: OperationShapes, place: Rows) -> Place:
    dim = moved_dims(o.params)[place.dim]
    return place.moved(dim) if o.shapes[0][place.dim] == o.results[0][dim] else UNKNOWN


def _same_size(o: OperationShapes, place: Rows) -> Any:
    """The examples stay where they are if what is cut out, or put in, has all of them."""
    sizes = {shape[place.dim] for shape in (*o.shapes, *o.results) if len(shape) > place.dim}
    return place if len(sizes) == 1 else _mixed(o, place.dim)


def _windows(o: OperationShapes, place: Rows) -> Any:
    return place if place.dim in untouched_dims(o.params) else _mixed(o, place.dim)


def _matrices(o: OperationShapes, place: Rows) -> list[Place] | Place:
    stays = all(place.dim < len(shape) - 2 for shape in o.shapes if shape)
    return [place if stays and len(shape) > place.dim else UNKNOWN for shape in o.results]


def _matrix_product(o: OperationShapes) -> Place:
    dims = dot_dimensions(o.params)
    free = [
        [d for d in range(len(shape)) if d not in {*contracted, *batch}]
        for shape, contracted, batch in zip(o.shapes, dims.contracted, dims.batch, strict=True)
    ]
    places: list[Place] = []
    for operand, start in enumerate((len(dims.batch[0]), len(dims.batch[0]) + len(free[0]))):
        place, other = o.at(operand), 1 - operand
        if place is None:
            continue
        if place.dim in dims.batch[operand]:
            places.append(place.moved(dims.batch[operand].index(place.dim)))
        elif place.dim in free[operand]:
            places.append(place.moved(start + free[operand].index(place.dim)))
        elif o.places[other] is None and 1 < o.rows in [o.shapes[other][d] for d in free[other]]:
            places.append(UNKNOWN)  # by a matrix that has a row for each example, which may make running sums
    return joined(places)


def _convolution(o: OperationShapes) -> Place:
    dims, left, right = convolution_dimensions(o.params), o.at(0), o.at(1)
    if right is not None and right.dim != dims.filter_inputs:
        return UNKNOWN
    if right is not None or (left is not None and left.dim == dims.channels):
        # The derivative by the filters: the examples are what is summed over.
        if dims.channel_groups != 1 or (left is not None and left.dim != dims.channels):
            return UNKNOWN
        return None
    assert left is not None
    if left.dim != dims.examples or dims.example_groups != 1:
        return UNKNOWN
    return left.moved(dims.result_examples)


_KINDS = {
    **column("examples"),
    **dict.fromkeys((p.name for p in (mark_p, share_p, share_back_p, alone_p, gathered_p, assign_p)), "each"),
    all_reduce_p.name: "together",
    asks_p.name: "asks",
}
"""The kind of each of JAX's primitives, and of Replicax's own."""

_RULES: Mapping[str | None, Callable[[OperationShapes], Any]] = {
    "elementwise": lambda o: joined(o.places),
    "random": lambda o: joined(o.places),
    "reduced": _of_rows(_reduced),
    "along": _of_rows(_along_others),
    "sorted": _of_rows(_reordered),
    "reversed": _of_rows(_reordered),
    "moved": _of_rows(_moved),
    "reshaped": _of_rows(lambda o, place: reshaped(place, o.shapes[0], o.results[0])),
    "taken": _of_rows(lambda o, place: _reduced(o, place) or UNKNOWN),
    "stacked": _of_rows(_added),
    "part": _of_rows(_same_size),
    "windowed": _of_rows(_windows),
    "product": _matrix_product,
    "convolution": _convolution,
    "lookup": gather,
    "scattered": scatter,
    "matrices": _of_rows(_matrices),
}
"""The rules by kind. Other kinds (``each``, ``together``, ``reference``) need no look at the operation's shapes."""
