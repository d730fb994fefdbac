"""Predict the time of a matrix product: its shape against the tiles and the multiprocessors of the chip.

A GPU cuts the result into tiles, and each of its multiprocessors computes one at a time. A result that does not fill
the last tile of a row or column wastes the rest of it, and tiles that do not fill the last wave leave multiprocessors
idle. Small tiles waste less, but read each operand more often. Where there are few tiles, the contracted dim is cut,
too, and the parts are added up. The quickest of these ways counts, as the library that computes products tries them.

A TPU's matrix unit is a square that each dim has to fill.
"""

from __future__ import annotations

import dataclasses
import math

from replicax.hlo.instructions import Computation, Instruction
from replicax.hlo.products import (
    arithmetic_of,
    convolution_dims,
    convolution_labels,
    dot_dims,
    is_gradient_of,
    product_kind,
)
from replicax.planning.chip_specs import Chip
from replicax.planning.cost import matrix_flops

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.62))
"""Rows, columns, and the share of the chip's sustained speed that a multiprocessor reaches with them."""
_SPLITS = (1, 2, 4, 8)
_RAMP = 96  # of the contracted dim: what filling the pipeline of a tile takes
_SQUARE = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, or a convolution as one."""

    batch: int  # how many products of the same shape
    rows: int  # the number of rows of the result
    columns: int  # the number of columns of the result
    depth: float  # the size of the contracted dim; of a convolution, how many pairs are multiplied, on average
    arithmetic: str  # see :func:`replicax.hlo.products.arithmetic_of`
    is_recomputed: bool = False  # whether the backward pass computes it a second time, to save memory

    @property
    def flops(self) -> int:
        """Two for each multiplication with its addition."""
        return round(2 * self.batch * self.rows * self.columns * self.depth)


def product_of(instruction: Instruction, computation: Computation) -> Product | None:
    """The product that an instruction is; ``None`` if it is none."""
    flops = matrix_flops(instruction, computation)
    if not flops:
        return None
    operands = [computation.instructions[name].arrays[0] for name in instruction.operands[:2]]
    result = instruction.arrays[0].dims
    if product_kind(instruction) == "dot":
        batch, rows, columns = _dims_of(instruction, operands[0].dims, operands[1].dims)
    else:
        columns = _features_of(instruction, computation)
        batch, rows = 1, math.prod(result) // max(1, columns)
    depth = flops / (2 * batch * rows * columns)
    arithmetic = arithmetic_of(instruction, computation)
    return Product(batch, rows, columns, depth, arithmetic, instruction.is_recomputed)


def _dims_of(dot: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, int, int]:
    batch = math.prod(left[d] for d in dot_dims(dot, "lhs_batch"))
    taken = {*dot_dims(dot, "lhs_batch"), *dot_dims(dot, "lhs_contracting")}
    rows = math.prod(size for d, size in enumerate(left) if d not in taken)
    taken = {*dot_dims(dot, "rhs_batch"), *dot_dims(dot, "rhs_contracting")}
    return batch, rows, math.prod(size for d, size in enumerate(right) if d not in taken)


def _features_of(convolution: Instruction, computation: Computation) -> int:
    """The features of what is computed, as the columns of a product: those of the input for its gradient."""
    labels = convolution_labels(convolution)
    source, _, result = convolution_dims(convolution, computation)
    if is_gradient_of(convolution) == "input":
        return source[labels[0].index("f")]
    return result[labels[2].index("f")]


def seconds_of_product(product: Product, chip: Chip) -> float:
    """Return the seconds of a product whose operands are there in time.

    A chip without a number of multiprocessors has matrix units that work as one.
    """
    peak = peak_of(product.arithmetic, chip) * chip.sustained
    if chip.is_serial:
        return product.flops / peak
    if not chip.multiprocessors:
        padded = math.prod(_ceil(size, _SQUARE) for size in (product.columns, product.depth))
        rows = _ceil(product.rows, 8)
        return 2 * product.batch * rows * padded / peak
    return min(
        _in_tiles(product, chip.multiprocessors, peak, tile, split)
        for tile in _TILES
        for split in _SPLITS
        if split == 1 or product.depth // split >= 512
    )


def _in_tiles(product: Product, multiprocessors: int, peak: float, tile: tuple[int, int, float], split: int) -> float:
    rows, columns, share = tile
    tiles = product.batch * -(-product.rows // rows) * -(-product.columns // columns) * split
    depth = -(-product.depth // split) + _RAMP
    return -(-tiles // multiprocessors) * 2 * rows * columns * depth / (peak / multiprocessors * share)


def _ceil(size: float, of: int) -> float:
    return -(-size // of) * of if size > of else max(size, of // 16)


def peak_of(arithmetic: str, chip: Chip) -> float:
    """The peak for products in an arithmetic: see :func:`replicax.hlo.products.arithmetic_of`.

    Float32 is multiplied as TF32 on GPUs, unless with the highest precision. Chips without a peak of float32 multiply
    bfloat16, once by default. A complex product is four.
    """
    dtype, _, asked = arithmetic.partition(" ")
    dtype, products = {"c64": ("f32", 4), "c128": ("f64", 4)}.get(dtype, (dtype, 1))
    if asked.startswith("x"):
        products *= int(asked[1:])
    elif dtype == "f32" and asked != "highest" and "tf32" in chip.peaks:
        dtype = "tf32"
    elif dtype == "f32" and "f32" not in chip.peaks and not chip.is_serial:
        products *= {"high": 3, "highest": 6}.get(asked, 1)
    return next((peak for name, peak in chip.peaks.items() if dtype.startswith(name)), chip.flops) / products
