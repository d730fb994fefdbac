"""Rules for lookups: where the examples are after a gather or a scatter.

Rows may be looked up by their own numbers (``scores[jnp.arange(rows), labels]``), so those are followed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from replicax import _jax
from replicax.execution.padding.example_places import (
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


def _looked_up(place: Place, operand_dims: Sequence[int], batching: Mapping[int, int]) -> dict[int, int]:
    """For each dim of the operand that goes along with one of the indices, that one."""
    columns = place.places if isinstance(place, Columns) else (place,)
    along = dict(batching)
    if len(columns) == len(operand_dims):
        along.update(
            (d, c.dim) for d, c in zip(operand_dims, columns, strict=True) if isinstance(c, Index) and c.kind == "at"
        )
    return along


def _rows_of_indices(place: Place) -> Place:
    return joined(place.places) if isinstance(place, Columns) else place if isinstance(place, Rows) else None


def gather(o: OperationShapes) -> Place:
    """After a gather."""
    n, operand, shape = o.params["dimension_numbers"], o.at(0), o.shapes[0]
    batch = [d for d in range(len(o.results[0])) if d not in n.offset_dims]
    window = [d for d in range(len(shape)) if d not in {*n.collapsed_slice_dims, *n.operand_batching_dims}]
    batching = dict(zip(n.operand_batching_dims, n.start_indices_batching_dims, strict=True))
    indices = _rows_of_indices(o.places[1])
    if isinstance(indices, Untraceable):
        return indices
    found: list[Place] = []
    if isinstance(indices, Rows):
        found.append(indices.moved(batch[indices.dim]) if indices.dim < len(batch) else UNKNOWN)
    if operand is not None:
        along = _looked_up(o.places[1], n.start_index_map, batching)
        if operand.dim in along:
            found.append(operand.moved(batch[along[operand.dim]]))
        elif operand.dim in window and o.params["slice_sizes"][operand.dim] == shape[operand.dim]:
            found.append(operand.moved(n.offset_dims[window.index(operand.dim)]))
        else:
            return UNKNOWN
    return joined(found)


def scatter(o: OperationShapes) -> Place:
    """After a scatter of any kind."""
    n, shape = o.params["dimension_numbers"], o.shapes[0]
    batch = [d for d in range(len(o.shapes[2])) if d not in n.update_window_dims]
    window = [d for d in range(len(shape)) if d not in {*n.inserted_window_dims, *n.operand_batching_dims}]
    batching = dict(zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True))
    along = _looked_up(o.places[1], n.scatter_dims_to_operand_dims, batching)
    goes_to = {batch[b]: d for d, b in along.items() if b < len(batch)}
    goes_to.update((u, window[i]) for i, u in enumerate(n.update_window_dims) if o.shapes[2][u] == shape[window[i]])
    indices, updates = _rows_of_indices(o.places[1]), o.at(2)
    if isinstance(indices, Untraceable):
        return indices
    sources = [updates] if updates is not None else []
    if isinstance(indices, Rows):
        if indices.dim >= len(batch):
            return UNKNOWN
        sources.append(indices.moved(batch[indices.dim]))
    found: list[Place] = [o.at(0)]
    for source in sources:
        if source.dim in goes_to:
            found.append(source.moved(goes_to[source.dim]))
        elif o.at(0) is not None or source.dim in n.update_window_dims:
            return UNKNOWN  # examples go where other examples are
        # Otherwise each example goes where its own index says: a sum over the examples, such as a count of classes.
    return joined(found)


# --- the numbers of rows --------------------------------------------------------------------------------


def _kept_number(o: OperationShapes) -> Place:
    return o.places[0] if isinstance(o.places[0], Index) else None


def _moved_number(o: OperationShapes) -> Place:
    place = o.places[0]
    if isinstance(place, Index) and place.kind == "at" and o.number(1) == o.shapes[0][place.dim]:
        return Index(place.dim, "moved")
    return None


def _negative_number(o: OperationShapes) -> Place:
    place = o.places[0]
    return Index(place.dim, "negative") if isinstance(place, Index) and o.number(1) == 0 else None


def _chosen_number(o: OperationShapes) -> Place:
    """``jnp`` counts negative indices from the end: ``where(i < 0, i + size, i)``."""
    if not all(isinstance(p, Index) for p in o.places) or len(o.places) != 3:
        return None
    kinds = [p.kind for p in o.places if isinstance(p, Index)]
    dims = {p.dim for p in o.places if isinstance(p, Index)}
    return o.places[1] if kinds == ["negative", "at", "moved"] and len(dims) == 1 else None


def _with_dims(o: OperationShapes) -> Place:
    place = o.places[0]
    if not isinstance(place, Index):
        return None
    size = o.shapes[0][place.dim]
    if o.name == "broadcast_in_dim":
        dim = o.params["broadcast_dimensions"][place.dim]
        return Index(dim, place.kind) if o.results[0][dim] == size else None
    found = reshaped(Rows(place.dim), o.shapes[0], o.results[0], size)
    return Index(found.dim, place.kind) if isinstance(found, Rows) and found.outer == found.inner == 1 else None


def _columns(o: OperationShapes) -> Place:
    last = o.params["dimension"] == len(o.results[0]) - 1 and all(shape[-1] == 1 for shape in o.shapes)
    return Columns(o.places) if last and any(isinstance(p, Index) for p in o.places) else None


_NUMBERING_OF: Mapping[str, Callable[[OperationShapes], Place]] = {
    "iota": lambda o: Index(o.params["dimension"]),
    "convert_element_type copy": _kept_number,
    "add": _moved_number,
    "lt": _negative_number,
    "select_n": _chosen_number,
    "broadcast_in_dim reshape squeeze": _with_dims,
    "concatenate": _columns,
}
NUMBERING = {name: rule for names, rule in _NUMBERING_OF.items() for name in _jax.primitives_named(names)}
"""Operations that keep the numbers of rows; the rule says ``None`` if this one does not."""
