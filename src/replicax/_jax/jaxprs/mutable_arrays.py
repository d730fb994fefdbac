"""Mutable arrays (``jax.new_ref``) in programs."""

from __future__ import annotations

from typing import Any

from replicax._jax.jaxprs.programs import sub_jaxprs
from replicax._jax.jaxprs.types import Jaxpr, Literal


def check_freed_once(jaxpr: Jaxpr) -> None:
    """Raise if a program frees a mutable array and then uses it.

    Raises:
      ValueError: it does. JAX has a bare ``KeyError`` for it, or no error, if the result is not used.
    """
    freed: set[Any] = set()
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if not isinstance(atom, Literal) and atom in freed:
                use = "freed twice" if equation.primitive.name == "free_ref" else "used after it was freed"
                raise ValueError(
                    f"a mutable array (jax.new_ref) was {use} (jax.free_ref): free it once, when all is done"
                )
        if equation.primitive.name == "free_ref":
            freed.update(equation.invars)
        for inner in sub_jaxprs(equation):
            check_freed_once(inner)


def is_mutable(atom: Any) -> bool:
    """Whether a variable of a program is a mutable array (``jax.new_ref``)."""
    return type(getattr(atom, "aval", None)).__name__ == "AbstractRef"
