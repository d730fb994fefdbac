"""``replicax doctor`` on machines with NVIDIA GPUs: what it makes of the texts that ``nvidia-smi`` prints there."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import stat
import time
from typing import Any

import pytest

from replicax.cli.diagnosis import environment_variables, nvidia_gpus
from replicax.cli.diagnosis.findings import Finding, State
from tests.cli import nvidia_smi_texts as texts

SXM = texts.USUAL["name"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with GPUs: its ``nvidia-smi`` is a script that prints what the test gives; returns what is found."""
    monkeypatch.setattr(nvidia_gpus, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(environment_variables, "has_nvidia_gpu", lambda: True)

    def make(
        report: str,
        topology: str = "",
        peers: str = "",
        code: int = 0,
        plugins: dict[str, str] | None = None,
        **environment: str,
    ) -> list[Finding]:
        for name, text in (("report", report), ("topology", topology), ("peers", peers)):
            (tmp_path / name).write_text(text)
        cases = f'"-q -x") cat {tmp_path}/report; exit {code};; "topo -m") cat {tmp_path}/topology;; '
        command(f'case "$*" in {cases} "topo -p2p r") cat {tmp_path}/peers;; *) exit 99;; esac')
        versions = plugins or {}

        def version(package: str) -> str:
            if package not in versions:
                raise importlib.metadata.PackageNotFoundError
            return versions[package]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(nvidia_gpus, "environment_at_start", lambda: environment)
        return nvidia_gpus.check(20)

    def command(text: str) -> None:
        path = pathlib.Path(tmp_path / "bin" / "nvidia-smi")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    make.command = command
    return make


def told(findings: list[Finding], *states: State) -> list[str]:
    """What findings of these states say; of all, without any."""
    return [f"{f.topic}: {f.what}" + f" → {f.to_do}" * bool(f.to_do) for f in findings if f.state in (states or State)]


def bad(findings: list[Finding]) -> list[str]:
    return told(findings, State.WARNING, State.WRONG)


# --- machines that are well -----------------------------------------------------------------------------------


def test_eight_gpus_that_nvlink_joins(machine) -> None:
    cards = [f"mlx5_{i}" for i in range(8)]
    found = machine(
        texts.report(count=8),
        texts.topology(8, lambda i, j: "NV18", cards),
        texts.peers(8),
        plugins={"jax-cuda12-plugin": "0.10.2", "nvidia-nccl-cu12": "2.27.7"},
    )
    assert told(found) == [
        f"GPUs: 8 × {SXM}, 79.6 GiB each; driver 550.54.15, for CUDA 12.4 and older",
        "GPU memory: JAX takes 75% when it starts, 59.7 GiB of each GPU",
        "NVLink: between all 8 GPUs (18 links, at least)",
        "peer access: each GPU reads the memory of each other one",
        "NCCL: NCCL 2.27.7 probably goes over NVLink; 8 network card(s) for other hosts (mlx5_0, mlx5_1, mlx5_2, "
        "mlx5_3); NCCL_DEBUG=INFO shows its choice",
    ]
    assert bad(found) == []


def test_a_machine_without_gpus_says_nothing(monkeypatch) -> None:
    monkeypatch.setattr(nvidia_gpus, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(nvidia_gpus.shutil, "which", lambda name: None)
    assert nvidia_gpus.check(5) == []


# --- driver and plugin ----------------------------------------------------------------------------------------


def test_a_driver_that_is_too_old_for_the_plugin(machine) -> None:
    [finding] = bad(machine(texts.report(count=1), plugins={"jax-cuda13-plugin": "0.10.2"}))
    assert finding == (
        "GPUs: jax-cuda13-plugin needs a driver for CUDA 13 (580 or newer), and 550.54.15 is for CUDA 12.4: JAX finds "
        "no GPU → update the driver, or pip install 'replicax[cuda12]'"
    )
    old = texts.report(driver="470.223.02", cuda="11.4", count=1)
    [finding] = bad(machine(old, plugins={"jax-cuda12-plugin": "0.10.2"}))
    assert finding.endswith("JAX finds no GPU → update the driver")


def test_two_plugins(machine) -> None:
    both = {"jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": "0.10.2"}
    [finding] = bad(machine(texts.report(driver="580.65.06", cuda="13.0", count=1), plugins=both))
    assert finding.endswith("→ keep one: pip uninstall jax-cuda12-plugin jax-cuda12-pjrt")


def test_no_tool_to_ask(machine, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = nvidia_gpus.check(5)
    assert finding.state is State.WARNING
    assert finding.what == "there is an NVIDIA GPU, and no nvidia-smi to ask about it"


def test_a_driver_that_hangs(machine) -> None:
    machine.command("sleep 1000")
    start = time.monotonic()
    [finding] = nvidia_gpus.check(1)
    assert time.monotonic() - start < 5
    assert told([finding], State.WRONG)[0].startswith("GPUs: nvidia-smi did not end within 0.9 s → the driver hangs")


@pytest.mark.parametrize(
    ("said", "code", "to_do"),
    [
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that …",
            9,
            "make the driver work first",
        ),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.86", 18, "restart the"),
        ("No devices were found", 6, "make the driver work first"),
    ],
)
def test_a_driver_that_is_not_there(machine, monkeypatch, said, code, to_do) -> None:
    [finding] = machine(said, code=code)
    assert (finding.state, finding.data) == (State.WRONG, {"code": code})
    assert finding.what.startswith(f"nvidia-smi ended with code {code}: {said[:20]}")
    assert to_do in finding.to_do
    monkeypatch.setattr(nvidia_gpus, "has_nvidia_gpu", lambda: False)  # such as on the node for logging in
    [finding] = machine(said, code=code)
    assert finding.state is State.WARNING


@pytest.mark.parametrize("text", ["", "\x00\xff garbage", "<nvidia_smi_log><gpu>", "<html/>", "<" * 10_000], ids=repr)
def test_a_report_that_is_none(machine, text) -> None:
    [finding] = machine(text)
    assert finding.state is State.WARNING
    assert finding.what.startswith("nvidia-smi -q -x printed no report")


@pytest.mark.parametrize(
    "text", ["", "GPU0", "GPU0 GPU1\nGPU0", "GPU0 GPU1\nGPU0 X\nGPU9 a b c d", "\x1b[4mGPU0\x1b[0m X"]
)
def test_tables_that_are_none(machine, text) -> None:
    found = machine(texts.report(count=2), text, text)
    assert "NVLink: nvidia-smi topo -m told nothing → see what it prints: the links are not known" in told(found)
    assert "NCCL" not in {f.topic for f in found}


def test_a_report_that_lacks_everything(machine) -> None:
    found = machine("<nvidia_smi_log><gpu/><gpu/></nvidia_smi_log>", texts.topology(2, lambda i, j: "PHB"), "")
    assert told(found)[0] == "GPUs: 2 × NVIDIA GPU; driver unknown"
    assert "GPU memory: not told by the driver" in told(found)
    [finding] = bad(machine("<nvidia_smi_log><driver_version>550.1</driver_version></nvidia_smi_log>"))
    assert finding.startswith("GPUs: none; driver 550.1 → nvidia-smi lists no GPU")


# --- between GPUs ---------------------------------------------------------------------------------------------


def test_gpus_without_nvlink(machine) -> None:
    gaming: dict[str, Any] = {"name": "NVIDIA GeForce RTX 5090", "total": 32607, "state": "N/A", "status": "N/A"}
    found = machine(texts.report(gaming, gaming), texts.topology(2, lambda i, j: "PHB"), texts.peers(2, "GNS"))
    assert "NVLink: none, all pairs go over PCIe (PHB: 1)" in told(found, State.OK)
    assert bad(found) == [
        "peer access: not between 1 of 1 pairs of GPUs (GPU 0 and 1: GNS); these copy through the host's memory → "
        "these GPUs have none: nothing to change"
    ]
    assert told(found)[-1].startswith("NCCL: NCCL probably goes over shared memory of the host")


def test_nvlink_between_some_and_where_it_should_be(machine) -> None:
    pairs = texts.topology(4, lambda i, j: "NV4" if (i, j) in ((0, 1), (2, 3)) else "SYS")
    found = machine(texts.report(*[{"name": "NVIDIA A100-PCIE-40GB"}] * 4), pairs, texts.peers(4))
    assert bad(found)[0].startswith("NVLink: between 2 of 6 pairs of GPUs; the others go over PCIe (NV4: 2, SYS: 4) →")
    assert "NCCL: NCCL probably goes over NVLink and PCIe, GPU to GPU" in told(found)[-1]
    found = machine(texts.report(count=2), texts.topology(2, lambda i, j: "SYS"), texts.peers(2))
    assert bad(found)[0].startswith("NVLink: none, all pairs go over PCIe (SYS: 1) → these GPUs have it as a rule")


def test_variables_that_slow_nccl_down(machine) -> None:
    nvlink = texts.topology(2, lambda i, j: "NV18"), texts.peers(2)
    found = machine(texts.report(count=2), *nvlink, NCCL_P2P_DISABLE="1")
    assert bad(found) == [
        "NCCL: NCCL probably goes over shared memory of the host; NCCL_DEBUG=INFO shows its choice → unset "
        "NCCL_P2P_DISABLE, which switched off direct copies between GPUs"
    ]
    found = machine(texts.report(count=2), *nvlink, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    assert "NCCL probably goes over the network, inside of this machine, too" in bad(found)[0]
    assert bad(machine(texts.report(count=2), *nvlink, NCCL_P2P_DISABLE="0")) == []


@pytest.mark.parametrize(
    ("state", "status", "well"),
    [
        ("Completed", "Success", True),
        ("N/A", "N/A", True),
        ("Not Supported", "Not Supported", True),
        ("In Progress", "N/A", False),
        ("Not Started", "N/A", False),
        ("Completed", "NVML_ERROR_UNKNOWN", False),
    ],
)
def test_the_fabric_of_nvswitches(machine, state, status, well) -> None:
    found = bad(machine(texts.report({"state": state, "status": status})))
    assert (found == []) is well
    assert well or "systemctl start nvidia-fabricmanager" in found[0]


# --- each GPU -------------------------------------------------------------------------------------------------


def test_memory_that_others_use(machine) -> None:
    busy = texts.report({}, {"used": 70000}, {"used": 60000})
    tables = texts.topology(3, lambda i, j: "NV18"), texts.peers(3)
    assert bad(machine(busy, *tables)) == [
        "GPU memory: GPU 1, and 1 more: 68.4 of 79.6 GiB are in use, and JAX takes 59.7 GiB when it starts → end what "
        "uses it, choose others (CUDA_VISIBLE_DEVICES), or XLA_PYTHON_CLIENT_PREALLOCATE=false"
    ]
    assert bad(machine(busy, *tables, XLA_PYTHON_CLIENT_PREALLOCATE="false")) == []
    assert bad(machine(busy, *tables, XLA_PYTHON_CLIENT_MEM_FRACTION="0.1")) == []
    assert bad(machine(busy, *tables, CUDA_VISIBLE_DEVICES="0")) == []
    assert "GPU 2: 58.6 of 79.6 GiB" in bad(machine(busy, *tables, CUDA_VISIBLE_DEVICES="0,2"))[0]
    assert "GPU 1, and 1 more" in bad(machine(busy, *tables, CUDA_VISIBLE_DEVICES="GPU-abc"))[0]
    platform = bad(machine(busy, *tables, XLA_PYTHON_CLIENT_ALLOCATOR="platform"))[0]
    assert platform.startswith("GPU memory: XLA_PYTHON_CLIENT_ALLOCATOR=platform → unset")
    found = machine(texts.report(count=1), XLA_CLIENT_MEM_FRACTION="0.9")
    assert "GPU memory: JAX takes 90% when it starts, 71.7 GiB of each GPU" in told(found)


def test_mig(machine) -> None:
    on = {"mig": "Enabled", "pending": "Enabled", "name": "NVIDIA A100-SXM4-80GB"}
    two = texts.topology(2, lambda i, j: "SYS"), texts.peers(2)
    found = bad(machine(texts.report({**on, "parts": 4}, {**on, "parts": 4}), *two))
    assert found == [
        "MIG: on for GPU 0, 1, 4 instance(s) each: a process sees one instance, and NCCL can't sum over several → a "
        "run for each, with CUDA_VISIBLE_DEVICES=MIG-… (nvidia-smi -L), or nvidia-smi -mig 0"
    ]
    assert "without an instance: there is no device" in bad(machine(texts.report(on)))[0]
    assert "changes for GPU 0 when it is reset" in bad(machine(texts.report({"pending": "Enabled"})))[0]


def test_gpus_that_are_broken(machine) -> None:
    found = machine(
        texts.report({"action": "Reset"}, {"failure": "Yes"}, {"uncorrectable": 3}, {"hot": "Active"}, {"lanes": 8}),
        texts.topology(5, lambda i, j: "NV18"),
        texts.peers(5),
    )
    assert [line.partition(" →")[0] for line in told(found, State.WRONG)] == [
        "GPUs: GPU 0 needs: reset",
        "GPUs: GPU 1 has memory that can't be repaired",
        "GPUs: GPU 2 has had 3 uncorrectable memory error(s) since the driver was loaded",
    ]
    warnings = told(found, State.WARNING)
    assert warnings[0].startswith("GPUs: GPU 3 is slowed down: hw thermal slowdown → look at its cooling")
    assert warnings[1].startswith("GPUs: GPU 4 has 8 lanes of PCIe, of 16")
    assert "may not be used" in bad(machine(texts.report({"compute": "Prohibited"})))[0]


# --- variables ------------------------------------------------------------------------------------------------


def test_variables_that_jax_refuses(machine, monkeypatch) -> None:
    def look(**environment: str) -> list[str]:
        monkeypatch.setattr(environment_variables, "environment_at_start", lambda: environment)
        return bad(environment_variables.check(1))

    assert look(XLA_PYTHON_CLIENT_ALLOCATOR="bfc", XLA_CLIENT_MEM_FRACTION=".9") == []
    assert "expected one of default, platform" in look(XLA_PYTHON_CLIENT_ALLOCATOR="fast")[0]
    [both] = look(XLA_PYTHON_CLIENT_MEM_FRACTION=".9", XLA_CLIENT_MEM_FRACTION=".9")
    assert both.endswith("are both set: JAX refuses that → unset XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert "may replace the CUDA that came with JAX" in look(LD_LIBRARY_PATH="/usr/local/cuda/lib64")[0]
