"""Params of JAX's operations, in terms of dims: how they are spelled differs from operation to operation.

The families in :mod:`replicax._jax.primitive_families` say which operations each function is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

Params = Mapping[str, Any]


def dims_along(params: Params, ndim: int) -> tuple[int, ...]:
    """The dims, of ``ndim``, that an operation goes along: reduces, sorts, counts, joins, takes away or transforms."""
    if "fft_lengths" in params:
        return tuple(range(ndim - len(params["fft_lengths"]), ndim))
    [dims] = [params[name] for name in ("axes", "axis", "dimension", "dimensions") if name in params]
    return tuple(int(d) % ndim for d in (dims if isinstance(dims, Sequence) else [dims]))


def reduced_along(params: Params, dims: Sequence[int]) -> dict[str, Any]:
    """The params of a reduction, for one that reduces ``dims``."""
    return {**params, "axes": tuple(dims)}


def moved_dims(params: Params) -> Sequence[int]:
    """Where each dim of the operand is in the result: of a broadcast or a transposition."""
    if "permutation" in params:
        return sorted(range(len(params["permutation"])), key=params["permutation"].__getitem__)
    return params["broadcast_dimensions"]


def untouched_dims(params: Params) -> list[int]:
    """The dims along which an operation that pads, or goes over windows, leaves each element where it is."""
    if "padding_config" in params:
        return [d for d, steps in enumerate(params["padding_config"]) if not any(steps)]
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    steps = [params[name] for name in names if params.get(name) is not None]
    return [d for d, padding in enumerate(params["padding"]) if not any(padding) and all(s[d] == 1 for s in steps)]


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingWindows:
    """The windows of the gradient of a pooling, dim by dim."""

    sizes: tuple[int, ...]  # how many elements a window has
    strides: tuple[int, ...]  # how far it is from one window to the next
    # How many elements there are before and after those of the operand, which are chosen last.
    padding: tuple[tuple[int, int], ...]
    largest: bool  # whether a window chooses its largest element, and not its smallest; of equal ones the first


def pooling_windows(params: Params) -> PoolingWindows:
    """The windows of the gradient of a pooling with these params."""
    sizes, strides, padding = (params[name] for name in ("window_dimensions", "window_strides", "padding"))
    return PoolingWindows(sizes, strides, padding, params["select_prim"] is lax.ge_p)


@dataclasses.dataclass(frozen=True, slots=True)
class DotDimensions:
    """The dims of a product of matrices; the result has those of the batch, then what is left of each operand."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]  # for each of the two operands, the dims that are summed over
    batch: tuple[tuple[int, ...], tuple[int, ...]]  # for each of them, the dims that they have in common


def dot_dimensions(params: Params) -> DotDimensions:
    """The dims of a matrix product with these params."""
    (a, b), (c, d) = params["dimension_numbers"]
    return DotDimensions((tuple(a), tuple(b)), (tuple(c), tuple(d)))


@dataclasses.dataclass(frozen=True, slots=True)
class LookupDimensions:
    """The dims of the operand, indices and slices of a gather or a scatter, and which go together.

    The slices are a gather's result and a scatter's updates. Their dims that are not those of windows are those of the
    indices, but for the last of these, in their order.
    """

    # The dims of the operand that the indices are about, in the order of the indices' last dim.
    indexed: tuple[int, ...]
    batch: Mapping[int, int]  # the dims of the operand that go along with one of the indices, and that one
    # The dims of the operand that slices have parts of, and the dim of the slices that each is.
    windows: Mapping[int, int]


def lookup_dimensions(params: Params, ndim: int) -> LookupDimensions:
    """The dims of a gather or a scatter with these params, whose operand has ``ndim`` dims."""
    n = params["dimension_numbers"]
    if isinstance(n, lax.GatherDimensionNumbers):
        indexed, batch = n.start_index_map, n.start_indices_batching_dims
        dropped, windows = n.collapsed_slice_dims, n.offset_dims
    else:
        indexed, batch = n.scatter_dims_to_operand_dims, n.scatter_indices_batching_dims
        dropped, windows = n.inserted_window_dims, n.update_window_dims
    whole = [d for d in range(ndim) if d not in {*dropped, *n.operand_batching_dims}]
    return LookupDimensions(
        tuple(indexed),
        dict(zip(n.operand_batching_dims, batch, strict=True)),
        dict(zip(whole, windows, strict=True)),
    )


def dropping(params: Params) -> dict[str, Any] | None:
    """The params of a scatter, with updates beyond the operand dropped; ``None`` if it puts them elsewhere."""
    if params["mode"] not in (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS):
        return None
    return {**params, "mode": lax.GatherScatterMode.FILL_OR_DROP}


def wanted_sharding(params: Params) -> Any:
    """The ``PartitionSpec`` that an operation asks for its operand; ``None`` if it asks in another way."""
    return getattr(params["sharding"], "spec", None)
