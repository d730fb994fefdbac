"""Keys of single operations and of programs: equal for what computes the same, whenever JAX has traced it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from replicax._jax.jaxprs.keys import Hashed, Keys
from replicax._jax.jaxprs.types import ClosedJaxpr, Equation, Jaxpr, Primitive


class _OperationKeys(Keys):
    """Keys of parameters: as JAX compares them, except for programs; a program with constants has no key."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: weakref.WeakKeyDictionary[Any, Hashed] = weakref.WeakKeyDictionary()

    def of_program(self, program: Any) -> Hashed:
        if program not in self._programs:
            self._programs[program] = Hashed(super().of_program(program))
        return self._programs[program]

    def of_params(self, equation: Equation) -> Any:
        return self.of_each(equation.params)

    def of_each(self, params: dict[str, Any]) -> Any:
        is_program = (Jaxpr, ClosedJaxpr)
        return tuple((name, self.of_program(p) if isinstance(p, is_program) else p) for name, p in params.items())

    def of_array(self, array: Any) -> Any:
        raise TypeError("a program with constants has no key")


_keys = _OperationKeys()


def operation_key(
    primitive: Primitive, params: dict[str, Any], avals: Sequence[Any], any_power: bool = False
) -> Hashable | None:
    """A key that is equal for equal operations on operands of equal kinds; ``None`` if there is none."""
    try:
        key = (primitive, any_power, *_keys.of_each(params), *avals)
        hash(key)
    except TypeError:
        return None
    return key


def program_key(program: ClosedJaxpr) -> Hashable | None:
    """A key that is equal for equal programs; ``None`` if there is none."""
    try:
        return "program", _keys.of_program(program)
    except TypeError:
        return None
