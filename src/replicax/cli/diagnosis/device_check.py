"""Checks the devices: a separate process finds them, compiles for them and sums over them, within a deadline."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from replicax.cli.diagnosis.check_runner import run_process
from replicax.cli.diagnosis.environment_variables import environment_at_start, has_nvidia_gpu, has_tpu
from replicax.cli.diagnosis.findings import Finding, ok, warning, wrong
from replicax.system.quantities import counted

_PROBE = Path(__file__).with_name("device_probe.py")
_STAGES = {
    "import": "importing JAX",
    "devices": "finding the devices",
    "compile": "compiling a small program",
    "sum": "summing over the devices",
}
_GIB = 2**30


def check(seconds: float) -> list[Finding]:
    """The devices of this machine, and whether they compute."""
    lines, printed, ended = _probe(seconds)
    done = {line["stage"]: line for line in lines}
    findings: list[Finding] = []
    if "devices" in done:
        findings += _devices(done["devices"])
    if "compile" in done:
        findings.append(
            _computation("compiler", "a small program", done["compile"], f"{done['compile']['seconds']:.2f} s")
        )
    if "sum" in done:
        each = f"{1000 * done['sum']['again']:.2f} ms"
        count = len(done["devices"]["kinds"])
        across = f"all-reduce of 1 MiB on {counted(count, 'device')}"
        findings.append(
            _computation("collectives", across, done["sum"], f"{each}, the first time {done['sum']['first']:.2f} s")
        )
        return findings
    stage = next(name for name in _STAGES if name not in done)
    doing = _STAGES[stage]
    if "failed" in done:
        error = " ".join(done["failed"]["error"].split())
        to_do = "read the error; JAX_PLATFORMS=cpu leaves accelerators alone"
        if error.endswith(":"):  # JAX says nothing more if the plugin of the one platform in JAX_PLATFORMS is missing
            platform = os.environ.get("JAX_PLATFORMS") or "the devices"
            error += " JAX does not say why"
            to_do = f"install JAX's plugin for {platform} (such as pip install 'replicax[cuda12]'); {to_do}"
        findings.append(wrong("devices", f"{doing} failed: {error[:300]}", to_do, stage=stage, error=error))
    elif ended is None:
        hint = (
            "a driver hangs, or another program holds the devices; if it is only slow: --timeout 60"
            if stage in ("import", "devices")
            else "devices wait for each other: too few threads (replicax.use_cpu_devices), or a broken link between "
            "GPUs (NCCL_DEBUG=INFO says which); if it is only slow: --timeout 60"
        )
        if has_tpu():
            hint = f"on a TPU slice of several hosts run replicax doctor on all of them at once; {hint}"
        findings.append(wrong("devices", f"{doing} did not end within {seconds:.1f} s", hint, stage=stage))
    else:
        last = (printed.strip().splitlines() or ["it printed nothing"])[-1]
        to_do = f"see all that it prints: {sys.executable} {_PROBE}"
        what = f"{doing} ended the process with code {ended}: {last[:200]}"
        findings.append(wrong("devices", what, to_do, stage=stage, code=ended))
    return findings


def _probe(seconds: float) -> tuple[list[dict[str, Any]], str, int | None]:
    """The lines of the probe, its other output, and its exit code; ``None`` if it had to be killed."""
    environment = {
        **environment_at_start(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # another program may need the memory
        "TF_CPP_MIN_LOG_LEVEL": "2",  # warnings are for programs that go on
    }
    # -P: the probe's folder must not hide packages
    output, errors, ended = run_process([sys.executable, "-P", str(_PROBE)], seconds, environment)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"stage"') and line.endswith("}")]
    return lines, errors, ended


def _devices(devices: dict[str, Any]) -> list[Finding]:
    kinds = Counter(devices["kinds"])
    limits = [limit for limit in devices["memory"] if limit]
    what = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if devices["platform"] not in what.lower():
        what += f" ({devices['platform']})"
    if limits:
        what += f", {min(limits) / _GIB:.1f} GiB each"
    data = {"platform": devices["platform"], "kinds": dict(kinds), "memory": devices["memory"]}
    unused = [name for name, there in (("NVIDIA GPU", has_nvidia_gpu()), ("TPU", has_tpu())) if there]
    if devices["platform"] == "cpu" and unused:
        chosen = os.environ.get("JAX_PLATFORMS")
        package = "replicax[tpu]" if unused[0] == "TPU" else "replicax[cuda12]"
        to_do = f"unset JAX_PLATFORMS={chosen}" if chosen else f"pip install '{package}'"
        return [warning("devices", f"{what}, though there is a {unused[0]}", to_do, **data)]
    return [ok("devices", what, **data)]


def _computation(topic: str, what: str, done: dict[str, Any], took: str) -> Finding:
    data = {key: value for key, value in done.items() if key != "stage"}
    if not done["right"]:
        return wrong(
            topic, f"{what} gave wrong numbers", "don't trust these devices: update the driver or jaxlib", **data
        )
    return ok(topic, f"{what}: {took}", **data)
