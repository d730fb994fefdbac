"""The form of the corpus's programs: a whole program beside its plain form, which has no strategy.

A program is written as its user would: it makes its model, trains or infers for a few steps, and returns what it has
found. It calls Replicax as the documents teach it, and otherwise only JAX and the libraries around it. Its plain form
does the same on one device, on the whole of the data. The other files hold the programs, a subject each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import replicax

WAYS = ("2", "executor", "1", "4")
"""How a program is run: compiled on so many replicas, or on two replicas by the per-replica executor."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One program.

    Attributes:
      run: the program for a strategy; it returns a pytree of arrays.
      plain: the program without a strategy, with the same results.
      rtol: by how much the results may differ, relative to the larger one of 1 and their size.
      quick: which of :data:`WAYS` ``make test`` takes; ``make soak`` takes all.
      fails: why it is known to fail, for the ways that do.
    """

    run: Callable[[replicax.Strategy], Any]
    plain: Callable[[], Any]
    rtol: float
    quick: tuple[str, ...]
    fails: dict[str, str]

    @property
    def name(self) -> str:
        return self.run.__name__


PROGRAMS: list[Program] = []


def program(
    plain: Callable[[], Any],
    *,
    rtol: float = 1e-5,
    quick: tuple[str, ...] = (),
    fails: dict[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a program beside its plain form; see :class:`Program`."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        assert all(p.name != run.__name__ for p in PROGRAMS), run.__name__
        PROGRAMS.append(Program(run, functools.cache(plain), rtol, quick, fails or {}))
        return run

    return register


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Data that are normally distributed."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Integers from 0 to ``high``, exclusive."""
    return np.random.default_rng(seed).integers(0, high, size=shape, dtype=np.int32)


def whole(strategy: replicax.Strategy, *arrays: Any) -> Iterator[Any]:
    """The arrays as a single batch, divided over the replicas."""
    return iter(strategy.distribute_dataset([arrays]))
