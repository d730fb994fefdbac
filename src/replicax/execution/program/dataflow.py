"""Dataflow: what is known of each value of a program, found in one pass from its inputs on.

A *fact* is, for example, whether replicas may differ in a value. A subclass has the rules for operations: the facts on
the results, given those on the operands. All subclasses follow facts through the programs inside in the same way: they
search the fixpoint of a loop, join the results of branches, and go through a called program in place of its call; a
mutable array (``jax.new_ref``) takes on what is written into it.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from replicax import _jax

Fact = TypeVar("Fact")

Found = tuple[list[Fact], list[Fact]]
"""The facts on the results of an equation or program, and on its operands afterwards."""

Control = str | None
"""The loop or branch around a program, if it matters that it may not run, or not as often; otherwise ``None``."""


class Dataflow(abc.ABC, Generic[Fact]):
    """The pass over one program.

    The search of a fixpoint has ``final=False``. A last pass over its result has ``final=True``; only that pass may
    raise, or answer a question.

    Args:
      constant: the fact on constants, and on numbers written into the program.
      facts_of_values: takes the facts on all values in the program, joined with those that it has already: a value may
        be computed in several places.
    """

    def __init__(self, constant: Fact, facts_of_values: dict[Any, Fact] | None = None) -> None:
        self.constant = constant
        self.facts_of_values = facts_of_values
        # Nested loops would otherwise repeat the search of their inner loops' fixpoints again and again.
        self._searched: dict[Any, Found[Fact]] = {}
        self._inside: list[_jax.Equation] = []
        self._noted: dict[int, tuple[_jax.Equation, ...]] = {}

    def note(self, equation: _jax.Equation) -> int:
        """The number of an operation that the pass is at, for :meth:`place`."""
        self._noted.setdefault(id(equation), tuple(self._inside))
        return id(equation)

    def noted(self, number: int) -> _jax.Equation:
        """The operation with a number of :meth:`note`."""
        return self._noted[number][-1]

    def place(self, number: int) -> tuple[str, int]:
        """The user's file and line of the operation with a number of :meth:`note`."""
        return _jax.source_place(self._noted[number])

    # --- what a subclass defines --------------------------------------------------------------------------

    @abc.abstractmethod
    def join(self, facts: Iterable[Fact]) -> Fact:
        """The fact on what may be any of several values."""

    @abc.abstractmethod
    def operation(self, equation: _jax.Equation, facts: list[Fact], control: Control, final: bool) -> Found[Fact]:
        """The facts on the results of any operation but a loop, branch or call, and on its operands afterwards."""

    def literal(self, literal: _jax.Literal) -> Fact:
        """The fact on a number written into the program."""
        return self.constant

    def decided(self, fact: Fact, decision: Fact) -> Fact:
        """The fact on a result that also depends on a ``decision``: how often a loop runs, or which branch."""
        return fact

    def inside(self, where: str, decision: Fact, control: Control) -> Control:
        """The ``control`` inside a loop or branch (``where``) whose predicate has the fact ``decision``."""
        return control

    def sliced(self, facts: list[Fact]) -> list[Fact]:
        """The facts on an iteration's slices, from those on the operands that a scan slices."""
        return facts

    def stacked(self, facts: list[Fact], over: list[Fact]) -> list[Fact]:
        """The facts on the stacked results of a scan's iterations, which goes ``over`` values of these facts."""
        return facts

    # --- programs -----------------------------------------------------------------------------------------

    def run(self, jaxpr: _jax.Jaxpr, inputs: Sequence[Fact], control: Control = None, *, final: bool) -> Found[Fact]:
        """The facts on the outputs of a program, and on its inputs afterwards."""
        key = (id(jaxpr), tuple(inputs), control is not None)
        if not final and key in self._searched:
            return self._searched[key]
        env: dict[Any, Fact] = dict.fromkeys(jaxpr.constvars, self.constant)
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Fact:
            return self.literal(atom) if isinstance(atom, _jax.Literal) else env[atom]

        for equation in jaxpr.eqns:
            facts = [read(v) for v in equation.invars]
            self._inside.append(equation)
            results, after = self.equation(equation, facts, control, final)
            self._inside.pop()
            if after is not facts:
                for v, fact in zip(equation.invars, after, strict=True):
                    if _jax.is_mutable(v):
                        env[v] = self.join((env[v], fact))
            env.update(zip(equation.outvars, results, strict=True))
        if final and self.facts_of_values is not None:
            for v, fact in env.items():
                self.facts_of_values[v] = self.join((self.facts_of_values.get(v, self.constant), fact))
        self._searched[key] = [read(v) for v in jaxpr.outvars], [env[v] for v in jaxpr.invars]
        return self._searched[key]

    def equation(self, equation: _jax.Equation, facts: list[Fact], control: Control, final: bool) -> Found[Fact]:
        """The facts on an equation's results, and on its operands afterwards."""
        inner = _jax.control_flow_of(equation)
        if inner is None:
            called = _jax.called_program(equation)
            if called is not None:
                return self.run(called, facts, control, final=final)
            return self.operation(equation, facts, control, final)
        if isinstance(inner, _jax.Scan):
            return self._scan(inner, equation, facts, control, final)
        if isinstance(inner, _jax.While):
            return self._while(inner, equation, facts, control, final)
        return self._branches(inner, equation, facts, control, final)

    def _scan(
        self, inner: _jax.Scan, equation: _jax.Equation, facts: list[Fact], control: Control, final: bool
    ) -> Found[Fact]:
        n, m = inner.constants, inner.constants + inner.carried
        while True:
            inputs = [*facts[:m], *self.sliced(facts[m:])]
            results, touched = self.run(inner.body, inputs, control, final=False)
            after = self._written(equation.invars, facts, touched)
            after[n:m] = [self.join(pair) for pair in zip(facts[n:m], results[: m - n], strict=True)]
            if after == facts:
                break
            facts = after
        if final:
            self.run(inner.body, inputs, control, final=True)
        return [*facts[n:m], *self.stacked(results[m - n :], facts[m:])], facts

    def _while(
        self, inner: _jax.While, equation: _jax.Equation, facts: list[Fact], control: Control, final: bool
    ) -> Found[Fact]:
        n, m = inner.test_constants, inner.test_constants + inner.body_constants
        decision = self.constant

        def iteration(final: bool) -> tuple[Fact, list[Fact], list[Fact]]:
            within = self.inside("inside a while loop", decision, control)
            [decided], tested = self.run(inner.test, [*facts[:n], *facts[m:]], within, final=final)
            results, written = self.run(inner.body, facts[n:], within, final=final)
            return decided, results, [*tested[:n], *written]

        while True:
            decided, results, touched = iteration(final=False)
            decision = self.join((decision, decided))
            after = self._written(equation.invars, facts, touched)
            carried = zip(facts[m:], results, strict=True)
            after[m:] = [self.decided(self.join(pair), decision) for pair in carried]
            if after == facts:
                break
            facts = after
        if final:
            iteration(final=True)
        return facts[m:], facts

    def _branches(
        self, inner: _jax.Branches, equation: _jax.Equation, facts: list[Fact], control: Control, final: bool
    ) -> Found[Fact]:
        decision, operands = facts[0], facts[1:]
        within = self.inside("inside a branch (jax.lax.cond or switch)", decision, control)
        outcomes = [self.run(program, operands, within, final=final) for program in inner.programs]
        results = [self.decided(self.join(column), decision) for column in zip(*(r for r, _ in outcomes), strict=True)]
        for _, touched in outcomes:
            facts = self._written(equation.invars, facts, [decision, *touched])
        return results, facts

    def _written(self, atoms: Sequence[Any], before: Sequence[Fact], after: Sequence[Fact]) -> list[Fact]:
        """The facts on operands when mutable arrays among them have been written to."""
        result = list(before)
        for i, atom in enumerate(atoms):
            if _jax.is_mutable(atom):
                result[i] = self.join((before[i], after[i]))
        return result
