"""Programs in the idioms of public code have the results of their plain form, however many replicas run them."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import pytest

import replicax
from tests.conftest import strategy_of
from tests.corpus import (  # noqa: F401
    control,
    decoding,
    generative,
    graphs,
    implicit,
    inference,
    optimizers,
    populations,
    regularizers,
    reinforcement,
    selfsupervised,
    sequences,
    vision,
)
from tests.corpus.corpus import PROGRAMS, WAYS, Program
from tests.programs.programs import third_party


def cells() -> Any:
    for program in PROGRAMS:
        for way in WAYS:
            marks = [] if way in program.quick else [pytest.mark.soak]
            if way in program.fails:
                marks.append(pytest.mark.xfail(strict=True, reason=program.fails[way]))
            yield pytest.param(program, way, id=f"{program.name}-{way}", marks=marks)


@pytest.mark.parametrize(("program", "way"), list(cells()))
@third_party
def test_programs_have_the_results_of_their_plain_form(program: Program, way: str) -> None:
    expected = jax.device_get(program.plain())
    # Two programs that return zeros, or nothing, would agree, too.
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(expected))
    assert jax.tree.leaves(expected)
    strategy = strategy_of(2 if way == "executor" else int(way))
    with replicax.debug() if way == "executor" else contextlib.nullcontext():
        found = program.run(strategy)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, leaf), wanted in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        for held in copies(leaf):
            assert held.shape == np.shape(wanted), jax.tree_util.keystr(path)
            np.testing.assert_allclose(
                held, wanted, rtol=program.rtol, atol=program.rtol, err_msg=jax.tree_util.keystr(path)
            )


def copies(leaf: Any) -> list[Any]:
    """What each device holds of a result, where each holds all of it."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        return [np.asarray(shard.data) for shard in leaf.addressable_shards]
    return [np.asarray(leaf)]
