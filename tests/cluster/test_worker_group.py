"""Which worker this process is, of how many, and where they meet: by resolvers, variables and JAX's detection."""

from __future__ import annotations

import json
import re

import pytest

from replicax import _jax
from replicax.cluster import ClusterSpec, SimpleClusterResolver
from replicax.cluster.worker_group import WorkerGroup, detected_group, group_from_environment, group_of

CLUSTER = {"ps": ["p:1"], "worker": ["a:1", "b:1"], "chief": ["c:1"], "evaluator": ["e:1"]}


def resolver(task_type: str | None, task_id: int | None, cluster: dict | None = None) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(CLUSTER if cluster is None else cluster), "", task_type, task_id)


@pytest.mark.parametrize(("task", "index"), [(("chief", 0), 0), (("worker", 0), 1), (("worker", 1), 2)])
def test_the_chief_is_the_first(task, index) -> None:
    group = group_of(resolver(*task))
    assert group == WorkerGroup("c:1", 3, index, "SimpleClusterResolver", ("c:1", "a:1", "b:1"))
    assert group.name_of(1) == "worker 1 (a:1)"


def test_without_a_chief_it_is_the_first_worker() -> None:
    assert group_of(resolver("worker", 1, {"worker": ["a:1", "b:1"]})).coordinator == "a:1"
    assert group_of(resolver(None, None, {"worker": ["a:1"]})) is None
    assert group_of(resolver("worker", 0, {})) is None


@pytest.mark.parametrize(
    ("task", "cluster", "message"),
    [
        (
            ("ps", 0),
            None,
            "this process is 'ps' 0, .* synchronous, without parameter s.*there is replicax.ParameterServerStrategy",
        ),
        (("evaluator", 0), None, "'evaluator' 0.*without evaluators.*evaluate in a program of its own"),
        (("trainer", 0), None, "a task of the unknown job 'trainer'; expected one of 'chief', 'worker'"),
        (("worker", 2), None, "there is no 'worker' 2: the cluster has 2, numbered from 0"),
        ((None, None), None, "a cluster of 3 workers, and does not say which .*task_type is None and task_id is None"),
        (("trainer", 0), {"trainer": ["a:1"]}, "the unknown job 'trainer'; expected 'chief' and 'worker'.*Rename it"),
        (("ps", 0), {"ps": ["a:1"]}, "the cluster has no task of the jobs 'chief' and 'worker'"),
        (("chief", 0), {"chief": ["a:1", "b:1"]}, "expected one task of the job 'chief', got 2"),
        (("worker", 0), {"worker": {0: "a:1", 2: "b:1"}}, r"the tasks \[0, 2\] of the job 'worker' are not all from 0"),
    ],
)
def test_tasks_that_are_no_workers(task, cluster, message) -> None:
    with pytest.raises(ValueError, match=f"^SimpleClusterResolver.*{message}"):
        group_of(resolver(*task, cluster))


# --- variables ------------------------------------------------------------------------------------------


def jax_variables(monkeypatch: pytest.MonkeyPatch, coordinator: str, count: str, index: str) -> None:
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    for name, value in zip(names, (coordinator, count, index), strict=True):
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)


def test_the_variables_of_jax(monkeypatch) -> None:
    assert group_from_environment() is None
    jax_variables(monkeypatch, "a:1", "3", "2")
    found = group_from_environment()
    assert found == WorkerGroup("a:1", 3, 2, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID")
    assert found.name_of(2) == "worker 2"
    cluster = {"worker": ["x:1", "y:1", "z:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 2}}))
    found = group_from_environment()
    source = "TF_CONFIG and JAX_COORDINATOR_ADDRESS"
    assert (found.coordinator, found.source, found.addresses) == ("a:1", source, ("x:1", "y:1", "z:1"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ("a:1", "3", ""),
            "JAX_COORDINATOR_ADDRESS=a:1, JAX_NUM_PROCESSES=3 is set, and JAX_PROCESS_ID is not: set all",
        ),
        (("", "3", "1"), "JAX_NUM_PROCESSES=3, JAX_PROCESS_ID=1 is set, and JAX_COORDINATOR_ADDRESS is not"),
        (("a:1", "3", "3"), "JAX_PROCESS_ID=3: expected a number from 0 to 2, as JAX_NUM_PROCESSES=3"),
        (("a:1", "x", "0"), "JAX_NUM_PROCESSES=x: expected a whole number, 1 or more"),
        (("a:1", "2", "-1"), "JAX_PROCESS_ID=-1: expected a whole number, 0 or more"),
        (("a", "2", "0"), "JAX_COORDINATOR_ADDRESS: 'a' has no port"),
    ],
)
def test_what_is_wrong_with_the_variables_of_jax(monkeypatch, values, message) -> None:
    jax_variables(monkeypatch, *values)
    with pytest.raises(ValueError, match=message):
        group_from_environment()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("", "4", ""), "SimpleClusterResolver says 3 workers, and JAX_NUM_PROCESSES says 4.*Unset one of the two"),
        (("", "3", "0"), "SimpleClusterResolver says 2 as this worker's number, and JAX_PROCESS_ID says 0"),
    ],
)
def test_a_resolver_and_the_variables_disagree(monkeypatch, values, message) -> None:
    jax_variables(monkeypatch, *values)
    with pytest.raises(ValueError, match=message):
        group_of(resolver("worker", 1))


# --- what JAX finds -------------------------------------------------------------------------------------


def test_a_slurm_step_is_found_by_jax(monkeypatch) -> None:
    for name, value in {"JOB_ID": "7", "STEP_NODELIST": "n[1-2]", "NTASKS": "4", "PROCID": "3", "LOCALID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "2222")
    assert detected_group(10) == WorkerGroup("n1:2222", 4, 3, "the slurm that JAX finds", is_detected=True)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "n9:1")
    assert detected_group(10).coordinator == "n9:1"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "n9")
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS: 'n9' has no port; expected 'HOST:PORT'"):
        detected_group(10)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert detected_group(10) is None
    monkeypatch.setenv("SLURM_NTASKS", "x")
    with pytest.raises(RuntimeError, match=r"fails to read its variables \(ValueError: .*'x'\): correct them, or set"):
        detected_group(10)


def test_nothing_is_found_where_there_is_nothing(monkeypatch) -> None:
    assert _jax.detected_cluster(10) is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # a pod of no indexed Job, without the package
    assert _jax.detected_cluster(10) is None


def test_open_mpi_is_found_by_jax(monkeypatch) -> None:
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
    for name, value in {"SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    found = _jax.detected_cluster(10)
    assert (found.name, found.count, found.index) == ("ompi", 2, 1)
    assert re.fullmatch(r"10\.96\.0\.1:\d+", found.coordinator)
