"""``replicax doctor``: what it finds here, what it says of things that are wrong, and that it waits for nobody."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap
import threading
from typing import Any
from unittest import mock

import pytest

from replicax.cli import main
from replicax.cli.diagnosis import device_check, environment_variables, host_machine, installed_packages, reachability
from replicax.cli.diagnosis.check_runner import Check, run_checks
from replicax.cli.diagnosis.findings import Finding, State, ok
from tests import processes

REPLICAX = [sys.executable, "-c", "import sys; from replicax.cli import main; sys.exit(main())"]


def doctor(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it, with time for a machine that is busy."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS") and not k.startswith("TPU_")}
    return subprocess.run(
        [*REPLICAX, "doctor", "--timeout", "100", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, "JAX_PLATFORMS": "cpu", "COLUMNS": "120", **env},
    )


def told(findings: list[Finding], state: State | None = None) -> str:
    """What findings say, all of them or those of a state."""
    return "\n".join(f"{f.topic}: {f.what} → {f.to_do}" for f in findings if state in (None, f.state))


# --- as a user would ----------------------------------------------------------------------------------------


def test_what_it_finds_here(tmp_path) -> None:
    done = doctor("--json", "--directory", str(tmp_path / "not yet"), XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0 if report["well"] else 1, "")
    found = {finding["topic"]: finding for finding in report["findings"]}
    assert found["devices"]["state"] == "ok"
    assert found["devices"]["data"]["kinds"] == {"cpu": 1}
    assert found["compiler"]["data"]["right"] is found["collectives"]["data"]["right"] is True
    assert found["collectives"]["data"]["again"] > 0
    assert found["disk"]["state"] in ("ok", "warning")
    assert found["environment"]["data"]["variables"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert "TPU_SKIP_MDS_QUERY" not in found["environment"]["data"]["variables"]  # JAX has set it, not the user
    assert found["cluster"]["data"] == {"workers": 1}
    versions = next(f["data"]["versions"] for f in report["findings"] if "versions" in f["data"])
    assert {"jax", "jaxlib"} <= versions.keys()


def test_the_rest_is_checked_if_jax_can_not_be_imported() -> None:
    done = doctor("--json", JAX_NUM_CPU_DEVICES="many")
    assert (done.returncode, done.stderr) == (1, "")
    found = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    why = 'Invalid value "many" for JAX flag jax_num_cpu_devices'
    assert found["devices"]["what"] == f"importing JAX ended the process with code 1: ValueError: {why}"
    assert found["cluster"]["what"] == f"can't be looked at, as JAX can't be imported: {why}"
    assert found["environment"]["data"]["variables"]["JAX_NUM_CPU_DEVICES"] == "many"


def test_what_is_wrong_is_said_with_what_to_do(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "file"
    file.touch()
    variables = {
        "COLUMNS": "200",
        "JAX_PLATFORMS": "x",
        "NPROC": "7",
        "TF_CONFIG": json.dumps({"cluster": {"worker": ["127.0.0.1"]}}),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for module in (environment_variables, device_check):
        monkeypatch.setattr(module, "environment_at_start", lambda: dict(os.environ))
    assert main(["doctor", "--timeout", "100", "--directory", str(file)]) == 1
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 30  # one screen
    text = re.sub(r"\s+", " ", shown)
    assert "✗ devices finding the devices failed: RuntimeError: Unable to initialize backend 'x'" in text
    assert f"✗ disk {file} is a file → name a folder: --directory" in text
    assert "✗ XLA_FLAGS emulates 4 devices with 7 thread(s): replicas that meet may wait for ever" in text
    assert "→ use replicax.use_cpu_devices(4) instead, or set NPROC=8" in text
    assert "✗ cluster TF_CONFIG, 'cluster': the task 'worker' 0: '127.0.0.1' has no port" in text
    assert re.search(r"4 wrong(, \d to look at)? \(\d+\.\d s\)", text)


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "nan", "1e9"])
def test_times_that_are_none(capsys, seconds) -> None:
    assert main(["doctor", "--timeout", seconds]) == 2
    assert "--timeout: must be a number of seconds, above 0 and at most 3600, got" in capsys.readouterr().err


# --- deadlines ------------------------------------------------------------------------------------------------


def test_nobody_is_waited_for() -> None:
    never = threading.Event()

    def fails(seconds: float) -> list[Finding]:
        raise ValueError("oh no")

    def hangs(seconds: float) -> list[Finding]:
        never.wait()
        return []

    checks = [Check("stuck", hangs), Check("well", lambda seconds: [ok("well", f"{seconds}")]), Check("broken", fails)]
    stuck, well, broken = run_checks(checks, 0.5)
    never.set()
    assert (stuck.state, stuck.what) == (State.WRONG, "no answer within 0.5 s")
    assert (well.state, well.what) == (State.OK, "0.5")
    assert (broken.state, broken.what) == (State.WRONG, "can't be looked at: ValueError: oh no")
    assert re.search(r"a mistake of replicax doctor's \(.*test_doctor.py:\d+\)", broken.to_do)


# --- devices --------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_jax(monkeypatch, tmp_path):
    """Has the probe import a JAX that is no more than the given code."""

    def make(code: str) -> None:
        (tmp_path / "jax").mkdir()
        (tmp_path / "jax" / "__init__.py").write_text(textwrap.dedent(code))
        for module in ("numpy", "sharding"):
            text = "NamedSharding = PartitionSpec = None\n"
            (tmp_path / "jax" / f"{module}.py").write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        monkeypatch.setattr(device_check, "environment_at_start", lambda: environment)

    return make


def test_a_driver_that_hangs(fake_jax) -> None:
    fake_jax("import time\ntime.sleep(1000)")
    [finding] = device_check.check(0.5)
    assert finding.state is State.WRONG
    assert finding.what == "importing JAX did not end within 0.5 s"
    assert "a driver hangs, or another program holds the devices" in finding.to_do


def test_a_driver_that_ends_the_process(fake_jax) -> None:
    fake_jax("""
        import os, sys
        def local_devices():
            print("no such libfoo", file=sys.stderr, flush=True)
            os.abort()
    """)
    [finding] = device_check.check(60)
    assert finding.what == "finding the devices ended the process with code -6: no such libfoo"
    assert finding.to_do.endswith("device_probe.py")


def test_a_platform_without_its_plugin(fake_jax, monkeypatch) -> None:
    fake_jax("def local_devices():\n    raise AssertionError")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    [finding] = device_check.check(60)
    assert finding.what == "finding the devices failed: AssertionError: JAX does not say why"
    assert finding.to_do.startswith("install JAX's plugin for cuda (such as pip install 'replicax[cuda12]')")


def test_devices_that_do_not_compute(fake_jax) -> None:
    fake_jax("""
        class Device:
            platform, device_kind = "gpu", "NVIDIA H100"
            def memory_stats(self):
                return {"bytes_limit": 80 * 2**30}
        def local_devices():
            return [Device(), Device()]
    """)
    found, failed = device_check.check(60)
    assert (found.state, found.what) == (State.OK, "2 × NVIDIA H100 (gpu), 80.0 GiB each")
    assert failed.state is State.WRONG
    assert failed.what.startswith("compiling a small program failed: AttributeError")


def test_wrong_numbers(monkeypatch) -> None:
    lines: list[dict[str, Any]] = [
        {"stage": "import"},
        {"stage": "devices", "platform": "cpu", "kinds": ["cpu"], "memory": [None]},
        {"stage": "compile", "seconds": 0.5, "right": True},
        {"stage": "sum", "seconds": 0.5, "right": False, "again": 0.1, "first": 0.2},
    ]
    monkeypatch.setattr(device_check, "_probe", lambda seconds: (lines, "", 0))
    found = device_check.check(1)
    assert told(found, State.WRONG).startswith(
        "collectives: all-reduce of 1 MiB on 1 device gave wrong numbers → don't"
    )
    monkeypatch.setattr(device_check, "_probe", lambda seconds: (lines[:3], "", None))
    late = "summing over the devices did not end within 1.0 s →"
    assert f"{late} devices wait for each other" in told(device_check.check(1), State.WRONG)
    monkeypatch.setattr(device_check, "has_tpu", lambda: True)
    assert f"{late} on a TPU slice of several hosts run" in told(device_check.check(1), State.WRONG)


def test_an_accelerator_that_jax_does_not_use(monkeypatch) -> None:
    lines = [{"stage": "import"}, {"stage": "devices", "platform": "cpu", "kinds": ["cpu"], "memory": [None]}]
    monkeypatch.setattr(device_check, "_probe", lambda seconds: (lines, "", None))
    monkeypatch.setattr(device_check, "has_nvidia_gpu", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    expected = "devices: 1 × cpu, though there is a NVIDIA GPU → unset JAX_PLATFORMS=cpu"
    assert told(device_check.check(1), State.WARNING) == expected
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "→ pip install 'replicax[cuda12]'" in told(device_check.check(1), State.WARNING)


# --- software and machine -------------------------------------------------------------------------------------


def test_versions(monkeypatch) -> None:
    assert told(installed_packages.check(1), State.WRONG) == ""
    versions = {"jax": "0.9.0", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.8.0", "numpy": "9.9", "replicax": "0.1.0"}
    needed = {"replicax": ["jax>=0.10.2,<0.12.1", "numpy", "optax", "pytest; extra == 'dev'"], "jax": ["jaxlib<=0.9.1"]}

    def version(package: str) -> str:
        if package not in versions:
            raise installed_packages.importlib.metadata.PackageNotFoundError
        return versions[package]

    monkeypatch.setattr(installed_packages.importlib.metadata, "version", version)
    monkeypatch.setattr(installed_packages.importlib.metadata, "requires", needed.get)
    monkeypatch.setattr(installed_packages.platform, "python_version", lambda: "3.9.1")
    wrong = told(installed_packages.check(1), State.WRONG).splitlines()
    assert wrong == [
        "software: Python 3.9.1, Replicax 0.1.0 → Replicax supports Python >=3.11: use such a Python",
        "software: jax 0.9.0 is not supported: <0.12.1,>=0.10.2 → pip install 'jax<0.12.1,>=0.10.2'",
        "software: optax is not installed → pip install 'optax'",
        "software: jaxlib 0.10.2 is not supported: <=0.9.1 → pip install 'jaxlib<=0.9.1'",
        "software: jax-cuda12-plugin 0.8.0 does not go with jaxlib 0.10.2: JAX leaves the devices out, or fails → pip "
        "install 'jax-cuda12-plugin==0.10.2'",
    ]


def test_a_container_that_has_less_than_its_machine(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(host_machine, "_CGROUP", tmp_path)
    cores = set(range(8))
    monkeypatch.setattr(host_machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(host_machine.os, "sched_getaffinity", lambda process: cores)
    monkeypatch.delenv("NPROC", raising=False)
    for name, value in {"cpu.max": "150000 100000", "memory.max": "2147483648", "memory.current": "2000000000"}.items():
        (tmp_path / name).write_text(value + "\n")
    warnings = told(host_machine.check(1), State.WARNING)
    assert "cores: 1.5 of 64 cores; XLA takes 8 threads → the container has 1.5 cores: set NPROC=2" in warnings
    assert "memory: 0.1 of 2.0 GiB free → end what uses it" in warnings
    cores &= {0, 1}
    assert "cores:" not in told(host_machine.check(1), State.WARNING)  # XLA takes no more than those
    monkeypatch.setenv("NPROC", "4")
    assert "cores:" not in told(host_machine.check(1), State.WARNING)


def test_a_machine_that_does_not_tell_of_its_memory_and_cores(monkeypatch) -> None:
    monkeypatch.setattr(host_machine, "_read_text", lambda path: "")
    monkeypatch.delattr(host_machine.os, "sched_getaffinity")
    assert "memory: not known, as there is no /proc/meminfo" in told(host_machine.check(1), State.OK)


def test_shared_memory_and_open_files(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(host_machine.resource, "getrlimit", lambda kind: (256, 4096))
    found = told(host_machine.check(1), State.WARNING)
    assert "open files: 256 at a time, at most 4096 → readers of many files need more: ulimit -n 4096" in found
    monkeypatch.setattr(host_machine, "_SHARED", tmp_path / "none")
    assert f"there is no {tmp_path / 'none'} → mount it" in told(host_machine.check(1), State.WARNING)
    small = type(host_machine.shutil.disk_usage(tmp_path))(2**26, 0, 2**26)
    monkeypatch.setattr(host_machine, "_SHARED", tmp_path)
    monkeypatch.setattr(host_machine.shutil, "disk_usage", lambda path: small)
    assert "0.1 of 0.1 GiB free → NCCL and Grain's worker processes" in told(host_machine.check(1), State.WARNING)


def test_the_disk_for_checkpoints(monkeypatch, tmp_path) -> None:
    [finding] = host_machine.look_at_disk(tmp_path / "a" / "b")
    assert finding.data["directory"] == str(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    file = tmp_path / "file"
    file.touch()
    assert told(host_machine.look_at_disk(file), State.WRONG) == f"disk: {file} is a file → name a folder: --directory"
    [finding] = host_machine.look_at_disk(pathlib.Path("/proc/self"))  # nobody can write there, not even root
    assert finding.state is State.WRONG
    assert re.match(r"/proc/self can't be written \(.+\)", finding.what)
    too_long, deleted = tmp_path / ("a" * 300), tmp_path / "deleted"
    [finding] = host_machine.look_at_disk(too_long)
    assert finding.what == f"{too_long} can't be written (File name too long)"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    [finding] = host_machine.look_at_disk(pathlib.Path())
    assert finding.what == ". can't be written (No such file or directory)"
    full = type(host_machine.shutil.disk_usage(tmp_path))(2**40, 2**40, 0)
    monkeypatch.setattr(host_machine.shutil, "disk_usage", lambda path: full)
    assert "0.0 of 1024.0 GiB free → make room for checkpoints" in told(host_machine.look_at_disk(tmp_path))


def test_variables_that_are_mistakes(monkeypatch) -> None:
    environment = {
        "CUDA_VISIBLE_DEVICES": "-1",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "9O%",
        "NCCL_DEBUG": "x" * 50,
        "NPROC": "abc",
        "A": "b",
    }
    monkeypatch.setattr(environment_variables, "environment_at_start", lambda: environment)
    monkeypatch.setattr(environment_variables, "has_nvidia_gpu", lambda: True)
    shown, hidden, threads, fraction = environment_variables.check(1)
    assert f"NCCL_DEBUG={'x' * 39}…" in shown.what
    assert "A=b" not in shown.what
    assert told([hidden]) == "environment: CUDA_VISIBLE_DEVICES=-1 hides all GPUs → unset it, or name some: 0,1"
    assert re.search(r"NPROC=abc is no whole number: .* takes \d+ thread\(s\) → set it to a number", told([threads]))
    assert "expected a number above 0" in fraction.to_do
    for threads, mistakes in (("8", 0), ("7", 1)):
        environment = {"NPROC": threads, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        assert len(environment_variables.check(1)) == 1 + mistakes


# --- cluster --------------------------------------------------------------------------------------------------


def in_cluster(monkeypatch: pytest.MonkeyPatch, index: int, *addresses: str) -> list[Finding]:
    task = {"type": "worker", "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": addresses}, "task": task}))
    return reachability.check(20)


def here() -> str:
    return f"127.0.0.1:{processes.free_port()}"


def test_a_cluster_on_this_machine(monkeypatch) -> None:
    first, second = here(), here()
    cluster, network = in_cluster(monkeypatch, 1, first, second)
    assert cluster.what == f"worker 1 of 2 (TF_CONFIG), coordinator {first}"
    assert (network.state, network.what) == (State.OK, "the hosts of 2 addresses are known and answer")
    assert [f.state for f in in_cluster(monkeypatch, 0, first, second)] == [State.OK, State.OK]
    assert [f.state for f in in_cluster(monkeypatch, 0, first)] == [State.OK]
    port = int(first.partition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        found = told(in_cluster(monkeypatch, 0, first, second), State.WRONG)
    assert found == (
        f"cluster: worker 0 can't listen at {first}: the port is in use → end what uses it, or choose another port"
    )


def test_an_address_to_listen_at_that_is_none(monkeypatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "here")
    found = told(in_cluster(monkeypatch, 0, here(), here()), State.WRONG)
    assert found.startswith("cluster: JAX_COORDINATOR_BIND_ADDRESS: 'here' has no port; expected 'HOST:PORT'")
    assert found.endswith("→ correct it, or unset the variable")


def test_hosts_out_of_reach(monkeypatch) -> None:
    unknown = [f"nowhere{i}.invalid:1" for i in range(7)]
    lines = told(in_cluster(monkeypatch, 1, here(), *unknown), State.WRONG).splitlines()
    assert lines[0].endswith("can reach")  # a coordinator on loopback, and workers elsewhere
    assert re.match(r"network: worker 1 at nowhere0.invalid:1: the name 'nowhere0.invalid' is not known here", lines[1])
    assert lines[6] == "network: 2 more hosts can't be reached → as above"
    assert len(lines) == 7
    for error, why in ((TimeoutError, "the host does not answer"), (OSError(101, "No route"), "No route")):
        connect = mock.Mock(side_effect=error)
        monkeypatch.setattr(reachability.socket, "create_connection", connect)
        lines = told(in_cluster(monkeypatch, 1, here(), here()), State.WRONG).splitlines()
        assert [line.partition(" → ")[0].rpartition(": ")[2] for line in lines] == [why, why]


def test_a_worker_0_that_others_would_look_for_on_another_machine(monkeypatch) -> None:
    found = told(in_cluster(monkeypatch, 0, "192.0.2.1:1", here()), State.WARNING)
    assert found.startswith(
        "cluster: this process is worker 0, and 192.0.2.1 is no address of this machine → give each"
    )
