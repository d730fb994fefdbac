"""Names: of files, and which tensors make up which array of a model."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The name of a tensor whose dims have another order in the file.

    Args:
      name: the name of the tensor.
      axes: for each dim here the dim of the file, as in ``np.transpose(tensor, axes)``; by default they are reversed.
        Linear layers of PyTorch have ``[out, in]``, which is reversed, and its convolutions ``[out, in, height,
        width]``, which Flax has with the axes ``(2, 3, 1, 0)``.

    >>> from replicax.models.safetensors import Transposed
    >>> {"layers/{}/up/kernel": Transposed("model.layers.{}.mlp.up_proj.weight")}
    {'layers/{}/up/kernel': Transposed(name='model.layers.{}.mlp.up_proj.weight', axes=None)}
    """

    name: str
    axes: tuple[int, ...] | None = None


Name = str | Transposed | None
Names = Mapping[str, Name] | Callable[[str], Name] | None


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """The tensors that make up an array."""

    names: tuple[str, ...]  # the names of the tensors; one, if they are not stacked
    axes: tuple[int, ...]  # for each dim of a tensor, as it is here, the dim that it is in the file
    is_stacked: bool  # whether dim 0 of the array numbers the tensors

    def here(self, of_file: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor here, from that in the file."""
        return tuple(of_file[axis] for axis in self.axes)

    def in_file(self, dims: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``dims``, one entry for each dim of a tensor here, in the order of the file."""
        return tuple(dims[self.axes.index(axis)] for axis in range(len(dims)))


def source_of(path: str, shape: Sequence[int], names: Names) -> TensorSource | None:
    """The source of the array at ``path``; ``None`` if ``names`` leaves it out."""
    if names is None:
        named: Any = path.replace("/", ".")
    elif isinstance(names, Mapping):
        named = _name_of(path, names)
    else:
        named = names(path)
    if named is None:
        return None
    name, axes = (named.name, named.axes) if isinstance(named, Transposed) else (named, None)
    if not isinstance(name, str):
        raise TypeError(f"names: for {path} it gives {named!r}; expected a name, Transposed(name) or None")
    is_stacked = "{}" in name
    if name.count("{}") > 1:
        raise ValueError(
            f"names: {path} is called {name!r}, but only one {{}} can stand for the numbers of stacked tensors, along "
            "its dim 0. Give the other numbers: names may be a function of the path"
        )
    dims = len(shape) - is_stacked
    if isinstance(named, Transposed):
        axes = tuple(reversed(range(dims))) if axes is None else tuple(axes)
    else:
        axes = tuple(range(dims))
    if dims < 0 or sorted(axes) != list(range(dims)):
        raise ValueError(f"names: {named!r} does not fit {path}, whose shape is {tuple(shape)}")
    numbers = range(shape[0]) if is_stacked else (0,)
    return TensorSource(tuple(name.replace("{}", str(number), 1) for number in numbers), axes, is_stacked)


def _name_of(path: str, names: Mapping[str, Name]) -> Name:
    """The name of the tensor, from a dict, with the parts of the path in it."""
    if path in names:
        return names[path]
    for pattern, name in names.items():
        parts = matches(pattern, path)
        if parts is None:
            continue
        for part in parts:
            if isinstance(name, str):
                name = name.replace("{}", part, 1)
            elif name is not None:
                name = dataclasses.replace(name, name=name.name.replace("{}", part, 1))
        return name
    near = difflib.get_close_matches(path, names, 1, 0.6)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"names has no entry for {path}{hint}; None leaves it as it is")


def matches(pattern: str, text: str) -> tuple[str, ...] | None:
    """The parts of ``text`` that the ``{}`` of ``pattern`` stand for; ``None`` if it is not like the pattern.

    >>> matches("h.{}.attn.bias", "h.11.attn.bias")
    ('11',)
    """
    found = _expression(pattern).fullmatch(text)
    return None if found is None else found.groups()


@functools.lru_cache(maxsize=1000)
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("([^/.]+)".join(map(re.escape, pattern.split("{}"))))
