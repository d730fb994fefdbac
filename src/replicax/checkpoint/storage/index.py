"""The index: the entries of a checkpoint by name, and the place of each piece of an array."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax.checkpoint.storage.blocks import Block
from replicax.checkpoint.storage.manifest import DamagedError, Manifest, check_inside
from replicax.system.json_files import parsed, read_regular
from replicax.workers.codec import declared

NAME = "index.json"
FORMAT = 1
"""The version of the format: increased when older versions can't read new files; all earlier formats can be read."""


@dataclasses.dataclass(frozen=True)
class ArrayKind:
    """The properties that a saved array and its target must share."""

    shape: tuple[int, ...]  # the shape of its numbers
    dtype: str  # the name of their dtype
    # For random keys, the name of their implementation; then the numbers are the keys' data.
    generator: str | None = None
    # The number of replicas, if each one's copy of an on-read variable is saved; dim 0 numbers the copies.
    copies: int | None = None
    # True if the dtype yields to that of other operands, as a Python number's does; false if the array is NumPy's,
    # which becomes an array of JAX's in a step; may differ.
    is_weak: bool | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.generator is not None:
            text = f"{self.generator} keys, {text}"
        return text if self.copies is None else f"{text}, of {self.copies} replicas' copies"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        return np.dtype(getattr(jnp, self.dtype, self.dtype))


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """An array, in pieces."""

    kind: ArrayKind
    pieces: Mapping[Block, tuple[str, str]]
    """The folder and key of each block."""


@declared
@dataclasses.dataclass(frozen=True)
class PlainEntry:
    """A number, a string, a bool or ``None``."""

    value: Any


@declared
@dataclasses.dataclass(frozen=True)
class IteratorEntry:
    """The place of an input iterator."""

    state: Any


@declared
@dataclasses.dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer, whose slots are separate entries."""

    built: bool  # whether it had slots
    # The pytree of its variables, with their names in the checkpoint as leaves; ``None`` if they are not in it, or in
    # containers that are not Python's.
    parameters: Any


Entry = ArrayEntry | PlainEntry | IteratorEntry | OptimizerEntry


@dataclasses.dataclass(frozen=True)
class CheckpointIndex:
    """The content of a checkpoint; the id and step are those of its manifest."""

    id: str
    time: float
    """When the save began, in seconds since 1970 by the chief's clock."""
    step: int | None
    metrics: Mapping[str, float]
    entries: Mapping[str, Entry]

    def dumps(self) -> str:
        """Return the index as JSON."""
        entries = {name: _entry_as_json(entry) for name, entry in self.entries.items()}
        metrics = {name: plain_as_json(value) for name, value in self.metrics.items()}
        fields = {"format": FORMAT, **vars(self), "metrics": metrics, "entries": entries}
        return json.dumps(fields, indent=1, allow_nan=False)  # in ASCII, as strings may be no Unicode


def loads_index(text: str) -> CheckpointIndex:
    """Parse the text of ``dumps``; raises a DamagedError if it is no index, or one of a later format."""
    try:
        data = parsed(text)
        if data["format"] > FORMAT:
            raise DamagedError(f"it has format {data['format']}, and this version of Replicax reads up to {FORMAT}")
        metrics = {name: plain_from_json(value) for name, value in data["metrics"].items()}
        entries = {name: _entry_from_json(entry) for name, entry in data["entries"].items()}
        return CheckpointIndex(data["id"], data["time"], data["step"], metrics, entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{NAME} can't be read: {type(error).__name__}: {error}") from None


def read_index(folder: str, listed: Manifest) -> CheckpointIndex:
    """The index in ``folder``, whose manifest is ``listed``; raises a DamagedError if the two don't fit together."""
    if NAME not in listed.files:
        raise DamagedError(f"{NAME} is not in the manifest")
    try:
        index = loads_index(read_regular(os.path.join(folder, NAME), listed.files[NAME][0]).decode())
    except OSError as error:
        raise DamagedError(f"{NAME} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{NAME} can't be read: {error}") from None
    known = {name.partition("/")[0] for name in listed.files if "/" in name}
    for name, entry in index.entries.items():
        if isinstance(entry, ArrayEntry):
            for where, _ in entry.pieces.values():
                if where not in known:
                    raise DamagedError(f"{NAME} has {name} in {where!r}, which is not in the manifest")
    return index


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, ArrayEntry):
        kind = {k: v for k, v in dataclasses.asdict(entry.kind).items() if v is not None}
        pieces = [[block, folder, key] for block, (folder, key) in entry.pieces.items()]
        return {"array": {**kind, "pieces": pieces}}
    if isinstance(entry, PlainEntry):
        return {"plain": plain_as_json(entry.value)}
    if isinstance(entry, IteratorEntry):
        return {"iterator": entry.state}
    return {"optimizer": {"built": entry.built, "parameters": entry.parameters}}


def _entry_from_json(data: Mapping[str, Any]) -> Entry:
    [(what, fields)] = data.items()
    if what == "array":
        fields = dict(fields)
        pieces: dict[Block, tuple[str, str]] = {}
        for ranges, folder, key in fields.pop("pieces"):
            block = tuple((int(start), int(stop)) for start, stop in ranges)
            pieces[block] = str(folder), str(key)
            check_inside(str(folder))
        return ArrayEntry(ArrayKind(**{**fields, "shape": tuple(fields["shape"])}), pieces)
    if what == "plain":
        return PlainEntry(plain_from_json(fields))
    if what == "iterator":
        return IteratorEntry(fields)
    if what == "optimizer":
        return OptimizerEntry(fields["built"], fields["parameters"])
    raise KeyError(what)


def plain_as_json(value: Any) -> Any:
    """A plain value as JSON, which lacks complex numbers, infinity and NaN."""
    if isinstance(value, complex):
        return {"complex": [plain_as_json(value.real), plain_as_json(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def plain_from_json(data: Any) -> Any:
    """The value for the data of :func:`plain_as_json`."""
    if isinstance(data, dict):
        [(what, content)] = data.items()
        return float(content) if what == "float" else complex(*map(plain_from_json, content))
    return data
