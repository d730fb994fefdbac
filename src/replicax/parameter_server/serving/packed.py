"""Messages between workers and servers whose large arrays lie in memory that both share."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from replicax.parameter_server.serving.shared_memory import Lending

LEAST = 1 << 17
"""Smaller arrays are sent with the call."""
_ALIGNED = 64
"""Arrays that begin at a multiple of this JAX takes as they are."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A message.

    Attributes:
      pickled: all but its large arrays.
      places: where each of these begins and ends in the memory.
      use: of the block that has them.
    """

    pickled: bytes
    places: tuple[tuple[int, int], ...]
    use: Lending

    @property
    def nbytes(self) -> int:
        """Of all large arrays."""
        return sum(stop - start for start, stop in self.places)

    def unpacked(self, memory: np.ndarray) -> Any:
        """The message, with arrays that are in this memory."""
        return pickle.loads(self.pickled, buffers=[memory[start:stop] for start, stop in self.places])


def packed(message: Any, lend: Callable[[int], tuple[Lending, np.ndarray] | None]) -> Any:
    """A message on its way: ``message`` itself, if it has no large arrays, or they can't be shared.

    Args:
      message: anything that can be pickled.
      lend: gives memory for so many bytes, if there is any.
    """
    large: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < LEAST:
            return True
        large.append(raw)
        return False

    pickled = io.BytesIO()
    _Pickler(pickled, protocol=5, buffer_callback=take).dump(message)
    if not large:
        return message
    starts, end = aligned([raw.nbytes for raw in large])
    places = [(start, start + raw.nbytes) for start, raw in zip(starts, large, strict=True)]
    lent = lend(end)
    if lent is None:
        return message
    use, memory = lent
    for raw, (start, stop) in zip(large, places, strict=True):
        np.copyto(memory[start:stop], np.frombuffer(raw, np.uint8))  # others of this process can go on meanwhile
    return Packed(pickled.getvalue(), tuple(places), use)


class _Pickler(pickle.Pickler):
    """Has the memory of all arrays stay out of the pickle; NumPy by itself copies that of dtypes such as bfloat16."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not np.ndarray or value.dtype.hasobject or not value.flags.c_contiguous:
            return NotImplemented
        flat: Any = value.reshape(-1).view(np.uint8)
        return _array, (pickle.PickleBuffer(flat), value.dtype, value.shape)


def _array(buffer: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(buffer, np.uint8).view(dtype).reshape(shape)


def aligned(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where arrays of these sizes begin, one behind the other, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // _ALIGNED) * _ALIGNED)
        end = starts[-1] + size
    return starts, end
