"""Rules for lookups: where the examples are after a gather or a scatter.

Rows may be looked up by their own numbers (``scores[jnp.arange(rows), labels]``), so those are followed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from replicax._jax import primitive_families as families
from replicax._jax.operation_params import LookupDimensions, dims_along, lookup_dimensions, moved_dims
from replicax.padding.example_places import (
    UNKNOWN,
    Columns,
    Index,
    OperationShapes,
    Place,
    Rows,
    Untraceable,
    joined,
    reshaped,
)


def _looked_up(place: Place, dims: LookupDimensions) -> dict[int, int]:
    """The dims of the operand that go along with a dim of the indices, with that dim."""
    columns = place.places if isinstance(place, Columns) else (place,)
    along = dict(dims.batch)
    if len(columns) == len(dims.indexed):
        along.update(
            (d, c.dim) for d, c in zip(dims.indexed, columns, strict=True) if isinstance(c, Index) and c.kind == "at"
        )
    return along


def _rows_of_indices(place: Place) -> Place:
    return joined(place.places) if isinstance(place, Columns) else place if isinstance(place, Rows) else None


def gather(o: OperationShapes) -> Place:
    """Where the examples are after a gather."""
    dims, operand, shape = lookup_dimensions(o.params, len(o.shapes[0])), o.at(0), o.shapes[0]
    of_indices = [d for d in range(len(o.results[0])) if d not in dims.windows.values()]
    indices = _rows_of_indices(o.places[1])
    if isinstance(indices, Untraceable):
        return Untraceable(indices.is_part)
    places: list[Place] = []
    if isinstance(indices, Rows):
        places.append(indices.moved(of_indices[indices.dim]) if indices.dim < len(of_indices) else UNKNOWN)
    if operand is not None:
        along = _looked_up(o.places[1], dims)
        window = dims.windows.get(operand.dim)
        if operand.dim in along:
            places.append(operand.moved(of_indices[along[operand.dim]]))
        elif window is not None and o.results[0][window] == shape[operand.dim]:
            places.append(operand.moved(window))
        else:
            holding = of_indices if window is None else [window]
            return Untraceable(True, holding[0] if indices is None and len(holding) == 1 else None)
    return joined(places)


def scatter(o: OperationShapes) -> Place:
    """Where the examples are after a scatter of any kind."""
    dims, (shape, _, slices) = lookup_dimensions(o.params, len(o.shapes[0])), o.shapes
    of_indices = [d for d in range(len(slices)) if d not in dims.windows.values()]
    along = _looked_up(o.places[1], dims)
    goes_to = {of_indices[i]: d for d, i in along.items() if i < len(of_indices)}
    goes_to.update((window, d) for d, window in dims.windows.items() if slices[window] == shape[d])
    indices, updates = _rows_of_indices(o.places[1]), o.at(2)
    if isinstance(indices, Untraceable):
        return Untraceable(indices.is_part)
    sources = [updates] if updates is not None else []
    if isinstance(indices, Rows):
        if indices.dim >= len(of_indices):
            return UNKNOWN
        sources.append(indices.moved(of_indices[indices.dim]))
    places: list[Place] = [o.at(0)]
    for source in sources:
        dim = goes_to.get(source.dim)
        if dim is not None:
            places.append(source.moved(dim) if slices[source.dim] == shape[dim] else Untraceable(False, dim))
        elif o.at(0) is not None or source.dim in dims.windows.values():
            return UNKNOWN  # examples go where other examples are
        elif source is updates and indices is None and o.name in families.REPLACING_SCATTERS:  # to other rows
            places.append(Untraceable(False, dims.indexed[0] if len(dims.indexed) == 1 else None))
        # Otherwise each example goes where its own index says: a sum over the examples, such as a count of classes.
    return joined(places)


# --- the numbers of rows --------------------------------------------------------------------------------


def _of_number(rule: Callable[[OperationShapes, Index], Place]) -> Callable[[OperationShapes], Place]:
    """A rule for operations whose first operand is made of the numbers of rows."""
    return lambda o: rule(o, o.places[0]) if isinstance(o.places[0], Index) else None


def _moved_number(o: OperationShapes, place: Index) -> Place:
    is_size = place.kind == "at" and o.number(1) == o.shapes[0][place.dim]
    return Index(place.dim, "moved") if is_size else None


def _chosen_number(o: OperationShapes) -> Place:
    """``jnp`` counts negative indices from the end: ``where(i < 0, i + size, i)``."""
    numbers = [p for p in o.places if isinstance(p, Index)]
    is_one = [p.kind for p in numbers] == ["negative", "at", "moved"] and len({p.dim for p in numbers}) == 1
    return o.places[1] if is_one else None


def _broadcast_number(o: OperationShapes, place: Index) -> Place:
    dim = moved_dims(o.params)[place.dim]
    return Index(dim, place.kind) if o.results[0][dim] == o.shapes[0][place.dim] else None


def _reshaped_number(o: OperationShapes, place: Index) -> Place:
    found = reshaped(Rows(place.dim), o.shapes[0], o.results[0])
    return Index(found.dim, place.kind) if isinstance(found, Rows) and found.outer == found.inner == 1 else None


def _columns(o: OperationShapes) -> Place:
    ndim = len(o.results[0])
    last = dims_along(o.params, ndim) == (ndim - 1,) and all(shape[-1] == 1 for shape in o.shapes)
    return Columns(o.places) if last and any(isinstance(p, Index) for p in o.places) else None


def _new_number(o: OperationShapes) -> Place:
    [dim] = dims_along(o.params, len(o.results[0]))
    return Index(dim)


NUMBERING: Mapping[str, Callable[[OperationShapes], Place]] = families.by_primitive(
    {
        families.IOTAS: _new_number,
        families.CASTS: _of_number(lambda o, place: place),
        families.ADDITIONS: _of_number(_moved_number),
        families.LESS_THAN: _of_number(lambda o, place: Index(place.dim, "negative") if o.number(1) == 0 else None),
        families.SELECTIONS: _chosen_number,
        families.BROADCASTS: _of_number(_broadcast_number),
        families.RESHAPES | families.SQUEEZES: _of_number(_reshaped_number),
        families.CONCATENATIONS: _columns,
    }
)
"""Operations that keep the numbers of rows; the rule says ``None`` if this one does not."""
