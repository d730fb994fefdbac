"""Variables whose pieces are on several workers, compared with copies of them in one process."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

import replicax
from tests import processes
from tests.conftest import strategy_of
from tests.soaking import soak_except
from tests.strategies.test_multi_worker import compare, joined
from tests.variables import workers_split


@functools.cache
def on_one_worker(name: str) -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return workers_split.PROGRAMS[name](strategy_of(4))


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        pytest.param([2, 2], ["row updates, exactly", "run_steps"], marks=pytest.mark.soak),
        ([1, 2, 1], ["across", "run_steps"]),
        pytest.param([2, 2], list(workers_split.PROGRAMS), marks=pytest.mark.soak),
        pytest.param([1, 2, 1], list(workers_split.PROGRAMS), marks=pytest.mark.soak),
    ],
    ids=["two-workers", "three-workers", "two-workers-all", "three-workers-all"],
)
def test_split_variables_do_the_same_as_copies_on_one_worker(devices: list[int], names: list[str]) -> None:
    results = processes.run(workers_split.run_programs, names, workers=len(devices), devices=devices, timeout=240)
    for name in names:
        compare(joined([r[name] for r in results]), on_one_worker(name), name)


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        pytest.param([1, 3], ["row updates, exactly"], marks=pytest.mark.soak),
        pytest.param([1, 3], list(workers_split.PROGRAMS), marks=pytest.mark.soak),
        pytest.param([2, 2], list(workers_split.PROGRAMS), marks=pytest.mark.soak),
    ],
    ids=["a-group-of-two-workers", "a-group-of-two-workers-all", "a-group-of-each-all"],
)
def test_variables_split_in_pairs_do_the_same_as_copies_on_one_worker(devices: list[int], names: list[str]) -> None:
    results = processes.run(workers_split.run_programs, names, 2, workers=2, devices=devices, timeout=240)
    for name in names:
        compare(joined([r[name] for r in results]), on_one_worker(name), name)


def test_what_one_worker_does_alone() -> None:
    ours, theirs = processes.run(workers_split.alone, workers=2, devices=2)
    whole = np.arange(20, dtype=np.float32).reshape(10, 2)
    assert ours["name"] == "MultiWorkerMirroredStrategy(4 replicas on 2 worker(s); here: cpu:0, cpu:1)"
    assert ours["layout"] == theirs["layout"] == "split along dim 0 over 4 replicas"
    assert ours["rows here"] == theirs["rows here"] == [3, 3]
    assert "over 4 replicas:\nhere 6:10 [[12. 13.]" in theirs["repr"]
    assert theirs["pieces"] == [whole[6:9].tolist(), whole[9:].tolist()]
    same = {
        "one worker reads": (
            "DeadlockError",
            "worker 0 creates a variable 'made'; worker 1 reads the whole of a split variable 'v'",
        ),
        "one replica reads": (
            "DeadlockError",
            r"replica 0 has returned .*; replica 3 is in reading variable 'v' \(float32\[10,2\]\), which is split over "
            r"several workers at .*workers_split.py:\d+ \(on worker 1\)",
        ),
        "assigned": ("LocalityError", "'v' .* worker 1 has another than worker 0"),
        "unlike": ("ValueError", "the workers create different variables here, worker 0 one of .*32.8.*32.9"),
    }
    for key, (kind, message) in same.items():
        for found in (ours, theirs):
            assert found[key][0] == kind, (key, found[key])
            assert re.search(message, found[key][1], re.DOTALL), (key, found[key])
    for found in (ours, theirs):
        assert found["sends"] == 0  # what is computed alike is known to be alike
        for value, chiefs in zip(found["alike"], ours["alike"], strict=True):
            np.testing.assert_array_equal(value, chiefs)
        np.testing.assert_array_equal(found["still"], whole)
        np.testing.assert_array_equal(found["from an array"], ours["own"])
        np.testing.assert_allclose(found["from a program"], np.tanh(ours["own"]), rtol=1e-6)
        np.testing.assert_array_equal(found["from a program's number"], np.zeros(5))


@pytest.mark.parametrize(
    ("shared", "group_size"),
    [(True, None), (False, None), pytest.param(True, 2, marks=pytest.mark.soak)],
    ids=["shared", "own-disks", "shared-groups"],
)
def test_each_worker_saves_its_pieces(tmp_path, shared, group_size) -> None:
    results = processes.run(workers_split.saved, str(tmp_path), shared, group_size, workers=2, devices=2)
    both = 2 * workers_split.WHOLE.nbytes  # the variable and its slot
    for worker, (is_right, sizes) in enumerate(results):
        assert is_right
        assert set(sizes) == ({"arrays-0", "arrays-1"} if shared else {f"arrays-{worker}"})
        for size in sizes.values():
            assert 0.49 * both < size < 0.55 * both
    if shared:
        with strategy_of(2).scope():
            v = replicax.Variable(np.zeros_like(workers_split.WHOLE), name="v")
        replicax.Checkpoint(v=v).restore(tmp_path / "a", partial=True)
        np.testing.assert_array_equal(v, workers_split.WHOLE)


@pytest.mark.parametrize(("devices", "group_size"), soak_except([(1, None), (2, 2)], (2, 2)))
def test_a_device_of_a_worker_holds_a_part_of_the_model_and_a_few_layers(devices: int, group_size: int | None) -> None:
    layers, layer = 12, 4 * 256 * 256
    for kept, temporaries in processes.run(workers_split.held, group_size, workers=2, devices=devices, timeout=120):
        assert 3 * layers * layer / 2 <= kept <= 3 * layers * layer / 2 * 1.01
        assert temporaries < 9 * layer  # a gradient is summed as a whole, and there once more for that
