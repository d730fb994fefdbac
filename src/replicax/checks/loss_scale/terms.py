"""What a value is the sum of, and by which numbers that has been multiplied.

A replica's *share* of a loss is right to differentiate: the shares of all replicas add up to the whole, and so do their
gradients. What is not a share, and is summed all the same, comes out too large or too small. So of each value the
*terms* are followed that are certain, with the numbers that they have been multiplied by. Whatever is not certain is
left out, and what has been scaled in a way that can't be told is left out, too: a mistake may be missed, but what is
right is not called wrong.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from replicax.execution.padding.example_places import Place, Rows, Untraceable, joined
from replicax.locality import Locality, M, T


class Kind(enum.Enum):
    """What a term is."""

    SUM = "a sum over this replica's own examples"
    MEAN = "a mean over this replica's own examples"
    SHARE = "this replica's share of a whole"
    DECLARED = "declared to be a share, with as_share"
    REPEATED = "computed from variables alone, so the same on every replica"
    RAGGED = "a mean over this replica's own examples, averaged with those of replicas that have other numbers of them"
    MEAN_OF_MEANS = "a mean over this replica's own examples, of which the mean over such replicas has been taken"
    DOUBLE_SCALED = "a share that has been divided by the number of replicas once more"
    SUMMED_TWICE = "a sum of the replicas' gradients that they have added up once more"
    NONLINEAR = "a function of a share that is not linear, so that it is no share"
    CLIPPED = "a gradient that its replica has clipped, or scaled by a function of itself"
    FUNCTION = "another function of a gradient"
    COMMON = "a loss that the replicas have added up, so that each of them differentiates all of it"
    UNKNOWN = "the gradient of a loss of which nothing is certain"


class Level(enum.Enum):
    """How far a term has come."""

    LOSS = "of this replica"
    WEIGHT = "what examples of a loss are multiplied by, where its derivative begins"
    REDUCED = "of this replica, summed over the replicas, and no gradient"
    COTANGENT = "in a backward pass"
    GRADIENT = "the gradient of it"
    TOTAL = "summed over the replicas"


class Origin(enum.IntEnum):
    """Where a number comes from."""

    UNKNOWN = 0
    """It may be anything: a weight, a count of examples, or one over the number of replicas."""
    MEAN = 1
    """JAX has divided by a number of elements."""
    REPLICAS = 2
    """It certainly is one over the number of replicas, and not a number that happens to be the same."""


class Factor(NamedTuple):
    """A number that a term has been multiplied by."""

    value: float
    origin: Origin = Origin.UNKNOWN


Factors = tuple[Factor, ...]

ANY = Factor(0.0)
"""Stands for a number that may be anything, so also the number of replicas."""

_MOST_FACTORS = 4
"""With more of them, too many numbers could be made from them to tell anything."""

_MOST_TERMS = 12
"""A loop could make ever more of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One term of a value."""

    kind: Kind
    line: int
    """The operation that made it, by its number."""
    level: Level = Level.LOSS
    divisors: tuple[int, ...] = ()
    """Of a sum: divided by one of these it is a mean. How many examples it goes over, and how many numbers."""
    factors: Factors = ()
    begun: int = 0
    """Of a weight: the operation with which its way began, by its number."""

    def at(self, level: Level) -> Term:
        """The same, come further."""
        return dataclasses.replace(self, level=level)


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleFact:
    """What is known of a value."""

    locality: Locality = M
    place: Place = None
    """Where the examples are."""
    terms: frozenset[Term] = frozenset()
    """What it is the sum of, if no examples lie along its dims."""
    rest: bool = False
    """Whether something is in the sum of which nothing is known."""
    factors: Factors = ()
    """If it has no terms: what it may have been multiplied by since something was computed that is not linear."""
    trained: bool = False
    """Whether it depends on variables that are trained."""
    outside: bool = False
    """Whether it depends on numbers from outside the step, which may have the number of replicas in them."""
    number: float | None = None
    """The number that it is, if that is known."""

    @property
    def has_examples(self) -> bool:
        """Whether examples may lie along one of its dims."""
        return isinstance(self.place, Rows | Untraceable)

    def are(self, level: Level, *kinds: Kind) -> bool:
        """Whether it is made of terms of these kinds, at this level, and of nothing else."""
        return bool(self.terms) and not self.rest and all(t.level is level and t.kind in kinds for t in self.terms)


NOTHING_KNOWN = ScaleFact(locality=T, rest=True, factors=(ANY,))
"""Of a value that may differ between replicas."""


def limited(fact: ScaleFact) -> ScaleFact:
    """``fact``, or nothing certain if it has too many terms."""
    return fact if len(fact.terms) <= _MOST_TERMS else dataclasses.replace(fact, terms=frozenset(), rest=True)


def in_common(facts: Iterable[ScaleFact]) -> ScaleFact:
    """What is known of what may be any of several values."""
    found = tuple(dict.fromkeys(facts))
    if len(found) == 1:
        return found[0]
    locality = M
    for fact in found:
        locality = locality | fact.locality
    # Of a constant, such as the zero with which a loop starts, nothing comes in.
    mixed = locality is T and any(f.locality is not T and f.trained for f in found)
    return ScaleFact(
        locality,
        joined(f.place for f in found),
        frozenset().union(*(f.terms for f in found)),
        mixed or any(f.rest for f in found),
        of_all(f.factors for f in found),
        any(f.trained for f in found),
        any(f.outside for f in found),
    )


def of_all(factors: Iterable[Factors]) -> Factors:
    """What a value may have been multiplied by that is made of values with these factors."""
    result: list[Factor] = []
    for some in factors:
        result += [f for f in dict.fromkeys(some) for _ in range(some.count(f) - result.count(f))]
    return _ordered(result)


def product_of(*factors: Factors) -> Factors:
    """What a product has been multiplied by, of values with these factors."""
    return _ordered([f for some in factors for f in some])


def _ordered(factors: Sequence[Factor]) -> Factors:
    if len(factors) > _MOST_FACTORS:
        factors = [*(f for f in factors if f.origin is Origin.REPLICAS), ANY]
    certain = sorted(f for f in factors if f != ANY)
    return (*certain[:_MOST_FACTORS], ANY) if ANY in factors else tuple(certain)


def over(term: Term, size: int) -> Term:
    """The sum of ``size`` such terms; one of the examples may go over these numbers, too."""
    return with_divisors(term, [d * size for d in term.divisors])


def with_divisors(term: Term, divisors: Iterable[int]) -> Term:
    """``term``, which may be a sum over so many, too."""
    known = tuple(sorted({*term.divisors, *divisors}))
    if len(known) > _MOST_FACTORS:
        return times(term, (ANY,))
    return dataclasses.replace(term, divisors=known)


def times(term: Term, factors: Factors) -> Term:
    """``term``, multiplied by ``factors``."""
    return dataclasses.replace(term, factors=product_of(term.factors, factors)) if factors else term


def reading(term: Term, replicas: int) -> Kind | None:
    """What a term is, with what it has been multiplied by; ``None`` if it can be read in several ways."""
    factors = term.factors
    if ANY in factors and term.kind in (Kind.SUM, Kind.MEAN, Kind.REPEATED, Kind.COMMON, Kind.SUMMED_TWICE):
        return None
    if term.kind is Kind.SUM:
        found = {Kind.SHARE if _has(rest, 1 / replicas) else Kind.MEAN for rest in _without_counts(term)}
        if any(True for _ in _without_counts(term, replicas)):
            found.add(Kind.SHARE)
        if found == {Kind.MEAN} and _has([f for f in factors if f.origin is Origin.UNKNOWN], 1 / replicas):
            return None  # as many replicas as examples: which of them the number stands for can't be told
        return Kind.SUM if not found else found.pop() if len(found) == 1 else None
    if term.kind in (Kind.MEAN, Kind.REPEATED, Kind.COMMON, Kind.SUMMED_TWICE):
        return Kind.SHARE if _has(factors, 1 / replicas) else term.kind
    if term.kind is Kind.SHARE and any(f.origin is Origin.REPLICAS for f in factors) and not _has(factors, replicas):
        return Kind.DOUBLE_SCALED
    return term.kind


def settled(term: Term, replicas: int) -> Term:
    """``term``; a sum that is a mean as such, so that no number that comes later, as a learning rate, is the count."""
    if term.kind is Kind.SUM and reading(term, replicas) is Kind.MEAN:
        rest = next(iter(_without_counts(term)))
        return dataclasses.replace(term, kind=Kind.MEAN, divisors=(), factors=tuple(rest))
    return term


def is_close(a: float, b: float) -> bool:
    """Whether two numbers are the same but for the rounding of a half-precision float."""
    return math.isclose(a, b, rel_tol=2e-3)


def _without_counts(term: Term, times: int = 1) -> Iterable[list[Factor]]:
    """The factors of a sum without those that divide it by a number of its examples, ``times`` that: all ways."""
    for some, rest in _parts(term.factors):
        if any(f.origin is Origin.REPLICAS for f in some):
            continue
        product = math.prod(f.value for f in some)
        if any(is_close(product * divisor * times, 1.0) for divisor in term.divisors):
            yield rest


def _has(factors: Sequence[Factor], wanted: float) -> bool:
    """Whether the product of some of ``factors`` is ``wanted``."""
    return any(is_close(math.prod(f.value for f in some), wanted) for some, _ in _parts(factors))


def _parts(factors: Sequence[Factor]) -> Iterable[tuple[list[Factor], list[Factor]]]:
    """Some of ``factors``, at least one, and the others: all ways of choosing them."""
    for chosen in itertools.product((True, False), repeat=len(factors)):
        if any(chosen):
            pairs = list(zip(factors, chosen, strict=True))
            yield [f for f, c in pairs if c], [f for f, c in pairs if not c]
