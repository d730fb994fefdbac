"""The rules for terms in the backward pass of a derivative: that of ``jax.grad``, called by any library.

The loss is not marked there. But its derivative begins with a 1, which passes the loss's own scale before the examples:
a mean over 8 of them multiplies each example's derivative by 1 / 8. So the factors of this *weight* tell the kind of
loss. Multiplied with the examples, the weight becomes the term of a *cotangent*, in which all later operations are
linear.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from replicax._jax import primitive_families as families
from replicax.checks.loss_scale.operation_rules import ADDED, ScaledOperation, scale_of
from replicax.checks.loss_scale.terms import (
    ANY,
    Factor,
    Kind,
    Level,
    ScaleFact,
    Term,
    effective_kind,
    elements_of,
    is_close,
    limited,
    settle,
    times,
    with_divisors,
)
from replicax.locality import Locality, R, T
from replicax.padding.example_places import Place, Untraceable

FIRST_WEIGHT = ScaleFact(terms=frozenset({Term(Kind.SUM, 0, Level.WEIGHT)}))
"""The 1 with which a derivative begins."""

_SCALED = families.PRODUCTS | families.QUOTIENTS
_SUMMED = families.SUMS | families.MATRIX_PRODUCTS


def is_backward(fact: ScaleFact) -> bool:
    """Return whether ``fact`` is a weight or a cotangent."""
    return any(t.level in (Level.WEIGHT, Level.COTANGENT) for t in fact.terms)


def leave_backward_pass(fact: ScaleFact) -> ScaleFact:
    """The fact of a gradient, at the end of the backward pass."""
    if not is_backward(fact):
        return fact
    terms = (t.at(Level.GRADIENT) if t.level is Level.COTANGENT else t for t in fact.terms)
    place = None if isinstance(fact.place, Untraceable) else fact.place  # it may be summed over the examples
    return dataclasses.replace(fact, place=place, terms=frozenset(t for t in terms if t.level is not Level.WEIGHT))


def without_constants(o: ScaledOperation) -> ScaledOperation:
    """``o`` without weights that are only constants: the 1 of ``1 - x`` is one, and has no dims."""
    if o.shapes.name not in families.ELEMENTWISE:
        return o
    result = o.shapes.results[0]
    pairs = zip(o.facts, o.shapes.shapes, strict=True)
    return dataclasses.replace(
        o, facts=tuple(ScaleFact(m.locality) if _weights(m) and shape != result else m for m, shape in pairs)
    )


def backward(o: ScaledOperation, locality: Locality, place: Place) -> ScaleFact:
    """The fact of a result, if there are weights or cotangents among the operands."""
    cotangents = frozenset(t for m in o.facts for t in _cotangents(m))
    weights = [t for m in o.facts for t in _weights(m)]
    if cotangents:
        terms = cotangents
        if o.shapes.name in ADDED and Kind.SHARE in {effective_kind(t, o.replicas) for t in cotangents}:
            repeated = (t for m in o.facts if m.trained and m.locality is not T for t in _weights(m))
            terms |= {Term(Kind.REPEATED, t.begun or t.line, Level.COTANGENT, (), t.factors) for t in repeated}
    elif locality is T:
        terms = _times_own_values(o, weights)
    else:
        terms = frozenset(_moved_weight(o, t) for t in weights)
    return limited(ScaleFact(locality, place, terms, trained=any(m.trained for m in o.facts) or locality is T))


def reduced_cotangent(o: ScaledOperation, fact: ScaleFact, locality: Locality) -> ScaleFact:
    """The fact of a collective's result in a backward pass."""
    terms = _cotangents(fact)
    over_examples = (t for t in fact.terms if _example_counts(t.divisors, o.shapes.rows))
    if not terms and locality is R and not any(over_examples):
        terms = frozenset(Term(Kind.COMMON, t.begun or o.line, Level.COTANGENT) for t in fact.terms)
    return ScaleFact(locality, fact.place, terms or _unknown(o), trained=True)


def through_share(o: ScaledOperation, stated: bool) -> ScaleFact:
    """The fact of a cotangent that has gone back through the mark of a share."""
    [m], [shape] = o.facts, o.shapes.shapes
    terms = _cotangents(m)
    if shape != ():
        return m
    if terms and not stated:
        if m.locality is not T or {t.kind for t in terms} != {Kind.SHARE}:
            return m
        return dataclasses.replace(m, terms=frozenset(dataclasses.replace(t, kind=Kind.NONLINEAR) for t in terms))
    factors = () if stated else next((t.factors for t in _weights(m)), ())
    kind = Kind.DECLARED if stated else Kind.SHARE
    return dataclasses.replace(m, terms=frozenset({Term(kind, o.line, Level.COTANGENT, (), factors)}))


def times_examples_in_loop(m: ScaleFact, rows: int, replicas: int, asked: bool) -> ScaleFact:
    """``m`` in a loop over the examples, one in each iteration."""
    divisors = rows, rows
    terms = (_times_examples(t, divisors, replicas, asked) if t.level is Level.WEIGHT else t for t in m.terms)
    return dataclasses.replace(m, terms=frozenset(terms))


def _times_examples(weight: Term, divisors: Iterable[int], replicas: int, asked: bool) -> Term:
    """The cotangent of a weight, multiplied by examples; ``divisors`` are their possible counts."""
    cotangent = with_divisors(dataclasses.replace(weight, level=Level.COTANGENT, divisors=(), begun=0), divisors)
    factor = math.prod(f.value for f in cotangent.factors)
    if asked and not any(is_close(factor * divisor, 1.0) for divisor in cotangent.divisors):
        cotangent = times(cotangent, (ANY,))
    return settle(cotangent, replicas)


def _divisors(o: ScaledOperation, weight: Term, is_clear: bool) -> tuple[int, ...]:
    """The possible counts of the examples that multiply a weight; ``is_clear``: along a known dim."""
    if not is_clear and len(weight.divisors) == 1:
        return (o.shapes.rows, *weight.divisors)
    size = max(math.prod(shape) for shape in o.shapes.shapes)
    return (o.shapes.rows, *_example_counts(weight.divisors or (size,), o.shapes.rows))


def _example_counts(divisors: Iterable[int], rows: int) -> tuple[int, ...]:
    """Return the ``divisors`` that may count all examples, or their elements."""
    return tuple(d for d in divisors if rows and d % rows == 0)


def _weights(m: ScaleFact) -> list[Term]:
    return [t for t in m.terms if t.level is Level.WEIGHT]


def _cotangents(m: ScaleFact) -> frozenset[Term]:
    return frozenset(t for t in m.terms if t.level is Level.COTANGENT)


def _unknown(o: ScaledOperation) -> frozenset[Term]:
    return frozenset({Term(Kind.UNKNOWN, o.line, Level.COTANGENT)})


def _times_own_values(o: ScaledOperation, weights: Iterable[Term]) -> frozenset[Term]:
    """The cotangents of weights, multiplied by values of this replica's own."""
    own_values = [m for m in o.own if not _weights(m)]
    if any(m.has_examples for m in own_values):
        is_clear = not any(isinstance(m.place, Untraceable) for m in own_values)
        return frozenset(_times_examples(t, _divisors(o, t, is_clear), o.replicas, o.asked) for t in weights)
    for m in own_values:
        kinds = {effective_kind(t, o.replicas) for t in m.terms if t.level is Level.LOSS}
        if m.has_unknown or len(kinds) != 1:
            continue
        [kind], line = kinds, next(t.line for t in m.terms)
        if kind is Kind.MEAN or (kind is Kind.SUM and o.shapes.name in families.QUOTIENTS):
            line, count = o.line if kind is Kind.SUM else line, elements_of(m.terms, o.replicas)
            return frozenset({Term(Kind.MEAN, line, Level.COTANGENT, count=count)})
        if kind in (Kind.SHARE, Kind.NONLINEAR) and o.shapes.name in _SCALED:
            return frozenset({Term(kind, o.line, Level.COTANGENT)})
    return _unknown(o)


def _moved_weight(o: ScaledOperation, term: Term) -> Term:
    """A weight after an operation on values that are the same on every replica."""
    name, shapes = o.shapes.name, o.shapes.shapes
    if name in _SCALED:
        others = [(i, m) for i, m in enumerate(o.facts) if not _weights(m)]
        for i, m in others:
            scale = scale_of(o, m, name in families.QUOTIENTS and i == 1)
            certain = scale.number is None or ANY not in scale.factors
            term = times(term, scale.factors if certain else (Factor(abs(scale.number or 1.0)),))
    size = math.prod(o.shapes.results[0])
    if size > max(math.prod(shape) for shape in shapes):
        term = with_divisors(term if term.divisors else dataclasses.replace(term, line=o.line), (size,))
    elif name in _SUMMED and term.divisors:
        term = times(term, (ANY,))
    return term if term.begun else dataclasses.replace(term, line=term.line or o.line, begun=o.line)
