"""Processes come together by what resolvers and the environment tell, and say what is wrong with it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import replicax
from tests import processes


def together(what: str, environments: list[dict[str, str]]) -> list[Any]:
    """What each of several processes answers, each with variables of its own."""
    program = [*processes.MODULE, "tests.cluster.workers_together", what]
    printed = processes.run_programs([program] * len(environments), environment=environments)
    answers = [re.search("^answer: (.*)$", text, re.MULTILINE) for text in printed]
    assert all(answers), printed
    return [json.loads(answer[1]) for answer in answers if answer]


def tf_config(cluster: dict[str, Any], task_type: str, task_id: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": task_id}})


def here() -> str:
    return f"127.0.0.1:{processes.free_port()}"


def test_a_strategy_connects_its_workers_by_tf_config() -> None:
    cluster = {"worker": [here()], "chief": [here()], "ps": [here()]}
    tasks = [("worker", 0), ("chief", 0)]
    found = together("summed", [{"TF_CONFIG": tf_config(cluster, *task)} for task in tasks])
    assert found == [[3.0, 1, 2, "worker", 0], [3.0, 0, 2, "chief", 0]]  # the chief is the first


def test_a_strategy_connects_its_workers_by_jax_variables_and_through_no_proxy() -> None:
    told = {"JAX_COORDINATOR_ADDRESS": here(), "JAX_NUM_PROCESSES": "2", "http_proxy": f"http://{here()}"}
    others = [{}, {"no_grpc_proxy": "example.org"}]
    found = together("summed", [told | others[i] | {"JAX_PROCESS_ID": str(i)} for i in range(2)])
    assert found == [[3.0, 0, 2, "worker", 0], [3.0, 1, 2, "worker", 1]]


def test_what_a_launcher_sets_and_devices_before_the_strategy() -> None:
    cluster = {"worker": [here(), here()]}
    told = {"JAX_COORDINATOR_ADDRESS": here(), "JAX_NUM_PROCESSES": "2"}
    variables = [told | {"JAX_PROCESS_ID": str(i), "TF_CONFIG": tf_config(cluster, "worker", i)} for i in range(2)]
    for i, (seen, same, accelerators, (kind, message)) in enumerate(together("devices_first", variables)):
        assert (seen, same, accelerators) == (2, True, {})
        assert kind == "ValueError"
        expected = r"SimpleClusterResolver says 3 workers, and JAX_NUM_PROCESSES says 2.*Unset one"
        assert re.search(expected, message), (i, message)


def test_a_strategy_connects_the_tasks_of_a_slurm_step() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    port = {"JAX_COORDINATOR_PORT": str(processes.free_port())}
    tasks = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    assert together("summed", [step | port | task for task in tasks]) == [
        [3.0, 0, 2, "worker", 0],
        [3.0, 1, 2, "worker", 1],
    ]


def test_two_processes_are_one_worker() -> None:
    told = {"TF_CONFIG": tf_config({"worker": [here(), here()]}, "worker", 0)}
    for kind, message in together("refused", [told, told]):
        assert kind == "RuntimeError"
        assert re.search(r"two processes are worker 0: process \d+ on .+ and process \d+ on .+from 0 to 1", message)


def test_devices_that_were_made_before() -> None:
    [(kind, message)] = together("too_late", [{"TF_CONFIG": tf_config({"worker": [here(), here()]}, "worker", 1)}])
    assert kind == "RuntimeError"
    assert re.search(r"worker 1 \(.*\) of 2 \(TF_CONFIG\).*made its devices already.*initialize_workers\(\)", message)


def test_a_process_that_is_alone_stays_alone(monkeypatch) -> None:
    alone = replicax.cluster.SimpleClusterResolver(replicax.cluster.ClusterSpec({"worker": [here()]}))
    replicax.initialize_workers()
    found = replicax.MultiWorkerMirroredStrategy().cluster_resolver
    assert (found.task_type, found.task_id, found.cluster_spec()) == ("worker", 0, {})
    for resolver in (alone, replicax.cluster.SimpleClusterResolver(replicax.cluster.ClusterSpec({}))):
        replicax.initialize_workers(resolver)
        assert replicax.MultiWorkerMirroredStrategy(cluster_resolver=resolver).cluster_resolver is resolver
    monkeypatch.setenv("TF_CONFIG", tf_config({"chief": [here()]}, "chief", 0))
    assert replicax.MultiWorkerMirroredStrategy().extended.workers.count == 1


def test_what_is_no_resolver_and_no_time() -> None:
    with pytest.raises(
        TypeError, match="cluster_resolver must be a replicax.cluster.ClusterResolver, got 'node0:2222'.*Simple"
    ):
        replicax.initialize_workers("node0:2222")
    with pytest.raises(
        TypeError, match=r"first argument names devices, .*SimpleClusterResolver.*cluster_resolver=\.\.\."
    ):
        replicax.MultiWorkerMirroredStrategy(replicax.cluster.SimpleClusterResolver(replicax.cluster.ClusterSpec({})))
    for options in (replicax.CommunicationImplementation.NCCL, replicax.CommunicationOptions()):
        with pytest.raises(TypeError, match=r"names devices, .*pass communication_options=replicax\.Comm"):
            replicax.MultiWorkerMirroredStrategy(options)
    for seconds in (0, -1, True, "9"):
        with pytest.raises(ValueError, match="timeout_seconds must be a positive number or None"):
            replicax.initialize_workers(timeout_seconds=seconds)
