"""Codec: encodes objects for other workers, in a format that can't run code.

Anyone who reaches the port of the coordination service can read and write what is in it. So nothing that comes
from there is unpickled. Bytes become what is named here, and nothing else: plain Python objects, arrays, dtypes, keys,
and instances of the few classes that have been :func:`declared`, field by field. An error becomes one of Python's or of
Replicax's own classes, or a :class:`replicax.errors.WorkerError` with the text of the original.

The format is a header in JSON, in which everything but numbers, strings and bools is a list with a tag, and after it
the bytes of the arrays, one after the other.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import json
import struct
import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax import errors
from replicax.devices.arrays import local_array

_LENGTH = struct.Struct("<q")
_Class = TypeVar("_Class", bound=type)
_classes: dict[str, type] = {}


def declared(cls: _Class) -> _Class:
    """Let instances of a dataclass or an enum be sent; a decorator. Both sides look the class up by its name."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if not (dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum)):
        raise TypeError(f"{name} is neither a dataclass nor an enum")
    _classes[name] = cls
    return cls


def dumps(item: Any) -> bytes:
    """``item`` as bytes; see :func:`loads`; raises a TypeError that names the class of an object that can't be sent."""
    buffers: list[bytes] = []
    header = json.dumps(_encoded_item(item, buffers), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *buffers])


def loads(data: bytes) -> Any:
    """Restore what :func:`dumps` was given, with arrays on this worker's default device.

    Raises:
      ValueError: the bytes are not such a message; says what is wrong.

    >>> loads(dumps({"x": (jnp.ones(2, jnp.bfloat16), None)}))
    {'x': (Array([1, 1], dtype=bfloat16), None)}
    """
    try:
        [length] = _LENGTH.unpack_from(data)
        start = _LENGTH.size
        return _decoded_node(json.loads(data[start : start + length]), memoryview(data)[start + length :])
    except (struct.error, TypeError, KeyError, IndexError, ValueError, RecursionError) as error:
        raise ValueError(f"this is not a message of a worker: {error}") from error


def _encoded_item(item: Any, buffers: list[bytes]) -> Any:
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, *(_encoded_item(x, buffers) for x in item)]
    if kind is dict:
        return ["dict", *(_encoded_item(x, buffers) for pair in item.items() for x in pair)]
    if kind is collections.OrderedDict:
        return ["ordered", _encoded_item(dict(item), buffers)]
    if kind is bytes:
        return ["bytes", *_kept_at(item, buffers)]
    if isinstance(item, jax.Array):
        if jnp.issubdtype(item.dtype, jax.dtypes.prng_key):
            return [
                "key",
                str(jax.random.key_impl(item)),
                _encoded_item(np.asarray(jax.random.key_data(item)), buffers),
            ]
        return ["jax", _encoded_item(np.asarray(local_array(item)), buffers)]
    if kind is np.ndarray and _has_a_name(item.dtype):
        name = item.dtype.name
        return ["array", name, list(item.shape), *_kept_at(np.asarray(item, name).tobytes(), buffers)]
    if isinstance(item, np.generic) and _has_a_name(item.dtype):
        return ["scalar", _encoded_item(np.asarray(item), buffers)]
    if isinstance(item, np.dtype):
        return ["dtype", item.name]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _classes:
        if isinstance(item, enum.Enum):
            return ["enum", name, item.name]
        fields = (getattr(item, field.name) for field in dataclasses.fields(item))
        return ["object", name, *(_encoded_item(x, buffers) for x in fields)]
    if isinstance(item, tuple) and _named_tuple(kind.__module__, kind.__qualname__) is kind:
        return ["named", kind.__module__, kind.__qualname__, *(_encoded_item(x, buffers) for x in item)]
    raise TypeError(f"an object of the class {name} can't be told to other workers: {item!r}")


def _kept_at(data: bytes, buffers: list[bytes]) -> tuple[int, int]:
    """Return where ``data`` begins among the buffers, and its length."""
    start = sum(map(len, buffers))
    buffers.append(data)
    return start, len(data)


def _decoded_node(node: Any, buffers: memoryview) -> Any:
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](_decoded_node(x, buffers) for x in rest)
    if tag == "dict":
        items = [_decoded_node(x, buffers) for x in rest]
        return dict(zip(items[::2], items[1::2], strict=True))
    if tag == "ordered":
        return collections.OrderedDict(_decoded_node(rest[0], buffers))
    if tag == "named":
        cls = _named_tuple(*rest[:2])
        if cls is None or len(cls._fields) != len(rest) - 2:
            raise ValueError(f"there is no named tuple {rest[0]}.{rest[1]} here")
        return tuple.__new__(cls, [_decoded_node(x, buffers) for x in rest[2:]])
    if tag == "bytes":
        start, length = rest
        return bytes(_part(start, length, buffers))
    if tag == "array":
        name, shape, start, length = rest
        return np.frombuffer(_part(start, length, buffers), np.dtype(name)).reshape(shape).copy()
    if tag == "scalar":
        return _decoded_node(rest[0], buffers)[()]
    if tag == "jax":
        return jnp.asarray(_decoded_node(rest[0], buffers))
    if tag == "key":
        return jax.random.wrap_key_data(jnp.asarray(_decoded_node(rest[1], buffers)), impl=rest[0])
    if tag == "dtype":
        return np.dtype(rest[0])
    if tag == "enum":
        return _classes[rest[0]][rest[1]]  # type: ignore[index]
    if tag == "object":
        return _classes[rest[0]](*(_decoded_node(x, buffers) for x in rest[1:]))
    raise ValueError(f"unknown tag {tag!r}")


_CONTAINERS: dict[Any, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _named_tuple(module: str, qualname: str) -> Any:
    """The class of named tuples of this name in a module that has been imported; ``None`` if there is none."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    is_one = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    return found if is_one else None


def _part(start: int, length: int, buffers: memoryview) -> memoryview:
    if not 0 <= start <= start + length <= len(buffers):
        raise ValueError(f"it ends before byte {start + length}")
    return buffers[start : start + length]


def _has_a_name(dtype: np.dtype[Any]) -> bool:
    """Return whether the name of a dtype says all of it but the byte order, as of numbers."""
    return not dtype.hasobject and dtype.newbyteorder("=") == dtype.name


# --- errors ---------------------------------------------------------------------------------------------


def error_as_data(error: BaseException) -> tuple[str, str, bytes | None]:
    """The class of an error and its text; and its arguments, if another worker can rebuild the error from them."""
    name, text = type(error).__name__, f"{type(error).__name__}: {error}".rstrip(": ")
    if not isinstance(error, Exception) or _class_of_errors(name) is not type(error):
        return name, text, None
    try:
        arguments = dumps(error.__reduce__()[1])  # `args`, and the file of an OSError
        again = error_from_data(name, text, arguments)
    except TypeError:
        return name, text, None
    return name, text, arguments if str(again) == str(error) else None


def error_from_data(name: str, text: str, arguments: bytes | None) -> Exception:
    """The error that :func:`error_as_data` was given, or a ``WorkerError`` with its text if it can't be made."""
    cls = _class_of_errors(name)
    if cls is None or arguments is None:
        return errors.WorkerError(text)
    try:
        return cls(*loads(arguments))
    except (TypeError, ValueError):
        return errors.WorkerError(text)


def _class_of_errors(name: str) -> type[Exception] | None:
    cls = getattr(builtins, name, None) or getattr(errors, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, Exception) else None
