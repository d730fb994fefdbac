"""Loading: tensors go straight onto the devices.

Each worker reads only the blocks of a tensor that its own devices hold, one array after the other. So its host never
has more than about one tensor beside what it keeps.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from replicax.argument_checks import checked_path
from replicax.checkpoint.checkpoint import lockstep_of
from replicax.checkpoint.device_blocks import LARGE
from replicax.checkpoint.matching import listed
from replicax.checkpoint.storage.blocks import Block
from replicax.devices.mesh import is_here
from replicax.errors import CheckpointError
from replicax.execution.tracing.stateful_arguments import updated
from replicax.models.safetensors.arrays import check_call, leaves_of, sources_of
from replicax.models.safetensors.names import Names, TensorSource, matches
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax.models.safetensors.files import Tensor

Tree = TypeVar("Tree")
_MOST_LINES = 10


def load(
    path: str | os.PathLike[str], into: Tree, names: Names = None, *, ignore: Sequence[str] = (), cast: bool = False
) -> Tree:
    """Read weights into variables and arrays, as they lie on the devices.

    Everything is checked before anything changes: names, shapes, dtypes, whether the files are whole, and whether GPUs
    and TPUs have room.

    Args:
      path: a folder with ``model.safetensors``, or with several files and ``model.safetensors.index.json``; or a file.
      into: a pytree of variables and arrays, such as a state of Flax NNX. Variables, and objects and variables of NNX,
        get their values in place. For an array, or a ``jax.ShapeDtypeStruct``, the result has a new one with its
        sharding.
      names: the tensor of each path in ``into``: a dict, or a function of the path, which returns ``None`` for what is
        to stay as it is. A path is like ``layers/0/query/kernel``. In a dict ``{}`` stands for a part of a path, in
        the paths and in the names: ``{"layers/{}/up/kernel": Transposed("model.layers.{}.mlp.up_proj.weight")}``.
        If a name has one ``{}`` more than its path, the tensors of all numbers are stacked along dim 0. Without
        ``names`` a tensor is called like its path, with dots.
      ignore: names in the files, possibly with ``{}``, that are to be left out.
      cast: whether to convert numbers of another float dtype.

    Returns:
      ``into``, with new arrays in it.

    Raises:
      TypeError: ``path`` is not a path.
      FileNotFoundError: no such file, or the index names one that is not there.
      CheckpointError: a file is truncated or damaged, or can't be read to its end.
      MemoryError: a device has no room for an array; nothing was loaded.
      ValueError: what is in the files does not fit; lists missing and unexpected names, and other shapes and dtypes. Or
        two values have one path.
      ContextError: called inside a step.
      ImportError: the package safetensors is not installed.

    >>> import tempfile, numpy as np, replicax
    >>> from replicax.models import safetensors
    >>> folder = tempfile.mkdtemp()
    >>> safetensors.save(folder, {"model.fc.weight": np.arange(6.0, dtype=np.float32).reshape(2, 3)}, lambda path: path)
    >>> with replicax.ShardedStrategy(["cpu:0", "cpu:1"]).scope():
    ...     params = replicax.as_variables({"fc": {"kernel": np.zeros((3, 2), np.float32)}})
    >>> _ = safetensors.load(folder, params, {"fc/kernel": safetensors.Transposed("model.fc.weight")})
    >>> params["fc"]["kernel"].numpy().tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    check_call("load")
    path = checked_path(path, "safetensors.load(path)")
    from replicax.models.safetensors import files

    leaves, leaves_by_path, rebuilt = leaves_of(into)
    lockstep = lockstep_of(leaves)
    with lockstep.failing_together("loading weights"):
        tensors = files.tensors_at(pathlib.Path(path))
        sources = sources_of(leaves_by_path, names)
        _check_fits(path, leaves_by_path, sources, tensors, ignore, cast)
        _check_room(path, leaves_by_path, sources, tensors)
        lockstep.exchange("loads weights", None, path)
        values: dict[str, Any] = {}
        for at, source in sources.items():
            dtype = leaves_by_path[at].kind.numpy_dtype

            def read(block: Block, source: TensorSource = source, dtype: Any = dtype) -> np.ndarray[Any, Any]:
                return files.read_block(tensors, source, block, dtype)

            try:
                value = values[at] = leaves_by_path[at].restored(read)
                # Then the host's copy is free.
                jax.block_until_ready(value.stored() if isinstance(value, Variable) else value)
            except (OSError, ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:  # mmap's
                tensor = tensors[source.names[0]]
                raise CheckpointError(
                    f"reading {tensor.file} was broken off at {at} ({tensor.name}): {error}; variables before it are "
                    "loaded"
                ) from error
        lockstep.exchange("has loaded weights", None, path)
    return updated(into, rebuilt(values))


def _check_fits(
    path: Any,
    leaves: Mapping[str, Any],
    sources: Mapping[str, TensorSource],
    tensors: Mapping[str, Tensor],
    ignore: Sequence[str],
    cast: bool,
) -> None:
    """Raise unless each array has its tensors, of its shape and dtype, and each tensor its array."""
    missing, different, used = [], [], set[str]()
    for at, source in sources.items():
        kind = leaves[at].kind
        shape = kind.shape[1:] if source.is_stacked else kind.shape
        for name in source.names:
            used.add(name)
            if name not in tensors:
                missing.append(f"{name}, for {at}")
            elif problem := _difference(tensors[name], source, shape, kind.dtype, cast):
                different.append(f"{at}, {kind}: {name} in {tensors[name].file.name} is {problem}")
    left = [name for name in tensors if name not in used and not any(matches(text, name) for text in ignore)]
    extra = [f"{name} in {tensors[name].file.name}" for name in left if name not in ignore]
    if missing or extra or different:
        lines = [
            *listed("in the files there is no", missing, _MOST_LINES),
            *listed("the files also have", extra, _MOST_LINES),
            *listed("they differ in", different, _MOST_LINES),
        ]
        hint = (
            "\nTo leave tensors out: ignore=[…], to leave arrays as they are: None in names."
            if extra or missing
            else ""
        )
        raise ValueError(f"the weights in {path} do not fit; nothing was loaded:\n" + "\n".join(lines) + hint)


def _difference(tensor: Tensor, source: TensorSource, shape: tuple[int, ...], dtype: str, cast: bool) -> str | None:
    in_file = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    if len(tensor.shape) != len(shape) or source.here(tensor.shape) != shape:
        turned = tensor.shape[::-1] == shape or tensor.shape == shape
        return in_file + (" (Transposed(name) or a plain name: the other one fits)" if turned else "")
    both_float = all(name.startswith(("float", "bfloat")) for name in (dtype, tensor.dtype))
    if tensor.dtype == dtype or (cast and both_float):
        return None
    return in_file + (" (cast=True converts it)" if both_float else "")


def _check_room(
    path: Any, leaves: Mapping[str, Any], sources: Mapping[str, TensorSource], tensors: Mapping[str, Tensor]
) -> None:
    """Raise unless each device that tells how much memory it has is able to take its parts of all arrays.

    New arrays are there together. A variable's new value is beside its old one while it is loaded, unless that is
    large: then the old one is freed first.
    """
    free: dict[Any, int | None] = {}
    taken = Counter[Any]()
    for at, source in sources.items():
        owner, kind = leaves[at].owner, leaves[at].kind
        if isinstance(owner, np.ndarray | np.generic):
            continue
        is_variable = isinstance(owner, Variable)
        shape = owner.layout.stored_shape(owner.shape) if is_variable else owner.shape
        sharding = owner.sharding or SingleDeviceSharding(jax.local_devices()[0])
        size = math.prod(sharding.shard_shape(shape)) * kind.numpy_dtype.itemsize
        for device in filter(is_here, sharding.device_set):
            if device not in free:
                free[device] = _free(device)
            left, needed = free[device], taken[device] + (0 if is_variable and size > LARGE else size)
            if left is not None and needed > left:
                tensor = tensors[source.names[0]]
                raise MemoryError(
                    f"{device} has {left:,} bytes free, and the weights in {path} need {needed:,} there, up to {at}, "
                    f"{kind} ({tensor.name} in {tensor.file.name}); nothing was loaded. Split the arrays over more "
                    "devices, or free others first"
                )
            if not is_variable:
                taken[device] = needed


def _free(device: Any) -> int | None:
    """The bytes that a device has left; ``None`` if it does not tell."""
    stats = _stats(device)
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    return None if limit is None or used is None else int(limit) - int(used)


def _stats(device: Any) -> Mapping[str, int]:
    return device.memory_stats() or {}
