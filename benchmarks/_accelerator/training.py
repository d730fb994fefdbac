"""Training: each way of Replicax beside the same by hand; the plan beside the measured step; and memory."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from collections.abc import Iterator
from typing import Any

import _measure
import jax
from _steps import Problem, replicax_step, train_by_hand, train_replicax

import replicax
from _accelerator import sides
from _accelerator.problems import Sizes, problem, title

Result = dict[str, Any]


def training(model: str, sizes: Sizes, count: int, seconds: float) -> Iterator[Result]:
    """Time the ways to train a model on the first ``count`` devices, ``seconds`` for each pair, and plan it."""
    devices = jax.local_devices()[:count]
    made, steps = problem(model, sizes, count), sizes.steps[model]
    examples = len(made.batch[0])
    about = {"model": model, "title": title(model, sizes), "devices": count, "examples": examples}

    def compared(way: str, ours: sides.Call, by_hand: sides.Call, each: int = 1) -> Result:
        times = _measure.interleave([ours, by_hand], seconds, warmup=max(2, 6 // each))
        paired = _measure.Paired(*([t / each for t in mine] for mine in times))
        rate = examples / statistics.median(paired.a)
        return {"table": "training", **about, "way": way, **paired.summary(), "examples_per_second": rate}

    step = compared("run", train_replicax(made, devices).call, train_by_hand(made, devices).call)
    yield step
    yield {"table": "plans", **about, "measured_s": step["a_ms"] / 1e3, **_planned_or_not(made, devices)}
    # What a pair has on the devices goes with it: none is kept in a variable here.
    yield {
        **compared(
            "run_steps",
            sides.many_steps(made, steps, devices),
            sides.many_steps_by_hand(made, steps, devices),
            each=steps,
        ),
        "steps": steps,
    }
    if importlib.util.find_spec("flax"):
        yield compared("NNX", *(make(model, sizes, made, devices) for make in (sides.nnx_replicax, sides.nnx_by_hand)))


def memory(model: str, sizes: Sizes, count: int, side: str) -> Iterator[Result]:
    """The peak of a device's memory after five steps of one side: a process of its own, as a peak can't be reset."""
    devices = jax.local_devices()[:count]
    made = problem(model, sizes, count)
    call = (train_replicax if side == "replicax" else train_by_hand)(made, devices).call
    for _ in range(5):
        call()
    found = [device.memory_stats() or {} for device in devices]
    numbers = {
        name: max((each[key] for each in found if key in each), default=None)
        for name, key in (("peak", "peak_bytes_in_use"), ("limit", "bytes_limit"))
    }
    yield {"table": "memory", "model": model, "title": title(model, sizes), "devices": count, "side": side, **numbers}


def _planned_or_not(made: Problem, devices: list[jax.Device]) -> Result:
    """The plan; or why there is none, which must not keep the rest from being measured."""
    try:
        return {**_planned(made, devices), "words": ""}
    except Exception as error:
        return {**dict.fromkeys(_PLANNED), "words": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


_PLANNED = (
    "chip",
    "predicted_s",
    "at_least_s",
    "predicted_bytes",
    "utilization",
    "model_flops",
    "peak_flops",
    "hidden",
)


def _planned(made: Problem, devices: list[jax.Device]) -> Result:
    """What ``replicax.plan`` says of the same step; of emulated devices by what was measured of them before."""
    from replicax.planning.calibration import measured_chip

    chip = measured_chip(devices) if devices[0].platform == "cpu" else None
    strategy = replicax.MirroredStrategy(devices)
    step, _, _ = replicax_step(strategy, made)
    spec = tuple(jax.ShapeDtypeStruct((len(x) // len(devices), *x.shape[1:]), x.dtype) for x in made.batch)
    found = replicax.plan(strategy, step, spec, chip=chip)
    return {
        "chip": None if found.chip is None else found.chip.name,
        "predicted_s": None if found.timeline is None else found.timeline.seconds,
        "at_least_s": None if found.estimate is None else found.estimate.at_least,
        "predicted_bytes": found.memory.total,
        "utilization": None if found.timeline is None else found.timeline.utilization,
        "model_flops": None if found.timeline is None else found.timeline.model_flops,
        "peak_flops": None if found.chip is None else found.chip.flops,
        "hidden": None if found.timeline is None else found.timeline.hidden,
        "collectives": [dataclasses.asdict(row) for row in found.collectives],
        "compile_s": found.compile_seconds,
    }
