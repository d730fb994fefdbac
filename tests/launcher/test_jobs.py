"""The same launch as a job: a script for Slurm that bash accepts, a manifest that YAML and Kubernetes accept."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

from replicax.cli import main

ARGUMENTS = ["--rate", "0.1", "a b", "it's", '"q"', "$HOME $(id)", "x;y", "--", "é", ""]


def written(capsys, *words: str) -> str:
    assert main(["launch", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def slurm(tmp_path, script: str, code: int = 0, **variables: str) -> tuple[list[str], list[str], int]:
    """Run a script with stand-ins for Slurm's commands: what srun and scontrol were called with, and the exit code."""
    for name, text in (
        ("srun", 'printf "%s\\0" "$@" > srun-words; exit $CODE'),
        ("scontrol", 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "$@" >> scontrol-words; fi'),
    ):
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code), "SLURM_JOB_ID": "12345"}
    environment |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_ON_NODE": "8", **variables}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=60)
    asked = tmp_path / "scontrol-words"
    requeued = asked.read_text().splitlines() if asked.exists() else []
    asked.unlink(missing_ok=True)
    return (tmp_path / "srun-words").read_text().split("\0")[:-1], requeued, done.returncode


def test_a_script_for_slurm(tmp_path, capsys) -> None:
    words = ["--workers", "4", "--devices-per-worker", "2", "--grace", "100", "--max-restarts", "5", "--sbatch"]
    words += ["--nodes", "2", "--gpus", "8", "--cpus", "64", "--time", "1-12:00:00", "--name", "run-7"]
    script = written(capsys, *words, "no such/train.py", *ARGUMENTS)
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "#SB" in line)
    options.pop("#SBATCH lines.", None)
    assert {name: options[name] for name in ("job-name", "nodes", "ntasks-per-node", "gpus-per-node")} == {
        "job-name": "run-7",
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
    }
    assert (options["cpus-per-task"], options["time"]) == ("64", "36:00:00")
    assert options["signal"] == "TERM@161"  # to the launchers, early enough for the workers' grace
    assert "requeue" in options
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)

    called, requeued, code = slurm(tmp_path, script)
    start = called.index("replicax")
    assert called[:start] == ["--cpus-per-task=8", "--kill-on-bad-exit=1"]
    launch = ["replicax", "launch", "--workers", "4", "--devices-per-worker", "2", "--grace", "100"]
    launch += ["--log-dir", "replicax-logs/12345", "--hosts", "node1,node2", "--port", str(61440 + 12345 % 4096)]
    assert called[start:] == [*launch, "no such/train.py", *ARGUMENTS]
    assert (requeued, code) == ([], 0)


def test_names_of_files_are_written_whatever_the_encoding_of_the_output() -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as output, contextlib.redirect_stdout(output):
        assert main(["launch", "--workers", "2", "--sbatch", "é.py"]) == 0
        assert os.fsencode("é.py") in output.buffer.getvalue()


@pytest.mark.parametrize(
    ("code", "before", "is_requeued"),
    [(0, "0", False), (75, "9", True), (1, "", True), (1, "2", True), (1, "3", False), (137, "0", True)],
)
def test_a_job_of_slurm_is_queued_again(tmp_path, capsys, code, before, is_requeued) -> None:
    script = written(capsys, "--workers", "2", "--sbatch", "train.py")
    count = {"SLURM_RESTART_COUNT": before} if before else {}
    _, requeued, ended = slurm(tmp_path, script, code, **count)
    assert requeued == (["requeue 12345"] if is_requeued else [])
    assert ended == code


def test_a_job_of_one_node_starts_its_workers_again_by_itself(tmp_path, capsys) -> None:
    words = ["--workers", "2:4", "--max-restarts", "7", "--log-dir", "my logs", "--show", "chief", "--sbatch"]
    words += ["--backoff", "0.5", "--max-resizes", "2", "--port", "7000", "--bind", "0.0.0.0"]
    script = written(capsys, *words, "-m", "package.train", "x")
    called, _, _ = slurm(tmp_path, script)
    assert shlex.join(called[called.index("replicax") :]) == (
        "replicax launch --workers 2:4 --grace 30 --log-dir 'my logs' --show chief --port 7000 "
        "--bind 0.0.0.0 --max-restarts 7 --max-resizes 2 --backoff 0.5 --max-preemptions 0 -m package.train x"
    )
    several = ["--workers", "2", "--nodes", "2", "--port", "7000", "--bind", "10.0.0.1", "--sbatch", "train.py"]
    called, _, _ = slurm(tmp_path, written(capsys, *several))
    assert called[-7:] == ["--hosts", "node1,node2", "--port", "7000", "--bind", "10.0.0.1", "train.py"]
    assert "#SBATCH --exclusive" in script


def test_a_jobset(tmp_path, capsys) -> None:
    words = ["--workers", "2", "--max-restarts", "5", "--grace", "60", "--jobset", "--nodes", "3", "--gpus", "4"]
    words += ["--image", "ghcr.io/me/train:1.2", "--time", "12:00:00", "--out", str(tmp_path / "job.yaml")]
    assert written(capsys, *words, "Train_It.py", *ARGUMENTS) == ""
    manifest = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"] == {"name": "train-it"}
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    assert policy["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    [group] = manifest["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (group["name"], group["replicas"]) == ("worker", 1)
    assert (job["completionMode"], job["parallelism"], job["completions"], job["backoffLimit"]) == ("Indexed", 3, 3, 0)
    assert job["activeDeadlineSeconds"] == 43200
    assert job["podFailurePolicy"]["rules"][0] == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "worker", "operator": "In", "values": [75]},
    }
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # or Kubernetes allows no podFailurePolicy
    assert pod["terminationGracePeriodSeconds"] > 60
    [container] = pod["containers"]
    assert container["image"] == "ghcr.io/me/train:1.2"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    command = [word.replace("$$", "$") for word in container["command"]]  # as Kubernetes reads them
    hosts = ",".join(f"train-it-worker-0-{i}.train-it" for i in range(3))
    launch = ["replicax", "launch", "--workers", "2", "--grace", "60", "--log-dir", "/tmp/replicax-logs"]
    launch += ["--hosts", hosts, "--port", "8476", "--bind", "0.0.0.0"]
    assert command == [*launch, "Train_It.py", *ARGUMENTS]
    assert "$(" not in "".join(container["command"]).replace("$$", "")
    assert container["ports"] == [{"name": "coordinator", "containerPort": 8476}]


def test_words_that_yaml_would_take_for_something_else_are_strings(capsys) -> None:
    words = ["yes", "1e3", "null", "0x1f", "- a", "a: b", "# c", "~", "True", "1:30", "\n", "é", "[", "*x"]
    words += [".5", "._1", ".inf", "./run", "\U0001f600", "\x7f", "\u2028"]
    text = written(capsys, "--workers", "1", "--jobset", "--image", "no", "train.py", *words)
    [group] = yaml.safe_load(text)["spec"]["replicatedJobs"]
    container = group["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-len(words) :] == words
    assert container["image"] == "no"
    assert "--hosts" not in container["command"]


DOCUMENTS = pathlib.Path(__file__).parent.parent.parent / "docs"
DOCUMENTED = [
    command.removeprefix("replicax ").partition(" >")[0].split()
    for path in sorted(DOCUMENTS.rglob("*.md"))
    for command in re.findall(r"replicax launch [^`\n]*(?:--sbatch|--jobset) [^`\n]*", path.read_text())
]


@pytest.mark.parametrize("words", DOCUMENTED, ids=" ".join)
def test_documented_commands_write_jobs_with_one_worker_or_one_for_each_gpu(words: list[str], capsys) -> None:
    job = written(capsys, *words[1:])
    option = dict(itertools.pairwise(words))
    assert option["--workers"] in ("1", option["--gpus"])
    if "--sbatch" in words:
        assert f"#SBATCH --nodes={option['--nodes']}\n#SBATCH --ntasks-per-node=1\n" in job
        assert f"#SBATCH --gpus-per-node={option['--gpus']}\n" in job
        assert f"replicax launch --workers {option['--workers']} " in job


def test_there_are_documented_commands_of_both_kinds() -> None:
    assert {"--sbatch", "--jobset"} <= {word for words in DOCUMENTED for word in words}
