"""What the workers of a launch are given: their program, arguments, environment, devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from replicax.cli import main
from replicax.launcher import LaunchError, device_allocation, rendezvous
from replicax.launcher.device_allocation import allocate_devices
from tests.cli.unread_output import unread_output
from tests.launcher.launches import ROOT, launched

ARGUMENTS = ["--rate", "0.1", "--workers", "9", "--help", "--", "a b", "", "--no-such=x", "-m", "$HOME", "--max"]
TELL = """
    import json, os, sys
    names = ("JAX_", "TF_CONFIG", "REPLICAX_", "NPROC", "OMP_NUM", "PYTHONUNBUFFERED", "CUDA_", "SLURM_")
    found = {k: v for k, v in os.environ.items() if k.startswith(names)}
    print(json.dumps([sys.argv[1:], found]))
"""


def told(launch) -> dict[int, list]:
    """What each worker says of itself."""
    lines = [line.split("] ", 1) for line in launch.stdout.splitlines()]
    return {int(number[1:]): json.loads(text) for number, text in lines}


def test_workers_get_the_arguments_as_they_are_and_know_who_they_are(tmp_path) -> None:
    launch = launched(
        tmp_path,
        "--workers",
        "3",
        "--log-dir",
        "logs",
        "--grace",
        "7",
        "train.py",
        *ARGUMENTS,
        script=TELL,
        SLURM_PROCID="5",
    )
    assert launch.code == 0, launch.stderr
    workers = told(launch)
    assert sorted(workers) == [0, 1, 2]
    for worker, (arguments, environment) in workers.items():
        assert arguments == ARGUMENTS
        cluster = json.loads(environment["TF_CONFIG"])
        addresses = cluster["cluster"]["worker"]
        assert cluster["task"] == {"type": "worker", "index": worker}
        assert len(set(addresses)) == 3
        assert all(address.startswith("127.0.0.1:") for address in addresses)
        assert environment["JAX_COORDINATOR_ADDRESS"] == environment["JAX_COORDINATOR_BIND_ADDRESS"] == addresses[0]
        assert (environment["JAX_NUM_PROCESSES"], environment["JAX_PROCESS_ID"]) == ("3", str(worker))
        assert (environment["REPLICAX_ATTEMPT"], environment["REPLICAX_MAX_RESTARTS"]) == ("0", "3")
        assert (environment["REPLICAX_MIN_WORKERS"], environment["REPLICAX_MAX_WORKERS"]) == ("3", "3")
        assert environment["REPLICAX_GRACE_SECONDS"] == "7"
        assert environment["REPLICAX_LOG_DIR"] == str(tmp_path / "logs")
        assert environment["PYTHONUNBUFFERED"] == "1"
        assert "SLURM_PROCID" not in environment  # it is the launcher's
        assert "JAX_NUM_CPU_DEVICES" not in environment
        assert int(environment["NPROC"]) >= 2
    assert len({environment["TF_CONFIG"].split('"task"')[0] for _, environment in workers.values()}) == 1


def test_workers_are_numbered_host_by_host(tmp_path) -> None:
    words = ("--workers", "2", "--hosts", "first.test,second.test,third.test", "--port", "7000", "--node-rank", "1")
    launch = launched(tmp_path, *words, "train.py", script=TELL)
    assert launch.code == 0, launch.stderr
    workers = told(launch)
    assert sorted(workers) == [2, 3]
    addresses = [f"{host}.test:{port}" for host in ("first", "second", "third") for port in (7000, 7001)]
    for worker, (_, environment) in workers.items():
        found = json.loads(environment["TF_CONFIG"])
        assert found == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": worker}}
        assert (environment["JAX_NUM_PROCESSES"], environment["JAX_PROCESS_ID"]) == ("6", str(worker))
        assert environment["JAX_COORDINATOR_ADDRESS"] == "first.test:7000"


def test_a_module_and_an_executable_are_programs_too(tmp_path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import os; assert 'JAX_PROCESS_ID' in os.environ, 'the launcher imports it'")
    (package / "tell.py").write_text("import sys; print(sys.argv[1:], flush=True)")
    launch = launched(tmp_path, "--workers", "1", "-m", "package.tell", "--rate", "-m", "--")
    assert launch.code == 0, launch.stderr
    assert launch.stdout == "[0] ['--rate', '-m', '--']\n"
    shell = tmp_path / "tell.sh"
    shell.write_text('#!/bin/sh\necho "$JAX_PROCESS_ID: $*"\n')
    shell.chmod(0o755)
    launch = launched(tmp_path, "--workers", "1", "tell.sh", "a", "--help")
    assert launch.code == 0, launch.stderr
    assert launch.stdout == "[0] 0: a --help\n"


def test_emulated_devices_and_threads(tmp_path) -> None:
    words = ("--workers", "2", "--devices-per-worker", "4", "train.py")
    for variables, threads, nproc in (
        ({}, max(1, len(os.sched_getaffinity(0)) // 2), 8),
        ({"OMP_NUM_THREADS": "3", "NPROC": "20"}, 3, 20),
    ):
        for _, environment in told(launched(tmp_path, *words, script=TELL, **variables)).values():
            assert environment["JAX_NUM_CPU_DEVICES"] == "4"
            assert environment["JAX_PLATFORMS"] == "cpu"
            assert environment["NPROC"] == str(max(nproc, threads))
            assert environment["OMP_NUM_THREADS"] == str(threads)


def test_gpus_are_divided(tmp_path, monkeypatch) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(device_allocation, "Path", lambda path: tmp_path)
    found = allocate_devices(2, None, {"JAX_PLATFORMS": "cuda"})
    assert (found.gpus, str(found)) == ((("0",), ("1",)), "1 GPU(s) each")  # CUDA numbers them from 0
    there = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0,1,GPU-abc,5,-1,7"}
    shares = allocate_devices(2, None, there)
    assert shares.gpus == (("0", "1"), ("GPU-abc", "5"))
    assert shares.variables(1, 2, there)["CUDA_VISIBLE_DEVICES"] == "GPU-abc,5"
    assert "NPROC" not in shares.variables(1, 2, there)
    assert allocate_devices(3, 1, there).gpus == (("0",), ("1",), ("GPU-abc",))
    assert allocate_devices(2, None, there | {"JAX_PLATFORMS": "cpu"}).gpus is None
    with pytest.raises(
        LaunchError, match=r"--workers 3 with 2 GPU\(s\) each need 6 GPUs, and there are 4 \(0, 1, GPU-a"
    ):
        allocate_devices(3, 2, there)
    with pytest.raises(LaunchError, match="4 GPUs can't be divided evenly among 3 workers.*1 leaves 1 unused"):
        allocate_devices(3, None, there)
    with pytest.raises(LaunchError, match="or emulates CPU devices, and JAX_PLATFORMS is 'tpu'"):
        allocate_devices(1, 2, {"JAX_PLATFORMS": "tpu"})
    assert allocate_devices(1, None, {"JAX_PLATFORMS": "tpu"}).gpus is None
    with pytest.raises(LaunchError, match="there are 0 .none visible"):
        allocate_devices(2, None, there | {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("of_kernel", ["32768\t60999", "1024\t65535", ""])  # for outgoing connections
def test_workers_have_free_ports_of_their_own(tmp_path, monkeypatch, of_kernel) -> None:
    monkeypatch.setattr(rendezvous, "_RANGE", tmp_path / "range")
    (tmp_path / "range").write_text(of_kernel)
    port = rendezvous.free_port("127.0.0.1")
    assert (20000 <= port < 32768) if of_kernel[:4] != "1024" else port >= 1024
    assert not rendezvous.is_taken("127.0.0.1", port)
    found = iter([port, port, port + 1])
    monkeypatch.setattr(rendezvous, "free_port", lambda host: next(found))
    addresses = rendezvous.on_this_machine(2, None, None).addresses
    assert addresses == (f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}")


def test_a_dry_run_prints_commands_that_do_the_same_and_starts_nothing(tmp_path) -> None:
    words = ("--workers", "2", "--dry-run", "--log-dir", "logs", "train.py", "a b")
    launch = launched(tmp_path, *words, script=TELL)
    assert launch.code == 0, launch.stderr
    assert launch.stderr == ""
    first, second = launch.stdout.splitlines()
    assert not (tmp_path / "logs").exists()
    done = subprocess.run(["bash", "-c", second], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    arguments, environment = json.loads(done.stdout)
    assert arguments == ["a b"]
    assert environment["JAX_PROCESS_ID"] == "1"
    assert "JAX_PROCESS_ID=0" in first


def test_a_dry_run_that_nobody_reads(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with unread_output():
        assert main(["launch", "--workers", "2", "--dry-run", "train.py"]) == 141
    assert capsys.readouterr().err == ""


def test_the_launcher_does_not_import_jax() -> None:
    code = (
        "import sys, replicax, replicax.launcher.supervisor, replicax.launcher.job_scripts.jobset\n"
        "from replicax.cli import main\n"
        "main(['launch', '--workers', '1', '--dry-run', sys.argv[1]])\n"
        "print(sorted({'jax', 'jaxlib', 'numpy', 'rich', 'threading'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, __file__],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr.strip() in ("[]", "['threading']")
