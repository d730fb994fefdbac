"""Several real worker processes, compared with one that has all their replicas."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

import replicax
from tests import processes
from tests.compiler import HURRIED
from tests.conftest import strategy_of
from tests.launcher.launches import launched
from tests.strategies import workers_checks


def joined(results: list[Any]) -> Any:
    """One result from the workers': their replicas' components together, and what all have once."""
    first = results[0]
    if isinstance(first, dict) and all(isinstance(k, int) for k in first):
        return {k: v for result in results for k, v in result.items()}
    if isinstance(first, dict):
        return {k: joined([r[k] for r in results]) for k in first}
    if isinstance(first, list | tuple):
        assert len({len(r) for r in results}) == 1
        return [joined(list(column)) for column in zip(*results, strict=True)]
    for other in results[1:]:
        np.testing.assert_array_equal(first, other)
    return first


def compare(found: Any, expected: Any, where: str) -> None:
    expected = joined([expected])
    assert jax.tree.structure(found) == jax.tree.structure(expected), where
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        name = where + jax.tree_util.keystr(path)
        if np.asarray(a).dtype.kind not in "biufc":
            assert np.array_equal(a, b), name
        else:
            assert np.asarray(a).dtype == np.asarray(b).dtype, name
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=name)


@functools.cache
def on_one_worker(name: str) -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return workers_checks.PROGRAMS[name](strategy_of(4))


SOME_PROGRAMS = ["variables", "across", "in a step", "in a step, exactly", "objects"]
LEFT_TO_SOAK = ["train", "train, exactly", "train a module, exactly", "variables", "uneven, exactly"]
"""``test_placements.py`` trains as well, and the others are there on the other executor."""


# Where a worker has a single replica, a worker has nothing to compare with.
@pytest.mark.parametrize(
    ("devices", "names", "num_replicas"),
    [
        ([2, 2], [name for name in workers_checks.PROGRAMS if name not in LEFT_TO_SOAK], None),
        pytest.param([2, 2], list(workers_checks.PROGRAMS), None, marks=pytest.mark.soak),
        pytest.param([1, 2, 1], SOME_PROGRAMS, None, marks=pytest.mark.soak),
        ([1, 1], ["in a step"], 4),
        pytest.param([1, 1], ["train", "train, exactly", "across", "objects"], 4, marks=pytest.mark.soak),
    ],
    ids=["two-workers", "two-workers-all", "three-workers", "shared-devices", "shared-devices-more"],
)
def test_every_program_does_the_same_as_on_one_worker(
    devices: list[int], names: list[str], num_replicas: int | None
) -> None:
    fresh = num_replicas is not None
    results = processes.run(
        workers_checks.run_programs,
        names,
        num_replicas,
        fresh,
        workers=len(devices),
        devices=devices,
        timeout=240,
        fresh=fresh,
    )
    for name in names:
        compare(joined([r[name] for r in results]), on_one_worker(name), name)


def test_what_goes_wrong_on_one_worker_is_an_error_on_all() -> None:
    ours, theirs = processes.run(workers_checks.errors, workers=2, devices=2, timeout=100)
    assert ours["random"] == theirs["random"]
    name = "MultiWorkerMirroredStrategy(4 replicas on 2 worker(s); here: cpu:0, cpu:1)"
    assert (ours["context"], theirs["context"]) == ([True, True, name], [False, False, name])
    # On the worker itself it is the exception as it was; on the other it says where it comes from.
    for key in ("fails", "fails, exactly", "fails late, exactly"):
        assert ours[key][0] == theirs[key][0] == "KeyError", key
    line = r"workers_checks.py:\d+\)"
    assert re.search(r"\(raised by fails, while it was traced on worker 1, at .*" + line, ours["fails"][1])
    assert re.search(r"\(raised by replica 2 of 4 on worker 1, at .*" + line, ours["fails, exactly"][1])
    assert re.search(r"\(raised by replica 3 of 4 on worker 1, at .*" + line, ours["fails late, exactly"][1])
    assert "(raised by replica 3 of 4)" in theirs["fails late, exactly"][1]
    same = {
        "other collective": (
            "DeadlockError",
            r"replica 0 is in all_reduce .* \(on worker 0\).* replica 3 is in all_gather .* \(on worker 1\)",
        ),
        "returns": ("DeadlockError", r"replica 2 is in all_reduce .*; replica 3 has returned \(on worker 1\)"),
        "structure": ("ValueError", "the same structure: replica 0 has .*, replica 3 has .*"),
        "differs": ("LocalityError", "'w' .* was assigned a value, but it differs between replicas"),
        "differs, exactly": ("LocalityError", "'w' .* was assigned a value, but it differs between replicas"),
        "step": ("DeadlockError", "worker 0 runs the step 'one' as .*; worker 1 runs the step 'another' as"),
        "executor": (
            "DeadlockError",
            "worker 0 runs .*'one' on the per-replica .*; worker 1 .* as one compiled program",
        ),
        "plain value": ("LocalityError", r"one: args\[0\] is a plain value, .* worker 1 has another than worker 0"),
        "captured": ("LocalityError", "a new value of .* 'w' is computed on worker 1 otherwise than on worker 0"),
        "order": ("LocalityError", "'at_random' is computed on worker 1 where .* 'w' is computed on worker 0"),
        "plain kind": ("ValueError", r"one: args\[0\] is float64\[2\] on worker 0, and float64\[3\] on worker 1"),
        "plain structure": ("ValueError", r"one: .* differ in structure: worker 0 has .*\*\],\).*1 has .*\*, \*\],\)"),
        "plain text": ("ValueError", r"args\[1\] is the Python value 'training' on worker 0, .*'evaluation' on"),
        "assign": ("LocalityError", "'w' .* was assigned a plain value, .* worker 1 has another than worker 0"),
        "create": ("ValueError", r"'unlike'.*: the workers create different .* 0 one of float32\[3\].* float32\[4\]"),
        "create or run": ("DeadlockError", "worker 0 creates a variable 'unlike'; worker 1 runs the step 'one'"),
        "logical": ("RuntimeError", "the number of logical devices of a replica is 1 on worker 0 and 2 on worker 1"),
        "devices": (
            "ValueError",
            "belongs to process .*MultiWorkerMirroredStrategy is the strategy for the devices of",
        ),
    }
    for key, (kind, message) in same.items():
        for found in (ours[key], theirs[key]):
            assert found[0] == kind, (key, found)
            assert re.search(message, found[1], re.DOTALL), (key, found)
    for found in (ours, theirs):
        assert found["afterwards"][0] == 4.0
        np.testing.assert_array_equal(found["afterwards"][1], 1.0)


def test_a_worker_that_does_not_come_is_named(tmp_path: pathlib.Path) -> None:
    ours, theirs = processes.run(workers_checks.lateness, tmp_path, workers=2, devices=2, timeout=60, fresh=True)
    kind, message = ours["collective"]
    assert kind == "DeadlockError"
    assert re.search(r"replica\(s\) \[0, 1\] have waited for more than 1 s .* waited .* for worker 1 of 2", message)
    assert ours["exactly"][0] == theirs["exactly"][0] == "DeadlockError"
    assert re.search("replica 0 is, for at most 1 s, in all_reduce .* for worker 1 of 2, who did", ours["exactly"][1])
    assert re.search("came too late, when worker 0 gave up", theirs["exactly"][1])
    assert ours["afterwards"] == theirs["afterwards"] == 8.0
    assert ours["variable"][0] == "DeadlockError"
    assert re.search("worker 0 creates a variable 'lonely', and .* for worker 1 of 2", ours["variable"][1])


def test_devices_that_cannot_reach_other_processes() -> None:
    for kind, message in processes.run(workers_checks.too_late, workers=2, fresh=True):
        assert kind == "RuntimeError"
        assert "can't reach those of other processes" in message
        assert "jax.config.update('jax_cpu_collectives_implementation', 'gloo')" in message


def test_with_one_process_it_is_a_mirrored_strategy() -> None:
    strategy = replicax.MultiWorkerMirroredStrategy(["cpu:0", "cpu:1"])
    assert strategy.extended.worker_devices == tuple(jax.devices()[:2])
    assert strategy.extended.workers.count == 1
    assert strategy.extended.should_checkpoint
    assert replicax.MultiWorkerMirroredStrategy().num_replicas_in_sync == 8
    with pytest.raises(ValueError, match="timeout_seconds must be a positive number or None, got -1"):
        replicax.MultiWorkerMirroredStrategy(timeout_seconds=-1)
    with pytest.raises(ValueError, match="devices names cpu:1 twice"):
        replicax.MultiWorkerMirroredStrategy(["cpu:1", "cpu:1"])


@pytest.mark.soak
def test_a_worker_that_fails_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.5)
    with pytest.raises(processes.WorkersFailedError, match=r"worker 1 ended with code 1(?s:.*)ZeroDivision"):
        processes.run(workers_fail, workers=2, timeout=30, fresh=True)


def workers_fail() -> None:
    if jax.process_index() == 1:
        _ = 1 // 0


@pytest.mark.soak
def test_the_document_s_program_prints_what_it_says(tmp_path: pathlib.Path) -> None:
    text = (processes.ROOT / "docs" / "workers.md").read_text()
    [program, command, printed] = re.findall(r"^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[:3]
    first, *words = command.split()
    assert [first, words[0]] == ["replicax", "launch"]
    launch = launched(tmp_path, *words[1:], script=program, **HURRIED)
    assert launch.code == 0, launch.stderr
    assert launch.stdout.endswith(printed)
    assert launch.stdout.count("replicas") == 1  # only the chief prints
