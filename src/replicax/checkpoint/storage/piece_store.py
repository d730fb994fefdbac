"""The store of a worker's pieces: arrays by key, in one folder, written with TensorStore.

Orbax uses TensorStore, too, and the format is the same: Zarr arrays in an OCDBT database, which has a few large files
however many arrays there are. Orbax itself does not fit: it writes the NumPy arrays of process 0 only, and refuses
arrays of one process among several.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Request = tuple[str, str, tuple[slice, ...], np.dtype[Any]]
"""A request to read: the folder, the key, the part of the array, and its dtype."""


def write_pieces(folder: str, pieces: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays, none of them empty, into a new folder; raises an OSError that says why they can't be written."""
    import tensorstore as ts

    os.makedirs(folder, exist_ok=True)
    context = _context()
    try:
        opened = [
            ts.open(_spec(folder, key) | _new(array), create=True, open=True, context=context)
            for key, array in pieces.items()
        ]
        written = [
            store.result().write(_plain(array), can_reference_source_data_indefinitely=True)
            for store, array in zip(opened, pieces.values(), strict=True)
        ]
        for future in written:
            future.result()
    except ValueError as error:  # TensorStore raises it for all file system errors
        raise _error("write to", folder, error) from error


def read_pieces(requests: Sequence[Request]) -> list[np.ndarray[Any, Any]]:
    """Read parts of stored arrays in parallel; raises an OSError that says why one can't be read."""
    if not requests:
        return []
    import tensorstore as ts

    context = _context()
    try:
        opened = [ts.open(_spec(folder, key), open=True, context=context) for folder, key, _, _ in requests]
        parts = [
            store.result()[part].read() if part else store.result().read()
            for store, (_, _, part, _) in zip(opened, requests, strict=True)
        ]
        return [np.asarray(part.result()).view(dtype) for part, (_, _, _, dtype) in zip(parts, requests, strict=True)]
    except ValueError as error:
        raise _error("read from", requests[0][0], error) from error


def _context() -> Any:
    import tensorstore as ts

    # Nothing is read twice; and all files are flushed at once after writing.
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": False})


def _spec(folder: str, key: str) -> dict[str, Any]:
    files = {"driver": "file", "path": os.path.abspath(folder) + "/"}
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": files, "path": f"{key}/"}}


def _new(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "metadata": {
            "shape": list(array.shape),
            "chunks": list(array.shape),  # a piece is small enough for one chunk
            "dtype": _plain(array).dtype.str,
            "compressor": None,  # trained numbers hardly compress
            "fill_value": None,
            "order": "C",
        },
        "store_data_equal_to_fill_value": True,
    }


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View the bytes in a dtype of NumPy itself: JAX's further dtypes become unsigned integers."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _error(doing: str, folder: str, error: ValueError) -> OSError:
    """TensorStore's error as an OSError, with its number if known."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
        if os.strerror(number) in str(error):
            return OSError(number, os.strerror(number), folder)
    return OSError(f"TensorStore could not {doing} {folder}: {str(error).splitlines()[0][:500]}")
