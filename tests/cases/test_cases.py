"""Control flow, custom rules, batching, derivatives, operations, collectives: two replicas against plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import replicax
from tests.cases.cases import CASES, REPLICAS, A, Case, X, bundles, numbers, plainly, together
from tests.conftest import strategy_of
from tests.programs.programs import components

pytestmark = pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")  # some draw from a key that all have

BUNDLES = bundles(26)
# Bundles of a subject are alike. What `make test` has is an even choice of more than a third of the programs.
FURTHER = ["control flow 2", "custom rules 2", "batching 2", "collectives 2"]
FURTHER += [f"{subject} {number}" for subject in ("autodiff", "operations") for number in (2, 3)]
# An even choice of what needs no collective of jax.lax, which compiled steps only have.
EXACTLY = [case for case in CASES if not case.meets][::32]


def is_per_replica(leaf: Any) -> bool:
    return isinstance(leaf, replicax.PerReplica)


def the_one_that_fails(cases: list[Case], run: Any) -> str:
    """Which of the programs raises if it is run by itself."""
    for case in cases:
        try:
            run([case])
        except Exception as error:
            return f"{case.subject}: {case.name}: {type(error).__name__}: {error}"
    return "none of them alone"


def computed(cases: list[Case], options: replicax.RunOptions | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The results of the programs, run together, and their localities."""
    strategy = strategy_of(REPLICAS)
    x = strategy.distribute_values_from_function(lambda ctx: X[ctx.replica_id_in_sync_group])

    def run(some: list[Case]) -> tuple[dict[str, Any], str]:
        step = together(some)
        found = "" if options else "".join(v.value for v in strategy.extended.trace(step, (x, A)).localities)
        return strategy.run(step, (x, A), options=options), found

    try:
        results, found = run(cases)
    except Exception as error:
        error.add_note(f"the program that fails: {the_one_that_fails(cases, run)}")
        raise
    localities = {}
    for name, result in sorted(results.items()):  # in the order in which JAX flattens a dict
        count = len(jax.tree.leaves(result, is_leaf=is_per_replica))
        localities[name], found = found[:count], found[count:]
    return results, localities


def check(cases: list[Case], options: replicax.RunOptions | None) -> None:
    results, localities = computed(cases, options)
    expected = plainly(cases)
    wrong = []
    for case in cases:
        if options is None and localities[case.name] != case.localities:
            wrong.append(f"{case.name}: the localities are {localities[case.name]}, expected {case.localities}")
        mine, tree = jax.tree.flatten(results[case.name], is_leaf=is_per_replica)
        theirs = [jax.tree.leaves(e[case.name]) for e in expected]
        assert tree == jax.tree.structure(expected[0][case.name]), case.name
        for i, leaf in enumerate(mine):
            held = components(leaf) if is_per_replica(leaf) else [leaf] * REPLICAS
            for replica in range(REPLICAS):
                own = numbers(held[replica])
                other = numbers(theirs[replica][i])
                same = own.shape == other.shape and own.dtype == other.dtype
                if not same or not np.allclose(own, other, rtol=2e-5, atol=5e-6, equal_nan=True):
                    wrong.append(f"{case.name}: leaf {i} on replica {replica} is {own}, expected {other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("bundle", [pytest.param(b, marks=[pytest.mark.soak] if b in FURTHER else []) for b in BUNDLES])
def test_programs_are_what_plain_jax_computes(bundle: str) -> None:
    check(BUNDLES[bundle], None)


def test_the_per_replica_executor_computes_the_same() -> None:
    check(EXACTLY, replicax.RunOptions(executor="per_replica"))


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 300
    assert sum(len(BUNDLES[b]) for b in BUNDLES if b not in FURTHER) >= 110
    assert len(EXACTLY) >= 8
    assert sum("T" in case.localities for case in CASES) > 100
    assert sum("M" in case.localities for case in CASES) > 80
