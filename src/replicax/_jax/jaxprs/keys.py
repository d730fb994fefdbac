"""Keys: equal for what means the same to a program, whatever objects it is made of.

One walk over Python values and programs makes them all. A subclass of :class:`Keys` says where its job differs:

* ``tracing.function_key``: steps, at each call, by code and captured values; other objects by identity;
* ``pytrees``: attributes of objects that a step has read, when one is another object than before; likewise;
* ``eager.operation_keys``: operations of the per-replica executor; parameters as JAX compares them, as it is quick;
* ``eager.library_functions``: optimizers that consist of parts of libraries; anything else is refused;
* ``ragged.value_numbering``: operations in the programs of ragged replicas; arrays by content;
* :func:`program_digest`: programs on different workers; objects by their text, as identities differ there.

What ``workers.digests`` compares is made otherwise: arrays, and what a program's outputs are computed from, whatever
else it does.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._jax.internals import literals as _literals
from replicax._jax.jaxprs.types import ClosedJaxpr, Equation, Jaxpr, Literal

BY_VALUE = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
CONTAINERS = (tuple, list, dict, set, frozenset)
"""The containers of Python, which consist of their items. Subclasses may have more than items."""

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_ARRAYS = jax.Array | np.ndarray | np.generic | _literals.TypedNdArray


class Hashed:
    """Base of keys that are looked up at each call: keeps the hash, and compares it before the ``parts``.

    Pass first the parts that are quick to compare.
    """

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: Hashable) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(other) is type(self) and self._hash == other._hash and self._parts == other._parts


class ById:
    """Equal to another only if both are of the same living object; holds the object weakly if it can."""

    __slots__ = ("_hash", "_ref", "_strong")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._strong: Any = None
        self._ref: Any = None
        try:
            self._ref = weakref.ref(value)
        except TypeError:
            self._strong = value

    @property
    def value(self) -> Any:
        """The object; ``None`` if it is gone."""
        return self._strong if self._ref is None else self._ref()

    @property
    def is_dead(self) -> bool:
        """Whether the object is gone, so that nothing can equal this any more."""
        return self._ref is not None and self._ref() is None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self._hash == other._hash and self.value is other.value is not None

    def __repr__(self) -> str:
        return "an object that is gone" if self.is_dead else repr(self.value)


class Keys:
    """Makes keys of values and of programs.

    Numbers and strings count by value, containers and frozen dataclasses item by item, functions by their code and what
    they have captured, programs by their operations.
    """

    def __init__(self) -> None:
        self._inside: list[int] = []  # the containers that are being looked at, by id
        self._functions: dict[int, tuple[Any, Hashable]] = {}

    def of(self, value: Any) -> Any:
        """The key of a value."""
        cls: Any = type(value)
        if cls in BY_VALUE:
            return cls, repr(value) if cls in (float, complex) else value  # repr, because 0.0 == -0.0
        if isinstance(value, _FUNCTIONS):
            return self.of_function(value)
        if cls in CONTAINERS:
            items: Any = value.items() if cls is dict else value
        elif is_record(value):
            items = (getattr(value, field.name) for field in dataclasses.fields(value))
        else:
            return self.of_other(value)
        if id(value) in self._inside:
            return "inside itself", self._inside.index(id(value))
        self._inside.append(id(value))
        try:
            if cls is dict:
                return cls, tuple((self.of(k), self.of(v)) for k, v in items)
            return cls, (frozenset if cls in (set, frozenset) else tuple)(map(self.of, items))
        finally:
            self._inside.pop()

    def of_function(self, fn: Any) -> Any:
        """The key of a function, a method or a ``functools.partial``."""
        if isinstance(fn, functools.partial):
            return functools.partial, self.of(fn.func), self.of(fn.args), self.of(fn.keywords)
        if isinstance(fn, types.MethodType):
            return types.MethodType, self.of(fn.__func__), self.of(fn.__self__)
        if id(fn) not in self._functions:
            self._functions[id(fn)] = fn, ("function", len(self._functions))  # it may have captured itself
            cells = tuple(self.of(cell.cell_contents) for cell in fn.__closure__ or () if cell != types.CellType())
            key = fn.__code__, id(fn.__globals__), cells, self.of(fn.__defaults__), self.of(fn.__kwdefaults__)
            self._functions[id(fn)] = fn, key
        return self._functions[id(fn)][1]

    def of_other(self, value: Any) -> Any:
        """The key of any other value: by default the value itself."""
        return value

    def of_program(self, program: Any) -> Any:
        """The key of a program, whose values count by where they come from."""
        jaxpr = getattr(program, "jaxpr", program)
        numbers: dict[Any, int] = {}

        def operand(atom: Any) -> Hashable:
            if isinstance(atom, Literal):
                return self.of_aval(atom.aval), np.asarray(atom.val).tobytes()
            return numbers[atom]

        def new(variables: Sequence[Any]) -> Hashable:
            for variable in variables:
                numbers[variable] = len(numbers)
            return tuple(self.of_aval(variable.aval) for variable in variables)

        constants = tuple(map(self.of_array, getattr(program, "consts", ())))
        inputs = new([*jaxpr.constvars, *jaxpr.invars])
        operations = tuple(
            (e.primitive, self.of_params(e), tuple(map(operand, e.invars)), new(e.outvars)) for e in jaxpr.eqns
        )
        return constants, inputs, operations, tuple(map(operand, jaxpr.outvars))

    def of_params(self, equation: Equation) -> Any:
        """The key of an operation's parameters."""
        return tuple((name, self.of(value)) for name, value in sorted(equation.params.items()))

    def of_aval(self, aval: Any) -> Any:
        """The key of the shape and dtype of a value in a program."""
        return aval

    def of_array(self, array: Any) -> Any:
        """The key of an array that a program has closed over: by default that of any other value."""
        return self.of_other(array)


def is_record(value: Any) -> bool:
    """Return whether ``value`` is of a frozen dataclass, and nothing but its fields."""
    params = getattr(type(value), "__dataclass_params__", None)
    if params is None or not params.frozen or not params.eq:
        return False
    attributes = getattr(value, "__dict__", None)  # there is none where fields are slots
    return attributes is None or attributes.keys() == {f.name for f in dataclasses.fields(value)}


def program_digest(program: ClosedJaxpr) -> bytes:
    """Bytes that are the same in all processes for the same operations on the same numbers, and differ for others.

    Equal programs may still have different digests, as some parameters are known by their text only.
    """
    return digested(repr(_Digests().of_program(program)).encode())


class _Digests(Keys):
    def of_function(self, fn: Any) -> Any:
        return re.sub(r"0x[0-9a-f]+", "", str(fn))  # where an object is in memory

    def of_other(self, value: Any) -> Any:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self.of_program(value)
        return self.of_array(value) if isinstance(value, _ARRAYS) else self.of_function(value)

    def of_aval(self, aval: Any) -> Any:
        return str(aval)

    def of_array(self, array: Any) -> Any:
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        numbers = np.asarray(jax.random.key_data(jnp.asarray(array)) if is_key else array)
        return str(array.dtype), numbers.shape, digested(numbers.tobytes())


def digested(data: bytes) -> bytes:
    """Sixteen bytes that stand for ``data``, the same in all processes."""
    return hashlib.blake2b(data, digest_size=16).digest()
