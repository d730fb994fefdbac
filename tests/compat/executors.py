"""Both executors, for tests that hold on each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import replicax
from replicax.compat import v1
from tests.soaking import soaked

Executor = Callable[[], contextlib.AbstractContextManager[Any]]

always_on_both = pytest.mark.parametrize(
    "executor", [contextlib.nullcontext, replicax.debug], ids=["compiled", "per_replica"]
)
on_both = pytest.mark.parametrize(
    "executor", [contextlib.nullcontext, soaked(replicax.debug)], ids=["compiled", "per_replica"]
)
"""``make test`` runs these compiled: the package translates names and arguments, and executors do the rest."""


def two_towers() -> v1.MirroredStrategy:
    return v1.MirroredStrategy(["/device:CPU:0", "/device:CPU:1"])


@contextlib.contextmanager
def entered(distribution: v1.DistributionStrategy, executor: Executor) -> Iterator[v1.DistributionStrategy]:
    """The strategy's scope, on one of the executors."""
    with executor(), distribution.scope():
        yield distribution


def numbers(distribution: v1.DistributionStrategy, value: Any) -> list[float]:
    """The components of a value, of scalars or of arrays of one element."""
    return [float(x.reshape(())) if hasattr(x, "reshape") else float(x) for x in distribution.unwrap(value)]
