"""Values of CSV fields: the dtype of each column, requested or derived from its first values."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
_REAL = re.compile(r"\s*[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|nan|inf|infinity)\s*", re.IGNORECASE)
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclasses.dataclass(frozen=True)
class Converter:
    """Converts the text of one column to values."""

    dtype: np.dtype[Any]  # the dtype of the values; ``np.dtype(str)`` for text
    worked_out: bool  # whether the dtype comes from the first rows, not from the caller
    # Whether an integer that the dtype would round is refused, as the first rows hold no other numbers.
    exact: bool = False

    @property
    def may_overflow(self) -> bool:
        """Return whether a float of Python may be too large for the dtype."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating)) and self.dtype != np.float64

    def __call__(self, text: str) -> Any:
        """The value of ``text``; raises a ValueError or OverflowError if it is not of this dtype."""
        dtype = self.dtype
        if dtype.kind == "U":
            return text
        if dtype.kind == "b":
            return np.bool_(_TRUTH[text.strip().lower()] if text.strip().lower() in _TRUTH else _refuse(text))
        if dtype.kind == "M":
            return np.datetime64(text.strip() or _refuse(text)).astype(dtype)
        if jnp.issubdtype(dtype, np.integer):
            # Python would accept digits of any script, and 1_000; and int4 would wrap.
            number = dtype.type(int(text) if _INTEGER.fullmatch(text) else _refuse(text))
            return number if int(number) == int(text) else _refuse(text)
        value = dtype.type(float(text) if _REAL.fullmatch(text) else np.nan if not text else _refuse(text))
        is_beyond = not math.isfinite(value) and any(map(str.isdigit, text))
        if is_beyond or (self.exact and _INTEGER.fullmatch(text) and int(value) != int(text)):
            _refuse(text)
        return value

    def problem(self, text: str, column: str) -> str:
        """The reason why ``text`` is not a value of this column, and the remedy."""
        if self.worked_out:
            wider = "float" if self.dtype.kind == "i" and (not text or _REAL.fullmatch(text)) else "str"
            return (
                f"{text!r} is not {self.dtype}, which is what the first rows hold. "
                f"Say what the column holds, such as dtypes={{{column!r}: {wider}}}."
            )
        return f"{text!r} is not {self.dtype}. Mend the file, or ask for another dtype, such as str."


def _refuse(text: str) -> Any:
    raise ValueError(text)


def requested(dtypes: Any, columns: Sequence[str]) -> dict[str, np.dtype[Any]]:
    """The dtype of each column for which the caller requests one."""
    if dtypes is None:
        return {}
    wanted = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(columns, dtypes)
    result = {}
    for column, dtype in wanted.items():
        try:
            result[column] = np.dtype(dtype)
        except TypeError as error:
            raise TypeError(f"csv_rows: dtypes: {column!r}: {dtype!r} is not a dtype: {error}") from error
        kind = result[column]
        if kind.kind not in "UbM" and not any(jnp.issubdtype(kind, k) for k in (np.integer, np.floating)):
            raise TypeError(f"csv_rows: dtypes: {column!r}: text can't be read as {kind}; use str, and a map after it")
    return result


def converters(samples: Mapping[str, Sequence[str]], wanted: Mapping[str, np.dtype[Any]]) -> dict[str, Converter]:
    """A converter for each column: for the requested dtype, or the one that its sample fits."""
    return {
        column: Converter(wanted[column], False)
        if column in wanted
        else Converter(_fitting(sample), True, all(_INTEGER.fullmatch(text) for text in sample if text))
        for column, sample in samples.items()
    }


def _fitting(sample: Sequence[str]) -> np.dtype[Any]:
    """The dtype that fits these first fields of a column.

    >>> _fitting(["1", "2"]), _fitting(["1", ""]), _fitting(["1", "2.5"]), _fitting(["1", "x"])
    (dtype('int64'), dtype('float64'), dtype('float64'), dtype('<U'))
    """
    texts = [text for text in sample if text]
    if not texts or not all(_REAL.fullmatch(text) for text in texts):
        return np.dtype(str)
    if not all(_INTEGER.fullmatch(text) for text in texts):
        return np.dtype(np.float64)
    limits = np.iinfo(np.int64)
    if not all(limits.min <= int(text) <= limits.max for text in texts):
        return np.dtype(str)  # as a float it would be another number
    if len(texts) == len(sample):
        return np.dtype(np.int64)
    return np.dtype(np.float64 if all(int(float(text)) == int(text) for text in texts) else str)
