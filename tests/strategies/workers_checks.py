"""What the workers of ``test_multi_worker.py`` do.

Everything in ``PROGRAMS`` runs twice: on several workers, and on a ``MirroredStrategy`` of as many replicas in the
test's own process. What it returns must be the same: results of all workers' replicas, in their order.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax

PER_REPLICA = replicax.RunOptions(executor="per_replica")
here = replicax.get_replica_context


def run_programs(names: Sequence[str], num_replicas: int | None, is_fresh: bool) -> dict[str, Any]:
    if is_fresh:  # and has no devices yet: the strategy can still choose how they reach each other
        jax.config.update("jax_cpu_collectives_implementation", None)
    strategy = replicax.MultiWorkerMirroredStrategy(timeout_seconds=60, num_replicas=num_replicas)
    return {name: PROGRAMS[name](strategy) for name in names}


def values(strategy: replicax.Strategy, tree: Any) -> Any:
    """A result as NumPy arrays: of a ``PerReplica`` this worker's components, in a ``PerReplica`` of NumPy arrays."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, replicax.PerReplica):
            return {r: np.asarray(v) for r, v in zip(leaf.replicas, leaf.values, strict=True)}
        return np.asarray(leaf) if isinstance(leaf, jax.Array | replicax.Variable) else leaf

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, replicax.Variable | replicax.PerReplica))


def rows(strategy: replicax.Strategy, sizes: list[int] | None = None) -> Any:
    """``[rows, 3]`` of replica ``r``, from the same global data on any number of workers."""
    data = np.random.default_rng(3).normal(size=(16, 4, 3)).astype(np.float32)
    return strategy.distribute_values_from_function(
        lambda ctx: data[ctx.replica_id_in_sync_group][: sizes[ctx.replica_id_in_sync_group] if sizes else 4]
    )


def train_an_mlp(strategy: replicax.Strategy, options: Any = None) -> Any:
    with strategy.scope():
        w1 = replicax.Variable(lambda: jax.random.normal(jax.random.key(0), (3, 8)), name="w1")
        w2 = replicax.Variable(np.ones(8, np.float32), name="w2")
        seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
        # Operation by operation, Adam is slow.
        optimizer = replicax.Optimizer(optax.sgd(0.01, momentum=0.9) if options else optax.adam(0.01))

    def step(x: Any, factor: Any) -> Any:
        def loss() -> Any:
            losses = (jnp.tanh(x @ w1) @ w2 - x.sum(-1)) ** 2
            return replicax.compute_average_loss(losses * factor)

        seen.assign_add(x.shape[0])
        share, grads = replicax.value_and_grad(loss, [w1, w2])()
        optimizer.apply_gradients(zip(grads, [w1, w2], strict=True))
        return share

    x = rows(strategy)
    losses = [
        float(strategy.reduce("sum", strategy.run(step, args=(x, factor), options=options)))
        for factor in np.array([1.0, 0.5] if options else [1.0, 0.5, 0.25, 1.0, 2.0], np.float32)
    ]
    return losses, values(strategy, [w1, w2, seen, *optimizer.variables])


def train_a_module(strategy: replicax.Strategy, options: Any = None) -> Any:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss(model: Any) -> Any:
            return replicax.compute_average_loss((model(x)[:, 0] - x.sum(-1)) ** 2)

        share, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, here().all_reduce("sum", grads))
        return share

    arguments = model, optimizer, rows(strategy)
    losses = [float(strategy.reduce("sum", strategy.run(step, args=arguments, options=options))) for _ in range(2)]
    return losses, values(strategy, nnx.to_pure_dict(nnx.state((model, optimizer))))


def kinds_of_variables(strategy: replicax.Strategy, options: Any = None) -> Any:
    found = []
    for synchronization in ("on_write", "on_read"):
        for aggregation in ("none", "sum", "mean", "only_first_replica"):
            with strategy.scope():
                v = replicax.Variable(10.0, synchronization=synchronization, aggregation=aggregation)

            def step(x: Any) -> None:
                v.assign(x)  # noqa: B023
                v.assign_add(x)  # noqa: B023

            x: Any = strategy.distribute_values_from_function(lambda ctx: 1.0 + ctx.replica_id_in_sync_group)
            if (synchronization, aggregation) == ("on_write", "none"):
                x = 4.0
            strategy.run(step, args=(x,), options=options)
            readable = (synchronization, aggregation) != ("on_read", "none")
            found.append(float(v) if readable else None)
            copies = strategy.local_results(v)
            assert len(copies) == len(strategy.extended.local_replicas)
            if synchronization == "on_read":
                found.append(dict(zip(strategy.extended.local_replicas, map(float, copies), strict=True)))
            v.assign(6.0)
            found.append(float(v) if readable else None)
            if readable and (synchronization, aggregation) != ("on_read", "sum"):
                v.assign_add(jnp.float32(0.5))
                found.append(float(v))
            assert repr(v).startswith("<Variable 'variable_")
    return found


def across_replicas(strategy: replicax.Strategy) -> Any:
    x = rows(strategy)
    uneven = rows(strategy, [2, 2, 1, 0])
    extended = strategy.extended
    slices = replicax.IndexedSlices(x, strategy.distribute_values_from_function(lambda _: np.arange(4) % 2), (2, 3))
    return values(
        strategy,
        [
            strategy.reduce("sum", {"a": x, "b": [x, x]}),
            strategy.reduce("mean", x, axis=0),
            strategy.reduce("sum", uneven, axis=0),
            strategy.reduce("mean", [uneven, uneven], axis=(0, 1)),
            strategy.reduce("sum", slices).to_dense(),
            strategy.gather(x, axis=1),
            strategy.gather(uneven, axis=0),
            extended.reduce_to("mean", x, destinations=None),
            extended.reduce_to("sum", x, destinations="cpu:0"),
            extended.batch_reduce_to("sum", [(x, None), (x, x)]),
            extended.broadcast_to({"a": np.arange(3.0)}),
            extended.broadcast_to(strategy.reduce("sum", x), "cpu:0"),
            x,
            uneven,
        ],
    )


def updates(strategy: replicax.Strategy) -> Any:
    extended = strategy.extended
    with strategy.scope():
        v = replicax.Variable(np.arange(3.0), name="v")
        count = replicax.Variable(0, name="count")
        extended.update(v, lambda v, x: v.assign_add(x), args=(strategy.reduce("sum", rows(strategy), axis=0),))
        extended.update_non_slot(extended.non_slot_devices([v]), lambda: count.assign_add(1))
        with extended.colocate_vars_with(v):
            other = replicax.Variable(v.value * 2)
    assert extended.value_container(strategy.local_results(x := rows(strategy))[0]) is x
    v.scatter_add(replicax.IndexedSlices(np.ones(2), np.array([0, 2]), (3,)))
    return values(strategy, [v, count, other, extended.read_var(v)])


def in_a_step(strategy: replicax.Strategy, options: Any = None) -> Any:
    constant = jnp.arange(2.0)
    created: list[Any] = []
    kept: list[Any] = []

    def merge(strategy: replicax.Strategy, x: Any, c: Any, name: str) -> Any:
        assert isinstance(x, replicax.PerReplica)
        assert c is constant
        assert name == "name"
        return strategy.reduce("mean", x), strategy.gather(x, 0), strategy.local_results(x), x

    def step(x: Any, number: Any) -> Any:
        replica = here()
        v = replicax.Variable(lambda: jnp.full(3, 2.0), name="made in the step")
        created.append(v)
        mean, whole, parts, mine = replica.merge_call(merge, args=(x * number, constant, "name"))
        # A single local replica must not be taken for the same object everywhere.
        again = replica.merge_call(lambda s, y: isinstance(y, replicax.PerReplica), args=(x,))
        kept.append(again)
        v.assign_add(replica.all_reduce("sum", x[0]))
        return {
            "mean": mean,
            "whole": whole,
            "parts": tuple(parts),
            "mine": mine - x * number,
            "id": replica.replica_id_in_sync_group,
            "first": replica.all_gather(x[:1], axis=0),
            "text": "text",
            "v": v,
            "loop": jax.lax.fori_loop(0, 3, lambda i, s: s + replica.all_reduce("sum", x.sum()), 0.0),
        }

    results = [strategy.run(step, args=(rows(strategy), 2.0), options=options) for _ in range(2)]
    assert all(kept)
    assert all(v is created[0] for v in created)
    return values(strategy, results)


def uneven_steps(strategy: replicax.Strategy, options: Any = None) -> Any:
    with strategy.scope():
        w = replicax.Variable(np.ones(3, np.float32), name="w")

    def step(x: Any) -> Any:
        loss, [grad] = replicax.value_and_grad(lambda: replicax.compute_average_loss(((x * w) ** 2).sum(-1)), [w])()
        w.assign_sub(0.1 * here().all_reduce("sum", grad))
        return loss, x * 2, here().all_gather(x, 0)

    return values(strategy, [strategy.run(step, args=(rows(strategy, [2, 2, 1, 0]),), options=options), w])


def communication_options(strategy: replicax.Strategy) -> Any:
    x = rows(strategy)
    found = []
    for options in (
        replicax.CommunicationOptions(timeout_seconds=30),
        replicax.CommunicationOptions(bytes_per_pack=16, implementation="ring"),
    ):
        for executor in (None, PER_REPLICA):
            found.append(
                strategy.run(
                    lambda x, o=options: (here().all_reduce("sum", [x, x * 2], o), here().all_gather(x, 0, o)),
                    args=(x,),
                    options=executor,
                )
            )
    return values(strategy, found)


def objects(strategy: replicax.Strategy) -> Any:
    """Python objects that steps return, and keys."""

    def step() -> Any:
        replica = int(here().replica_id_in_sync_group)
        texts = "same", ("odd", "even")[replica % 2]
        return texts, jax.random.key_data(jax.random.key(7)), {"n": replica // 10}, slice(0, 3), slice(0, replica)

    return values(strategy, list(strategy.run(step, options=PER_REPLICA)))


def exactly(program: Callable[..., Any]) -> Callable[[replicax.Strategy], Any]:
    return lambda strategy: program(strategy, options=PER_REPLICA)


PROGRAMS: dict[str, Callable[[replicax.Strategy], Any]] = {
    "train": train_an_mlp,
    "train, exactly": exactly(train_an_mlp),
    "train a module": train_a_module,
    "train a module, exactly": exactly(train_a_module),
    "variables": kinds_of_variables,
    "variables, exactly": exactly(kinds_of_variables),
    "across": across_replicas,
    "updates": updates,
    "in a step": in_a_step,
    "in a step, exactly": exactly(in_a_step),
    "uneven": uneven_steps,
    "uneven, exactly": exactly(uneven_steps),
    "options": communication_options,
    "objects": objects,
}


# --- what only several workers can do -------------------------------------------------------------------


def message_of(fn: Callable[[], Any]) -> tuple[str, str]:
    """The type and text of what ``fn`` raises."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("nothing was raised")


def errors() -> dict[str, Any]:
    """Everything that can go wrong on one of two workers, as each of them sees it."""
    strategy = replicax.MultiWorkerMirroredStrategy(timeout_seconds=20)
    worker = strategy.extended.workers.index
    x = rows(strategy)
    with strategy.scope():
        w = replicax.Variable(np.ones(3, np.float32), name="w")
        # np.random is another one in each process
        at_random = replicax.Variable(np.random.default_rng().normal(size=4), name="at_random")
        by_a_function = replicax.Variable(lambda: jnp.asarray(np.random.default_rng().normal(size=4)))
    found: dict[str, Any] = {
        "random": [at_random.numpy().tolist(), by_a_function.numpy().tolist()],
        "context": [strategy.extended.should_checkpoint, strategy.extended.should_save_summary, repr(strategy)],
    }

    def fails(x: Any) -> Any:
        if worker == 1:
            raise KeyError("no such thing")
        return here().all_reduce("sum", x)

    def fails_late(x: Any) -> Any:
        total = here().all_reduce("sum", x)
        if int(here().replica_id_in_sync_group) == 3:
            raise KeyError("no such thing")
        return here().all_reduce("sum", total)

    def other_collective(x: Any) -> Any:
        if int(here().replica_id_in_sync_group) == 3:
            return here().all_gather(x, 0)
        return here().all_reduce("sum", x)

    def returns(x: Any) -> Any:
        return x if int(here().replica_id_in_sync_group) == 3 else here().all_reduce("sum", x)

    def other_structure(x: Any) -> Any:
        return [x] if int(here().replica_id_in_sync_group) == 3 else (x, x)

    def one(x: Any) -> Any:
        return x

    def another(x: Any) -> Any:
        return x

    def create(value: Any) -> None:
        with strategy.scope():
            replicax.Variable(value, name="unlike")

    for name, step in {"fails": fails, "fails late": fails_late}.items():
        found[name + ", exactly"] = message_of(lambda: strategy.run(step, args=(x,), options=PER_REPLICA))  # noqa: B023
    found["fails"] = message_of(lambda: strategy.run(fails, args=(x,)))
    found["other collective"] = message_of(lambda: strategy.run(other_collective, args=(x,), options=PER_REPLICA))
    found["returns"] = message_of(lambda: strategy.run(returns, args=(x,), options=PER_REPLICA))
    found["structure"] = message_of(lambda: strategy.run(other_structure, args=(x,), options=PER_REPLICA))
    for name, options in {"differs": None, "differs, exactly": PER_REPLICA}.items():
        found[name] = message_of(
            lambda: strategy.run(lambda x: w.assign(x[0]), args=(x,), options=options)  # noqa: B023
        )
    found["step"] = message_of(lambda: strategy.run([one, another][worker], args=(x,)))
    found["executor"] = message_of(lambda: strategy.run(one, args=(x,), options=[PER_REPLICA, None][worker]))
    found["plain value"] = message_of(lambda: strategy.run(one, args=(np.float32(worker),)))
    rate, order = 1.0 + worker, [w, at_random][:: 1 - 2 * worker]
    found["captured"] = message_of(lambda: strategy.run(lambda: w.assign(w * rate)))
    found["order"] = message_of(lambda: strategy.run(lambda: [v.assign(v * 2) for v in order] and None))
    found["plain kind"] = message_of(lambda: strategy.run(one, args=(np.zeros(2 + worker),), options=PER_REPLICA))
    found["plain structure"] = message_of(lambda: strategy.run(one, args=([1.0] * (1 + worker),)))
    mode = ["training", "evaluation"][worker]
    found["plain text"] = message_of(lambda: strategy.run(lambda x, mode: one(x), args=(x, mode)))
    found["assign"] = message_of(lambda: w.assign(np.full(3, worker, np.float32)))
    found["create"] = message_of(lambda: create(np.zeros(3 + worker)))
    found["create or run"] = message_of(lambda: [lambda: create(0.0), lambda: strategy.run(one, args=(1.0,))][worker]())
    found["devices"] = message_of(lambda: replicax.MirroredStrategy(jax.devices()))
    found["logical"] = message_of(lambda: replicax.MultiWorkerMirroredStrategy(num_logical_devices=1 + worker))
    found["afterwards"] = values(strategy, [strategy.run(lambda x: here().all_reduce("sum", x), args=(1.0,)), w])
    return found


def lateness(folder: pathlib.Path) -> dict[str, Any]:
    """Workers that come late, or not at all, as each of two sees it.

    Who is late comes when the other has given up, which files in the folder say, in whatever time.
    """
    strategy = replicax.MultiWorkerMirroredStrategy(timeout_seconds=3)
    worker = strategy.extended.workers.index
    options = replicax.CommunicationOptions(timeout_seconds=1)
    found: dict[str, Any] = {}

    def tell(what: str) -> None:
        (folder / what).touch()

    def wait_for(what: str) -> None:
        while not (folder / what).exists():  # the test has a deadline
            time.sleep(0.01)

    def step(x: Any) -> Any:
        return here().all_reduce("sum", x, options)

    def late(x: Any) -> Any:
        if int(here().replica_id_in_sync_group) == 2:
            wait_for("exactly")
        return here().all_reduce("sum", x, options)

    for _ in range(4):
        strategy.run(step, args=(1.0,))
    if worker == 0:  # the other does not come to the fifth call
        found["collective"] = message_of(lambda: strategy.run(step, args=(1.0,)))
        tell("collective")
    else:
        wait_for("collective")
        strategy.run(step, args=(1.0,))  # which frees the others' devices
    found["exactly"] = message_of(lambda: strategy.run(late, args=(1.0,), options=PER_REPLICA))
    tell(["exactly", "too late"][worker])
    wait_for("too late")
    found["afterwards"] = float(strategy.run(step, args=(2.0,)))
    if worker == 0:
        with strategy.scope():
            found["variable"] = message_of(lambda: replicax.Variable(1.0, name="lonely"))
        tell("variable")
    else:
        wait_for("variable")
    return found


def too_late() -> tuple[str, str]:
    """What stands in the way when devices can't reach other processes."""
    assert jax.config.values["jax_cpu_collectives_implementation"] == "gloo"
    jax.config.update("jax_cpu_collectives_implementation", None)
    jax.devices()
    return message_of(replicax.MultiWorkerMirroredStrategy)
