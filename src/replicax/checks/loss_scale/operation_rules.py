"""The rules for operations: the terms of results, from those of the operands.

Terms pass through linear operations: sums, products with values that are the same on every replica, and moves of
elements. A sum over the examples begins a term. A function that is not linear ends all terms, except those for which it
is a mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from replicax._jax import primitive_families as families
from replicax._jax.operation_params import dims_along, dot_dimensions
from replicax._jax.primitive_table import column
from replicax.checks.loss_scale.terms import (
    ANY,
    NOTHING_KNOWN,
    Factor,
    Factors,
    Kind,
    Level,
    Origin,
    ScaleFact,
    Term,
    combined_factors,
    effective_kind,
    elements_of,
    is_close,
    limited,
    product_of,
    settle,
    times,
    with_divisors,
)
from replicax.execution.program.locality_rules import join
from replicax.locality import R, T
from replicax.padding.example_places import OperationShapes, Place, Rows

GRADIENTS = (
    Kind.SUM,
    Kind.MEAN,
    Kind.SHARE,
    Kind.DECLARED,
    Kind.REPEATED,
    Kind.DOUBLE_SCALED,
    Kind.NONLINEAR,
    Kind.COMMON,
    Kind.UNKNOWN,
)
"""Terms of a gradient that is not clipped."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScaledOperation:
    """One operation, as the rules see it."""

    shapes: OperationShapes
    facts: tuple[ScaleFact, ...]
    line: int
    """Its number."""
    is_float: bool
    """Whether its results are floats."""
    replicas: int
    asked: bool
    """Whether the step has read the number of replicas: then any number may include it."""
    origin: Callable[[float], Origin]
    """Gives the origin of a divisor."""

    @property
    def own(self) -> list[ScaleFact]:
        """The facts of operands that may differ between replicas."""
        return [m for m in self.facts if m.locality is T]


def own_result(o: ScaledOperation, place: Place) -> ScaleFact:
    """The fact of a result that may differ between replicas."""
    kind = _KINDS.get(o.shapes.name)
    made = _other_function(o) if kind is None else _RULES[kind](o)
    made = dataclasses.replace(
        made, locality=T, place=place, trained=any(m.trained for m in o.facts), outside=False, number=None
    )
    if made.has_examples:
        return dataclasses.replace(made, terms=frozenset(), has_unknown=False)
    return limited(dataclasses.replace(made, has_unknown=made.has_unknown or not made.terms))


def common_result(o: ScaledOperation, place: Place) -> ScaleFact:
    """The fact of a result that is the same on every replica, as all operands are."""
    name = o.shapes.name
    locality = join(m.locality for m in o.facts)
    factors: Factors = ()
    terms = frozenset(t for m in o.facts for t in m.terms)
    numbers = [m.number for m in o.facts]
    number = None
    if name in _OF_NUMBERS and None not in numbers:
        with contextlib.suppress(ArithmeticError):
            number = _OF_NUMBERS[name](*numbers)
    if name in _PRODUCTS_AND_QUOTIENTS:
        scales = [scale_of(o, m, name in families.QUOTIENTS and i == 1) for i, m in enumerate(o.facts)]
        factors = product_of(*(m.factors if m.trained else s.factors for m, s in zip(o.facts, scales, strict=True)))
        pairs = zip(o.facts, scales[::-1], strict=True)
        terms = frozenset(_scaled_term(t, scale) for m, scale in pairs for t in m.terms)
    elif _KINDS.get(name) in _LINEAR:
        factors = combined_factors([m.factors for m in o.facts])
    trained, outside = any(m.trained for m in o.facts), any(m.outside for m in o.facts)
    return limited(ScaleFact(locality, place, terms, False, factors, trained, outside, number))


# --- products and quotients -------------------------------------------------------------------------------


class Scale(NamedTuple):
    """The factor of a value."""

    factors: Factors
    number: float | None = None


def scale_of(o: ScaledOperation, m: ScaleFact, divides: bool) -> Scale:
    """The factor for a multiplication by ``m``, which is the same on every replica, or for a division by it."""
    if m.number is None:
        if m.locality is R or m.outside:
            return Scale((ANY,))
        return Scale(tuple(f._replace(value=1 / f.value) if divides and f != ANY else f for f in m.factors))
    if not m.number or not math.isfinite(m.number):
        return Scale(())
    value = 1 / m.number if divides else m.number
    size = abs(value)
    origin = o.origin(m.number) if divides else Origin.UNKNOWN
    if is_close(size, 1.0) and origin is not Origin.MEAN:
        return Scale(())
    if is_close(size, 1 / o.replicas) or origin is Origin.MEAN:
        return Scale((Factor(size, origin),), value)
    if o.asked and not is_close(size, o.replicas):
        return Scale((ANY,), value)
    whole = max(size, 1 / size)
    return Scale((Factor(size),) if is_close(whole, round(whole)) else (), value)


def _scaled_term(term: Term, scale: Scale) -> Term:
    """``term``, multiplied by ``scale``."""
    factors = scale.factors
    if term.level is Level.TOTAL and (scale.number or -1.0) < 0:
        return times(term, tuple(f for f in factors if f != ANY and scale.number is None))  # a learning rate
    if ANY in factors and scale.number is not None and any(is_close(scale.number * d, 1.0) for d in term.divisors):
        factors = (Factor(scale.number),)
    return times(term, factors)


def _multiplied_value(m: ScaleFact, scale: Scale) -> ScaleFact:
    """A value that may differ between replicas, multiplied by one that does not."""
    terms = frozenset(_scaled_term(t, scale) for t in m.terms)
    return ScaleFact(T, m.place, terms, m.has_unknown, product_of(m.factors, scale.factors))


def _product_or_quotient(o: ScaledOperation) -> ScaleFact:
    (a, b), divides = o.facts, o.shapes.name in families.QUOTIENTS
    if b.locality is not T:
        return _multiplied_value(a, scale_of(o, b, divides))
    if a.locality is not T:
        return _other_function(o) if divides else _multiplied_value(b, scale_of(o, a, False))
    if a.has_examples or b.has_examples:
        # A number that differs between replicas may be anything, such as this replica's fraction of the examples.
        both = a.has_examples and b.has_examples
        return ScaleFact(T, factors=product_of(a.factors, b.factors) if both else (ANY,))
    if a.is_made_of(Level.GRADIENT, *GRADIENTS) and b.is_made_of(Level.GRADIENT, Kind.FUNCTION):
        return _one(o, Kind.CLIPPED, Level.GRADIENT)
    if not divides and b.is_made_of(Level.GRADIENT, *GRADIENTS) and a.is_made_of(Level.GRADIENT, Kind.FUNCTION):
        return _one(o, Kind.CLIPPED, Level.GRADIENT)
    if divides and all(m.is_made_of(Level.LOSS, Kind.SUM) and _effective_kinds(o, m) == {Kind.SUM} for m in (a, b)):
        return _one(o, Kind.MEAN, count=elements_of(a.terms, o.replicas))
    return _other_function(o)


def _matrix_product(o: ScaledOperation) -> ScaleFact:
    a, b = o.facts
    dims = dot_dimensions(o.shapes.params)
    if a.has_examples or b.has_examples:
        # A factor before a layer is not a scale of the loss.
        factors: Factors = product_of(*(m.factors for m in o.own))
        if any(m.locality is not T and m.trained for m in (a, b)):
            factors = ()
        places = [m.place.dim if isinstance(m.place, Rows) else None for m in (a, b)]
        if any(place in contracted for place, contracted in zip(places, dims.contracted, strict=True)):
            size = math.prod(o.shapes.shapes[0][d] for d in dims.contracted[0])
            return _sum_over(o, size, factors)
        return ScaleFact(T, factors=factors)
    return _product_or_quotient(o)


# --- sums ---------------------------------------------------------------------------------------------------


def _sum(o: ScaledOperation) -> ScaleFact:
    [m], [shape] = o.facts, o.shapes.shapes
    dims = dims_along(o.shapes.params, len(shape))
    size = math.prod(shape[d] for d in dims)
    if m.has_examples:
        if len(dims) == len(shape) or (isinstance(m.place, Rows) and m.place.dim in dims):
            return _sum_over(o, size, m.factors, m.place)
        return ScaleFact(T, factors=m.factors)
    # A sum of equal terms goes over as many times as many numbers, if they go over examples.
    terms = (with_divisors(t, [d * size for d in t.divisors]) for t in m.terms)
    return dataclasses.replace(m, terms=frozenset(terms))


def _sum_over(o: ScaledOperation, size: int, factors: Factors, place: Place = None) -> ScaleFact:
    """A sum over the examples, and over ``size`` numbers in all."""
    sizes = {size} if place is not None and not isinstance(place, Rows) else {o.shapes.rows, size}
    if not size:
        return NOTHING_KNOWN
    return ScaleFact(T, terms=frozenset({Term(Kind.SUM, o.line, divisors=tuple(sorted(sizes)), factors=factors)}))


def _added_values(o: ScaledOperation) -> ScaleFact:
    """The sum of values of this replica's own and of values that are the same on every replica."""
    own = _merged_facts(o, o.own)
    levels = {t.level for t in own.terms}
    if own.has_examples or len(levels) > 1:
        return own
    level = levels.pop() if levels else Level.LOSS
    if level is Level.GRADIENT and Kind.SHARE not in _effective_kinds(o, own):
        return own
    repeated = {Term(Kind.REPEATED, o.line, level, (), m.factors) for m in o.facts if m.locality is not T and m.trained}
    return dataclasses.replace(own, terms=own.terms | repeated)


def _merged_facts(o: ScaledOperation, facts: Sequence[ScaleFact]) -> ScaleFact:
    terms = frozenset(t for m in facts for t in m.terms)
    place = next((m.place for m in facts if m.has_examples), None)
    return ScaleFact(T, place, terms, any(m.has_unknown for m in facts), combined_factors([m.factors for m in facts]))


def _chosen_or_joined(o: ScaledOperation) -> ScaleFact:
    """A choice between values, or their concatenation."""
    made = _merged_facts(o, o.own)
    mixed = any(m.locality is not T and m.trained for m in o.facts)
    return dataclasses.replace(made, has_unknown=made.has_unknown or mixed)


def _selected_elements(o: ScaledOperation) -> ScaleFact:
    cases = dataclasses.replace(o, facts=o.facts[1:])
    made = _chosen_or_joined(cases)
    weights = any(m.number not in (None, 0.0, 1.0) and not math.isnan(m.number or 0.0) for m in cases.facts)
    return dataclasses.replace(made, factors=(ANY,)) if weights else made


# --- other functions ----------------------------------------------------------------------------------------


def _other_function(o: ScaledOperation) -> ScaleFact:
    """The result of an operation without a rule of its own."""
    own = _merged_facts(o, o.own)
    linear = o.shapes.name in _PRODUCTS_AND_QUOTIENTS
    unclear = ScaleFact(T, has_unknown=True, factors=product_of(*(m.factors for m in o.own)) if linear else ())
    if own.has_examples or not own.terms:
        return unclear
    bounded = o.shapes.name in families.BOUNDS
    if own.is_made_of(Level.LOSS, Kind.SUM) and bounded and len(o.own) == 1 and _effective_kinds(o, own) == {Kind.SUM}:
        return own  # as in max(count, 1)
    if not o.is_float:
        return unclear
    if {t.level for t in own.terms} == {Level.GRADIENT}:
        if bounded and own.is_made_of(Level.GRADIENT, Kind.CLIPPED):
            return own
        clips = bounded and own.is_made_of(Level.GRADIENT, *GRADIENTS)
        return _one(o, Kind.CLIPPED if clips else Kind.FUNCTION, Level.GRADIENT)
    if any(m.locality is not T and m.trained for m in o.facts) and not own.is_made_of(Level.LOSS, Kind.SHARE):
        return unclear
    if not own.has_unknown and _effective_kinds(o, own) == {Kind.MEAN}:
        means = (Term(Kind.MEAN, t.line, count=settle(t, o.replicas).count) for t in own.terms)
        return dataclasses.replace(own, terms=frozenset(means))
    if own.is_made_of(Level.LOSS, Kind.SHARE):
        return _one(o, Kind.NONLINEAR)
    return unclear


def _one(o: ScaledOperation, kind: Kind, level: Level = Level.LOSS, count: int = 0) -> ScaleFact:
    return ScaleFact(T, terms=frozenset({Term(kind, o.line, level, count=count)}))


def _effective_kinds(o: ScaledOperation, m: ScaleFact) -> set[Kind | None]:
    return {effective_kind(t, o.replicas) for t in m.terms}


_KINDS = column("terms")
ADDED = frozenset(name for name, kind in _KINDS.items() if kind == "added")
_KEEPING = families.IDENTITIES | families.CASTS | families.BROADCASTS | families.RESHAPES
"""Operations that keep a known number."""
_OF_NUMBERS: Mapping[str, Callable[..., float]] = families.by_primitive(
    {
        _KEEPING: lambda x: x,
        families.NEGATIONS: operator.neg,
        families.ADDITIONS: operator.add,
        families.DIFFERENCES: operator.sub,
        families.PRODUCTS: operator.mul,
        families.QUOTIENTS: operator.truediv,
    }
)
"""How to compute with known numbers."""

_RULES: Mapping[str, Callable[[ScaledOperation], ScaleFact]] = {
    "times": _product_or_quotient,
    "divided": _product_or_quotient,
    "product": _matrix_product,
    "sum": _sum,
    "added": _added_values,
    "first": lambda o: o.facts[0],  # elements of it, selected by the others
    "together": _chosen_or_joined,
    "selected": _selected_elements,
}
"""The rules, by the word in the column ``terms`` of :mod:`replicax._jax.primitive_table`."""

_PRODUCTS_AND_QUOTIENTS = families.PRODUCTS | families.QUOTIENTS
_LINEAR = _RULES.keys() - {"selected"}
