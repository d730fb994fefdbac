"""``checkpoints="folder"``: the loop finds out what the step uses, saves it, and goes on from it."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import replicax
from replicax.loop.step_objects import objects_of
from tests.conftest import strategy_of
from tests.loop.models import Line

pytestmark = pytest.mark.usefixtures("promotion_of_dtypes")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(replicas: int, tmp_path: pathlib.Path) -> None:
    whole = Line(strategy_of(replicas))
    replicax.train(whole.step, whole.dataset(), 17, progress=False)
    states = []
    for steps in (7, 17):
        line = Line(strategy_of(replicas))
        run = replicax.train(line.step, line.dataset(), steps, checkpoints=tmp_path, stop_at_nan=True, progress=False)
        states.append((run.resumed_at, run.step))
    assert states == [(None, 7), (7, 17)]
    for mine, theirs in zip(line.state(), whole.state(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


weights = None


def test_what_a_step_uses_is_found_by_name() -> None:
    global weights
    with strategy_of(2).scope():
        v = replicax.Variable(0.0, name="v")
        params = replicax.as_variables({"dense": [np.ones(2, np.float32)]})
        optimizer = replicax.Optimizer(optax.sgd(0.1))
        weights, _weights = replicax.Variable(1.0, name="other"), replicax.Variable(1.0, name="another")
        save, train = replicax.Mean("mean"), replicax.Variable(0, name="train")

    def loss_of(batch: Any) -> Any:
        return (lambda: weights.value)() * v.value  # type: ignore[attr-defined]

    def step(more: Any, batch: Any) -> Any:
        optimizer.apply_gradients([params, loss_of(batch), _weights])
        save.update(batch)
        train.assign(1)

    line = Line(strategy_of(1))
    assert objects_of(functools.partial(step, {"also": v})).keys() == {
        "argument_0", "optimizer", "params", "save_", "train_", "weights", "weights_2",
    }  # fmt: skip
    assert objects_of(line.step).keys() == {"w", "optimizer", "seen", "mean"}
    for kind in (dict, type("Table", (dict,), {})):
        whole = kind(first=v, second=line.w)  # found after v
        assert list(objects_of(lambda x: (v.value, whole["second"].value))) == ["v", "whole"]  # noqa: B023
    assert objects_of(functools.partial(lambda x: isinstance(x, Line))) == {}


def test_what_is_a_default_argument_is_found() -> None:
    with strategy_of(1).scope():
        v, w, u = (replicax.Variable(0.0, name=name) for name in "vwu")

    def scaled(x: Any, /, by: Any = v) -> Any:
        return x * by

    def step(x: Any, weight: Any = w, *, shift: Any = u) -> Any:
        return scaled(x) * weight + shift

    assert list(objects_of(step)) == ["weight", "shift", "by"]


def test_a_module_without_variables_of_its_own_is_left_out() -> None:
    net = nn.Dense(3)  # its variables are a pytree beside it
    params = replicax.as_variables(net.init(jax.random.key(0), np.ones((1, 2), np.float32)))

    def step(x: jax.Array) -> Any:
        return net.apply(replicax.as_arrays(params), x)

    assert list(objects_of(step)) == ["params"]
    for module in (net, net.bind(replicax.as_arrays(params))):  # whose variables are arrays
        with pytest.raises(TypeError, match="Checkpoint: net is "):
            replicax.Checkpoint(net=module).save("unused")


def test_what_a_step_uses_may_be_made_later() -> None:
    with strategy_of(1).scope():
        v = replicax.Variable(0.0, name="v")

    def step(x: Any) -> Any:
        return scale * v.value * x

    assert list(objects_of(step)) == ["v"]
    scale = 2.0


@pytest.mark.parametrize("made", [jax.jit, jax.checkpoint, jax.custom_vjp, jax.custom_jvp, functools.lru_cache])
def test_what_a_wrapped_function_uses_is_found(made: Callable[..., Any]) -> None:
    with strategy_of(1).scope():
        v = replicax.Variable(0.0, name="v")
    assert list(objects_of(made(lambda x: v.value * x))) == ["v"]
    for wrapped in (
        replicax.loop.accumulated(made(lambda x: v.value * x), 2),
        replicax.loop.Precision("bf16")(made(lambda x: v.value * x)),
    ):
        assert list(objects_of(wrapped)) == ["v"]


def test_what_a_wrapper_wraps_has_the_name_that_the_wrapper_gives_it() -> None:
    with strategy_of(1).scope():
        v = replicax.Variable(0.0, name="v")

    def step(x: Any) -> Any:
        return v.value * x

    step.__wrapped__ = v  # type: ignore[attr-defined]
    assert list(objects_of(step)) == ["v"]


def test_a_variable_that_is_not_found_is_an_error_before_anything_is_saved(tmp_path: pathlib.Path) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        v, w = replicax.Variable(0.0, name="v"), replicax.Variable(0.0, name="w")
    hidden = {"state": iter([w])}
    kept: list[Any] = []

    def step(x: Any) -> None:
        kept.extend(hidden["state"])
        v.assign(v + 1.0)
        kept[0].assign(1.0)

    dataset = strategy.distribute_dataset([np.ones(2, np.float32)])
    with pytest.raises(ValueError, match="has changed <?.*'w'.*Say what to save"):
        replicax.train(step, dataset, 3, checkpoints=tmp_path, progress=False)
    assert not list(tmp_path.glob("step-*"))


def test_a_step_without_variables_says_that_there_is_nothing_to_save(tmp_path: pathlib.Path) -> None:
    dataset = strategy_of(1).distribute_dataset([np.ones(2, np.float32)])
    with pytest.raises(ValueError, match="uses no variable, optimizer or model by a name"):
        replicax.train(lambda x: x.sum(), dataset, 3, checkpoints=tmp_path, progress=False)
