"""One rule for each operation, which says where the examples are in its result.

Both executors use them: :mod:`replicax.execution.padding.examples` for a program, and the exact one as it goes along.
What has no rule here gives ``UNKNOWN``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import AXIS_REDUCTIONS, ELEMENTWISE, REFERENCES
from replicax.execution.padding.example_places import (
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
from replicax.execution.padding.lookup_rules import NUMBERING, gather, scatter
from replicax.execution.program.collective_operations import over_replicas


def result_places(operation: OperationShapes) -> list[Place]:
    """Where the examples are in each result of an operation without programs inside."""
    if operation.name in REFERENCES:
        found: Sequence[Place] = [UNKNOWN] * len(operation.results)
    elif (operation.name in _PUT_TOGETHER and over_replicas(operation.params)) or operation.name in _WITHOUT_EXAMPLES:
        found = [None] * len(operation.results)
    elif operation.name in NUMBERING and (number := NUMBERING[operation.name](operation)) is not None:
        found = [number]
    elif operation.name in _EACH:
        found = [p if isinstance(p, Rows | Untraceable) else None for p in operation.places]
    elif PART in operation.places:
        found = [PART] * len(operation.results)
    elif UNKNOWN in operation.places:
        found = [UNKNOWN] * len(operation.results)
    elif not any(isinstance(p, Rows | Columns) for p in operation.places):
        found = [None] * len(operation.results)
    elif operation.name in _RULES:
        place = _RULES[operation.name](operation)
        found = place if isinstance(place, list) else [place] * len(operation.results)
    else:
        found = [UNKNOWN] * len(operation.results)
    if operation.name in _CUTTING:
        found = [PART if p is UNKNOWN else p for p in found]
    # A number is of all examples or of none, unless some have been left out before.
    return [p if shape or p is PART else None for p, shape in zip(found, operation.results, strict=True)]


def _elementwise(o: OperationShapes) -> Place:
    return joined(o.places)


def _alone(rule: Callable[[OperationShapes, Rows], Place]) -> Callable[[OperationShapes], Place]:
    """A rule for operations of which the first operand matters."""

    def applied(o: OperationShapes) -> Place:
        place = joined(o.places)
        return rule(o, place) if isinstance(place, Rows) else place

    return applied


def _unless_along(param: str) -> Callable[[OperationShapes], Place]:
    """The examples stay where they are, unless ``param`` names their dim: then they are mixed."""

    def rule(o: OperationShapes, place: Rows) -> Place:
        named = o.params[param]
        named = (named,) if isinstance(named, int) else named
        return UNKNOWN if place.dim in [a % len(o.shapes[0]) for a in named] else place

    return _alone(rule)


def _without(param: str) -> Callable[[OperationShapes], Place]:
    """Dims are reduced away: of the examples nothing remains, or they move up."""

    def rule(o: OperationShapes, place: Rows) -> Place:
        axes = [a % len(o.shapes[0]) for a in o.params[param]]
        return None if place.dim in axes else place.moved(place.dim - sum(a < place.dim for a in axes))

    return _alone(rule)


def _squeeze(o: OperationShapes, place: Rows) -> Place:
    dims = o.params["dimensions"]
    return UNKNOWN if place.dim in dims else place.moved(place.dim - sum(a < place.dim for a in dims))


def _broadcast(o: OperationShapes, place: Rows) -> Place:
    dim = o.params["broadcast_dimensions"][place.dim]
    return place.moved(dim) if o.shapes[0][place.dim] == o.results[0][dim] else UNKNOWN


def _transpose(o: OperationShapes, place: Rows) -> Place:
    return place.moved(tuple(o.params["permutation"]).index(place.dim))


def _reshape(o: OperationShapes, place: Rows) -> Place:
    return reshaped(place, o.shapes[0], o.results[0], o.rows)


def _stack(o: OperationShapes, place: Rows) -> Place:
    return place.moved(place.dim + (place.dim >= o.params["axis"] % len(o.results[0])))


def _unstack(o: OperationShapes, place: Rows) -> Place:
    axis = o.params["axis"] % len(o.shapes[0])
    return UNKNOWN if place.dim == axis else place.moved(place.dim - (place.dim > axis))


def _tile(o: OperationShapes, place: Rows) -> Place:
    return place if o.params["reps"][place.dim] == 1 else UNKNOWN


def _slice(o: OperationShapes, place: Rows) -> Place:
    dim = place.dim
    strides = o.params["strides"]
    whole = o.shapes[0][dim] == o.results[0][dim] and (strides is None or strides[dim] == 1)
    return place if whole else UNKNOWN


def _same_size(o: OperationShapes, place: Rows) -> Place:
    """What is cut out, or what is put in, has all of the examples."""
    sizes = {shape[place.dim] for shape in (*o.shapes, *o.results) if len(shape) > place.dim}
    return place if len(sizes) == 1 else UNKNOWN


def _pad(o: OperationShapes, place: Rows) -> Place:
    return place if tuple(o.params["padding_config"][place.dim]) == (0, 0, 0) else UNKNOWN


def _window(o: OperationShapes, place: Rows) -> Place:
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    steps = [o.params[n][place.dim] for n in names if o.params.get(n) is not None]
    return place if set(steps) == {1} and tuple(o.params["padding"][place.dim]) == (0, 0) else UNKNOWN


def _concatenate(o: OperationShapes) -> Place:
    place = joined(o.places)
    return UNKNOWN if isinstance(place, Rows) and place.dim == o.params["dimension"] else place


def _top_k(o: OperationShapes, place: Rows) -> Place:
    last = len(o.shapes[0]) - 1
    return UNKNOWN if place.dim == o.params.get("axis", last) % (last + 1) else place


def _leading(core: int) -> Callable[[OperationShapes], Place]:
    """The last dims are computed on; those before them are a batch."""

    def rule(o: OperationShapes, place: Rows) -> list[Place] | Place:
        stays = all(place.dim < len(shape) - core for shape in o.shapes if shape)
        return [place if stays and len(shape) > place.dim else UNKNOWN for shape in o.results]

    return _alone(rule)  # type: ignore[arg-type]


def _fft(o: OperationShapes, place: Rows) -> Place:
    return place if place.dim < len(o.shapes[0]) - len(o.params["fft_lengths"]) else UNKNOWN


def _dot_general(o: OperationShapes) -> Place:
    (contracted, batch) = o.params["dimension_numbers"]
    found: list[Place] = []
    start = len(batch[0])
    for operand in (0, 1):
        free = [d for d in range(len(o.shapes[operand])) if d not in {*contracted[operand], *batch[operand]}]
        place = o.at(operand)
        if place is not None and place.dim in batch[operand]:
            found.append(place.moved(tuple(batch[operand]).index(place.dim)))
        elif place is not None and place.dim in free:
            found.append(place.moved(start + free.index(place.dim)))
        start += len(free)
    return joined(found)


def _convolution(o: OperationShapes) -> Place:
    numbers, left, right = o.params["dimension_numbers"], o.at(0), o.at(1)
    if right is not None and right.dim != numbers.rhs_spec[1]:
        return UNKNOWN
    if right is not None or (left is not None and left.dim == numbers.lhs_spec[1]):
        # The derivative by the filters: the examples are what is summed over.
        if o.params["feature_group_count"] != 1 or (left is not None and left.dim != numbers.lhs_spec[1]):
            return UNKNOWN
        return None
    assert left is not None
    if left.dim != numbers.lhs_spec[0] or o.params["batch_group_count"] != 1:
        return UNKNOWN
    return left.moved(numbers.out_spec[0])


# What replicas have put together is no replica's own examples.
_PUT_TOGETHER = AXIS_REDUCTIONS | _jax.primitives_named("all_gather all_gather_invariant") | {"all_reduce"}
_WITHOUT_EXAMPLES = _jax.primitives_named("axis_index") | {"replicax_asks", "replicax_sum", "replicax_whole"}
_CUTTING = _jax.primitives_named("dynamic_slice gather slice split squeeze unstack")
_EACH = _jax.primitives_named("optimization_barrier device_put sharding_constraint") | {
    "replicax_mark",
    "replicax_share",
    "replicax_alone",
    "replicax_gathered",
    "replicax_assign",
}

_RULES_OF: dict[str, Callable[[OperationShapes], Any]] = {
    """
    add_any bessel_i0e bessel_i1e clz complex conj eq_to igamma_grad_a igammac le_to lt_to mulhi name population_count
    pvary regularized_incomplete_beta threefry2x32
    """: _elementwise,
    """
    random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
    """: _elementwise,
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin": _without("axes"),
    "reduce": _without("dimensions"),
    "cumsum cumprod cummax cummin cumlogsumexp split": _unless_along("axis"),
    "sort": _unless_along("dimension"),
    "rev": _unless_along("dimensions"),
    "top_k": _alone(_top_k),
    "broadcast_in_dim": _alone(_broadcast),
    "reshape": _alone(_reshape),
    "squeeze": _alone(_squeeze),
    "transpose": _alone(_transpose),
    "slice": _alone(_slice),
    "dynamic_slice dynamic_update_slice bitcast_convert_type": _alone(_same_size),
    "pad": _alone(_pad),
    "concatenate": _concatenate,
    "stack": _alone(_stack),
    "unstack": _alone(_unstack),
    "tile": _alone(_tile),
    """
    reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add
    """: _alone(_window),
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": gather,
    "scatter scatter-sub scatter-add scatter-mul scatter-min scatter-max": scatter,
    "cholesky eigh householder_product lu qr svd triangular_solve": _leading(2),
    "fft": _alone(_fft),
}
_RULES = dict.fromkeys(ELEMENTWISE, _elementwise) | {
    name: rule for names, rule in _RULES_OF.items() for name in _jax.primitives_named(names)
}
