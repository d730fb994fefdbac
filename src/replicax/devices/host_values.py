"""Values of the host that go to devices: dtypes, integer ranges and copies.

While JAX's 64-bit numbers are off, an int64 array becomes an int32 one on its way to a device, and integers that don't
fit become other numbers: 2**40 becomes 0. So all code that brings values of the host to devices checks them here first.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.argument_checks import check_unmasked, text_of
from replicax.errors import IntegerRangeError, shortened

Where = str | Callable[[], str]
"""The name of a value in a message; or a function that returns it, if that takes time."""


def check_integers(value: Any, where: Where, dtype: Any = None) -> None:
    """Raise an IntegerRangeError if ``value`` has an integer that would become another number in ``dtype``.

    Checks only integers of the host (of NumPy, of Python, and lists of these), and their values only if the other dtype
    lacks numbers of theirs: with JAX's default settings those of int64 and uint64. Without a ``dtype`` it is the one
    that JAX chooses. Floats round, and are not checked.
    """
    if isinstance(value, np.ndarray | np.generic):
        source = value.dtype
        if source.kind not in "iu":
            return
    elif type(value) is int:
        source = None
    else:
        if isinstance(value, list | tuple):
            for leaf in jax.tree_util.tree_leaves(value):
                check_integers(leaf, where, dtype)
        return
    target = jax.dtypes.canonicalize_dtype((source or int) if dtype is None else dtype, allow_extended_dtype=True)
    limits = _limits(source, target)
    if limits is None:
        return
    lowest, highest = limits
    if source is None:
        fits = lowest <= value <= highest
    else:
        fits = not value.size or (value.min() >= lowest and value.max() <= highest)
    if not fits:
        raise IntegerRangeError(_message(value, text_of(where), target, lowest, highest))


@functools.cache
def _limits(source: Any, target: Any) -> tuple[int, int] | None:
    """The first and last integer of ``target``, if ``source`` (``None``: any integer) has a larger range."""
    if not jnp.issubdtype(target, jnp.integer):
        return None
    limits = jnp.iinfo(target)  # type: ignore[no-untyped-call]
    if source is not None:
        given: Any = np.iinfo(source)
        if limits.min <= given.min and given.max <= limits.max:
            return None
    return int(limits.min), int(limits.max)


def own_copy(array: np.ndarray[Any, Any], dtype: Any = None) -> np.ndarray[Any, Any]:
    """A copy for JAX, in memory that no other code writes to.

    JAX takes a NumPy array without a copy: on a CPU a device's array may be that very memory, whatever
    ``jax.device_put`` is asked for, and elsewhere JAX reads it in the background. So code that fills the same array
    again, as many datasets do, would change an array on a device, or the input of a step that has not begun.

    Large copies are aligned so that CPU devices take them without another copy.
    """
    if array.nbytes < _LARGE:
        return array.copy() if dtype is None else array.astype(dtype)
    copy = room_for(array.shape, array.dtype if dtype is None else np.dtype(dtype))
    copy[...] = array
    return copy


def room_for(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array to be filled once, aligned so that CPU devices take it without a copy."""
    if dtype.hasobject:
        return np.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


_LARGE = 1 << 16
"""For copies of at least so many bytes it is faster to align the first one."""
_ALIGNMENT = 64
"""XLA's alignment on CPUs, in bytes."""


def as_array(value: Any, where: Where, dtype: Any = None) -> jax.Array:
    """``jnp.asarray(value, dtype)``, after :func:`check_integers`; copies a NumPy array."""
    check_integers(value, where, dtype)
    if isinstance(value, np.ndarray):
        check_numbers(value, where)
        value = own_copy(value)
    try:
        return jnp.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        check_numbers(value, where)
        error.add_note(f"(raised for {text_of(where)})")
        raise


def strongly_typed(array: jax.Array) -> jax.Array:
    """``array`` with a dtype that does not yield to others, as values have that go from step to step."""
    return lax.convert_element_type(array, array.dtype) if getattr(array, "weak_type", False) else array


def check_numbers(value: Any, where: Where) -> None:
    """Raise a TypeError if ``value`` is not made of numbers, has rows of several lengths, or a mask."""
    if isinstance(value, jax.Array | numbers.Number) or hasattr(value, "__jax_array__"):
        return
    check_unmasked(value, where)
    dtype = np.dtype(object)
    with contextlib.suppress(TypeError, ValueError):  # raised for rows of several lengths
        dtype = np.asarray(value).dtype
    if holds_no_numbers(dtype):
        shown = shortened(repr(value), 200)
        raise TypeError(f"{text_of(where)} is {shown}, and not an array of numbers")


def holds_no_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy arrays of a dtype hold objects, text, times or records. JAX's gradients of integers do not."""
    return dtype.kind in "OSUMm" or (issubclass(dtype.type, np.void) and dtype != jax.dtypes.float0)


def numpy_copy(value: Any, dtype: Any, where: Where) -> np.ndarray[Any, Any] | None:
    """A copy of a NumPy array in JAX's dtype (:func:`own_copy`); ``None`` for any other value. Checks both."""
    check_integers(value, where, dtype)
    if not isinstance(value, np.ndarray):
        return None
    check_numbers(value, where)
    wanted = jax.dtypes.canonicalize_dtype(value.dtype if dtype is None else dtype)
    return None if dtype is not None and wanted != dtype else own_copy(value, wanted)


def numpy_array(value: Any) -> Any:
    """A NumPy scalar or a list of numbers as a NumPy array; any other value unchanged."""
    is_list = isinstance(value, list | tuple) and all(
        isinstance(leaf, np.generic | bool | int | float | complex) for leaf in jax.tree_util.tree_leaves(value)
    )
    return np.array(value) if is_list or isinstance(value, np.generic) else value


def _message(value: Any, where: str, target: Any, lowest: int, highest: int) -> str:
    number, place = value, ""
    if type(value) is not int:
        array = np.asarray(value)
        index = np.argwhere((array < lowest) | (array > highest))[0].tolist()
        number, place = int(array[tuple(index)]), f" at {index}" if index else ""
    cure = "Choose a dtype that has it, or smaller numbers."
    if target.itemsize == 4 and jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        cure = (
            "JAX's 64-bit numbers are off: switch them on before anything else, with "
            "jax.config.update('jax_enable_x64', True), or give such numbers (ids, say) smaller ones instead before "
            "they go to a device."
        )
    return f"{where} has the integer {number}{place}, but {target.name} goes from {lowest} to {highest}. {cure}"


# --- dtypes ---------------------------------------------------------------------------------------------


def is_key(dtype: Any) -> bool:
    """Whether ``dtype`` is a dtype of random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def check_no_keys(array: Any, name: str) -> None:
    """Raise a TypeError if ``array``, of a dataset, holds random keys."""
    if is_key(getattr(array, "dtype", None)):
        raise TypeError(
            f"{name} holds random keys, and datasets take only numbers: put jax.random.key_data(keys) into the "
            "dataset, and make keys of it in the step with jax.random.wrap_key_data. Or pass one key in args, and "
            "draw with this replica's own: replicax.get_replica_context().random_key(key)"
        )


def casts(source: Any, target: Any) -> bool:
    """Whether ``source`` converts to ``target`` within its kind, or to a wider kind."""
    if is_key(source) or is_key(target):
        return bool(source == target)
    order: tuple[Any, ...] = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank = [next(i for i, kind in enumerate(order) if jnp.issubdtype(d, kind)) for d in (source, target)]
    return rank[0] <= rank[1]


def check_x64(dtype: Any, what: Callable[[], str]) -> None:
    """Raise a RuntimeError if the arrays of ``what`` have 64 bits, and JAX's 64-bit numbers are off here."""
    if jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype:
        raise RuntimeError(
            f"{what()} has the dtype {jnp.dtype(dtype).name}, but JAX's 64-bit numbers are off: don't change "
            "jax_enable_x64 while the program runs, or use it inside `with jax.enable_x64(True):`"
        )


def dtype_and_shape(variable: Any) -> str:
    """The dtype and shape in a message: ``float32[2,3]``."""
    name = getattr(variable.dtype, "name", str(variable.dtype))
    return f"{name}[{','.join(map(str, variable.shape))}]"
