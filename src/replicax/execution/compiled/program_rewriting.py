"""Rewriting: a pass that replaces some operations of a traced program, also inside loops, branches and calls.

It comes last before the compilation, so the passes before it need not know of it. All rules are applied in one pass.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax import _jax
from replicax._jax.primitive_families import SHARD_MAPS


class Rule(abc.ABC):
    """Replaces some operations by others."""

    @abc.abstractmethod
    def is_ours(self, equation: _jax.Equation) -> bool:
        """Whether the rule replaces an operation."""

    @abc.abstractmethod
    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        """The results of an operation that it replaces. The pass does not rewrite these again by itself."""


class Rewriting:
    """The pass over a program, and those inside it. The first rule whose ``is_ours`` is true replaces an operation."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._concerned: dict[int, tuple[Any, bool]] = {}
        self._rewritten: dict[int, tuple[Any, Any]] = {}

    def applied_to(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` with its operations replaced, as part of whatever traces it."""

        def call(*args: Any) -> Any:
            flat, tree = jax.tree_util.tree_flatten(args)
            program, shape = jax.make_jaxpr(lambda *xs: fn(*jax.tree_util.tree_unflatten(tree, xs)), return_shape=True)(
                *flat
            )
            results = _jax.called(self.rewritten(program.jaxpr), [*program.consts, *flat])
            return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), results)

        return call

    def rewritten(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        """``jaxpr``, with its constants among its inputs."""
        opened = _jax.opened(jaxpr)
        return _jax.spliced(opened, self._replacement) if self.concerns(jaxpr) else opened

    def run(self, jaxpr: _jax.Jaxpr, values: Sequence[Any]) -> list[Any]:
        """The results of a program without constants, as part of what is being traced now."""
        return _jax.interpret(jaxpr, values, self._equation)

    def concerns(self, jaxpr: _jax.Jaxpr) -> bool:
        """Whether there is anything to rewrite."""
        concerned = self._concerned.get(id(jaxpr))
        if concerned is None:
            concerned = self._concerned[id(jaxpr)] = jaxpr, any(map(self._concerns, jaxpr.eqns))
        return concerned[1]

    def _concerns(self, equation: _jax.Equation) -> bool:
        return self._rule_for(equation) is not None or self._concerns_programs_of(equation)

    def _concerns_programs_of(self, equation: _jax.Equation) -> bool:
        return equation.primitive.name not in SHARD_MAPS and any(map(self.concerns, _jax.sub_jaxprs(equation)))

    def _rule_for(self, equation: _jax.Equation) -> Rule | None:
        return next((rule for rule in self._rules if rule.is_ours(equation)), None)

    def _replacement(self, equation: _jax.Equation) -> Callable[..., list[Any]] | None:
        """A function to take the place of an operation; ``None`` if it stays, as all with mutable arrays do."""
        if not self._concerns(equation) or any(map(_jax.is_mutable, equation.invars)):
            return None
        return lambda *operands: self._equation(equation, list(operands))

    def after(
        self, rule: Rule, equation: _jax.Equation, operands: list[Any], otherwise: Callable[..., Any] = _jax.bind
    ) -> list[Any]:
        """The results of an operation, by a rule after ``rule`` if one replaces it, or else by ``otherwise``."""
        later = self._rules[self._rules.index(rule) + 1 :]
        chosen = next((other for other in later if other.is_ours(equation)), None)
        return otherwise(equation, operands) if chosen is None else chosen.replaced(equation, operands, self)

    def _equation(self, equation: _jax.Equation, operands: list[Any]) -> list[Any]:
        if (rule := self._rule_for(equation)) is not None:
            return rule.replaced(equation, operands, self)
        if not self._concerns_programs_of(equation):
            return _jax.bind(equation, operands)
        called = _jax.called_program(equation)
        if called is not None and _jax.has_rules(equation):  # has been differentiated
            return self.run(_jax.opened(called), [*_jax.closed_over(equation, called), *operands])
        return _jax.bind(equation, operands, self._params(equation))

    def _params(self, equation: _jax.Equation) -> dict[str, Any]:
        """Params with programs rewritten. One that is called again is the same object, so JAX lowers it once."""
        rewritten = {}
        for name, value in equation.params.items():
            if id(value) not in self._rewritten:
                new = _jax.map_jaxprs({name: value}, inside(self.rewritten))[name]
                self._rewritten[id(value)] = value, new
            rewritten[name] = self._rewritten[id(value)][1]
        return rewritten


def inside(rewrite: Callable[[_jax.Jaxpr], _jax.Jaxpr]) -> Callable[[_jax.Jaxpr], _jax.Jaxpr]:
    """``rewrite`` for a program inside another, whose constants stay where they are."""

    def rewritten(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        program, n = rewrite(jaxpr), len(jaxpr.constvars)
        return program.replace(constvars=program.invars[:n], invars=program.invars[n:])

    return rewritten
