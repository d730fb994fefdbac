"""Pickles functions for workers, with references to objects that each process has.

Variables, optimizers and the strategy exist in all processes, and are not copied: the pickle refers to them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from replicax.errors import WorkerError

Reference = tuple[str, int]
"""A kind, such as ``"variable"``, and the number of the object among those of that kind."""


def dumps(
    value: Any, reference_of: Callable[[Any], Reference | None], what: str, uses: list[Any] | None = None
) -> bytes:
    """Pickle ``value``, called ``what`` in messages.

    ``reference_of`` returns the reference to an object, or ``None`` if it must be copied; its ``ValueError`` and
    ``WorkerError`` pass through. ``uses`` collects the objects that the pickle refers to.
    """
    from ray import cloudpickle

    def persistent_id(_: Any, value: Any) -> Reference | None:
        reference = reference_of(value)
        if reference is not None and uses is not None:
            uses.append(value)
        return reference

    make: Any = type("Pickler", (cloudpickle.CloudPickler,), {"persistent_id": persistent_id})
    buffer = io.BytesIO()
    try:
        make(buffer).dump(value)
    except (ValueError, WorkerError):
        raise
    except Exception as error:
        raise TypeError(
            f"{what} can't be sent to workers: {type(error).__name__}: {error}. What a scheduled function uses is "
            "copied to another process: locks, open files, iterators and connections can't be. Make them inside "
            "the function, or with create_per_worker_dataset."
        ) from error
    return buffer.getvalue()


def loads(data: bytes, find: Callable[[Reference], Any], what: str) -> Any:
    """Unpickle data, called ``what`` in messages. ``find`` returns the object for a reference; its errors pass."""
    unpickler = _Unpickler(data, find)
    try:
        return unpickler.load()
    except Exception as error:
        if unpickler.is_finding:
            raise
        raise pickle.UnpicklingError(
            f"{what} was pickled in the coordinator's program, and this process can't read it: "
            f"{type(error).__name__}: {error}. What it uses of modules is not copied: they have to be there, and the "
            "same, on every machine."
        ) from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, find: Callable[[Reference], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._find = find
        self.is_finding = False

    def persistent_load(self, reference: Reference) -> Any:
        self.is_finding = True
        found = self._find(reference)
        self.is_finding = False
        return found
