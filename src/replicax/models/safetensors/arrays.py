"""The variables and arrays of a pytree, by path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import context
from replicax.checkpoint.array_leaves import kind_of_array
from replicax.checkpoint.device_blocks import assembled
from replicax.checkpoint.leaves import Leaves
from replicax.checkpoint.storage.blocks import Block, whole_block
from replicax.devices.host_values import is_key
from replicax.errors import ContextError
from replicax.models.safetensors.names import Names, TensorSource, source_of
from replicax.pytrees import is_leaf, registered
from replicax.system.packages import check_installed
from replicax.variables import Variable


class _Described:
    """A ``jax.ShapeDtypeStruct`` that an array is made for; like an array in a checkpoint."""

    def __init__(self, described: jax.ShapeDtypeStruct) -> None:
        self.owner, self.kind = described, kind_of_array(described)

    def restored(self, read: Callable[[Block], np.ndarray[Any, Any]]) -> jax.Array:
        if self.owner.sharding is None:
            return jnp.array(read(whole_block(self.kind.shape)))
        return assembled(self.owner.sharding, self.kind.shape, self.kind.numpy_dtype, read)


def leaves_of(tree: Any) -> tuple[Leaves, dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
    """The variables and arrays in a pytree, by path, and a function from new ones to the pytree with them."""
    structure: Any
    flat, structure = jax.tree_util.tree_flatten_with_path(registered(tree), is_leaf=is_leaf)
    boxes = _boxes_in(tree)
    arrays = (Variable, jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    values: list[Any] = [value for _, value in flat]
    places: dict[str, int] = {}
    for i, (path, value) in enumerate(flat):
        if isinstance(value, arrays) and not is_key(value.dtype):
            name = "/".join(_words(path, boxes))
            if places.setdefault(name, i) != i:
                raise ValueError(f"two arrays have the path {name}: rename one, so that the names of tensors differ")
    by_path = {path: values[i] for path, i in places.items()}
    for value in by_path.values():
        if isinstance(value, Variable):
            context.check_present(value.replicas, "replicax.models.safetensors")
    leaves = Leaves({path: value for path, value in by_path.items() if not isinstance(value, jax.ShapeDtypeStruct)})
    described = {path: _Described(v) for path, v in by_path.items() if isinstance(v, jax.ShapeDtypeStruct)}
    leaves_by_path = {**leaves.arrays(), **described}

    def rebuilt(new: Mapping[str, Any]) -> Any:
        news = {i: new[path] for path, i in places.items() if path in new}
        return structure.unflatten([news.get(i, value) for i, value in enumerate(values)])

    return leaves, {path: leaves_by_path[path] for path in by_path}, rebuilt


def _boxes_in(tree: Any) -> set[Any]:
    """The paths of Flax' containers of one ``value``: variables of NNX, and arrays of Linen with names of axes."""
    modules = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))
    kinds = tuple(getattr(sys.modules[module], name) for module, name in modules if module in sys.modules)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: is_leaf(x) or isinstance(x, kinds))
    return {path for path, value in flat if isinstance(value, kinds)}


def _words(path: tuple[Any, ...], boxes: Set[Any]) -> list[str]:
    """The parts of a path. The name ``value`` of what a box has in it is left out."""
    keys = [next(getattr(k, a) for a in ("key", "name", "idx") if hasattr(k, a)) for k in path]
    if len(keys) > 1 and keys[-1] == "value" and path[:-1] in boxes:
        del keys[-1]
    return [str(key) for key in keys]


def sources_of(leaves: Mapping[str, Any], names: Names) -> dict[str, TensorSource]:
    """Return the source of each array that ``names`` does not leave out."""
    sources = {path: source_of(path, leaf.kind.shape, names) for path, leaf in leaves.items()}
    return {path: source for path, source in sources.items() if source is not None}


def check_call(method: str) -> None:
    """Raise inside a step, or if the package safetensors is not installed."""
    if context.in_step():
        raise ContextError(f"safetensors.{method} was called inside a step: call it outside")
    check_installed(f"replicax.models.safetensors.{method}", "safetensors", "safetensors")
