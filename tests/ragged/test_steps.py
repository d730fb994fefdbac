"""Steps whose arguments differ in size between replicas: one compiled program that means the same as per replica."""

from __future__ import annotations

import functools
import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import replicax
from replicax.variables.partitioners import over_all
from tests.conftest import logical_strategy, shared_strategy, strategy_of
from tests.programs.test_properties import check_results, is_array, is_leaf
from tests.soaking import soak_except

PER_REPLICA = replicax.RunOptions(executor="per_replica")
COMPILED = replicax.RunOptions(executor="compiled")
AXIS = replicax.REPLICA_AXIS
here = replicax.get_replica_context


def rows(strategy: replicax.Strategy, sizes: tuple[int, ...], width: int = 3) -> Any:
    """``[size, width]`` for each replica, all numbers different."""
    start = np.cumsum([0, *sizes])

    def part(ctx: Any) -> np.ndarray[Any, Any]:
        i = ctx.replica_id_in_sync_group
        numbers = np.arange(start[i] * width, start[i + 1] * width, dtype=np.float32)
        return np.sin(numbers).reshape(sizes[i], width)

    return strategy.distribute_values_from_function(part)


def split_over(size: int, groups: int = 1) -> replicax.Strategy:
    partitioner = replicax.variables.GroupPartitioner(size, over_all(size, min_bytes=0))
    return replicax.ShardedStrategy([f"cpu:{i}" for i in range(size * groups)], partitioner)


# --- programs: each makes its variables, and returns them with the step ---------------------------------


def train() -> tuple[list[replicax.Variable], Callable[..., Any]]:
    """Statistics over the whole batch inside the loss, an optimizer, running means, a counter."""
    w = replicax.Variable(jnp.arange(6.0).reshape(3, 2) / 6)
    running = replicax.Variable(jnp.zeros(2))
    steps = replicax.Variable(0)
    optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
    mean = replicax.Mean()

    def step(x: Any) -> Any:
        def loss_fn() -> Any:
            h = x @ w.value
            count = here().all_reduce("sum", jnp.float32(x.shape[0]))
            middle = here().all_reduce("sum", h.sum(0)) / count
            running.assign(0.9 * running.value + 0.1 * middle)
            return replicax.compute_average_loss(((h - middle[None]) ** 2).sum(-1) + jnp.abs(h).sum(-1))

        loss, [gradient] = replicax.value_and_grad(loss_fn, [w])()
        optimizer.apply_gradients([(gradient, w)])
        steps.assign_add(1)
        mean.update(x.sum(-1))
        return loss, x @ w.value

    return [w, running, steps, *optimizer.variables, mean._total, mean._weight], step


def gather() -> tuple[list[replicax.Variable], Callable[..., Any]]:
    """A loss of pairs of examples of all replicas, so that gradients go through an uneven gather."""
    w = replicax.Variable(jnp.eye(3) * 0.5)

    def step(x: Any) -> Any:
        def loss_fn() -> Any:
            h = jnp.tanh(x @ w.value)
            everyone = here().all_gather(h, 0)
            return replicax.compute_average_loss((h @ everyone.T).sum(-1))

        loss, [gradient] = replicax.value_and_grad(loss_fn, [w])()
        w.assign_sub(0.1 * here().all_reduce("sum", gradient))
        return loss, here().all_gather({"x": x.T}, axis=1), jax.vmap(lambda c: here().all_gather(c, 0), 1, 1)(x)

    return [w], step


def across() -> tuple[list[replicax.Variable], Callable[..., Any]]:
    """A merge_fn with everything that it may do."""
    total = replicax.Variable(jnp.zeros(3))

    def merge(strategy: replicax.Strategy, x: Any) -> Any:
        total.assign_add(strategy.reduce("sum", x, axis=0))
        parts = strategy.local_results(x)
        return strategy.reduce("mean", x, axis=(0, 1)), strategy.gather(x, 0), tuple(parts), x

    def step(x: Any) -> Any:
        return here().merge_call(merge, args=(x * 2,))

    return [total], step


def variables() -> tuple[list[replicax.Variable], Callable[..., Any]]:
    """On-read variables, aggregations, one that the step creates, sparse updates."""
    copies = replicax.Variable(jnp.zeros(()), synchronization="on_read", aggregation="sum")
    summed = replicax.Variable(jnp.zeros(3), aggregation="sum")
    table = replicax.Variable(jnp.zeros((2, 3)))
    created: list[replicax.Variable] = []

    def step(x: Any) -> Any:
        made = replicax.Variable(lambda: jnp.ones(3), name="made")
        created[:] = [made]
        copies.assign_add(x.sum() + x.shape[0])
        summed.assign(x.sum(0))
        made.assign_add(here().all_reduce("mean", x.sum(0)))
        indices = jnp.arange(x.shape[0], dtype=jnp.int32) % 2
        slices = here().all_reduce("sum", replicax.IndexedSlices(x, indices, (2, 3)))
        table.scatter_add(slices)
        return made, copies.read_value()

    return [copies, summed, table], step


def shapes() -> tuple[list[replicax.Variable], Callable[..., Any]]:
    """Python that goes another way for small sizes; results that differ in other ways than in size."""
    w = replicax.Variable(jnp.ones(3))

    def step(x: Any) -> Any:
        centred = x - x.mean(0, keepdims=True) if x.shape[0] > 1 else x * w.value[None]
        normal = jnp.where(x > 0, jax.nn.softmax(centred), centred) if x.size else centred
        gradient = jax.grad(lambda w: (jnp.tanh(x * w[None]).sum(0) ** 2).sum())(w.value)

        def noted(_: Any, both: Any) -> Any:
            note = jax.new_ref(both[0])
            note[0] = 2.0
            return note[...] * 2, both[1] + both[0]

        first, second = jax.lax.fori_loop(0, 2, noted, (w.value, x.sum(0)))
        w.assign(here().all_reduce("mean", gradient) + w.value)
        return x.shape, x.shape[0], "text", normal[:, :2].reshape(-1), jnp.cumsum(x, 0), first * second

    return [w], step


def loops() -> tuple[list[replicax.Variable], Callable[..., Any]]:
    """Loops and branches over the examples, and others in which replicas meet."""
    w = replicax.Variable(jnp.ones(3))

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return jnp.sin(x * w[None])

    def step(x: Any) -> Any:
        last, each = jax.lax.scan(
            lambda c, row: (c + row * w.value, c.sum()), jnp.zeros(3), jnp.concatenate([x, jnp.ones((1, 3))])
        )
        doubled = jax.lax.cond(x.sum() > 0, lambda: x * 2, lambda: x - 1)
        met = jax.lax.fori_loop(0, 3, lambda i, s: s + here().all_reduce("sum", last), jnp.zeros(3))
        gradient = jax.grad(lambda w: layer(layer(x, w), w).sum())(w.value)
        w.assign_add(0.1 * here().all_reduce("sum", gradient + last))
        noise = jax.random.fold_in(jax.random.key(3), jnp.asarray(here().replica_id_in_sync_group))
        return each, doubled, met, jax.random.uniform(noise, x.shape), jax.random.uniform(jax.random.key(1), (2,))

    return [w], step


def convolutions() -> tuple[list[replicax.Variable], Callable[..., Any]]:
    """In orders of the dims for which XLA has no fast code, or only at the top of a program."""
    kernel = replicax.Variable(jnp.sin(jnp.arange(12.0)).reshape(3, 2, 2))

    def step(x: Any) -> Any:
        def loss_fn(order: tuple[str, str, str]) -> Any:
            images = jax.lax.transpose(x[:, None, :] * jnp.ones((1, 2, 1)), ["NCW".index(c) for c in order[0]])
            filters = jax.lax.transpose(kernel.value, ["WIO".index(c) for c in order[1]])
            out = jax.lax.conv_general_dilated(images, filters, (1,), "SAME", dimension_numbers=order)
            return replicax.compute_average_loss((out**2).sum([i for i, c in enumerate(order[2]) if c != "N"]))

        total = 0.0
        for order in [("NCW", "OIW", "NWC"), ("NWC", "WIO", "NCW"), ("CNW", "IWO", "WNC")]:
            loss, [gradient] = replicax.value_and_grad(loss_fn, [kernel])(order)
            kernel.assign_sub(0.01 * here().all_reduce("sum", gradient))
            total = total + loss
        return total

    return [kernel], step


MORE = [("train", (2, 1)), ("loops", (1, 3)), ("convolutions", (3, 2))]
PROGRAMS = {f.__name__: f for f in (train, gather, across, variables, shapes, loops, convolutions)}


def outcome(strategy: replicax.Strategy, make: Any, sizes: list[tuple[int, ...]], options: Any) -> Any:
    with strategy.scope():
        made, step = make()
    args = [rows(strategy, s) for s in sizes]
    results = [strategy.run(step, args=(x,), options=options) for x in args]
    return results, [v.numpy() for v in made if v.aggregation.value != "none" or not v.is_stacked]


class _Compared:
    """What ``check_results`` asks of a trial."""

    def __init__(self, strategy: replicax.Strategy) -> None:
        self.strategy = strategy


def assert_agree(strategy: replicax.Strategy, make: Any, sizes: list[tuple[int, ...]]) -> None:
    results, state = outcome(strategy, make, sizes, COMPILED)
    expected, exact_state = outcome(strategy, make, sizes, PER_REPLICA)
    for mine, theirs in zip(results, expected, strict=True):
        mine, theirs = (
            jax.tree.map(lambda v: None if isinstance(v, replicax.Variable) else v, x, is_leaf=is_leaf)
            for x in (mine, theirs)
        )
        leaves = [jax.tree.leaves(x, is_leaf=is_leaf) for x in (mine, theirs)]
        objects = [[strategy.local_results(x) for x in side if not _arrays(strategy, x)] for side in leaves]
        assert objects[0] == objects[1]
        numbers = [[x for x in side if _arrays(strategy, x)] for side in leaves]
        check_results(_Compared(strategy), *numbers)  # type: ignore[arg-type]
    for a, b in zip(state, exact_state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _arrays(strategy: replicax.Strategy, leaf: Any) -> bool:
    return is_array(leaf) and all(isinstance(c, jax.Array) for c in strategy.local_results(leaf))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gather", (2, 0, 2)),
        ("across", (1, 1, 0)),
        ("variables", (2, 1)),
        ("shapes", (2, 1, 0)),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE),
    ],
)
def test_it_means_what_the_per_replica_executor_does(name: str, sizes: tuple[int, ...]) -> None:
    assert_agree(strategy_of(len(sizes)), PROGRAMS[name], [sizes])


SHARED: dict[str, dict[str, Any]] = {
    "two devices": {"devices": ["cpu:0", "cpu:1"]},
    "one device": {"devices": ["cpu:0"]},
    "split": {"devices": ["cpu:0", "cpu:1"], "variable_partitioner": over_all(2, min_bytes=0)},
    "several at once": {"devices": ["cpu:0", "cpu:1"], "replicas_at_once": 4},
}


@pytest.mark.parametrize("place", soak_except(SHARED, "split"))
@pytest.mark.parametrize("name", soak_except(["train", "gather", "shapes", "loops"], "shapes"))
def test_it_means_the_same_where_replicas_share_devices(name: str, place: str) -> None:
    """A last batch of 10 on 8 replicas: three of them, and with two devices most of one device's, have nothing."""
    strategy = replicax.MirroredStrategy(num_replicas=8, **SHARED[place])
    assert_agree(strategy, PROGRAMS[name], [(2, 2, 2, 2, 2, 0, 0, 0)])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(replicax.CommunicationOptions(implementation="ring"), id="ring"),
        pytest.param(replicax.CommunicationOptions(timeout_seconds=60.0), id="timeout", marks=pytest.mark.soak),
    ],
)
def test_it_is_the_same_however_replicas_communicate(options: replicax.CommunicationOptions) -> None:
    strategy = strategy_of(3)
    with strategy.scope():
        w = replicax.Variable(jnp.eye(3))

    def step(x: Any, options: Any) -> Any:
        def loss() -> Any:
            h = jnp.tanh(x @ w.value)
            return (h @ here().all_gather(h, 0, options=options).T).sum()

        _, [gradient] = replicax.value_and_grad(loss, [w])()
        return here().all_reduce("sum", gradient, options=options), here().all_gather(x.T, 1, options=options)

    x = rows(strategy, (3, 1, 2))
    expected, found = (strategy.run(step, args=(x, o)) for o in (None, options))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --- one program for each set of sizes ------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(split_over(2), id="split", marks=pytest.mark.soak),
        pytest.param(split_over(2, groups=2), id="split in groups"),
        pytest.param(replicax.CentralStorageStrategy(["cpu:0", "cpu:1"]), id="central", marks=pytest.mark.soak),
        pytest.param(logical_strategy(2, 2), id="logical", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("name", soak_except(["train", "gather"], "gather"))
def test_it_is_the_same_wherever_variables_are(strategy: replicax.Strategy, name: str) -> None:
    replicas = strategy.num_replicas_in_sync
    sizes = [(2, 1, 1, 2)[:replicas], (1, 2, 0, 2)[:replicas]]
    results, state = outcome(strategy, PROGRAMS[name], sizes, None)
    mirrored = strategy_of(replicas)
    expected, expected_state = outcome(mirrored, PROGRAMS[name], sizes, None)
    for a, b in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    leaves = [
        [c for x in jax.tree.leaves(side, is_leaf=is_leaf) for c in owner.local_results(x)]
        for owner, side in ((strategy, results), (mirrored, expected))
    ]
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_exchanges_among_all_devices_are_not_left_to_some() -> None:
    """A row of a split variable goes from one logical device to the other: the compiler permutes among all devices."""

    def trained(strategy: replicax.Strategy, sizes: tuple[int, ...], **split: Any) -> Any:
        with strategy.scope():
            w = replicax.Variable(np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30), **split)
            optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

        def step(x: Any) -> Any:
            def loss() -> Any:
                return replicax.compute_average_loss(((x[:, :1] * w.value[0][None] - 1.0) ** 2).mean(1))

            share, gradients = replicax.value_and_grad(loss, [w])()
            optimizer.apply_gradients(zip(gradients, [w], strict=True))
            return share

        losses = [strategy.reduce("sum", strategy.run(step, args=(rows(strategy, sizes),))) for _ in range(2)]
        return [*map(float, losses)], w.numpy()

    with pytest.warns(
        replicax.errors.ExecutorWarning, match="split over logical devices .* exchanges parts of them among"
    ):
        losses, w = trained(logical_strategy(3, 2), (3, 3, 2), partition_dimensions=[2, 1])
    expected_losses, expected = trained(strategy_of(1), (8,))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-6)


@functools.cache
def on_one_device() -> Any:
    return outcome(strategy_of(1), PROGRAMS["train"], [(7,), (7,)], None)[1]


@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        *(pytest.param(sizes, n, marks=pytest.mark.soak) for sizes, n in [((4, 3), 2), ((2, 2, 2, 1), 4)]),
        ((0, 5, 2, 0), 4),
        ((2, 2, 2, 1, 0, 0), 2),
    ],
)
def test_it_is_the_step_on_the_whole_batch(sizes: tuple[int, ...], devices: int) -> None:
    """However a batch falls on replicas, training is that of one device."""
    _, state = outcome(shared_strategy(len(sizes), devices), PROGRAMS["train"], [sizes, sizes], None)
    for a, b in zip(state, on_one_device(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_python_runs_once_for_each_size_and_nothing_is_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    strategy = strategy_of(4)
    with strategy.scope():
        w = replicax.Variable(jnp.ones(3))
    seen: list[tuple[int, ...]] = []

    def step(x: Any) -> Any:
        seen.append(x.shape)
        w.assign_add(here().all_reduce("mean", x.sum(0)))
        return replicax.compute_average_loss((x * w.value[None]).sum(-1)), here().all_gather(x, 0)

    first, second = rows(strategy, (3, 3, 2, 2)), rows(strategy, (3, 3, 3, 1))
    for x in (first, second):
        strategy.run(step, args=(x,))
    assert seen == [(3, 3), (2, 3), (3, 3), (1, 3)]
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for _ in range(3):
            for x in (first, second):
                strategy.run(step, args=(x,))
    assert len(seen) == 4
    assert not [r for r in caplog.records if "ompil" in r.getMessage()]
    assert len(strategy.extended.programs._entries) == 2


def test_a_wrong_guess_is_made_good() -> None:
    """What replicas ask of each other before the first of another size is captured can't be known, only guessed."""
    strategy = strategy_of(3)
    sizes = (3, 1, 2)  # each asks for a number that no dim has

    def step(x: Any) -> Any:
        odd = here().all_gather(x[: x.shape[0] // 2], 0)
        deep = here().all_gather(jnp.zeros((odd.shape[0] + x.shape[0], 1)), 0)
        return odd, jnp.zeros(deep.shape[0])

    odd, deep = strategy.run(step, args=(rows(strategy, sizes),))
    assert (odd.shape, deep.shape) == ((2, 3), (12,))
    exact = strategy.run(step, args=(rows(strategy, sizes),), options=PER_REPLICA)
    np.testing.assert_array_equal(odd, exact[0])


def test_errors_of_the_step_are_raised_as_they_are() -> None:
    strategy = strategy_of(2)
    x = rows(strategy, (2, 1))
    with strategy.scope():
        w = replicax.Variable(jnp.zeros(3), name="w")

    def fails_for_one(x: Any) -> None:
        w.assign(jnp.ones(3))
        if x.shape[0] == 1:
            raise KeyError("mine")

    def all_meet() -> Any:
        return here().all_reduce("sum", 1.0)

    def agreed_loss() -> Any:
        return replicax.value_and_grad(lambda: jnp.sum(w.value**2), [w])()[0]

    with pytest.raises(KeyError, match="mine"):
        strategy.run(fails_for_one, args=(x,))
    with pytest.raises(replicax.errors.LocalityError, match=r"(?s)'w'.*test_steps.py"):
        strategy.run(lambda x: w.assign(x.sum(0)), args=(x,))
    with pytest.raises(replicax.errors.LocalityError, match="'w'"):  # the first of two
        strategy.run(lambda x: (w.assign(x.sum(0)), jax.lax.cond(x.sum() > 0, all_meet, lambda: 0.0)), args=(x,))
    with pytest.raises(replicax.errors.LocalityError, match=r"(?s)the loss is the same on every .*test_steps.py"):
        strategy.run(lambda x: jax.lax.map(lambda _: agreed_loss(), jnp.zeros(2)), args=(x,))
    with pytest.raises(replicax.errors.DeadlockError, match=r"stands inside a branch"):
        strategy.run(lambda x: jax.lax.cond(x.sum() > 0, all_meet, lambda: 0.0), args=(x,))
    np.testing.assert_array_equal(w.numpy(), np.zeros(3))
    assert float(strategy.run(lambda x: here().all_reduce("sum", x.sum()) * 0 + 1, args=(x,))) == 1


# --- what replicas agree on -----------------------------------------------------------------------------


def _times(factor: float) -> Callable[[Any], Any]:
    times = jax.custom_jvp(lambda x: x * factor)
    times.defjvps(lambda t, _, x: t * factor)
    return times


def _loops_of_both(x: Any, w: Any) -> Any:
    """For each kind of loop, branch or call what all replicas have, and what each has."""
    common, own = w * 2, x.sum(0)

    def turn(i: Any, both: Any) -> Any:
        return both[0] * 2 + i, both[1] + both[0]

    return {
        "scan": jax.lax.scan(lambda c, i: (turn(1.0, c), c), (common, own), None, length=2),
        "while": jax.lax.while_loop(lambda c: c[0].sum() < 20, lambda c: turn(1.0, c), (common, own)),
        "cond": jax.lax.cond(w[0] > 0, lambda: (common, own), lambda: (w, own + 1)),
        "checkpoint": jax.checkpoint(turn)(1.0, (common, own)),
        "while in scan": jax.lax.scan(
            lambda c, i: (jax.lax.fori_loop(0, common[0].astype(int), lambda i, c: turn(1.0, c), c), None),
            (common, own),
            None,
            length=2,
        ),
        "own not used": jax.lax.scan(lambda c, i: ((jnp.sin(own), c + 1)[1], None), common, None, length=2),
        "own rules": [jax.lax.fori_loop(0, 2, lambda i, c, f=f: f(c), common) for f in (_times(2.0), _times(3.0))],
    }


def test_what_replicas_agree_on_is_mirrored_where_a_loop_has_what_they_do_not_agree_on() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(jnp.ones(3))
    mask, key = np.eye(200, 3, dtype=np.float32), jax.random.key(0)  # which the step captures

    def step(x: Any) -> Any:
        found = _loops_of_both(x, w.value)
        jax.lax.after_all(jax.lax.create_token())
        decision = found["while in scan"][0][0].sum() > 0  # on which all agree, so that they meet or don't
        own = x.sum(0)
        met = jax.lax.cond(decision, lambda: here().all_reduce("sum", own), lambda: jnp.zeros(3))
        w.assign(met * 2)  # which nobody uses
        w.assign(found["scan"][0][0] + met * 0 + jnp.asarray(mask).sum(0) * jax.random.uniform(key, (3,)))
        return found, met

    found = []
    for sizes in [(2, 2), (2, 1)]:
        w.assign(jnp.ones(3))
        x = rows(strategy, sizes)
        found.append((strategy.run(step, args=(x,), options=COMPILED), w.numpy()))
    (even, even_w), (uneven, uneven_w) = found
    differ = [[isinstance(v, replicax.PerReplica) for v in jax.tree.leaves(r, is_leaf=is_leaf)] for r in (even, uneven)]
    assert differ[0] == differ[1]
    assert set(differ[0]) == {False, True}
    np.testing.assert_array_equal(even_w, uneven_w)
    for name in even[0]:  # replica 0 has the same rows in both
        mine, theirs = (strategy.local_results(result[0][name])[0] for result in (even, uneven))
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def test_calls_of_the_host_are_those_of_a_program_of_one_size() -> None:
    """Inside a loop that replicas agree on, in one in which they meet, and of what all have; by functions made anew."""
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(jnp.ones(3))
    calls: list[tuple[str, float]] = []

    def step(x: Any) -> Any:
        own = x.sum(0)

        def tell(what: str, value: Any) -> None:
            jax.debug.callback(lambda v: calls.append((what, float(v))), value.sum())

        def agreed(_: Any, value: Any) -> Any:
            tell("agreed", value)
            return value * 2

        def met(_: Any, value: Any) -> Any:
            tell("met", value)
            return value + here().all_reduce("sum", own)

        def asked(value: Any) -> np.ndarray[Any, Any]:
            return np.asarray(value) * 3

        def both(_: Any, values: Any) -> Any:
            told = io_callback(
                lambda: calls.append(("both", 0.0)) or np.float32(1), jax.ShapeDtypeStruct((), np.float32)
            )
            return values[0] * 2, values[1] + told

        doubled = jax.lax.fori_loop(0, 2, agreed, w.value)
        twice, _ = jax.lax.fori_loop(0, 2, both, (w.value, own))
        w.assign((doubled + twice) / 2)
        tell("own", own * 0 + x.shape[0])
        kept = jax.checkpoint(lambda x: x * 2, policy=jax.checkpoint_policies.save_only_these_names("x"))(w.value)
        return jax.lax.fori_loop(0, 2, met, w.value), jax.pure_callback(asked, jax.typeof(w.value), w.value), kept

    results = strategy.run(step, args=(rows(strategy, (2, 1)),), options=COMPILED)
    jax.effects_barrier()
    total = float(results[0].sum())
    assert [isinstance(r, jax.Array) for r in results] == [True] * 3
    np.testing.assert_array_equal(results[1:], [[12] * 3, [8] * 3])
    expected = [("agreed", 3), ("agreed", 6), ("met", 12), ("met", 12 + (total - 12) / 2)] * 2
    names, values = zip(*sorted([*expected, ("own", 6), ("own", 3), *[("both", 0)] * 4]), strict=True)
    assert tuple(name for name, _ in sorted(calls)) == names
    np.testing.assert_allclose([value for _, value in sorted(calls)], values, rtol=1e-5)


# --- what can't be one program --------------------------------------------------------------------------


def _gathers_in_a_loop(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c + here().all_gather(x, 0).sum(), None), 0.0, None, length=2)[0]


def _meets_in_loops_of_its_own(x: Any, w: Any) -> Any:
    rows = x.shape[0]
    return jax.lax.scan(lambda c, _: (here().all_reduce("sum", c * rows), None), x.sum(), None, length=2)[0]


def _writes_only_if_many(x: Any, w: Any) -> Any:
    if x.shape[0] > 1:
        w.assign_add(jnp.zeros(3))
    return w.value


def _assigns_what_sizes_decide(x: Any, w: Any) -> Any:
    w.assign(jnp.zeros((x.shape[0], 3)).sum(0))
    return x


def _returns_other_structures(x: Any, w: Any) -> Any:
    return [x.sum()] * x.shape[0]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            _gathers_in_a_loop,
            r"the scan at .*test_steps.py:\d+ .* has a collective inside, and works on arrays that differ in size",
        ),
        (_meets_in_loops_of_its_own, r"the scan at .*test_steps.py:\d+ .* does something else for each size"),
        (_writes_only_if_many, "replicas of different sizes write different variables"),
        (
            _assigns_what_sizes_decide,
            r"whether replicas agree on the value at .*test_steps.py:\d+ .* depends on their sizes",
        ),
        (_returns_other_structures, "replicas of different sizes return different structures"),
    ],
)
def test_what_is_no_one_program_runs_exactly_and_says_why(program: Callable[..., Any], why: str) -> None:
    strategy = strategy_of(2)
    x = rows(strategy, (2, 1))
    with strategy.scope():
        w = replicax.Variable(jnp.zeros(3))

    def step(x: Any) -> Any:
        return program(x, w)

    with pytest.raises(ValueError, match=f"step can't run as one compiled program .*, because {why}.*per_replica"):
        strategy.run(step, args=(x,), options=COMPILED)
    traced = strategy.extended.programs
    if program is _returns_other_structures:
        with pytest.raises(ValueError, match="same structure") as caught:
            strategy.run(step, args=(x,))
        assert re.search(why, "".join(caught.value.__notes__))
        return
    with pytest.warns(replicax.errors.ExecutorWarning, match=why + "(?s:.*)So it does now"):
        result = strategy.run(step, args=(x,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = strategy.run(step, args=(x,))  # said once, and not tried again
    assert len(traced._refused) == 1
    check_results(_Compared(strategy), again, result)  # type: ignore[arg-type]


SMALL = 1  # the number of rows for which Python goes another way
OTHER_PROGRAMS = {
    "replicas of different sizes have float32[3], float32[] for": lambda x: x.sum() if len(x) == SMALL else x.sum(0),
    "replicas of different sizes return different kinds of objects": lambda x: x.sum() if len(x) == SMALL else "many",
    "as many values of dtype key<fry> as there are examples": lambda x: jax.random.split(jax.random.key(0), len(x)),
    "of the mutable array (jax.new_ref) at": lambda x: jax.new_ref(x)[...],
    "replicas of different sizes do not come to the same collectives. ": lambda x: (
        replicax.compute_average_loss(x.sum(1)) if len(x) == SMALL else x.sum()
    ),
    "do not come to the same collectives": lambda x: jax.lax.psum(x.sum(), AXIS) if len(x) == SMALL else x.sum(),
    "do not come to the same collectives: see the p": lambda x: (
        jax.lax.psum(x.sum(), AXIS) if len(x) == SMALL else jax.lax.pmax(x.sum(), AXIS)
    ),
}


@pytest.mark.parametrize("why", OTHER_PROGRAMS)
def test_programs_that_differ_in_more_than_sizes_are_not_one(why: str) -> None:
    strategy = strategy_of(2)
    with pytest.raises(ValueError, match=f"can't run as one compiled program .* because .*{re.escape(why)}"):
        strategy.run(lambda x: OTHER_PROGRAMS[why](x), args=(rows(strategy, (2, SMALL)),), options=COMPILED)


@pytest.mark.parametrize(
    ("name", "combine"),
    [
        ("all_gather", lambda x: jax.lax.all_gather(x, replicax.REPLICA_AXIS, tiled=True)),
        ("psum", lambda x: jax.lax.pmean(x, replicax.REPLICA_AXIS)),
        ("ppermute", lambda x: jax.lax.ppermute(x, replicax.REPLICA_AXIS, [(0, 1), (1, 0)])),
        ("all_reduce", lambda x: here().all_reduce("sum", x)),
    ],
)
def test_collectives_of_rows_that_differ_in_number_are_one_error(name: str, combine: Callable[[Any], Any]) -> None:
    """As no executor could compute them, none is promised; the error names a collective that can."""
    strategy = strategy_of(2)
    x = rows(strategy, (2, 1))
    said = rf"the {name} at .*test_steps.py:\d+ .*float32\[2, 3\], float32\[1, 3\].*get_replica_context\(\).all_gather"
    with pytest.raises(ValueError, match=said):
        strategy.run(lambda x: combine(x), args=(x,))
    gathered = strategy.run(lambda x: here().all_gather(x, 0), args=(x,))
    np.testing.assert_array_equal(np.asarray(gathered), np.concatenate(strategy.local_results(x)))


def test_a_step_that_neither_executor_can_run_warns_of_none() -> None:
    """A collective of jax.lax in a loop over arrays of several sizes; the error has the reason of the executor."""
    strategy = strategy_of(2)

    def step(x: Any) -> Any:
        def body(total: Any, _: Any) -> Any:
            return jax.lax.psum(x.sum(), replicax.REPLICA_AXIS) + total, None

        return jax.lax.scan(body, 0.0, None, length=2)[0]

    with pytest.raises(NameError, match="Collectives for both executors") as caught:
        strategy.run(step, args=(rows(strategy, (2, 1)),))
    assert re.search(r"per-replica executor: .*because the scan at .*test_steps.py", "".join(caught.value.__notes__))


def test_what_is_no_one_program_leaves_an_optimizer_unbuilt() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(jnp.zeros(3))
        optimizer = replicax.Optimizer(optax.sgd(1.0, momentum=0.9))

    def step(x: Any) -> Any:
        optimizer.apply_gradients([(x.sum(0), w)])
        return _writes_only_if_many(x, w)

    with pytest.raises(ValueError, match="step can't run as one compiled program"):
        strategy.run(step, args=(rows(strategy, (2, 1)),), options=COMPILED)
    assert optimizer.variables == []


@pytest.mark.usefixtures("young_heap")
def test_why_it_is_no_one_program_is_forgotten_with_what_the_step_captures() -> None:
    strategy = strategy_of(2)
    x = rows(strategy, (2, 1))
    with strategy.scope():
        w = replicax.Variable(jnp.zeros(3))

    def try_it(captured: jax.Array) -> None:
        with pytest.raises(ValueError, match="write different variables"):
            strategy.run(lambda x: _writes_only_if_many(x * captured, w), args=(x,), options=COMPILED)

    for number in range(3):
        try_it(jnp.float32(number))
        gc.collect()
    assert len(strategy.extended.programs._refused) == 1


def test_an_error_for_replicas_without_examples_says_that_they_have_none() -> None:
    strategy = strategy_of(4)
    five = [np.ones((5, 2, 3), np.float32)]

    def step(x):
        return replicax.compute_average_loss(x.reshape(len(x), -1).sum(-1))

    [batch] = strategy.distribute_dataset(five)
    with pytest.raises(ZeroDivisionError) as caught:
        strategy.run(step, args=(batch,))
    assert re.search(r"0 rows, in step 'step' at .*test_steps.py:\d+: `return .*reshape\(", caught.value.__notes__[0])
    assert "partial_batch='pad'" in caught.value.__notes__[0]

    def largest(x):
        return jnp.max(x, axis=0)

    with pytest.raises(ValueError, match="zero-size array") as caught:
        strategy.run(largest, args=(batch,))
    [note] = [note for note in caught.value.__notes__ if "0 rows" in note]
    assert re.search(
        r"in step 'largest' at .*: `return jnp.max\(x, axis=0\)`\. .* jnp.max\(x, initial=-jnp.inf\)", note
    )

    first, last = strategy.distribute_dataset(
        [np.ones((8, 2, 3), np.float32), *five], replicax.InputOptions(partial_batch="pad")
    )
    assert [float(strategy.reduce("sum", strategy.run(step, args=(x,)))) for x in (first, last)] == [6.0, 6.0]
