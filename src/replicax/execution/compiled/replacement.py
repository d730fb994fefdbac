"""Replacement: a last look at what is to be compiled, with other operations in the place of some."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax import _jax
from replicax._jax.primitive_families import SHARD_MAPS


class Replacement(abc.ABC):
    """Goes through a program, and those inside it, as one device runs them."""

    def __init__(self) -> None:
        self._concerned: dict[int, tuple[Any, bool]] = {}

    # --- what a subclass says -----------------------------------------------------------------------------

    @abc.abstractmethod
    def is_ours(self, equation: _jax.Equation) -> bool:
        """Whether something else is to stand in the place of an operation."""

    @abc.abstractmethod
    def instead(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        """Do what stands there; return its results."""

    def enters(self, equation: _jax.Equation) -> bool:
        """Whether to look at the programs inside an operation."""
        return equation.primitive.name not in SHARD_MAPS

    # --- programs -----------------------------------------------------------------------------------------

    def applied(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, of pytrees of arrays, rewritten when it is traced."""

        def call(*args: Any) -> Any:
            flat, tree = jax.tree_util.tree_flatten(args)
            program, shape = jax.make_jaxpr(lambda *xs: fn(*jax.tree_util.tree_unflatten(tree, xs)), return_shape=True)(
                *flat
            )
            results = _jax.evaluate(self.rewritten(program.jaxpr), [*program.consts, *flat])
            return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), results)

        return call

    def rewritten(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        """``jaxpr``, with its constants among its inputs."""
        opened = _jax.opened(jaxpr)
        if not self.concerns(jaxpr) or any(map(_jax.is_mutable, opened.invars)):
            return opened
        return retraced(lambda *values: self.run(opened, values), opened.invars)

    def inside(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        """Do an operation whose programs are rewritten, but for their operands and results."""
        return _jax.bind(equation, operands, _jax.map_jaxprs(equation.params, with_constants(self.rewritten)))

    def run(self, jaxpr: _jax.Jaxpr, values: Sequence[Any]) -> list[Any]:
        """The results of ``jaxpr``."""
        return _jax.interpret(jaxpr, values, self._equation)

    def concerns(self, jaxpr: _jax.Jaxpr) -> bool:
        """Whether there is anything to rewrite."""
        known = self._concerned.get(id(jaxpr))
        if known is None:
            found = any(self.is_ours(e) or self._concerns_inside(e) for e in jaxpr.eqns)
            known = self._concerned[id(jaxpr)] = jaxpr, found
        return known[1]

    def _concerns_inside(self, equation: _jax.Equation) -> bool:
        return self.enters(equation) and any(map(self.concerns, _jax.sub_jaxprs(equation)))

    def _equation(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        if self.is_ours(equation):
            return self.instead(equation, operands)
        if not self._concerns_inside(equation):
            return _jax.bind(equation, operands)
        called = _jax.called_program(equation)
        if called is not None and _jax.has_rules(equation):  # has been differentiated
            return self.run(_jax.opened(called), [*_jax.constants_of(equation), *operands])
        return self.inside(equation, operands)


def with_constants(rewrite: Callable[[_jax.Jaxpr], _jax.Jaxpr]) -> Callable[[_jax.Jaxpr], _jax.Jaxpr]:
    """``rewrite`` for a program inside another, whose constants stay where they are."""

    def rewritten(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        program, n = rewrite(jaxpr), len(jaxpr.constvars)
        return program.replace(constvars=program.invars[:n], invars=program.invars[n:])

    return rewritten


def retraced(fn: Callable[..., Any], like: Sequence[Any]) -> _jax.Jaxpr:
    """The program of ``fn``, of values like these of another program."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in like]
    closed = jax.make_jaxpr(fn)(*avals)
    assert not closed.consts
    return closed.jaxpr
