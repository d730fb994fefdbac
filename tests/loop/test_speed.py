"""Speed in the log: examples, tokens, MFU; and the line that a notebook shows."""

from __future__ import annotations

import io
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import replicax
from replicax.loop.logs import speed
from replicax.loop.logs.progress_bar import Progress
from replicax.planning import chip_specs
from tests.conftest import logical_strategy, strategy_of

pytestmark = pytest.mark.usefixtures("promotion_of_dtypes")


def scanned(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=5)[0]


CONVOLVED = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}


@pytest.mark.parametrize(
    ("fn", "shapes", "flops"),
    [
        (jnp.dot, [(4, 8), (8, 3)], 2 * 4 * 8 * 3),
        (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [(2, 4, 8), (2, 8, 3)], 2 * 2 * 4 * 8 * 3),
        (jax.value_and_grad(lambda x, y: (x @ y).sum(), (0, 1)), [(4, 8), (8, 3)], 3 * 2 * 4 * 8 * 3),
        (jax.jit(scanned), [(4, 8), (8, 8)], 5 * 2 * 4 * 8 * 8),
        (jax.checkpoint(scanned), [(4, 8), (8, 8)], 5 * 2 * 4 * 8 * 8),
        (
            lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: scanned(x, w), lambda: x @ w),
            [(4, 8), (8, 8)],
            5 * 2 * 4 * 8 * 8,
        ),
        (
            lambda x, k: jax.lax.conv_general_dilated(x, k, **CONVOLVED),
            [(2, 8, 8, 3), (3, 3, 3, 16)],
            2 * (2 * 8 * 8 * 16) * (3 * 3 * 3),
        ),
    ],
)
def test_matrix_products_of_a_step_are_counted(fn: Any, shapes: Any, flops: int) -> None:
    program = jax.make_jaxpr(fn)(*(jnp.ones(shape) for shape in shapes))
    assert speed.flops_of(program.jaxpr) == flops


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_gradients_of_a_convolution_cost_as_much_as_itself_each(groups: int) -> None:
    x, kernel = jnp.ones((4, 6, 6, 8)), jnp.ones((3, 3, 8 // groups, 16))

    def fn(x: Any, kernel: Any) -> Any:
        return jnp.sin(jax.lax.conv_general_dilated(x, kernel, **CONVOLVED, feature_group_count=groups)).sum()

    once = speed.flops_of(jax.make_jaxpr(fn)(x, kernel).jaxpr)
    assert speed.flops_of(jax.make_jaxpr(jax.grad(fn, (0, 1)))(x, kernel).jaxpr) == 3 * once > 0


@pytest.mark.parametrize("name", ["two", "logical"])
def test_mfu_is_what_the_steps_compute_over_the_peak_of_all_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = strategy_of(2) if name == "two" else logical_strategy(2, 2)
    chip = replicax.planning.Chip("card", flops=1e9, memory=1e9, bandwidth=1e9)
    monkeypatch.setattr(chip_specs, "chip_of", lambda kind: chip)
    with strategy.scope():
        w = replicax.Variable(np.ones((16, 8), np.float32), name="w")

    def step(x: Any) -> Any:
        return replicax.compute_average_loss((x @ w).sum(1))

    dataset = strategy.distribute_dataset([np.ones((8, 16), np.float32)])
    run = replicax.train(step, dataset, 40, log_every=10, tokens_per_example=5, steps_per_call=1, progress=False)
    assert run.numbers["tokens_per_second"] == pytest.approx(5 * run.numbers["examples_per_second"])
    devices = 2 if name == "two" else 4
    steps_per_second = run.numbers["examples_per_second"] / 8
    assert run.numbers["mfu"] == pytest.approx(2 * 8 * 16 * 8 * steps_per_second / (1e9 * devices), rel=1e-6)
    with replicax.debug():  # no program has all of a step
        assert "mfu" not in replicax.train(step, dataset, 1, progress=False).numbers
    uneven = strategy.distribute_dataset([np.ones((3, 16), np.float32)])
    assert "mfu" not in replicax.train(step, uneven, 1, progress=False).numbers


def test_two_devices_of_a_chip_have_its_peak_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(*coords: tuple[int, ...], slices: int = 1) -> float | None:
        devices = [
            types.SimpleNamespace(device_kind="card", coords=place, slice_index=i)
            for i in range(slices)
            for place in coords
        ]
        mesh = types.SimpleNamespace(devices=np.array(devices, dtype=object))
        strategy: Any = types.SimpleNamespace(extended=types.SimpleNamespace(mesh=mesh))
        return speed.peak_of(strategy)

    chip = replicax.planning.Chip("card", flops=8e9, memory=1e9, bandwidth=1e9)
    monkeypatch.setattr(chip_specs, "chip_of", lambda kind: chip)
    assert peak((0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0)) == 16e9
    assert peak((0, 0, 0), (1, 0, 0)) == 16e9
    assert peak((0, 0, 0), (1, 0, 0), slices=2) == 32e9  # each slice counts its chips from the first


def test_the_speed_is_logged_as_a_share_of_what_the_plan_predicts(tmp_path: pathlib.Path) -> None:
    strategy, slow = strategy_of(2), replicax.planning.Chip("slow card", flops=1e6, memory=1e9, bandwidth=1e6)
    with strategy.scope():
        w = replicax.Variable(np.ones((16, 8), np.float32), name="w")

    def step(x: Any) -> Any:
        return replicax.compute_average_loss((x @ w).sum(1))

    spec = jax.ShapeDtypeStruct((4, 16), np.float32)
    plan = replicax.plan(strategy, step, spec, chip=slow)
    dataset = strategy.distribute_dataset([np.ones((8, 16), np.float32)])
    assert plan.examples_per_second is not None
    for steps in (20, 40):  # the second run goes on from the first one's end
        run = replicax.train(step, dataset, steps, log_every=10, plan=plan, checkpoints=tmp_path, progress=False)
        assert run.numbers["of_plan"] == pytest.approx(run.numbers["examples_per_second"] / plan.examples_per_second)

    # As of a run that is started again with fewer workers.
    for other in (1, 4):
        elsewhere = strategy_of(other).distribute_dataset(np.ones((1, 8, 16), np.float32))
        with pytest.warns(UserWarning, match=rf"is for 2 replicas on 2 × cpu, and the step runs on {other} ") as told:
            run = replicax.train(lambda x: x.sum(), elsewhere, 1, plan=plan, progress=False)
        assert len(told) == 1
        assert "of_plan" not in run.numbers
    unknown = replicax.plan(strategy, step, spec)
    with pytest.raises(ValueError, match=r"the plan \(of cpu\) has no predicted time.*replicax.plan\(chip=…\)"):
        replicax.train(step, dataset, 1, plan=unknown, progress=False)
    with pytest.raises(TypeError, match=r"takes what replicax.plan\(strategy, step, spec\) returns, got 'plan.json'"):
        replicax.train(step, dataset, 1, plan="plan.json", progress=False)  # type: ignore[arg-type]


def test_the_speed_is_that_of_the_last_four_intervals() -> None:
    rates = speed.Speed(strategy_of(1), None)
    numbers = [rates.after(i, 8 * i, seconds) for i, seconds in enumerate((1.0, 2.0, 6.0, 8.0, 9.0), 1)]
    assert [number["examples_per_second"] for number in numbers] == [8, 8, 4, 4, 4]


def test_on_cpus_there_is_no_mfu() -> None:
    dataset = strategy_of(1).distribute_dataset([np.ones(4, np.float32)])
    run = replicax.train(lambda x: x.sum(), dataset, 2, progress=False)
    assert run.numbers.keys() == {"loss", "examples_per_second"}


def test_a_notebook_shows_a_line_that_is_redrawn() -> None:
    out, now = io.StringIO(), iter(range(10_000))
    console = Console(file=out, soft_wrap=True)
    console.is_jupyter = True
    show = Progress(console, clock=lambda: float(next(now)))
    dataset = strategy_of(1).distribute_dataset([np.ones(4, np.float32)])
    replicax.train(
        lambda x: x.sum(), dataset, 8, log_every=2, callbacks=show, progress=False,
        evaluate=lambda: {"accuracy": 0.5}, evaluate_every=4,
    )  # fmt: skip
    lines = out.getvalue().split("\n")
    assert [line.split("\r")[-1].rstrip() for line in lines[:2]] == [
        "step 4 of 8   evaluation: accuracy 0.5", "step 8 of 8   evaluation: accuracy 0.5",
    ]  # fmt: skip
    last = lines[2].split("\r")[-1]
    assert last.startswith(f"step 8 of 8 {'━' * 24}   loss 4   ")
    assert "examples/s" in last
    assert any("left" in part for part in out.getvalue().split("\r"))


def test_the_line_of_a_notebook_is_not_redrawn_at_every_step() -> None:
    out, now = io.StringIO(), [100.0]
    console = Console(file=out, soft_wrap=True)
    console.is_jupyter = True
    show = Progress(console, clock=lambda: now[0])
    run = types.SimpleNamespace(step=0, steps=100)
    show.on_start(run)
    for run.step in range(1, 33):
        now[0] += 1 / 16
        show.advanced(run.step)
    assert out.getvalue().count("\r") == 1 + 3  # in two seconds, more than half a second apart
    for numbers in ({"loss": 0.5, "accuracy": 0.25}, {"loss": 0.5}):
        show.on_log(run, run.step, numbers)
    longer, shorter = out.getvalue().split("\r")[-2:]
    assert len(shorter) == len(longer) > len(shorter.rstrip())  # nothing of the longer one is left
    show.on_end(run)
    shown, now[0] = out.getvalue(), now[0] + 1
    show.advanced(run.steps)
    assert out.getvalue() == shown


def test_lines_come_as_often_as_the_user_says(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for progress in (1e-9, 1000.0):
        dataset = strategy_of(1).distribute_dataset([np.ones(4, np.float32)])
        replicax.train(lambda x: x.sum(), dataset, 10, log_every=1, progress=progress, steps_per_call=1)
        counts.append(sum("loss 4" in line for line in capsys.readouterr().out.splitlines()))
    assert counts[0] == 10
    assert counts[1] <= 2
