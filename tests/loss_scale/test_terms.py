"""What a term is, by the numbers that it has been multiplied by."""

from __future__ import annotations

import pytest

from replicax.checks.loss_scale.terms import (
    ANY,
    Factor,
    Kind,
    Origin,
    ScaleFact,
    Term,
    combined_factors,
    effective_kind,
    join_facts,
    product_of,
    settle,
    times,
)
from replicax.locality import M, T

REPLICAS = 4
SUM, MEAN, SHARE, REPEATED = Kind.SUM, Kind.MEAN, Kind.SHARE, Kind.REPEATED


def factors(*values: float) -> tuple[Factor, ...]:
    return product_of(tuple(Factor(value) for value in values))


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (SUM, (), SUM),
        (SUM, (1 / 8,), MEAN),
        (SUM, (1 / 48,), MEAN),  # over the tokens, too
        (SUM, (1 / 32,), SHARE),
        (SUM, (1 / 192,), SHARE),
        (SUM, (1 / 8, 1 / 4), SHARE),
        (SUM, (1 / 8, 8, 1 / 32), SHARE),
        (SUM, (1 / 8, 1 / 2), MEAN),  # with a weight
        (SUM, (1 / 100,), SUM),
        (SUM, (1 / 8, 1 / 12, 4, 1 / 4), None),
        (MEAN, (), MEAN),
        (MEAN, (1 / 2,), MEAN),
        (MEAN, (1 / 4,), SHARE),
        (MEAN, (1 / 2, 1 / 2), SHARE),
        (MEAN, (8, 1 / 32), SHARE),
        (REPEATED, (1 / 100,), REPEATED),
        (REPEATED, (1 / 4, 1 / 100), SHARE),
        (SHARE, (1 / 4,), SHARE),  # a weight that is the same number
        (MEAN, (1 / 2, 1 / 3, 1 / 5, 1 / 7, 1 / 11), None),
    ],
)
def test_effective_kind(kind: Kind, values: tuple[float, ...], expected: Kind | None) -> None:
    assert effective_kind(Term(kind, 0, divisors=(8, 48), factors=factors(*values)), REPLICAS) is expected


def test_a_mean_is_settled_before_other_numbers_come() -> None:
    mean = settle(Term(SUM, 0, divisors=(5,), factors=factors(1 / 5, 1 / 3)), 2)
    assert mean == Term(MEAN, 0, factors=factors(1 / 3), count=5)
    assert effective_kind(times(mean, factors(0.1)), 2) is MEAN  # and not a sum, by 5 examples of 2 replicas
    assert settle(Term(SUM, 0, divisors=(5,), factors=factors(0.1)), 2).kind is SUM


def test_a_share_that_is_certainly_divided_by_the_replicas() -> None:
    certain = Factor(1 / 4, Origin.REPLICAS)
    assert effective_kind(Term(SHARE, 0, factors=(certain,)), REPLICAS) is Kind.DOUBLE_SCALED
    assert effective_kind(Term(SHARE, 0, factors=(*factors(4), certain)), REPLICAS) is SHARE
    assert effective_kind(Term(SHARE, 0, factors=(certain, ANY)), REPLICAS) is Kind.DOUBLE_SCALED


@pytest.mark.parametrize("kind", [SUM, MEAN, REPEATED])
def test_a_number_that_may_be_anything_hides_all(kind: Kind) -> None:
    assert effective_kind(Term(kind, 0, divisors=(8,), factors=(*factors(1 / 8), ANY)), REPLICAS) is None


def test_factors_of_a_sum_are_those_of_any_operand_and_those_of_a_product_are_all() -> None:
    a, b = factors(1 / 4, 1 / 4), factors(1 / 4, 3)
    assert combined_factors([a, b]) == factors(1 / 4, 1 / 4, 3)
    assert product_of(a, b) == factors(1 / 4, 1 / 4, 1 / 4, 3)
    assert product_of(a, a, b) == (ANY,)
    assert combined_factors([a, (ANY,)]) == (*a, ANY)


def test_what_starts_as_a_constant_has_the_terms_that_come_in() -> None:
    share = ScaleFact(T, terms=frozenset({Term(SHARE, 0)}))
    assert join_facts([ScaleFact(number=0.0), share]) == share
    assert join_facts([ScaleFact(M, trained=True), share]).has_unknown
