"""Acting like an array: operators, conversions and array methods, which call ``read_value``."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax
from replicax.name_hints import NameHints, missing
from replicax.pytrees import Opaque

if TYPE_CHECKING:
    from jax import Array as _Array  # whose operators and methods it has, and functions of JAX take it as one
else:
    _Array = abc.ABC


class ArrayLike(NameHints, Opaque, _Array):
    """An object with a value, which it acts like wherever an array is expected."""

    shape: Any

    @abc.abstractmethod
    def read_value(self) -> jax.Array:
        """The value."""

    __array_priority__ = 100  # NumPy arrays on the left leave operators to us

    def __jax_array__(self) -> Any:
        return self.read_value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:  # type: ignore[override]
        return np.array(self.read_value(), dtype, copy=copy)

    def __getitem__(self, index: Any) -> jax.Array:  # type: ignore[override, unused-ignore]
        return self.read_value()[index]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"{self!r}: elements can't be set in place; assign the whole value: "
            "variable.assign(variable.at[index].set(value)), or rows with scatter_update"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.read_value())

    def __format__(self, spec: str) -> str:
        return format(self.read_value(), spec)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self!r} is a scalar and has no len()")
        return int(self.shape[0])

    if TYPE_CHECKING:
        # JAX declares that these return what they are called on. They return arrays.
        T = mT = real = imag = cast(jax.Array, None)  # type: ignore[assignment, unused-ignore]  # noqa: N815
        _method = cast(Callable[..., jax.Array], None)
        __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _method  # type: ignore[assignment, unused-ignore]
        conj = conjugate = copy = flatten = ravel = repeat = _method  # type: ignore[assignment, unused-ignore]
        reshape = round = squeeze = swapaxes = _method  # type: ignore[assignment, unused-ignore]
        take = transpose = view = _method  # type: ignore[assignment, unused-ignore]
    else:

        def __getattr__(self, name: str) -> Any:
            # Methods and properties of arrays (.sum(), .T, .astype, .at, …) that a variable does not define itself.
            if name.startswith("_"):
                raise AttributeError(name)
            if not hasattr(jax.Array, name):
                otherwise = f"a Variable has no attribute {name!r}, and neither has an array"
                raise missing(self, name, otherwise)
            return getattr(self.read_value(), name)

    __hash__ = object.__hash__


def _forward(name: str) -> Callable[..., Any]:
    @_jax.public_call
    def method(self: ArrayLike, *args: Any) -> Any:
        operands = [a.read_value() if isinstance(a, ArrayLike) else a for a in args]
        return getattr(jnp.asarray(self.read_value()), name)(*operands)

    method.__name__ = name
    return method


def _converted_by(convert: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: ArrayLike) -> Any:
        return convert(self.read_value())

    method.__name__ = f"__{convert.__name__}__"
    return method


def _refuse_in_place(name: str) -> Callable[..., Any]:
    def method(self: ArrayLike, other: Any) -> NoReturn:
        raise TypeError(
            f"{self!r}: in-place operators would rebind the Python name and leave the variable as it was; "
            "use assign, assign_add or assign_sub"
        )

    method.__name__ = name
    return method


_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
_OTHERS = ["neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "divmod", "rdivmod", "round"]
for _name in _BINARY:
    setattr(ArrayLike, f"__{_name}__", _forward(f"__{_name}__"))
    setattr(ArrayLike, f"__r{_name}__", _forward(f"__r{_name}__"))
    setattr(ArrayLike, f"__i{_name}__", _refuse_in_place(f"__i{_name}__"))
for _name in _OTHERS:
    setattr(ArrayLike, f"__{_name}__", _forward(f"__{_name}__"))
for _convert in (bool, int, float, complex, operator.index):
    setattr(ArrayLike, f"__{_convert.__name__}__", _converted_by(_convert))
