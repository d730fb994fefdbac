"""Placements in combination: how variables lie, on how many workers, on how many logical devices, on which executor."""

from __future__ import annotations

import functools
import itertools
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import pytest

from tests import processes
from tests.soaking import soak_except
from tests.strategies import workers_placements
from tests.strategies.workers_placements import LAYOUTS, go_through

PLACES = {
    "one worker": ([4], 1),
    "two workers": ([2, 2], 1),
    "three workers": ([1, 2, 1], 1),  # no group has a worker for itself
    "2 replicas on each of 4 devices": ([4], 2),
    "4 replicas on each of 2 devices": ([2], 4),
    "8 replicas on a device": ([1], 8),
    "two workers, 2 replicas on each device": ([2, 2], 2),
}
"""How many devices each worker has, or groups of logical ones, and how many replicas each of these."""
NAMES = [("if finite",), ("adafactor",), ("adamw", "lamb", "lars", "momentum, clipped")]
QUICK = [
    ("groups", NAMES[0], "three workers", 1, "compiled"),
    ("split", NAMES[1], "two workers, 2 replicas on each device", 2, "compiled"),
]
GRID = list(itertools.product(LAYOUTS, NAMES, PLACES, (1, 2), ("compiled", "per_replica")))


@functools.cache
def on_one_device(names: tuple[str, ...]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return go_through([1], 1, "mirrored", "compiled", names, folder)


@pytest.mark.parametrize(
    ("layout", "names", "place", "logical", "executor"),
    soak_except(GRID, *QUICK),
    ids=lambda value: " and ".join(value) if isinstance(value, tuple) else None,
)
def test_every_placement_computes_what_one_device_does(
    layout: str, names: tuple[str, ...], place: str, logical: int, executor: str, tmp_path: pathlib.Path
) -> None:
    devices, per_device = PLACES[place]
    arguments = devices, logical, layout, executor, names, str(tmp_path), per_device
    if len(devices) == 1:
        results = [go_through(*arguments)]
    else:
        counts = [2 * count for count in devices]
        results = processes.run(go_through, *arguments, workers=len(devices), devices=counts, timeout=240)
    for found in results:
        check(found, names)


def check(found: Any, names: tuple[str, ...]) -> None:
    """It is what one device computes."""
    expected = on_one_device(names)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, mine), theirs in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_each_worker_has_all_parts_of_a_mirrored_variable() -> None:
    for values, shown in processes.run(workers_placements.read_parts, workers=2, devices=2):
        for found in values:
            np.testing.assert_array_equal(found, 2 * workers_placements.INITIAL["a"])
        assert "mirrored on 2 replicas, split [1, 2] over 2 logical devices of each:\n[[" in shown


def test_workers_that_choose_differently() -> None:
    """They would wait for each other in programs of different shapes."""
    said = [
        "num_replicas is 4 on worker 0 and 8 on worker 1",
        "num_replicas is None on worker 0 and 4 on worker 1",
        "replicas_at_once is 1 on worker 0 and 2 on worker 1",
        "reproducible is False on worker 0 and True on worker 1",
        "the number of logical devices of a replica is 1 on worker 0 and 2 on worker 1",
        "the version of Replicax is 'A' on worker 0 and 'B' on worker 1",
    ]
    for found in processes.run(workers_placements.disagree, workers=2, devices=2):
        assert found == [f"the workers do not fit together: {text}; it must be the same on all" for text in said]
