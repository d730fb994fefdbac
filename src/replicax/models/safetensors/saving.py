"""Saving: the chief writes files, which get their names when all of them are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.argument_checks import checked_integer, checked_path
from replicax.checkpoint.checkpoint import lockstep_of
from replicax.checkpoint.storage.manifest import flush
from replicax.devices.arrays import gathered, local_array
from replicax.errors import CheckpointError
from replicax.models.safetensors.arrays import check_call, leaves_of, sources_of
from replicax.models.safetensors.names import INDEX, SINGLE, Names, TensorSource
from replicax.variables import Variable


def save(
    folder: str | os.PathLike[str], tree: Any, names: Names = None, *, dtype: Any = None, max_file_bytes: int = 5 << 30
) -> None:
    """Write variables and arrays as safetensors, which the libraries of Hugging Face read.

    There is one file, or several with an index. They get their names when all of them are complete, and the index
    comes last. All workers call it; the chief writes, and its host has one file at a time.

    Args:
      folder: where to write; it may hold other files, such as ``config.json``, but no weights.
      tree: a pytree of variables and arrays.
      names: as in :func:`load`.
      dtype: the dtype of the floats in the files, such as ``"bfloat16"``; by default as they are.
      max_file_bytes: the size beyond which another file begins.

    Raises:
      FileExistsError: there are weights in ``folder``.
      TypeError: it is not a path, or ``dtype`` is no float dtype.
      ValueError: ``tree`` has no values, two have one name, or one has none.
      CheckpointError: the files can't be written; none is left.
      ContextError: called inside a step.
      ImportError: the package safetensors is not installed.

    >>> import os, tempfile, numpy as np
    >>> from replicax.models import safetensors
    >>> folder = tempfile.mkdtemp()
    >>> weights = {"up": np.ones((2, 3), np.float32), "down": np.ones((3, 2), np.float32)}
    >>> safetensors.save(folder, weights, dtype="bfloat16", max_file_bytes=12)
    >>> sorted(os.listdir(folder))
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    """
    check_call("save")
    folder = checked_path(folder, "safetensors.save(folder)")
    most = checked_integer(max_file_bytes, "safetensors.save: max_file_bytes")
    leaves, leaves_by_path, _ = leaves_of(tree)
    if not leaves_by_path:
        raise ValueError(f"safetensors.save: tree, of the class {type(tree).__name__}, has no variables and arrays")
    lockstep = lockstep_of(leaves)
    where, is_chief = pathlib.Path(folder), lockstep.workers.index == 0
    writer = _Writer(where)
    with lockstep.failing_together("a save of weights"):
        files = _files(leaves_by_path, sources_of(leaves_by_path, names), dtype, most)
        if is_chief:
            writer.prepare()
        lockstep.exchange("saves weights", None, folder)
        try:
            for file in files:
                data = {name: value for name, value in _values(file, is_chief) if is_chief}
                if is_chief:
                    writer.write(data)
                del data
            if is_chief:
                writer.finish()
        except Exception as error:
            writer.undo()
            raise CheckpointError(f"the weights could not be saved to {folder}: {error}") from error
    lockstep.exchange("has saved weights", None, folder)


@dataclasses.dataclass(frozen=True)
class _Item:
    """A tensor to be written: the array, its source, and the number of the tensor there."""

    value: Any
    source: TensorSource
    number: int
    dtype: Any
    bytes: int

    @property
    def name(self) -> str:
        return self.source.names[self.number]


def _files(leaves: Mapping[str, Any], sources: Mapping[str, TensorSource], dtype: Any, most: int) -> list[list[_Item]]:
    """The tensors of each file."""
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"safetensors.save: dtype must be a float dtype, such as 'bfloat16', got {dtype!r}")
    files: list[list[_Item]] = [[]]
    owners: dict[str, str] = {}
    for path, source in sources.items():
        kind = leaves[path].kind
        saved_dtype = jnp.dtype(dtype) if dtype and jnp.issubdtype(kind.numpy_dtype, jnp.floating) else kind.numpy_dtype
        size = math.prod(kind.shape) * saved_dtype.itemsize // (len(source.names) or 1)
        for number, name in enumerate(source.names):
            if name in owners:
                raise ValueError(f"names: {owners[name]} and {path} are both called {name}")
            owners[name] = path
            if files[-1] and sum(item.bytes for item in files[-1]) + size > most:
                files.append([])
            files[-1].append(_Item(leaves[path].owner, source, number, saved_dtype, size))
    return files


def _values(file: Sequence[_Item], is_chief: bool) -> Iterator[tuple[str, Any]]:
    """The names and values of a file. Workers that do not write take part in gathering them."""
    last, whole = None, None
    for item in file:
        if item.value is not last:
            last, whole = item.value, _gathered_value(item.value)
            whole = _on_host(whole) if is_chief else None
        if whole is not None:
            part = whole[item.number] if item.source.is_stacked else whole
            part = part.transpose(item.source.in_file(range(part.ndim)))
            yield item.name, np.asarray(part, item.dtype, order="C")


def _gathered_value(value: Any) -> Any:
    """The whole value, as this worker can read it."""
    if isinstance(value, Variable):
        return local_array(value.value)
    return gathered(value) if isinstance(value, jax.Array) else value


def _on_host(value: Any) -> np.ndarray[Any, Any]:
    """Copy an array to the host, without the copy that JAX keeps with an array."""
    if not isinstance(value, jax.Array):
        return np.asarray(value)
    if value.is_fully_replicated:
        return np.asarray(value.addressable_data(0))
    whole = np.empty(value.shape, value.dtype)
    for number, shard in enumerate(value.addressable_shards):
        whole[shard.index] = np.asarray(value.addressable_data(number))
    return whole


class _Writer:
    """Writes the files of a checkpoint, and gives them their names at the end."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._parts: list[tuple[pathlib.Path, list[str], int]] = []
        self._made: list[pathlib.Path] = []

    def prepare(self) -> None:
        """Make the folder; raise if there are weights in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        there = [*self._folder.glob("model*.safetensors"), *self._folder.glob(INDEX)]
        if there:
            raise FileExistsError(f"{there[0]} is there already: save to another folder, or remove its weights first")

    def write(self, data: Mapping[str, Any]) -> None:
        """Write one file, under a name of its own."""
        from safetensors.numpy import save_file

        part = self._folder / f"{SINGLE}.part{len(self._parts)}"
        self._made.append(part)
        self._parts.append((part, list(data), sum(value.nbytes for value in data.values())))
        save_file(dict(data), part, metadata={"format": "pt"})
        flush(str(part))

    def finish(self) -> None:
        """Give the files their names, after all has been written."""
        count, places, names = len(self._parts), dict[str, str](), dict[pathlib.Path, str]()
        for number, (part, tensors, _) in enumerate(self._parts, 1):
            names[part] = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            places |= dict.fromkeys(tensors, names[part])
        if count > 1:
            index = {"metadata": {"total_size": sum(size for *_, size in self._parts)}, "weight_map": places}
            part = self._folder / f"{INDEX}.part"
            self._made.append(part)
            part.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            flush(str(part))
            names[part] = INDEX
        for part, name in names.items():
            self._made.append(part.replace(self._folder / name))

    def undo(self) -> None:
        """Remove what has been written."""
        for file in self._made:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
