"""The terms of a value, and the numbers by which each has been multiplied.

A replica should differentiate its *share* of a loss: the shares of all replicas add up to the whole, and so do their
gradients. The sum of anything else is too large or too small. So the check follows the certain *terms* of each value,
with the numbers that have multiplied them. It leaves out terms that are uncertain, or scaled by unknown numbers: it may
miss a mistake, but never reports a correct step.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from replicax.execution.program.locality_rules import join
from replicax.locality import Locality, M, T
from replicax.padding.example_places import Place, Rows, Untraceable, joined


class Kind(enum.Enum):
    """The kinds of terms."""

    SUM = "a sum over this replica's own examples"
    MEAN = "a mean over this replica's own examples"
    SHARE = "this replica's share of a whole"
    DECLARED = "declared to be a share, with as_share"
    REPEATED = "computed from variables alone, so the same on every replica"
    RAGGED = "a mean over this replica's own examples, averaged with those of replicas that have other numbers of them"
    MEAN_OF_MEANS = "a mean over this replica's own examples, of which the mean over such replicas has been taken"
    MEAN_OF_SHARES = "a share that a metric takes the mean of"
    DOUBLE_SCALED = "a share that has been divided by the number of replicas once more"
    SUMMED_TWICE = "a sum of the replicas' gradients that they have added up once more"
    NONLINEAR = "a function of a share that is not linear, so that it is no share"
    CLIPPED = "a gradient that its replica has clipped, or scaled by a function of itself"
    FUNCTION = "another function of a gradient"
    COMMON = "a loss that the replicas have added up, so that each of them differentiates all of it"
    UNKNOWN = "the gradient of a loss of which nothing is certain"


class Level(enum.Enum):
    """The stages of a term on its way from a loss to a summed gradient."""

    LOSS = "of this replica"
    WEIGHT = "the factor of a loss's examples, where its derivative begins"
    REDUCED = "of this replica, summed over the replicas, and no gradient"
    COTANGENT = "in a backward pass"
    GRADIENT = "the gradient of it"
    TOTAL = "summed over the replicas"


class Origin(enum.IntEnum):
    """The origin of a divisor."""

    UNKNOWN = 0
    """Any number: a weight, a count of examples, or one over the number of replicas."""
    MEAN = 1
    """JAX divided by a number of elements."""
    REPLICAS = 2
    """Certainly one over the number of replicas, and not an equal number of another meaning."""


class Factor(NamedTuple):
    """A number that has multiplied a term."""

    value: float
    origin: Origin = Origin.UNKNOWN


Factors = tuple[Factor, ...]

ANY = Factor(0.0)
"""An unknown number, which may be the number of replicas."""

_MOST_FACTORS = 4
"""With more factors, too many products are possible to be certain of anything."""

_MOST_TERMS = 12
"""A bound, because a loop could add terms without end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One term of a value."""

    kind: Kind
    line: int
    """The number of the operation that made it."""
    level: Level = Level.LOSS
    divisors: tuple[int, ...] = ()
    """Of a sum: the counts of its examples and of its numbers. Divided by one of these it is a mean."""
    factors: Factors = ()
    begun: int = 0
    """Of a weight: the number of the operation with which its way began."""
    count: int = 0
    """Of a mean: the number of elements that it goes over; 0 if it is unknown."""

    def at(self, level: Level) -> Term:
        """Return this term at another level."""
        return dataclasses.replace(self, level=level)


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleFact:
    """The known facts of a value."""

    locality: Locality = M
    place: Place = None
    """Where the examples are."""
    terms: frozenset[Term] = frozenset()
    """Its terms, if no examples lie along its dims."""
    has_unknown: bool = False
    """Whether the sum has an unknown term."""
    factors: Factors = ()
    """If it has no terms: the numbers that may have multiplied it since the last operation that is not linear."""
    trained: bool = False
    """Whether it depends on trained variables."""
    outside: bool = False
    """Whether it depends on numbers from outside the step, which may include the number of replicas."""
    number: float | None = None
    """Its value, if it is a known number."""

    @property
    def has_examples(self) -> bool:
        """Return whether examples may lie along one of its dims."""
        return isinstance(self.place, Rows | Untraceable)

    def is_made_of(self, level: Level, *kinds: Kind) -> bool:
        """Return whether all its terms are of these kinds and at this level."""
        return (
            bool(self.terms) and not self.has_unknown and all(t.level is level and t.kind in kinds for t in self.terms)
        )


NOTHING_KNOWN = ScaleFact(locality=T, has_unknown=True, factors=(ANY,))
"""The fact of an unknown value that may differ between replicas."""


def limited(fact: ScaleFact) -> ScaleFact:
    """``fact``, without certain terms if it has too many."""
    return fact if len(fact.terms) <= _MOST_TERMS else dataclasses.replace(fact, terms=frozenset(), has_unknown=True)


def join_facts(facts: Iterable[ScaleFact]) -> ScaleFact:
    """The fact of a value that may be any of several values."""
    distinct = tuple(dict.fromkeys(facts))
    if len(distinct) == 1:
        return distinct[0]
    locality = join(f.locality for f in distinct)
    # A constant, such as the zero with which a loop starts, adds nothing.
    mixed = locality is T and any(f.locality is not T and f.trained for f in distinct)
    return ScaleFact(
        locality,
        joined(f.place for f in distinct),
        frozenset().union(*(f.terms for f in distinct)),
        mixed or any(f.has_unknown for f in distinct),
        combined_factors(f.factors for f in distinct),
        any(f.trained for f in distinct),
        any(f.outside for f in distinct),
    )


def combined_factors(factors: Iterable[Factors]) -> Factors:
    """The factors of a value that is made of values with these factors by addition or by choice."""
    result: list[Factor] = []
    for some in factors:
        result += [f for f in dict.fromkeys(some) for _ in range(some.count(f) - result.count(f))]
    return _ordered_factors(result)


def product_of(*factors: Factors) -> Factors:
    """The factors of the product of values with these factors."""
    return _ordered_factors([f for some in factors for f in some])


def _ordered_factors(factors: Sequence[Factor]) -> Factors:
    if len(factors) > _MOST_FACTORS:
        factors = [*(f for f in factors if f.origin is Origin.REPLICAS), ANY]
    certain = sorted(f for f in factors if f != ANY)
    return (*certain[:_MOST_FACTORS], ANY) if ANY in factors else tuple(certain)


def with_divisors(term: Term, divisors: Iterable[int]) -> Term:
    """``term``, as a sum that may also go over these numbers of elements."""
    all_divisors = tuple(sorted({*term.divisors, *divisors}))
    if len(all_divisors) > _MOST_FACTORS:
        return times(term, (ANY,))
    return dataclasses.replace(term, divisors=all_divisors)


def times(term: Term, factors: Factors) -> Term:
    """``term``, multiplied by ``factors``."""
    return dataclasses.replace(term, factors=product_of(term.factors, factors)) if factors else term


def effective_kind(term: Term, replicas: int) -> Kind | None:
    """The kind of a term after its factors are applied; ``None`` if several are possible."""
    factors = term.factors
    if ANY in factors and term.kind in (Kind.SUM, Kind.MEAN, Kind.REPEATED, Kind.COMMON, Kind.SUMMED_TWICE):
        return None
    if term.kind is Kind.SUM:
        kinds = {Kind.SHARE if _has(rest, 1 / replicas) else Kind.MEAN for rest, _ in _without_counts(term)}
        if any(True for _ in _without_counts(term, replicas)):
            kinds.add(Kind.SHARE)
        if kinds == {Kind.MEAN} and _has([f for f in factors if f.origin is Origin.UNKNOWN], 1 / replicas):
            return None  # as many replicas as examples: the number may stand for either
        return Kind.SUM if not kinds else kinds.pop() if len(kinds) == 1 else None
    if term.kind in (Kind.MEAN, Kind.REPEATED, Kind.COMMON, Kind.SUMMED_TWICE):
        return Kind.SHARE if _has(factors, 1 / replicas) else term.kind
    if term.kind is Kind.SHARE and any(f.origin is Origin.REPLICAS for f in factors) and not _has(factors, replicas):
        return Kind.DOUBLE_SCALED
    return term.kind


def settle(term: Term, replicas: int) -> Term:
    """``term``, a mean if it is one by now: later numbers, such as a learning rate, can't be its count any more."""
    if term.kind is Kind.SUM and effective_kind(term, replicas) is Kind.MEAN:
        rest, count = next(iter(_without_counts(term)))
        return dataclasses.replace(term, kind=Kind.MEAN, divisors=(), factors=tuple(rest), count=count)
    return term


def elements_of(terms: Iterable[Term], replicas: int) -> int:
    """The number of elements over which sums or means go; 0 if it is unknown."""
    return max((t.count or max(t.divisors, default=0) for t in (settle(term, replicas) for term in terms)), default=0)


def is_close(a: float, b: float) -> bool:
    """Return whether two numbers are equal up to the rounding of a half-precision float."""
    return math.isclose(a, b, rel_tol=2e-3)


def _without_counts(term: Term, times: int = 1) -> Iterable[tuple[list[Factor], int]]:
    """Yield all ways to take out factors that divide a sum by ``times`` one of its counts: the rest, and the count."""
    for some, rest in _parts(term.factors):
        if any(f.origin is Origin.REPLICAS for f in some):
            continue
        if times > 1 and all(f.origin is Origin.MEAN for f in some):
            continue  # a mean over so many elements, of which none is another replica's
        product = math.prod(f.value for f in some)
        count = next((divisor for divisor in term.divisors if is_close(product * divisor * times, 1.0)), None)
        if count is not None:
            yield rest, count


def _has(factors: Sequence[Factor], wanted: float) -> bool:
    """Return whether the product of some of ``factors`` is ``wanted``."""
    return any(is_close(math.prod(f.value for f in some), wanted) for some, _ in _parts(factors))


def _parts(factors: Sequence[Factor]) -> Iterable[tuple[list[Factor], list[Factor]]]:
    """Yield all ways to choose at least one of ``factors``: those chosen, and the others."""
    for chosen in itertools.product((True, False), repeat=len(factors)):
        if any(chosen):
            pairs = list(zip(factors, chosen, strict=True))
            yield [f for f, c in pairs if c], [f for f, c in pairs if not c]
