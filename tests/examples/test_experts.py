"""Experts on several devices compute what one device with all of them does; what goes wrong is counted and told."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from examples import experts
from tests.programs.programs import third_party

EXPERTS, TEXTS, LENGTH, WIDTH, HIDDEN = 4, 4, 12, 8, 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "BATCH", 8)
    monkeypatch.setattr(experts, "LENGTH", LENGTH)


def spread_over(devices: int, replicas: int = 1) -> replicax.Strategy:
    return replicax.MirroredStrategy([f"cpu:{i}" for i in range(devices * replicas)], num_logical_devices=devices)


def train(strategy: replicax.Strategy) -> Any:
    return experts.train(strategy, steps=3, width=16, heads=2, layers=1, experts=EXPERTS)


@functools.cache
def on_one_device() -> Any:
    return train(replicax.OneDeviceStrategy("cpu:0"))


def arrays() -> list[np.ndarray]:
    """Tokens, whose first number is 1; the router; and the experts' weights."""
    rng = np.random.default_rng(0)
    shapes = (TEXTS, LENGTH, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    x, router, up, down = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    x[..., 0] = 1
    return [x, router, up, down]


def layer(devices: int, *given: np.ndarray, **routing: Any) -> Any:
    """What a layer computes on so many devices: the result, the balance, and counts of all texts."""
    strategy = spread_over(devices)
    axes = strategy.extended.mesh.axis_names[1:]
    y, balance, counts = strategy.run(lambda *a: experts.expert_layer(axes, *a, **routing), args=given)
    return np.asarray(y), np.asarray(balance), {name: np.asarray(of_texts).sum(0) for name, of_texts in counts.items()}


def by_hand(x: np.ndarray, router: np.ndarray, up: np.ndarray, down: np.ndarray, top_k: int, room: int) -> Any:
    """The same, token by token."""
    y, dropped = np.zeros_like(x), np.zeros(EXPERTS, int)
    for text in range(len(x)):
        taken = np.zeros(EXPERTS, int)
        for place, token in enumerate(x[text]):
            probabilities = np.asarray(jax.nn.softmax(token @ router))
            best = np.argsort(-probabilities)[:top_k]
            for expert in best:
                weight = probabilities[expert] / (probabilities[best].sum() if top_k > 1 else 1)
                if taken[expert] < room:
                    y[text, place] += weight * np.asarray(jax.nn.gelu(token @ up[expert]) @ down[expert])
                dropped[expert] += taken[expert] >= room
                taken[expert] += 1
    return y, dropped


@pytest.mark.covering(1)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize(("top_k", "factor"), [(1, 1.0), (2, 0.75), (2, EXPERTS)])
@third_party
def test_a_layer_is_that_by_hand(devices: int, top_k: int, factor: float) -> None:
    y, balance, counts = layer(devices, *arrays(), top_k=top_k, factor=factor)
    room = experts.capacity(LENGTH, EXPERTS, top_k, factor)
    expected, dropped = by_hand(*arrays(), top_k=top_k, room=room)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(counts["dropped"], dropped)
    assert counts["chosen"].sum() == TEXTS * LENGTH * top_k
    assert (dropped.sum() > 0) == (factor < EXPERTS)
    assert balance.shape == (TEXTS,)


@pytest.mark.parametrize(
    ("replicas", "devices"), [(2, 2), *(pytest.param(*at, marks=pytest.mark.soak) for at in [(1, 2), (1, 4), (4, 1)])]
)
@third_party
def test_losses_are_those_of_one_device(replicas: int, devices: int) -> None:
    losses, counts, variables, program = train(spread_over(devices, replicas))
    expected, plain_counts, plain, _ = on_one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, counts, plain_counts)
    assert sum(step["dropped"].sum() for step in counts) > 0
    for ours, theirs in zip(jax.tree.leaves(variables), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    [part] = {shard.data.size for shard in variables["blocks"][0]["up"].value.addressable_shards}
    assert part == variables["blocks"][0]["up"].size // devices
    # Tokens go to experts and back, gradients are summed, and nothing is gathered.
    kinds = {c.kind for c in program.collectives()}
    assert kinds == {"all-reduce"} | ({"all-to-all"} if devices > 1 else set())


@third_party
def test_what_comes_later_is_not_seen() -> None:
    given = arrays()
    changed = [given[0].copy(), *given[1:]]
    changed[0][:, 7:] = 3.0
    before, after = (layer(2, *these)[0] for these in (given, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


@third_party
def test_the_balance_is_least_where_all_experts_have_as_much() -> None:
    x, router, *_ = arrays()
    x[:] = np.eye(WIDTH, dtype=np.float32)[np.arange(LENGTH) % EXPERTS]
    router[:EXPERTS] = 100 * np.eye(EXPERTS, dtype=np.float32)
    even = experts.route(jnp.asarray(x), jnp.asarray(router), 1, LENGTH)[-1]
    np.testing.assert_allclose(even, 1.0, rtol=1e-6)
    x[:] = x[:, :1]
    np.testing.assert_allclose(experts.route(jnp.asarray(x), jnp.asarray(router), 1, LENGTH)[-1], EXPERTS, rtol=1e-6)


# --- experts that get nothing, everything, or NaN -----------------------------------------------------------------


@third_party
def test_an_expert_without_tokens_is_told() -> None:
    x, router, up, down = arrays()
    router[0, 2] = -100
    y, _, counts = layer(2, x, router, up, down)
    assert np.isfinite(y).all()
    assert counts["chosen"][2] == counts["dropped"][2] == 0
    [line] = experts.report(jax.tree.map(lambda count: count[None], counts))
    assert line == "layer 0, expert 2: no token of 48 chose it, so it does not learn"


@third_party
def test_an_expert_with_all_tokens_is_told() -> None:
    x, router, up, down = arrays()
    router[0, 1] = 20
    _, _, counts = layer(2, x, router, up, down, factor=0.75)
    assert counts["chosen"][1] == TEXTS * LENGTH
    room = experts.capacity(LENGTH, EXPERTS, 2, 0.75)
    assert counts["dropped"][1] == TEXTS * (LENGTH - room) == 28
    [line] = experts.report(jax.tree.map(lambda count: count[None], counts))
    assert line == "layer 0, expert 1: all 48 tokens chose it, and it dropped 28"


@third_party
def test_nan_is_told_where_it_comes_in_and_where_it_is_made() -> None:
    x, router, up, down = arrays()
    x[1, 3], x[2, 5, 4] = np.nan, np.inf
    _, _, counts = layer(2, x, router, up, down, factor=EXPERTS)
    assert counts["nan in"].sum() == 2 * 2  # two tokens, and each chooses two experts
    assert counts["nan out"].sum() == 0
    lines = experts.report(jax.tree.map(lambda count: count[None], counts))
    assert lines
    assert all("tokens with NaN or infinity: look at the layers before it" in line for line in lines)

    x, _, _, _ = arrays()
    up[3, 0, 0] = np.nan
    y, _, counts = layer(2, x, router, up, down)
    taken = counts["chosen"][3] - counts["dropped"][3]
    np.testing.assert_array_equal(counts["nan out"], [0, 0, 0, taken])
    assert np.isfinite(y).all(-1).sum() == TEXTS * LENGTH - taken  # the other tokens are as they were
    [line] = experts.report(jax.tree.map(lambda count: count[None], counts))
    assert line == f"layer 0, expert 3: made NaN or infinity of {taken} tokens: look at its weights"


# --- plans, and wrong numbers -------------------------------------------------------------------------------------


@pytest.mark.soak  # ring attention is planned for the same slice
@third_party
def test_on_tpus() -> None:
    resolver = replicax.TPUClusterResolver(topology="v5e:2x4")
    assignment = replicax.DeviceAssignment.build(resolver.topology, computation_shape=[2, 2, 1, 1], num_replicas=2)
    strategy = replicax.TPUStrategy(resolver, assignment)
    size = {"length": 256, "width": 256, "heads": 2, "layers": 1, "experts": 8, "hidden": 256, "letters": 256}
    plan = replicax.plan(strategy, *experts.plan(strategy, **size))
    assert plan.fits
    sends = [c for c in plan.collectives if c.kind == "all-to-all"]
    assert {c.participants for c in sends} == {4}
    assert sum(c.count for c in sends) == 4  # to the experts and back, and so do the gradients


@third_party
def test_experts_that_do_not_divide_are_refused() -> None:
    strategy = spread_over(4)
    with strategy.scope(), pytest.raises(ValueError, match="6 experts do not divide over the 4 devices of a replica"):
        experts.build(strategy, experts=6)


@third_party
def test_texts_that_do_not_divide_are_refused() -> None:
    strategy = spread_over(4)
    with strategy.scope():
        _, step = experts.build(strategy, width=16, heads=2, layers=0)
    text = np.zeros((6, 16), np.int32)
    with pytest.raises(ValueError, match="dim 0 of size 6 does not divide into 4 parts"):
        strategy.run(step, args=((text, text),))
