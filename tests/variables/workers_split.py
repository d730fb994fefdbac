"""What the workers of ``test_split_over_workers.py`` do.

The ``PROGRAMS`` run on several workers, with every variable split over all replicas, however small; and in the test's
own process on as many replicas with a copy of each. What they return must be the same.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax
from replicax.variables import collection
from replicax.variables.partitioners import over_all
from tests.many_steps import workers_steps
from tests.strategies.workers_checks import (
    PER_REPLICA,
    exactly,
    in_a_step,
    message_of,
    rows,
    train_an_mlp,
    uneven_steps,
    updates,
    values,
)

here = replicax.get_replica_context
everything = over_all(4, min_bytes=0)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "adamw": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 10), weight_decay=0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "lamb": lambda: optax.lamb(0.05),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
}


def optimizers(strategy: replicax.Strategy, options: Any = None, names: Sequence[str] = ("adam, clipped",)) -> Any:
    rng = np.random.default_rng(0)
    with strategy.scope():
        models = {
            name: [
                replicax.Variable(rng.normal(size=shape).astype(np.float32), name=f"{name}/{i}")
                for i, shape in enumerate(
                    [(3, 7), (7,), (7, 4)]
                )  # pieces of two rows, the last ones of one and of none
            ]
            for name in names
        }
        trained = {name: replicax.Optimizer(OPTIMIZERS[name]()) for name in names}

    def step(x: Any) -> Any:
        for name, (a, b, c) in models.items():

            def loss(a: Any = a, b: Any = b, c: Any = c) -> Any:
                return replicax.compute_average_loss(((jnp.tanh(x @ a + b.value[None]) @ c.value - 1.0) ** 2).mean(-1))

            share, gradients = replicax.value_and_grad(loss, [a, b, c])()
            trained[name].apply_gradients(zip(gradients, [a, b, c], strict=True))
        return share, sum(jnp.sum(v.value**2) for v in models[names[0]])

    for _ in range(1 if options else 2):
        result = strategy.run(step, args=(rows(strategy),), options=options)
    slots = {name: [v for v in optimizer.variables if v.ndim] for name, optimizer in trained.items()}
    return values(strategy, [result, models, slots])


def row_updates(strategy: replicax.Strategy, options: Any = None) -> Any:
    with strategy.scope():
        table = replicax.Variable(np.ones((10, 3), np.float32), name="table", aggregation="sum")
        first = replicax.Variable(np.zeros((10, 3), np.float32), name="first", aggregation="only_first_replica")
        trained = replicax.Variable(np.ones((10, 3), np.float32), name="trained")
        optimizer = replicax.Optimizer(optax.sgd(0.5))

    def step(x: Any) -> Any:
        found = jnp.asarray([1, 9, 4, 1]) + here().replica_id_in_sync_group * jnp.asarray([0, 0, 1, 1])
        slices = replicax.IndexedSlices(x, found, (10, 3))
        table.scatter_add(slices)
        first.scatter_update(slices)
        optimizer.apply_gradients([(slices, trained)])
        return table.value[found]

    looked_up = strategy.run(step, args=(rows(strategy),), options=options)
    table.scatter_sub(replicax.IndexedSlices(np.ones((2, 3), np.float32), np.array([0, 9]), (10, 3)))
    return values(strategy, [looked_up, table, first, trained])


def many_steps(strategy: replicax.Strategy) -> Any:
    with strategy.scope():
        w = replicax.Variable(np.ones((3, 5), np.float32), name="w")
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))

    def step(ctx: replicax.MultiStepContext, x: Any) -> None:
        loss, gradients = replicax.value_and_grad(
            lambda: replicax.compute_average_loss(jnp.tanh(x @ w.value).sum(1)), [w]
        )()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        ctx.set_last_step_output("loss", loss, "sum")

    data = list(np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32))
    iterator = iter(strategy.distribute_dataset(data))
    jax.config.update("eager_constant_folding", True)
    losses = [strategy.run_steps(step, iterator, 2).last_step_outputs["loss"] for _ in range(2)]
    jax.config.update("eager_constant_folding", False)
    return values(strategy, [losses, w, optimizer.variables])


def across(strategy: replicax.Strategy) -> Any:
    """What reads and assigns outside a step; and debugging."""
    with strategy.scope():
        v = replicax.variables.ShardedVariable(lambda: jax.random.normal(jax.random.key(1), (5, 6)), name="v")
        w = replicax.Variable(np.arange(10.0, dtype=np.float32), name="w")
        w.assign_add(np.ones(10, np.float32))
        v.assign(v * 2.0)
        w.assign(strategy.reduce("sum", strategy.run(lambda: jnp.arange(10.0) + here().replica_id_in_sync_group)))

    def read_in_merge(strategy: replicax.Strategy) -> Any:
        return [jnp.sum(piece) for piece in strategy.local_results(v)]

    with replicax.debug():
        debugged = strategy.run(lambda: w.assign(w.value * 2.0).value.sum())
    merged = sum(strategy.run(lambda: here().merge_call(read_in_merge)))  # of pieces, or of pieces of one worker
    return values(strategy, [v, w, debugged, merged, strategy.reduce("mean", w), w + v[0, 0]])


PROGRAMS: dict[str, Callable[[replicax.Strategy], Any]] = {
    "train, exactly": exactly(train_an_mlp),
    "updates": updates,
    "in a step": in_a_step,
    "in a step, exactly": exactly(in_a_step),
    "uneven": uneven_steps,
    "uneven, exactly": exactly(uneven_steps),
    "optimizers": functools.partial(optimizers, names=["adam, clipped", "adamw"]),
    "all optimizers": functools.partial(optimizers, names=list(OPTIMIZERS)),
    "an optimizer, exactly": exactly(optimizers),
    "row updates": row_updates,
    "row updates, exactly": exactly(row_updates),
    "run_steps": many_steps,
    "run_steps, partial batches": workers_steps.train,
    "across": across,
}


def run_programs(names: list[str], group_size: int | None = None) -> dict[str, Any]:
    in_groups = replicax.variables.GroupPartitioner(group_size, over_all(group_size or 4, min_bytes=0))
    strategy = replicax.ShardedStrategy(
        variable_partitioner=in_groups if group_size else everything, timeout_seconds=60
    )
    return {name: PROGRAMS[name](strategy) for name in names}


# --- what only several workers can do -------------------------------------------------------------------


def alone() -> dict[str, Any]:
    """What workers do alone, and what goes wrong if one does it that all have to do."""
    strategy = replicax.MultiWorkerMirroredStrategy(timeout_seconds=20, variable_partitioner=everything)
    worker = strategy.extended.workers.index
    whole = np.arange(20, dtype=np.float32).reshape(10, 2)
    with strategy.scope():
        v = replicax.Variable(whole, name="v")
    found: dict[str, Any] = {"name": repr(strategy), "layout": v.layout.describe(strategy.extended.mesh)}
    if worker == 1:
        found["repr"] = repr(v)
        found["pieces"] = [np.asarray(piece).tolist() for piece in strategy.local_results(v)]
    found["rows here"] = [shard.data.shape[0] for shard in v.slot.array.addressable_shards]

    def one_reads() -> Any:
        return v.value.sum() if int(here().replica_id_in_sync_group) == 3 else jnp.float32(0)

    def make(value: Any) -> replicax.Variable:
        with strategy.scope():
            return replicax.Variable(value, name="made")

    found["one worker reads"] = message_of([lambda: make(whole), v.numpy][worker])
    found["one replica reads"] = message_of(lambda: strategy.run(one_reads, options=PER_REPLICA))
    found["assigned"] = message_of(lambda: v.assign(whole + worker))
    found["unlike"] = message_of(lambda: make(np.zeros(8 + worker, np.float32)))
    found["still"] = v.numpy()
    key, initializers = jax.random.key(3), jax.nn.initializers
    makers: list[Callable[..., Any]] = [initializers.he_normal(), initializers.orthogonal()]
    makers.append(lambda key, shape: jax.nn.relu(jax.lax.fori_loop(0, 3, lambda i, x: x * i, whole[:6, :1] + 1.0)))
    with counted_sends() as sends:
        found["alike"] = [make(lambda init=init: init(key, (6, 5))).numpy() for init in makers]
    found["sends"] = len(sends)
    # Without a seed each worker has other numbers, in an array as in the program that makes them.
    own = np.random.default_rng(worker).normal(size=(8, 5)).astype(np.float32)
    found["own"] = own
    jax.config.update("eager_constant_folding", True)
    with jax.disable_jit():  # a split variable needs a compiled program all the same
        found["from an array"] = make(own).numpy()
    jax.config.update("eager_constant_folding", False)
    found["from a program"] = make(lambda: jnp.tanh(own)).numpy()
    found["from a program's number"] = make(lambda: jnp.full(5, float(worker))).numpy()
    return found


@contextlib.contextmanager
def counted_sends() -> Iterator[list[Any]]:
    """The variables of which the chief sends the initial value."""
    sends: list[Any] = []
    send = collection._from_first

    def counting(variable: Any, array: Any) -> Any:
        sends.append(variable)
        return send(variable, array)

    collection._from_first = counting
    try:
        yield sends
    finally:
        collection._from_first = send


WHOLE = np.random.default_rng(3).normal(size=(250, 41)).astype(np.float32)
"""What :func:`saved` saves; its pieces have 63 rows each, but the last has 61."""


def saved(folder: str, shared: bool, group_size: int | None = None) -> tuple[bool, dict[str, int]]:
    """Save pieces, and restore them: whether they are right, and how many bytes each worker has written here."""
    strategy = replicax.ShardedStrategy(
        variable_partitioner=replicax.variables.GroupPartitioner(group_size), timeout_seconds=60
    )
    worker = strategy.extended.workers.index
    path = pathlib.Path(folder) if shared else pathlib.Path(folder, f"disk-{worker}")
    path.mkdir(exist_ok=True)
    with strategy.scope():
        v = replicax.Variable(WHOLE, name="v")
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
        optimizer.build([v])
    checkpoint = replicax.Checkpoint(v=v, optimizer=optimizer)
    checkpoint.save(path / "a")
    v.assign(np.zeros_like(WHOLE))
    checkpoint.restore(path / "a")
    sizes = {
        store.name: sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
        for store in (path / "a").glob("arrays-*")
    }
    return np.array_equal(v.numpy(), WHOLE), sizes


def held(group_size: int | None) -> tuple[int, int]:
    """What a device keeps for a model of 12 layers of 256 KiB, Adam's slots included, and a step's temporaries."""
    strategy = replicax.ShardedStrategy(
        variable_partitioner=None if group_size is None else replicax.variables.GroupPartitioner(group_size)
    )
    with strategy.scope():
        layers = [replicax.Variable(lambda: jnp.full((256, 256), 0.01), name=f"layer{i}") for i in range(12)]
        optimizer = replicax.Optimizer(optax.adam(0.1))

    def step(x: Any) -> Any:
        def loss() -> Any:
            y = x
            for layer in layers:
                y = jnp.tanh(y @ layer)
            return replicax.compute_average_loss(y.mean(-1))

        share, gradients = replicax.value_and_grad(loss, layers)()
        optimizer.apply_gradients(zip(gradients, layers, strict=True))
        return share

    x = strategy.distribute_values_from_function(lambda _: np.ones((1, 256), np.float32))
    program = strategy.extended.trace(step, args=(x,))
    device = strategy.extended.worker_devices[strategy.extended.local_replicas[0]]
    shards = [s for v in strategy.extended.variables for s in v.stored().addressable_shards if s.device == device]
    return sum(s.data.nbytes for s in shards), program.compiled().memory_analysis().temp_size_in_bytes
