"""Many small programs in the manner of JAX's own tests: what they are called, and what plain JAX makes of them.

The files ``cases_*.py`` hold them by subject: ``CASES`` of name to the localities that the leaves of the result have,
in order, and the program ``f(x, a)``. ``x`` is ``float32[4]``, of each replica its own, and ``a`` the same for all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import (
    cases_autodiff,
    cases_batching,
    cases_collectives,
    cases_control_flow,
    cases_custom_rules,
    cases_operations,
)

REPLICAS = 2
X = np.array([[0.5, -1.25, 2.0, 0.75], [-0.75, 1.5, 0.25, -2.0]], np.float32)
A = np.array([0.3, -0.6, 0.9, 1.2], np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program."""

    subject: str
    name: str
    localities: str
    fn: Callable[[Any, Any], Any]

    @property
    def meets(self) -> bool:
        """Whether its replicas meet in collectives of ``jax.lax``."""
        return self.subject == "collectives"


SUBJECTS = {
    "control flow": cases_control_flow,
    "custom rules": cases_custom_rules,
    "batching": cases_batching,
    "autodiff": cases_autodiff,
    "operations": cases_operations,
    "collectives": cases_collectives,
}
CASES = [
    Case(subject, name, localities, fn)
    for subject, module in SUBJECTS.items()
    for name, (localities, fn) in module.CASES.items()
]


def together(cases: list[Case]) -> Callable[[Any, Any], dict[str, Any]]:
    """One program of many, so that there is one to compile."""
    return lambda x, a: {case.name: case.fn(x, a) for case in cases}


def bundles(size: int) -> dict[str, list[Case]]:
    """All of them, in bundles of one subject."""
    found = {}
    for subject in SUBJECTS:
        own = [case for case in CASES if case.subject == subject]
        count = math.ceil(len(own) / size)
        for i in range(count):
            found[f"{subject} {i + 1}"] = own[i::count]
    return found


def plainly(cases: list[Case]) -> list[dict[str, Any]]:
    """What plain JAX computes for each replica.

    Where replicas meet, their axis is one that JAX has batched over.
    """
    fn = together(cases)
    if any(case.meets for case in cases):
        stacked = jax.jit(jax.vmap(fn, in_axes=(0, None), axis_name="replica"))(X, A)
        stacked = jax.tree.map(numbers, stacked)
        return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(REPLICAS)]
    jitted = jax.jit(fn)
    return [jitted(x, A) for x in X]


def numbers(leaf: Any) -> np.ndarray[Any, Any]:
    """A result that can be compared."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)
