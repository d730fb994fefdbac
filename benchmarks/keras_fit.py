"""What an epoch of Keras' ``fit`` costs on one replica, against Keras by itself on one device.

    .venv-integrations/bin/python benchmarks/keras_fit.py [--quick]

The same small model, data and batch size on both sides: the time goes into starting steps. ``steps_per_execution`` is
1 and 32; Keras by itself starts each of the 32 steps, and under Replicax they are one program. Prints a table, writes
``results/keras_fit.json``, and exits with 1 if a bar is missed. See README.md.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import _measure

ROUNDS = 3
"""Each case is measured in that many processes."""
STEPS, ROWS = 128, 32
"""Of an epoch; of a batch."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
      name: for the JSON.
      ours: ``steps_per_execution`` under Replicax.
      theirs: the same, of Keras by itself.
      bar: the largest ratio that passes; ``None`` for a figure that is only shown.
    """

    name: str
    ours: int
    theirs: int
    bar: float | None


CASES = (
    Case("one_by_one", 1, 1, None),
    Case("loop_over_loop", 32, 32, 0.5),
    Case("loop_over_one_by_one", 32, 1, 0.5),
)
SECONDS = 6.0


# --- one process ----------------------------------------------------------------------------------------


def measure_here(devices: int, turn: int, share: float) -> dict[str, Any]:
    """Measure every case in this process."""
    os.environ["KERAS_BACKEND"] = "jax"
    import replicax

    replicax.use_cpu_devices(devices)
    results = {}
    for case in CASES:
        makers: list[Callable[[], Callable[[], None]]] = [
            lambda case=case: _replicax(case.ours),
            lambda case=case: _keras(case.theirs),
        ]
        made = {i: makers[i]() for i in ((1, 0) if turn % 2 else (0, 1))}
        results[case.name] = _measure.interleave([made[0], made[1]], SECONDS * share, warmup=2)
    return results


def _model(steps: int) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=steps)
    return model


def _epoch(model: Any) -> Callable[[], None]:
    import numpy as np

    x = np.random.default_rng(0).normal(size=(STEPS * ROWS, 16)).astype("float32")
    y = np.random.default_rng(1).integers(0, 4, size=STEPS * ROWS).astype("int32")
    return lambda: model.fit(x, y, batch_size=ROWS, epochs=1, verbose=0, shuffle=False) and None


def _replicax(steps: int) -> Callable[[], None]:
    import replicax

    with replicax.OneDeviceStrategy("cpu:0").scope():
        model = _model(steps)
    return _epoch(model)


def _keras(steps: int) -> Callable[[], None]:
    return _epoch(_model(steps))


# --- all of it ------------------------------------------------------------------------------------------


def measure(rounds: int, share: float) -> dict[str, Any]:
    """Measure all cases, each in ``rounds`` processes."""
    found: dict[str, list[Any]] = {case.name: [] for case in CASES}
    for turn in range(rounds):
        options = ("--devices", "1", "--turn", str(turn), "--share", str(share))
        for name, times in _measure.in_subprocess("keras_fit.py", *options).items():
            found[name].append(times)
    return {case.name: _measure.of_all_processes(found[case.name], STEPS).summary() for case in CASES}


def main() -> int:
    results = _measure.measured(__doc__ or "", "a third", measure_here, measure, ROUNDS, 0.5)
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Time of a step of Keras' fit: medians, and the median of paired ratios")
    for column in ("steps in an execution: Replicax, Keras", "Replicax", "Keras", "ratio", "95%", "bar", ""):
        table.add_column(column, justify="left" if column.startswith("steps") else "right")
    for case in CASES:
        table.add_row(f"{case.ours}, {case.theirs}", *_measure.cells(results[case.name], case.bar))
    Console(width=110).print(table)
    _measure.write("keras_fit.json", {"cases": results})
    return int(not all(_measure.meets(results[case.name], case.bar) for case in CASES))


if __name__ == "__main__":
    sys.exit(main())
