"""Every optimizer of Optax does with variables what it does with arrays: mirrored, in pieces, and on one device."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import replicax
from replicax.variables.partitioners import over_all
from tests.conftest import strategy_of

RNG = np.random.default_rng(3)
X = RNG.normal(size=(8, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 2)).astype(np.float32)
PARAMS = {"w": RNG.normal(size=(4, 2)).astype(np.float32), "b": np.full(2, 0.1, np.float32)}
STEPS = 3


def per_example(params: Any, x: Any, y: Any) -> Any:
    return jnp.sum((x @ params["w"] + params["b"][None, :] - y) ** 2, axis=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, and what its update gets besides: ``extra(loss, gradients, loss of parameters)``."""

    make: Callable[[], Any]
    extra: Callable[[Any, Any, Callable[[Any], Any]], dict[str, Any]] = lambda loss, gradients, of: {}


def gradient_of(of: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda params, step: jax.grad(of)(params)


def with_value(loss: Any, gradients: Any, of: Any) -> dict[str, Any]:
    return {"value": loss}


def with_line_search(loss: Any, gradients: Any, of: Any) -> dict[str, Any]:
    return {"value": loss, "grad": gradients, "value_fn": of}


# Those that a learning rate is not enough for, or that take none.
SPECIAL = {
    "noisy_sgd": Case(lambda: optax.noisy_sgd(0.05, key=3)),
    "optimistic_adam_v2": Case(lambda: optax.optimistic_adam_v2(0.05)),
    "polyak_sgd": Case(optax.polyak_sgd, with_value),
    "lbfgs": Case(lambda: optax.lbfgs(memory_size=2), with_line_search),
    "lbfgs that goes back": Case(
        lambda: optax.lbfgs(memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(4)), with_line_search
    ),
    "galore": Case(lambda: optax.contrib.galore(0.05, rank=1)),
    "momo": Case(lambda: optax.contrib.momo(0.05), with_value),
    "momo_adam": Case(lambda: optax.contrib.momo_adam(0.05), with_value),
    "sophia": Case(lambda: optax.contrib.sophia(0.05, update_interval=2), lambda loss, g, of: {"obj_fn": of}),
    "mechanize": Case(lambda: optax.contrib.mechanize(optax.sgd(0.05))),
    "schedule_free": Case(lambda: optax.contrib.schedule_free(optax.sgd(0.05), 0.05)),
    "sam": Case(
        lambda: optax.contrib.sam(
            optax.sgd(0.05), optax.chain(optax.contrib.normalize(), optax.sgd(0.1)), opaque_mode=True
        ),
        lambda loss, g, of: {"grad_fn": gradient_of(of)},
    ),
    "sam in the open": Case(lambda: optax.contrib.sam(optax.sgd(0.05), optax.sgd(0.1))),
    "reduce_on_plateau": Case(
        lambda: optax.chain(optax.sgd(0.05), optax.contrib.reduce_on_plateau(patience=0, rtol=0.9)), with_value
    ),
    "partition": Case(
        lambda: optax.partition({"slow": optax.sgd(0.01), "fast": optax.adam(0.1)}, {"w": "slow", "b": "fast"})
    ),
    "partition by path": Case(
        lambda: optax.partition(
            {"slow": optax.sgd(0.01), "fast": optax.adam(0.1)},
            lambda params: jax.tree.map_with_path(lambda path, _: "fast" if path[-1].key == "b" else "slow", params),
        )
    ),
    "adamw with a mask": Case(lambda: optax.adamw(0.05, weight_decay=0.3, mask={"w": True, "b": False})),
    "frozen": Case(lambda: optax.chain(optax.sgd(0.05), optax.freeze({"w": False, "b": True}))),
}
# One takes the gradients of single examples, which have another shape than the parameters; the other is deprecated.
OTHERS = {"dpsgd", "optimistic_adam"}


def optimizers() -> dict[str, Case]:
    """All that have a learning rate, as far as Optax says so, and those of the table."""
    found = {}
    for module in (optax, optax.contrib):
        for name, fn in vars(module).items():
            is_public = inspect.isfunction(fn) and not name.startswith(("_", "scale_by_", "inject_"))
            if is_public and "learning_rate" in inspect.signature(fn).parameters:
                found[name] = Case(lambda fn=fn: fn(learning_rate=0.05))
    return {name: case for name, case in {**found, **SPECIAL}.items() if name not in OTHERS}


CASES = optimizers()


@functools.cache
def plainly(names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Parameters and states of each, after some steps of Optax on one device."""

    def of(params: Any) -> Any:
        return jnp.mean(per_example(params, X, Y))

    @jax.jit
    def step(everything: Any) -> Any:
        after = {}
        for name, (params, state) in everything.items():
            loss, gradients = jax.value_and_grad(of)(params)
            tx = CASES[name].make()
            updates, state = tx.update(gradients, state, params, **CASES[name].extra(loss, gradients, of))
            after[name] = optax.apply_updates(params, updates), state
        return after

    everything = {name: (PARAMS, case.make().init(PARAMS)) for name, case in CASES.items() if name in names}
    for _ in range(STEPS):
        everything = step(everything)
    return {name: jax.tree.leaves(found) for name, found in everything.items()}


def strategies() -> dict[str, Callable[[], replicax.Strategy]]:
    return {
        "one": lambda: strategy_of(1),
        "mirrored": lambda: strategy_of(2),
        "split": lambda: replicax.ShardedStrategy(["cpu:0", "cpu:1"], over_all(2, min_bytes=0)),
    }


# What does something of its own: factors of matrices, sums over pieces, values, functions, and groups of parameters.
QUICK = ("adafactor", "lamb", "momo", "sam", "sophia", "muon", "schedule_free", "partition by path", "frozen")


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        pytest.param("split", {name: CASES[name] for name in QUICK}, id="split, a few"),
        pytest.param("split", CASES, id="split", marks=pytest.mark.soak),
        pytest.param("mirrored", CASES, id="mirrored", marks=pytest.mark.soak),
        pytest.param("one", CASES, id="one", marks=pytest.mark.soak),
    ],
)
def test_every_optimizer(kind: str, cases: dict[str, Case]) -> None:
    """All in one step, so that there is one program to compile."""
    strategy = strategies()[kind]()
    with strategy.scope():
        variables = {
            name: {part: replicax.Variable(value, name=f"{name}/{part}") for part, value in PARAMS.items()}
            for name in cases
        }
        trained = {name: replicax.Optimizer(case.make()) for name, case in cases.items()}

    def step(batch: Any) -> None:
        for name, case in cases.items():
            own = variables[name]

            def of(params: Any) -> Any:
                return replicax.compute_average_loss(per_example(params, *batch))

            try:
                loss, gradients = replicax.value_and_grad(lambda of=of, own=own: of(own), own)()
                trained[name].apply_gradients(gradients, own, **case.extra(loss, gradients, of))
            except Exception as error:
                error.add_note(f"the optimizer is {name}")
                raise

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        batch = next(iter(strategy.distribute_dataset([(X, Y)])))
        for _ in range(STEPS):
            strategy.run(step, args=(batch,))
        expected = plainly(tuple(cases))
    for name in cases:
        found = [*jax.tree.leaves(variables[name]), *trained[name].variables]
        for variable, value in zip(found, expected[name], strict=True):
            if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                what = f"{name}: {getattr(variable, 'name', 'parameters')}"
                np.testing.assert_allclose(np.asarray(variable), value, rtol=2e-4, atol=2e-5, err_msg=what)


def test_the_list_is_what_optax_has() -> None:
    """Nothing has been left out by an oversight of the search, and nothing of the table is unknown to Optax."""
    assert {"adam", "adamw", "sgd", "adafactor", "lbfgs", "muon", "prodigy", "lion", "polyak_sgd", "sam"} <= set(CASES)
    assert len(CASES) >= 55
