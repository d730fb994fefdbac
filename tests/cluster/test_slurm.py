"""The tasks of a Slurm step, from the variables that ``srun`` sets."""

from __future__ import annotations

import os
import time

import pytest

from replicax.cluster import SlurmClusterResolver
from replicax.cluster.slurm import expand_hostlist, expand_tasks_per_node

STEP = {"STEP_NODELIST": "node[9-10],big", "STEP_TASKS_PER_NODE": "2(x2),1", "STEP_NUM_TASKS": "5", "PROCID": "3"}


@pytest.fixture
def step(monkeypatch):
    """Sets the variables of a step; what is given is set instead, and what is ``None`` is not."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", os.defpath)

    def set_up(**values: str | None) -> None:
        for name, value in {**STEP, **values}.items():
            if value is None:
                monkeypatch.delenv(f"SLURM_{name}", raising=False)
            else:
                monkeypatch.setenv(f"SLURM_{name}", value)

    return set_up


@pytest.mark.parametrize(
    ("written", "nodes"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[3-3]", ["n3"]),
        ("a[1-2]-ib.example,b", ["a1-ib.example", "a2-ib.example", "b"]),
        ("r[1-2]n[01,03]", ["r1n01", "r1n03", "r2n01", "r2n03"]),
    ],
)
def test_lists_of_nodes(written, nodes) -> None:
    assert expand_hostlist(written) == nodes


@pytest.mark.parametrize("written", ["", "n[1-2", "n1-2]", "n[]", "n[2-1]", "n[a-b]", "a,,b", "n[[1]]", "n[1-2-3]"])
def test_what_is_no_list_of_nodes(written) -> None:
    with pytest.raises(ValueError, match="list of nodes"):
        expand_hostlist(written)


def test_tasks_are_in_the_order_of_slurm(step) -> None:
    step()
    resolver = SlurmClusterResolver(gpus_per_node=0)
    everyone = ["node9:8888", "node9:8889", "node10:8888", "node10:8889", "big:8888"]
    assert resolver.cluster_spec() == {"worker": everyone}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 3, "slurm")
    assert (resolver.master(), resolver.master("worker", 0, "")) == ("grpc://node10:8889", "grpc://node9:8888")
    assert resolver.num_accelerators() == {"GPU": 0}
    step(DISTRIBUTION="cyclic")
    around = ["node9:8888", "node10:8888", "big:8888", "node9:8889", "node10:8889"]
    assert SlurmClusterResolver(gpus_per_node=0).cluster_spec() == {"worker": around}
    step(DISTRIBUTION="plane", DIST_PLANESIZE="2", STEP_TASKS_PER_NODE="3,3,1", STEP_NUM_TASKS="7")
    in_twos = ["node9:8888", "node9:8889", "node10:8888", "node10:8889", "big:8888", "node9:8890", "node10:8890"]
    assert SlurmClusterResolver(gpus_per_node=0).cluster_spec() == {"worker": in_twos}


def test_tasks_in_an_order_that_slurm_does_not_tell(step) -> None:
    step(DISTRIBUTION="arbitrary")
    with pytest.raises(RuntimeError, match="unknown which node has which task"):
        SlurmClusterResolver(gpus_per_node=0)


def test_jobs_and_ports_of_ones_own(step) -> None:
    step(PROCID="1")
    resolver = SlurmClusterResolver({"worker": 3, "chief": 1, "ps": 1}, port_base=7000, gpus_per_node=0)
    assert resolver.cluster_spec() == {
        "chief": ["node9:7000"],
        "ps": ["node9:7001"],
        "worker": ["node10:7000", "node10:7001", "big:7000"],
    }
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)


def test_a_job_without_a_step_and_tasks_that_are_told(step) -> None:
    step(STEP_NODELIST=None, STEP_TASKS_PER_NODE=None, JOB_NODELIST="n[1-2]", TASKS_PER_NODE="2(x2)", PROCID="0")
    assert SlurmClusterResolver(gpus_per_node=0).cluster_spec().num_tasks("worker") == 4
    assert SlurmClusterResolver(tasks_per_node=1, gpus_per_node=0).cluster_spec() == {"worker": ["n1:8888", "n2:8888"]}
    told = SlurmClusterResolver(tasks_per_node={"x": 1, "y": 2}, gpus_per_node=0)
    assert told.cluster_spec() == {"worker": ["x:8888", "y:8888", "y:8889"]}


@pytest.mark.parametrize(
    ("visible", "variables", "arguments", "each", "seen"),
    [
        (None, {"GPUS_ON_NODE": "4"}, {}, 2, "2,3"),  # an equal share
        ("4,5,6,7", {}, {"gpus_per_task": 1}, 1, "5"),
        ("7", {"GPUS_ON_NODE": "4"}, {"gpus_per_task": 1}, 1, "7"),  # Slurm has given it its own
        ("0,1", {}, {"auto_set_gpu": False}, 1, "0,1"),
        (None, {}, {}, 0, None),  # there is no driver
    ],
)
def test_gpus(step, monkeypatch, visible, variables, arguments, each, seen) -> None:
    step(**variables)  # this task is the second on its node
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that what the resolver sets goes, too
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert SlurmClusterResolver(**arguments).num_accelerators() == {"GPU": each}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


def test_the_driver_is_asked_how_many_there_are(step, monkeypatch, tmp_path) -> None:
    step()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU 0: A\\nGPU 1: B\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    assert SlurmClusterResolver(auto_set_gpu=False).num_accelerators() == {"GPU": 1}
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(RuntimeError, match=r"nvidia-smi --list-gpus does not say .*status 9.*pass gpus_per_node"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"PROCID": None}, {}, "SLURM_PROCID is not set: this process is no task of a Slurm step.*srun"),
        ({"PROCID": "x"}, {}, "SLURM_PROCID=x, which is no number"),
        ({"STEP_NODELIST": None}, {}, "SLURM_STEP_NODELIST and SLURM_JOB_NODELIST and SLURM_NODELIST are not set"),
        ({"STEP_TASKS_PER_NODE": "2"}, {}, r"lists 3 nodes \(node9, node10, big\), and the tasks of 1 \(2\)"),
        ({"PROCID": "5"}, {}, "SLURM_PROCID=5, and the step has 5 tasks: 2 on node9, 2 on node10, 1 on big"),
        ({}, {"jobs": {"worker": 4}}, "jobs=.* are 4 tasks, and the step has 5: .*--ntasks=4"),
        ({}, {"gpus_per_node": 3, "gpus_per_task": 2}, "2 tasks of a node with 2 GPUs each need 4, and it has 3"),
    ],
)
def test_what_is_wrong_with_a_step(step, variables, arguments, message) -> None:
    step(**variables)
    with pytest.raises(RuntimeError, match=message):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gpus_per_node": 4, "gpus_per_task": -1}, ValueError, "gpus_per_task must be an int of at least 0, got -1"),
        ({"jobs": {"worker": 5.0}}, ValueError, r"jobs\['worker'\] must be an int of at least 0, got 5\.0"),
        ({"jobs": ["worker"]}, TypeError, r"jobs must be a dict from jobs to .*; got \['worker'\]"),
        ({"port_base": "8888"}, ValueError, "port_base must be an int of at least 1, got '8888'"),
        ({"tasks_per_node": {"big": -1}}, ValueError, r"tasks_per_node\['big'\] must be an int of at least 0, got -1"),
    ],
)
def test_arguments_that_are_no_numbers(step, arguments, error, message) -> None:
    step()
    with pytest.raises(error, match=message):
        SlurmClusterResolver(**arguments)


def test_gpus_that_are_hidden(step, monkeypatch) -> None:
    step()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(RuntimeError, match=r"CUDA_VISIBLE_DEVICES=0,1,2 has 3 GPUs, and this task, .* from 2 to 3"):
        SlurmClusterResolver(gpus_per_node=4)


@pytest.mark.parametrize("written", ["n[1-999999999]", "n[1-999]m[1-999]", "n[1-99999],m[1-99999]"])
def test_too_many_nodes_are_refused(written) -> None:
    with pytest.raises(ValueError, match=r"stands for \d+ nodes, and no cluster has more than 131072"):
        expand_hostlist(written)


def test_a_long_list_takes_no_time_and_is_cut_in_messages() -> None:
    begun = time.process_time()
    assert len(expand_hostlist(",".join(f"n{i}" for i in range(100_000)))) == 100_000
    with pytest.raises(ValueError, match="not a list of nodes") as caught:
        expand_hostlist("a," * 100_000)
    assert time.process_time() - begun < 10  # it was the square of the length: half a minute
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("written", ["", "2(x", "x2", "2(x2)(x3)"])
def test_what_is_no_list_of_tasks(written) -> None:
    with pytest.raises(ValueError, match="not the tasks of nodes as Slurm writes them"):
        expand_tasks_per_node(written)


@pytest.mark.parametrize("written", ["1(x999999999)", "999999999", "2(x99999)"])
def test_too_many_tasks_are_refused(written) -> None:
    with pytest.raises(ValueError, match=r"stands for \d+ (nodes|tasks), and no cluster has more than 131072"):
        expand_tasks_per_node(written)
