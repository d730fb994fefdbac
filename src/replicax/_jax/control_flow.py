"""Loops and branches taken apart: what their parameters are called differs from version to version."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replicax._jax.types import Jaxpr


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """A ``scan``: its operands are constants, what it carries, and what it goes over, in this order.

    Attributes:
      body: the program of one turn; it takes what the scan takes, and of what it goes over a slice.
      constants: how many operands are constants.
      carried: how many are carried.
      length: how often it runs.
      reverse: whether it goes from the last slice to the first.
      unroll: how many turns of the compiled loop are one.
    """

    body: Jaxpr
    constants: int
    carried: int
    length: int
    reverse: bool
    unroll: int


@dataclasses.dataclass(frozen=True, slots=True)
class While:
    """A ``while``: its operands are constants of the test, constants of the body, and what it carries.

    Attributes:
      test: the program that says whether to go on.
      body: that of one turn.
      test_constants: how many operands are the test's.
      body_constants: how many are the body's.
    """

    test: Jaxpr
    body: Jaxpr
    test_constants: int
    body_constants: int


def scan_of(params: Mapping[str, Any]) -> Scan:
    """The ``scan`` with these parameters."""
    if "ft_in" in params:  # from JAX 0.11 on
        constants, carried, _ = map(len, params["ft_in"].unpack())
    else:
        constants, carried = params["num_consts"], params["num_carry"]
    body = open_jaxpr(params["jaxpr"])
    return Scan(body, constants, carried, int(params["length"]), params["reverse"], params["unroll"])


def while_of(params: Mapping[str, Any]) -> While:
    """The ``while`` with these parameters."""
    test, body = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])
    return While(test, body, params["cond_nconsts"], params["body_nconsts"])


def branches_of(params: Mapping[str, Any]) -> Sequence[Jaxpr]:
    """The branches of a ``cond``, which takes the number of one of them and then their operands."""
    return [open_jaxpr(branch) for branch in params["branches"]]


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """A jaxpr without the constants that may be closed over it."""
    inner: Jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return inner
