"""Whether the numbers are right: each check compares Replicax on all devices with plain JAX on one, or with NumPy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import replicax

_ROWS = 48  # for each device
_STEPS = 10
_TOLERANCE = 1e-4

Difference = float
Check = Callable[[list[jax.Device]], Difference]


def checks() -> Iterator[dict[str, Any]]:
    """All checks, in full precision of products, each with the largest difference that it has found."""
    devices = jax.local_devices()
    for name, check in CHECKS.items():
        start, difference, words = time.perf_counter(), float("nan"), ""
        try:
            with jax.default_matmul_precision("highest"):
                difference = check(devices)
        except Exception as error:  # whatever it is belongs into the table
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield {
            "table": "checks",
            "name": name,
            "passed": not words and difference <= _TOLERANCE,
            "difference": None if words else difference,
            "words": words,
            "seconds": time.perf_counter() - start,
        }


# --- training -------------------------------------------------------------------------------------------------


def _data(rows: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 16)).astype(np.float32), rng.normal(size=(rows, 4)).astype(np.float32)


def _initial() -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.normal(0, 0.3, (16, 64)).astype(np.float32), rng.normal(0, 0.3, (64, 4)).astype(np.float32)]


def _losses(params: Sequence[Any], x: Any, y: Any) -> Any:
    def layer(x: Any, _: None) -> tuple[Any, None]:
        return x + jnp.tanh(x) / 3, None

    hidden, _ = lax.scan(layer, x @ params[0], None, length=3)
    return jnp.square(jnp.where(hidden > 0, hidden, 0.1 * hidden) @ params[1] - y).mean(-1)


def _plain(batches: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The parameters that plain JAX ends with, on one device."""
    tx, params = optax.adam(1e-2), [jnp.asarray(p) for p in _initial()]
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(lambda p: _losses(p, x, y).mean())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for x, y in batches:
        params, state = step(params, state, x, y)
    return [np.asarray(p) for p in params]


def _trained(strategy: replicax.Strategy, batches: Sequence[tuple[Any, Any]], at_once: int = 1) -> list[Any]:
    """Those that Replicax ends with."""
    with strategy.scope():
        variables = [replicax.Variable(p) for p in _initial()]
        optimizer = replicax.Optimizer(optax.adam(1e-2))

    def step(x: Any, y: Any) -> Any:
        loss, grads = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(_losses(variables, x, y)), variables
        )()
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    iterator = iter(strategy.distribute_dataset(list(batches)))
    if at_once > 1:

        def one(ctx: Any, x: Any, y: Any) -> None:
            step(x, y)

        with contextlib.suppress(StopIteration):
            while True:
                strategy.run_steps(one, iterator, at_once)
    else:
        for x, y in iterator:
            strategy.run(step, args=(x, y))
    return [v.numpy() for v in variables]


def _compared(make: Callable[[list[jax.Device]], replicax.Strategy], at_once: int = 1) -> Check:
    def check(devices: list[jax.Device]) -> Difference:
        batches = [_data(_ROWS * len(devices), seed) for seed in range(_STEPS)]
        return _apart(_trained(make(devices), batches, at_once), _plain(batches))

    return check


def _partial_batch(devices: list[jax.Device]) -> Difference:
    batches = [_data(_ROWS * len(devices)), _data(_ROWS * len(devices) - 5, 1), _data(max(1, len(devices) - 1), 2)]
    with _quiet():
        return _apart(_trained(replicax.MirroredStrategy(devices), batches), _plain(batches))


def _same_bits(devices: list[jax.Device]) -> Difference:
    """``reproducible=True``: as many replicas on one device have the bits of those on all; 0 if they are the same.

    Compilers for GPUs and TPUs may choose another product for another program (``docs/replicas.md``), so there other
    bits are no failure.
    """
    batches, count = [_data(_ROWS * len(devices), seed) for seed in range(3)], max(2, len(devices))
    count = count if count % len(devices) == 0 else len(devices)
    runs = [
        _trained(replicax.MirroredStrategy(those, num_replicas=count, reproducible=True), batches)
        for those in (devices, devices[:1])
    ]
    if all((a == b).all() for a, b in zip(*runs, strict=True)):
        return 0.0
    return float("inf") if devices[0].platform == "cpu" else _apart(*runs)


def _logical_devices(devices: list[jax.Device]) -> Difference:
    """Replicas of two devices each, over which the hidden units are split; one device has them all."""
    parts = 2 if len(devices) % 2 == 0 else 1
    strategy = replicax.MirroredStrategy(devices, num_logical_devices=parts)
    x, y = _data(_ROWS * len(devices))
    with strategy.scope():
        variables = [
            replicax.Variable(p, partition_dimensions=[parts if d == dim else 1 for d in range(2)])
            for p, dim in zip(_initial(), (1, 0), strict=True)
        ]

    def step(x: Any, y: Any) -> Any:
        loss, grads = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(_losses(variables, x, y)), variables
        )()
        return replicax.get_replica_context().all_reduce("sum", (loss, grads))

    [batch] = strategy.distribute_dataset([(x, y)])
    found = strategy.run(step, args=batch)
    expected = jax.value_and_grad(lambda p: _losses(p, x, y).mean())([jnp.asarray(p) for p in _initial()])
    return _apart(jax.tree.leaves(found), jax.tree.leaves(expected))


# --- values ---------------------------------------------------------------------------------------------------


def _collectives(devices: list[jax.Device]) -> Difference:
    strategy, n = replicax.MirroredStrategy(devices), len(devices)
    rows = np.arange(n * 6, dtype=np.float32).reshape(n, 6)
    x = strategy.distribute_values_from_function(lambda ctx: rows[ctx.replica_id_in_sync_group])

    def step(x: Any) -> Any:
        context = replicax.get_replica_context()
        merged = context.merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(2 * x,))
        return (
            context.all_reduce("sum", x),
            context.all_reduce("mean", jnp.square(x)),
            context.all_gather(x, axis=0),
            merged,
            jax.grad(lambda x: (context.all_reduce("sum", x) * x).sum())(x),
        )

    found = strategy.run(step, args=(x,))
    expected = rows.sum(0), np.square(rows).mean(0), rows.reshape(-1), 2 * rows.sum(0)
    *values, gradients = found
    gradients = np.stack([np.asarray(g) for g in strategy.local_results(gradients)])
    # Once as a factor, and once more as what all replicas' sums depend on.
    by_hand = np.broadcast_to(2 * rows.sum(0), gradients.shape)
    return max(_apart(values, expected), _apart([gradients], [by_hand]))


def _variables(devices: list[jax.Device]) -> Difference:
    """Copies that are read as their sum, and assignments that are aggregated."""
    strategy, n = replicax.MirroredStrategy(devices), len(devices)
    with strategy.scope():
        seen = replicax.Variable(0.0, synchronization="on_read", aggregation="sum")
        mean = replicax.Variable(jnp.zeros(3), aggregation="mean")

    def step() -> None:
        number = jnp.float32(replicax.get_replica_context().replica_id_in_sync_group)
        seen.assign_add(number + 1)
        mean.assign(jnp.full(3, number))

    for _ in range(3):
        strategy.run(step)
    return _apart([seen.numpy(), mean.numpy()], [3 * n * (n + 1) / 2, np.full(3, (n - 1) / 2)])


def _host_calls(devices: list[jax.Device]) -> Difference:
    strategy = replicax.MirroredStrategy(devices)
    x, _ = _data(4 * len(devices))
    [batch] = strategy.distribute_dataset([x])
    shape = jax.ShapeDtypeStruct((4, 16), jnp.float32)

    def step(x: Any) -> Any:
        doubled = jax.pure_callback(lambda x: np.asarray(x) * 2, shape, x)
        return replicax.get_replica_context().all_reduce("sum", doubled.sum(0))

    return _apart([strategy.run(step, args=(batch,))], [2 * x.sum(0)])


def _random_numbers(devices: list[jax.Device]) -> Difference:
    """Replicas draw different numbers from ``random_key``, and the same from run to run."""
    strategy = replicax.MirroredStrategy(devices)
    key = jax.random.key(3)

    def draws() -> list[Any]:
        drawn = strategy.run(lambda: jax.random.normal(replicax.get_replica_context().random_key(key), (4,)))
        return [np.asarray(x) for x in strategy.local_results(drawn)]

    ones, others = draws(), draws()
    different = len({x.tobytes() for x in ones}) == len(ones)
    return 0.0 if different and all((a == b).all() for a, b in zip(ones, others, strict=True)) else float("inf")


def _mistakes(devices: list[jax.Device]) -> Difference:
    """A value that differs between replicas is refused where all must have the same; one replica may assign it."""
    strategy = replicax.MirroredStrategy(devices)
    with strategy.scope():
        v = replicax.Variable(0.0)
    [batch] = strategy.distribute_dataset([np.arange(len(devices), dtype=np.float32)])
    try:
        strategy.run(lambda x: v.assign(x.sum()), args=(batch,))
    except replicax.errors.LocalityError:
        return 0.0
    return 0.0 if len(devices) == 1 else float("inf")


def _apart(ones: Sequence[Any], others: Sequence[Any]) -> Difference:
    """The largest difference, relative to the numbers where these are large."""
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(ones, others, strict=True)]
    return max(float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max()) for a, b in pairs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", replicax.errors.ExecutorWarning)
        yield


CHECKS: dict[str, Check] = {
    "mirrored": _compared(replicax.MirroredStrategy),
    "fully sharded": _compared(replicax.ShardedStrategy),
    "two replicas on each device": _compared(lambda d: replicax.MirroredStrategy(d, num_replicas=2 * len(d))),
    "central storage": _compared(replicax.CentralStorageStrategy),
    "run_steps": _compared(replicax.MirroredStrategy, at_once=5),
    "partial batches": _partial_batch,
    "logical devices": _logical_devices,
    "reproducible=True, one and all devices": _same_bits,
    "collectives and their gradients": _collectives,
    "variables with copies": _variables,
    "calls of the host": _host_calls,
    "random numbers": _random_numbers,
    "mistakes are refused": _mistakes,
}
