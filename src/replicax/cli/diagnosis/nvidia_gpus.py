"""Checks NVIDIA GPUs: the driver, JAX's plugin, links, NCCL, memory, MIG, and faults.

It does not use JAX: all data come from ``nvidia-smi``, the environment and the installed packages.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from replicax.cli.diagnosis import nvidia_smi
from replicax.cli.diagnosis.check_runner import run_concurrently
from replicax.cli.diagnosis.environment_variables import environment_at_start, has_nvidia_gpu
from replicax.cli.diagnosis.findings import Finding, ok, warning, wrong
from replicax.cli.diagnosis.installed_packages import version_of
from replicax.cli.diagnosis.nvidia_smi import Gpu, Links, Output, Report
from replicax.system.environment import memory_fraction

_GIB = 2**30
_PLUGINS = {12: "jax-cuda12-plugin", 13: "jax-cuda13-plugin"}
_DRIVERS = {12: 525, 13: 580}
"""The oldest driver for each CUDA, according to JAX's installation page."""
_SWITCHED_OFF = {"NCCL_P2P_DISABLE": "direct copies between GPUs", "NCCL_SHM_DISABLE": "copies through shared memory"}


def check(seconds: float) -> list[Finding]:
    """The findings for all GPUs of this machine; none if there is no sign of one."""
    questions = (["-q", "-x"], ["topo", "-m"], ["topo", "-p2p", "r"])
    if not has_nvidia_gpu() and shutil.which(nvidia_smi.COMMAND) is None:
        return []
    deadline = time.monotonic() + seconds
    answers = run_concurrently(lambda arguments: nvidia_smi.ask(arguments, 0.9 * seconds), questions, deadline)
    report, topology, peers = (answers.get(i, Output("", None)) for i in range(3))
    return [*_findings(report, topology, peers, environment_at_start(), seconds)]


def _findings(
    answer: Output, topology: Output, peers: Output, environment: Mapping[str, str], seconds: float
) -> Iterator[Finding]:
    report = nvidia_smi.parsed_report(answer.text) if answer.code == 0 else None
    if report is None:
        yield _no_report(answer, seconds)
        return
    yield _driver(report)
    yield from _plugins(report)
    if not report.gpus:
        return
    yield from _mig(report.gpus)
    yield from _faults(report.gpus)
    yield _memory(report.gpus, environment)
    if len(report.gpus) > 1:
        links = nvidia_smi.parsed_links(topology.text)
        yield from _links(links, nvidia_smi.parsed_links(peers.text), report.gpus, environment)


# --- driver and plugin ----------------------------------------------------------------------------------------


def _no_report(answer: Output, seconds: float) -> Finding:
    if not answer.is_there:
        to_do = "install the driver's tools, or start the container with them (docker run --gpus all)"
        return warning("GPUs", "there is an NVIDIA GPU, and no nvidia-smi to ask about it", to_do)
    if answer.code is None:
        to_do = "the driver hangs: look at `dmesg | grep -i nvrm`, and restart the machine; if it is slow: --timeout 60"
        return wrong("GPUs", f"nvidia-smi did not end within {0.9 * seconds:.1f} s", to_do)
    said = " ".join([line.strip() for line in answer.text.splitlines() if line.strip()][:2])[:300] or "nothing"
    if answer.code == 0:
        return warning("GPUs", f"nvidia-smi -q -x printed no report: {said}", "see what it prints, and report it")
    to_do = "make the driver work first: `nvidia-smi` must list the GPUs"
    if "mismatch" in said:
        to_do = "the driver was updated while an older one is loaded: restart the machine"
    what = f"nvidia-smi ended with code {answer.code}: {said}"
    if not has_nvidia_gpu():  # a login node, for example
        return warning("GPUs", what, f"if this machine has GPUs, {to_do}", code=answer.code)
    return wrong("GPUs", what, to_do, code=answer.code)


def _driver(report: Report) -> Finding:
    kinds = Counter(gpu.name for gpu in report.gpus)
    what = ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "none"
    sizes = [gpu.total for gpu in report.gpus if gpu.total]
    if sizes:
        what += f", {min(sizes) / _GIB:.1f} GiB each"
    what += f"; driver {report.driver or 'unknown'}" + (f", for CUDA {report.cuda} and older" if report.cuda else "")
    data = {"gpus": [gpu.name for gpu in report.gpus], "driver": report.driver, "cuda": report.cuda}
    if not report.gpus:
        to_do = "nvidia-smi lists no GPU: another container or a virtual machine has it, or it has failed (dmesg)"
        return wrong("GPUs", what, to_do, **data)
    return ok("GPUs", what, **data)


def _plugins(report: Report) -> Iterator[Finding]:
    """JAX's plugins, against the driver."""
    plugins = {cuda: version for cuda, name in _PLUGINS.items() if (version := version_of(name))}
    runs = nvidia_smi.first_number(report.cuda)
    if len(plugins) > 1:
        names = " and ".join(_PLUGINS[cuda] for cuda in plugins)
        to_do = f"keep one: pip uninstall {_PLUGINS[min(plugins)]} {_PLUGINS[min(plugins)].replace('plugin', 'pjrt')}"
        yield warning("GPUs", f"{names} are both installed", to_do, plugins=sorted(plugins))
    for cuda in plugins:
        if runs is None or runs >= cuda:
            continue
        what = f"{_PLUGINS[cuda]} needs a driver for CUDA {cuda} ({_DRIVERS[cuda]} or newer), and {report.driver} "
        what += f"is for CUDA {report.cuda}: JAX finds no GPU"
        to_do = f"update the driver, or pip install 'replicax[cuda{runs}]'" if runs in _PLUGINS else "update the driver"
        yield wrong("GPUs", what, to_do, plugin=cuda, driver=report.driver)


# --- each GPU -------------------------------------------------------------------------------------------------


def _mig(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    for those, gpu in _groups_alike(gpus, lambda gpu: (gpu.mig, gpu.instances, gpu.mig_changes)):
        if gpu.mig and not gpu.instances:
            to_do = "make instances (nvidia-smi mig -cgi … -C), or switch MIG off (nvidia-smi -mig 0)"
            yield wrong("MIG", f"on for {those}, without an instance: there is no device", to_do)
        elif gpu.mig:
            what = f"on for {those}, {gpu.instances} instance(s) each: a process sees one instance, and NCCL can't sum "
            to_do = "a run for each, with CUDA_VISIBLE_DEVICES=MIG-… (nvidia-smi -L), or nvidia-smi -mig 0"
            yield warning("MIG", what + "over several", to_do, instances=gpu.instances)
        if gpu.mig_changes:
            yield warning("MIG", f"changes for {those} when it is reset", "reset it, or restart the machine")


def _faults(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    for those, gpu in _groups_alike(gpus, lambda gpu: gpu.problems):
        for problem in gpu.problems:
            to_do = "have the machine repaired, or leave it out: CUDA_VISIBLE_DEVICES"
            if problem.startswith("needs"):
                to_do = "do so (nvidia-smi --gpu-reset, or restart the machine), or leave it out: CUDA_VISIBLE_DEVICES"
            if problem.startswith("is slowed"):
                yield warning(
                    "GPUs", f"{those} {problem}", "look at its cooling and power: nvidia-smi -q -d PERFORMANCE"
                )
            else:
                yield wrong("GPUs", f"{those} {problem}", to_do)
    for those, gpu in _groups_alike(gpus, lambda gpu: gpu.compute_mode):
        if gpu.compute_mode == "Prohibited":
            yield wrong("GPUs", f"{those} may not be used (compute mode)", "nvidia-smi -c DEFAULT, as root")
    for those, gpu in _groups_alike(gpus, lambda gpu: (gpu.lanes, gpu.most_lanes)):
        if gpu.lanes and gpu.most_lanes and gpu.lanes < gpu.most_lanes:
            what = f"{those} has {gpu.lanes} lanes of PCIe, of {gpu.most_lanes}"
            yield warning("GPUs", what, "reading input takes longer: another slot, if it is not meant so")
    bad = {"Not Started", "In Progress"}
    for those, gpu in _groups_alike(gpus, lambda gpu: gpu.fabric):
        state, _, status = gpu.fabric.partition(", ")
        if state in bad or (state == "Completed" and status not in ("", "Success")):
            to_do = "systemctl start nvidia-fabricmanager (of the driver's version); without it CUDA does not start"
            yield wrong("NVLink", f"the NVSwitch fabric of {those} is not ready: {gpu.fabric}", to_do)


def _memory(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Finding:
    """Report how much memory a JAX process takes when it starts, and whether it is free."""
    preallocates = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("false", "False", "0")
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    fraction = memory_fraction(environment)
    visible = _visible(environment)
    memories = [
        (number, gpu.total, gpu.used or 0)
        for number, gpu in enumerate(gpus)
        if gpu.total and (visible is None or number in visible)
    ]
    data = {"preallocates": preallocates, "allocator": allocator, "fraction": fraction}
    if not memories:
        return ok("GPU memory", "not told by the driver", **data)
    if allocator == "platform":
        to_do = "unset XLA_PYTHON_CLIENT_ALLOCATOR: each array is then asked of the driver, which is slow"
        return warning("GPU memory", "XLA_PYTHON_CLIENT_ALLOCATOR=platform", to_do, **data)
    if not preallocates:
        what = f"taken as it is needed (XLA_PYTHON_CLIENT_PREALLOCATE), up to {fraction:.0%}"
        return ok("GPU memory", what, **data)
    short = [(number, total, used) for number, total, used in memories if total - used < fraction * total]
    if short:
        number, total, used = short[0]
        others = f", and {len(short) - 1} more" if len(short) > 1 else ""
        what = f"GPU {number}{others}: {used / _GIB:.1f} of {total / _GIB:.1f} GiB are in use, and JAX takes "
        what += f"{fraction * total / _GIB:.1f} GiB when it starts"
        to_do = "end what uses it, choose others (CUDA_VISIBLE_DEVICES), or XLA_PYTHON_CLIENT_PREALLOCATE=false"
        return warning("GPU memory", what, to_do, **data)
    most = min(total for _, total, _ in memories)
    what = f"JAX takes {fraction:.0%} when it starts, {fraction * most / _GIB:.1f} GiB of each GPU"
    return ok("GPU memory", what, **data)


def _visible(environment: Mapping[str, str]) -> set[int] | None:
    """The numbers of the GPUs that JAX will see; ``None`` for all, or if the names are not numbers."""
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return {int(name) for name in names} if all(name.isdecimal() for name in names) else None


def _groups_alike(gpus: Sequence[Gpu], key: Callable[[Gpu], object]) -> Iterator[tuple[str, Gpu]]:
    """Groups of GPUs with the same ``key``: their description, and one of them."""
    groups: dict[object, list[int]] = {}
    for number, gpu in enumerate(gpus):
        groups.setdefault(key(gpu), []).append(number)
    for numbers in groups.values():
        yield "GPU " + ", ".join(map(str, numbers)), gpus[numbers[0]]


# --- between GPUs ---------------------------------------------------------------------------------------------


def _links(links: Links, peers: Links, gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Iterator[Finding]:
    if not links.between:
        yield warning("NVLink", "nvidia-smi topo -m told nothing", "see what it prints: the links are not known")
        return
    pairs = len(gpus) * (len(gpus) - 1) // 2
    joined = [pair for pair, word in links.between.items() if re.fullmatch(r"NV\d+", word)]
    lines = Counter(links.between.values())
    kinds = ", ".join(f"{word}: {count}" for word, count in sorted(lines.items()))
    data = {"pairs": dict(lines), "cards": list(links.cards)}
    expected = any(
        re.search(r"SXM|HBM3|H200|B200|B300", gpu.name) and not re.search("PCIe|NVL", gpu.name) for gpu in gpus
    )
    if len(joined) == pairs:
        least = min(int(word[2:]) for word in lines)
        yield ok("NVLink", f"between all {len(gpus)} GPUs ({least} links, at least)", **data)
    elif joined:
        what = f"between {len(joined)} of {pairs} pairs of GPUs; the others go over PCIe ({kinds})"
        to_do = "put GPUs without a link into different replicas or groups, or use those that are joined only"
        yield warning("NVLink", what, to_do, **data)
    elif expected and not any(gpu.mig for gpu in gpus):
        to_do = "these GPUs have it as a rule: a virtual machine or a fault hides it (nvidia-smi nvlink -s)"
        yield warning("NVLink", f"none, all pairs go over PCIe ({kinds})", to_do, **data)
    else:
        yield ok("NVLink", f"none, all pairs go over PCIe ({kinds})", **data)
    refused = {pair: word for pair, word in peers.between.items() if word != "OK"}
    if refused:
        yield _no_peers(refused, pairs)
    elif peers.between:
        yield ok("peer access", "each GPU reads the memory of each other one", pairs=pairs)
    yield _nccl(len(joined) == pairs, bool(refused) or not peers.between, links, environment)


def _no_peers(refused: Mapping[tuple[int, int], str], pairs: int) -> Finding:
    (first, second), word = next(iter(refused.items()))
    what = (
        f"not between {len(refused)} of {pairs} pairs of GPUs (GPU {first} and {second}: {word}); these copy through "
    )
    to_do = {
        "GNS": "these GPUs have none: nothing to change",
        "DR": "a setting of the driver forbids it (regkey)",
        "CNS": "the chipset forbids it, as do IOMMU and ACS in virtual machines",
    }.get(word, "IOMMU, ACS or a virtual machine forbids it, or the GPUs have none")
    return warning("peer access", what + "the host's memory", to_do, refused=len(refused))


def _nccl(joined: bool, refused: bool, links: Links, environment: Mapping[str, str]) -> Finding:
    """The transport that NCCL will probably choose, when it starts, between these GPUs and to other machines."""
    version = next((v for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (v := version_of(name))), None)
    name = f"NCCL {version}" if version else "NCCL"
    off = [variable for variable in _SWITCHED_OFF if environment.get(variable, "0") not in ("", "0")]
    if "NCCL_P2P_DISABLE" in off or (refused and not joined):
        way = "shared memory of the host"
        if "NCCL_SHM_DISABLE" in off:
            way = "the network, inside of this machine, too"
    else:
        some = any(word.startswith("NV") for word in links.between.values())
        way = "NVLink" if joined else "NVLink and PCIe, GPU to GPU" if some else "PCIe, GPU to GPU"
    cards = (
        f"; {len(links.cards)} network card(s) for other hosts ({', '.join(links.cards[:4])})" if links.cards else ""
    )
    what = f"{name} probably goes over {way}{cards}; NCCL_DEBUG=INFO shows its choice"
    if off:
        gone = " and ".join(_SWITCHED_OFF[variable] for variable in off)
        to_do = f"unset {' and '.join(off)}, which switched off {gone}"
        return warning("NCCL", what, to_do, way=way, version=version)
    return ok("NCCL", what, way=way, version=version, cards=list(links.cards))
