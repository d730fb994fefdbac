"""Checks the machine: cores, memory, shared memory, open files, and the disk for checkpoints."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

from replicax.cli.diagnosis.findings import Finding, ok, warning, wrong
from replicax.system.environment import chosen_threads, thread_limit, usable_cores

_GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")
_SHARED = Path("/dev/shm")
_OPEN_FILES = 1024


def check(seconds: float) -> list[Finding]:
    """Cores, memory, shared memory and open files."""
    return [_cores(), _memory(), _shared_memory(), _open_files()]


def _cores() -> Finding:
    usable, there = float(usable_cores()), os.cpu_count() or 1
    quota, _, period = _read_text(_CGROUP / "cpu.max").partition(" ")  # the container's limit
    if quota.isdigit() and period.strip().isdigit():
        usable = min(usable, int(quota) / int(period))
    chosen, made = chosen_threads(os.environ), thread_limit()
    what = f"{usable:g} of {there} cores; XLA takes {made} threads"
    data = {"cores": usable, "cores_of_the_machine": there, "threads": made}
    if chosen is None and made > 2 * usable:
        return warning("cores", what, f"the container has {usable:g} cores: set NPROC={max(2, round(usable))}", **data)
    return ok("cores", what, **data)


def _memory() -> Finding:
    lines = dict(line.split(":", 1) for line in _read_text(Path("/proc/meminfo")).splitlines() if ":" in line)
    total, free = (int(lines.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = _read_text(_CGROUP / "memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        used = _read_text(_CGROUP / "memory.current").strip()
        total = int(limit)
        free = min(free, max(0, total - int(used))) if used.isdigit() else free
    what = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    data = {"total": total, "free": free}
    if not total:
        return ok("memory", "not known, as there is no /proc/meminfo", **data)
    if free < _GIB:
        return warning("memory", what, "end what uses it: a program with JAX takes about 1 GiB by itself", **data)
    return ok("memory", what, **data)


def _shared_memory() -> Finding:
    if not _SHARED.is_dir():
        return warning("shared memory", f"there is no {_SHARED}", "mount it: NCCL and Grain's workers need it")
    there = shutil.disk_usage(_SHARED)
    what = f"{_SHARED}: {there.free / _GIB:.1f} of {there.total / _GIB:.1f} GiB free"
    data = {"total": there.total, "free": there.free}
    if there.free < _GIB / 2:
        to_do = "NCCL and Grain's worker processes share memory there: make it larger (docker run --shm-size=8g)"
        return warning("shared memory", what, to_do, **data)
    return ok("shared memory", what, **data)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"{_limit(soft)} at a time, at most {_limit(hard)}"
    data = {"soft": soft, "hard": hard}
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        to_do = f"readers of many files need more: ulimit -n {_OPEN_FILES if hard < 0 else min(hard, 65536)}"
        return warning("open files", what, to_do, **data)
    return ok("open files", what, **data)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def look_at_disk(directory: Path) -> list[Finding]:
    """Check whether checkpoints can be written into a folder, and how much space there is."""
    data = {"directory": str(directory)}
    try:
        there = directory.absolute()
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            return [wrong("disk", f"{there} is a file", "name a folder: --directory", **data)]
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        to_do = "checkpoints can't go there: make room, change its rights, or name another: --directory"
        return [wrong("disk", f"{directory} can't be written ({error.strerror})", to_do, **data)]
    usage = shutil.disk_usage(there)
    what = f"{directory}: {usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    sizes = {**data, "total": usage.total, "free": usage.free}
    if usage.free < _GIB:
        return [warning("disk", what, "make room for checkpoints, or name another folder: --directory", **sizes)]
    return [ok("disk", what, **sizes)]


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
