"""Converts Arrow arrays to rows of NumPy values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Types by their names in pyarrow.types: with values in one NumPy array, with text or bytes, and lists.
_PLAIN = ("boolean", "integer", "floating", "date", "timestamp", "duration")
_TEXT = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary")
_LISTS = ("list", "large_list", "fixed_size_list")


def _is(kind: Any, *names: str) -> bool:
    """Return whether an Arrow type is one of ``names``."""
    import pyarrow.types as types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def check_type(kind: Any, where: str) -> None:
    """Raise a TypeError, whose message begins with ``where``, if an Arrow type has no NumPy form."""
    if _is(kind, "struct"):
        for i in range(kind.num_fields):
            check_type(kind.field(i).type, f"{where}, field {kind.field(i).name!r}")
    elif _is(kind, "dictionary", *_LISTS):
        check_type(kind.value_type, where)
    elif not _is(kind, *_PLAIN, *_TEXT):
        raise TypeError(
            f"{where} is {kind}, which has no NumPy form. Leave it out (columns=[…]), or convert it when the file is "
            "written, such as a decimal to a float."
        )


def rows(array: Any, where: str, first_row: int) -> Sequence[Any]:
    """Convert an Arrow array to NumPy scalars, ``str``, ``bytes``, NumPy arrays for lists, or dicts for structs.

    Messages count rows of the file from ``first_row`` on.
    """
    kind = array.type
    if _is(kind, "dictionary"):
        return rows(array.dictionary_decode(), where, first_row)
    if array.null_count and not _is(kind, "floating"):
        row = first_row + array.is_null().to_pylist().index(True)
        raise ValueError(
            f"{where} is missing (null) in row {row}: only floating columns may have gaps, which become NaN. Fill the "
            "gaps in the file, or leave the column out (columns=[…])."
        )
    if _is(kind, *_PLAIN):
        return array.to_numpy(zero_copy_only=False)
    if _is(kind, *_LISTS):
        return _lists(array, where, first_row)
    if _is(kind, "struct"):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        parts = [
            rows(part, f"{where}, field {name!r},", first_row)
            for name, part in zip(names, array.flatten(), strict=True)
        ]
        return [dict(zip(names, values, strict=True)) for values in zip(*parts, strict=True)]
    return array.to_pylist()


def _lists(array: Any, where: str, first_row: int) -> Sequence[Any]:
    """The lists of an array of lists as NumPy arrays: views of one array, if their entries lie in one."""
    inner = array.type.value_type
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    if array.flatten().null_count and not _is(inner, "floating"):
        bad = array.flatten().is_null().to_pylist().index(True)
        row = first_row + int(np.searchsorted(ends, bad, side="right"))
        raise ValueError(f"{where} has a list with a missing (null) entry in row {row}: fill the gaps in the file")
    values = rows(array.flatten(), f"an entry of the lists of {where}", 0)
    # NumPy's own strings lose trailing zeros.
    nested = _is(inner, *_LISTS)
    result = []
    for i, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
        entries: Any = values[end - length : end]
        if nested and not length:
            entries = np.array([], _innermost(inner))
        try:
            result.append(entries if isinstance(entries, np.ndarray) else np.array(entries, None if nested else object))
        except ValueError as error:
            raise ValueError(
                f"{where}: the lists in the list of row {first_row + i} differ in length: {error}"
            ) from error
    return result


def _innermost(kind: Any) -> Any:
    """The dtype of the arrays for lists of lists."""
    import pyarrow

    if _is(kind, *_LISTS):
        return _innermost(kind.value_type)
    return pyarrow.array([], kind).to_numpy(zero_copy_only=False).dtype if _is(kind, *_PLAIN) else object
