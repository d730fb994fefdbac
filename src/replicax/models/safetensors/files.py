"""The files of a checkpoint: which tensors they have, and blocks of these."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from replicax.checkpoint.storage.blocks import Block, inside, pieces_of, shape_of
from replicax.errors import CheckpointError
from replicax.models.safetensors.names import INDEX, SINGLE, TensorSource

MAPPED = 4 << 20
"""Tensors are read in pieces of which the file has at most so many bytes: its pages count as memory while mapped."""
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    **{
        f"{letter}{bits}": f"{word}{bits}" for letter, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F8_{kind.upper()}": f"float8_{kind}" for kind in ("e5m2", "e4m3fnuz", "e5m2fnuz")},
}


class Tensor(NamedTuple):
    """A tensor in a file; ``dtype`` is NumPy's name, or that of the format if NumPy has none; ``start`` is in bytes."""

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int


def tensors_at(path: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name, from the headers of its files."""
    index = path / INDEX if path.is_dir() else path
    if path.is_dir() and (path / SINGLE).exists():
        return _tensors_in(path / SINGLE)
    if not index.exists():
        if not path.is_dir():
            raise FileNotFoundError(f"there is no {path}")
        names = ", ".join(sorted(file.name for file in path.iterdir())[:5])
        raise FileNotFoundError(f"{path} has neither {SINGLE} nor {INDEX}; it has {names or 'no files'}")
    if index.suffix != ".json":
        return _tensors_in(index)
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the index {index} is damaged: {error!r}") from error
    files = {place: index.parent / place for place in sorted(set(places.values()))}
    for place, file in files.items():
        if not file.exists():
            first = next(tensor for tensor, where in places.items() if where == place)
            raise FileNotFoundError(f"the index {index} names the file {place}, with {first}, which is not there")
    tensors_of_files = {place: _tensors_in(file) for place, file in files.items()}
    for name, place in places.items():
        if name not in tensors_of_files[place]:
            raise CheckpointError(f"the index {index} says that {name} is in {place}, where it is not")
    others = {name: tensor for tensors in tensors_of_files.values() for name, tensor in tensors.items()}
    return others | {name: tensors_of_files[place][name] for name, place in places.items()}


def _tensors_in(file: pathlib.Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="np"), file.open("rb") as opened:  # it checks the file, and can't read float8
            data = 8 + int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(data - 8))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is no safetensors file, or damaged: {error} ({file.stat().st_size:,} bytes). Was the download "
            "broken off?"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: Tensor(file, name, tuple(x["shape"]), _DTYPES.get(x["dtype"], x["dtype"]), data + x["data_offsets"][0])
        for name, x in header.items()
    }


def read_block(
    tensors: Mapping[str, Tensor], source: TensorSource, block: Block, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """A block of the array of ``dtype`` that some tensors make up."""
    if not source.is_stacked:
        return _read_one(tensors[source.names[0]], source, block).astype(dtype, copy=False)
    first, last = block[0]
    stacked = np.empty(shape_of(block), dtype)
    for number, name in enumerate(source.names[first:last]):
        stacked[number] = _read_one(tensors[name], source, block[1:])
    return stacked


def _read_one(tensor: Tensor, source: TensorSource, block: Block) -> np.ndarray[Any, Any]:
    """A block of a tensor, with its dims as they are here."""
    wanted, dtype = source.in_file(block), jnp.dtype(tensor.dtype)
    value = np.empty(shape_of(wanted), dtype)
    spread = math.prod(tensor.shape[1:]) // (math.prod(shape_of(wanted)[1:]) or 1)  # whole rows are in the pages
    for piece in pieces_of(wanted, dtype.itemsize * max(spread, 1), MAPPED):
        mapped = np.memmap(tensor.file, dtype, "r", tensor.start, tensor.shape)
        value[inside(piece, wanted)] = mapped[tuple(slice(start, stop) for start, stop in piece)]
    return value.transpose(source.axes)
