"""The types of values in cross-tower context."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from replicax.values import PerReplica
from replicax.variables.variable import Variable


class _Seen(type):
    """The metaclass of names for types of values, which strategies create."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{cls.__name__} values are made by a strategy, not by calling {cls.__name__}")


class _PerDeviceValues(_Seen):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, PerReplica)


class _MirroredValues(_Seen):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, jax.Array) or (isinstance(value, Variable) and not value.is_on_read)


class PerDevice(metaclass=_PerDeviceValues):
    """A value that differs between towers, for ``isinstance``. It is a :class:`replicax.PerReplica`.

    >>> import replicax
    >>> from replicax.compat import v1
    >>> distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with distribution.scope():
    ...     mine = distribution.call_for_each_tower(lambda: v1.get_tower_context().tower_id)
    >>> isinstance(mine, v1.PerDevice), isinstance(mine, v1.Mirrored)
    (True, False)
    """


class Mirrored(metaclass=_MirroredValues):
    """A value that is the same on all towers: an ordinary ``jax.Array``, or a :class:`replicax.Variable`.

    >>> import jax.numpy as jnp
    >>> from replicax.compat import v1
    >>> isinstance(jnp.ones(3), v1.Mirrored)
    True
    """
