"""The per-replica executor beside the compiled step; and a run that is saved and goes on in another process."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _steps import Problem, _wait, replicax_step

import replicax
from _accelerator.problems import Sizes, problem

Result = dict[str, Any]

_BEFORE, _AFTER = 5, 5
"""Steps before the save, and after it."""


def exact_executor(sizes: Sizes) -> Iterator[Result]:
    """Three steps of the MLP on all devices, compiled and in ``replicax.debug()``."""
    devices = jax.local_devices()
    made = problem("mlp", sizes, len(devices))
    with jax.default_matmul_precision("highest"):
        compiled, compiled_s = _trained(made, devices, 3)
        with replicax.debug():
            exact, exact_s = _trained(made, devices, 3)
    difference = _difference(compiled, exact)
    yield {
        "table": "exact",
        "devices": len(devices),
        "difference": difference,
        "passed": difference < 1e-4,
        "compiled_s": compiled_s,
        "exact_s": exact_s,
    }


def save(sizes: Sizes, folder: Path) -> Iterator[Result]:
    """Save a run of the MLP after five steps, and go on; then once more from the save."""
    run = _Run(sizes)
    run.steps(_BEFORE)
    saved = run.digest()
    start = time.perf_counter()
    run.checkpoint.save(folder / "saved", wait=False)
    stopped = time.perf_counter() - start
    run.checkpoint.wait()
    written = time.perf_counter() - start
    run.steps(_AFTER)
    (folder / "digests").write_text(f"{saved} {run.digest()}")
    yield {
        "table": "checkpoint",
        "step": "save",
        "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "stopped_s": stopped,
        "written_s": written,
        **_resumed(sizes, folder),
    }


def resume(sizes: Sizes, folder: Path) -> Iterator[Result]:
    """Go on with the run from its save, in a process that has not made it."""
    yield {"table": "checkpoint", "step": "resume", **_resumed(sizes, folder)}


def _resumed(sizes: Sizes, folder: Path) -> Result:
    """Whether the arrays that are restored have the bits that were saved, and so have those five steps later."""
    saved, later = (folder / "digests").read_text().split()
    run = _Run(sizes)
    start = time.perf_counter()
    run.checkpoint.restore(folder / "saved")
    took = time.perf_counter() - start
    restored = run.digest() == saved
    run.steps(_AFTER)
    return {"restored_s": took, "same_bits": restored, "same_bits_later": run.digest() == later, "process": os.getpid()}


class _Run:
    """Training the MLP on all devices, with what a checkpoint keeps of it."""

    def __init__(self, sizes: Sizes) -> None:
        devices = jax.local_devices()
        made = problem("mlp", sizes, len(devices))
        self._strategy = replicax.MirroredStrategy(devices)
        with self._strategy.scope():
            optimizer = replicax.Optimizer(made.tx)
        self._step, self._variables, _ = replicax_step(self._strategy, made, optimizer)
        [self._batch] = self._strategy.distribute_dataset([made.batch])
        self.checkpoint = replicax.Checkpoint(variables=self._variables, optimizer=optimizer)

    def steps(self, count: int) -> None:
        for _ in range(count):
            _wait(self._strategy.run(self._step, args=(self._batch,)))

    def digest(self) -> str:
        digest = hashlib.sha256()
        for variable in self._variables:
            digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
        return digest.hexdigest()


def _trained(made: Problem, devices: list[jax.Device], steps: int) -> tuple[list[Any], float]:
    """The parameters after so many steps, and the seconds of the last."""
    strategy = replicax.MirroredStrategy(devices)
    step, variables, _ = replicax_step(strategy, made)
    [batch] = strategy.distribute_dataset([made.batch])
    took = 0.0
    for _ in range(steps):
        start = time.perf_counter()
        jax.block_until_ready(strategy.local_results(strategy.run(step, args=(batch,))))
        took = time.perf_counter() - start
    return [v.numpy() for v in variables], took


def _difference(ones: list[Any], others: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ones, others, strict=True))
