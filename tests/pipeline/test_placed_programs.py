"""Pipelines through assign_to_logical_device reach the numbers of one device, with each stage's memory on its own."""

from __future__ import annotations

import collections
import contextlib
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.pipeline.regions import Region
from replicax.pipeline.schedule import schedule
from replicax.variables.partitioners import over_all
from tests import processes
from tests.pipeline import workers_placed
from tests.soaking import soak_except

BATCH, WIDTH = 16, 32


pytestmark = pytest.mark.usefixtures("ordinary_promotion")


def strategy_of(replicas: int, logical: int, **options) -> replicax.Strategy:
    devices = np.array(jax.devices()[: replicas * logical]).reshape(replicas, logical)
    return replicax.Strategy(replicax.StrategyExtended(devices, **options))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)


# --- models: for each stage its parameters, and what it computes ----------------------------------------------


def mlp(stages: int):
    def stage(p, h):
        return h + jnp.tanh(h @ p["w"] + p["b"])

    # Stages of different sizes, so that nobody can have mixed them up.
    params = [{"w": random(WIDTH, WIDTH, seed=k), "b": random(WIDTH, seed=k)} for k in range(stages)]
    params[-1] = {"w": random(WIDTH, 8), "b": random(8), "out": random(8, WIDTH)}

    def last(p, h):
        return jnp.tanh(h @ p["w"] + p["b"]) @ p["out"]

    return params, [stage] * (stages - 1) + [last], (WIDTH,)


def convolutions(stages: int):
    def stage(p, h):
        h = jax.lax.conv_general_dilated(h, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(h + p["bias"])

    params = [{"kernel": random(3, 3, 4, 4, seed=k), "bias": random(4, seed=k)} for k in range(stages)]
    return params, [stage] * stages, (6, 6, 4)


def transformer(stages: int):
    def stage(p, h):
        def norm(h):
            centred = h - h.mean(-1, keepdims=True)
            return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]

        q, k, v = jnp.split(norm(h) @ p["qkv"], 3, axis=-1)
        mask = jnp.tril(jnp.ones((h.shape[1], h.shape[1]), bool))
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(8.0), -1e9)
        h = h + jax.nn.softmax(scores) @ v
        return h + jax.nn.gelu(norm(h) @ p["up"]) @ p["down"]

    params = [
        {
            "scale": 1 + random(8, seed=k),
            "qkv": random(8, 24, seed=k),
            "up": random(8, 32, seed=k),
            "down": random(32, 8, seed=k),
        }
        for k in range(stages)
    ]
    return params, [stage] * stages, (5, 8)


def trained_on_one_device(model, tx, x, y, steps: int):
    params, stages, _ = model

    def loss_of(params):
        h = x
        for p, stage in zip(params, stages, strict=True):
            h = stage(p, h)
        return jnp.mean((h - y) ** 2)

    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(loss)
    return losses, params


class Pipeline:
    """A model in stages, of which each is on a logical device of its own."""

    def __init__(self, strategy: replicax.Strategy, model, tx, microbatches: int) -> None:
        params, stages, _ = model
        with strategy.scope():
            self.params = jax.tree.map(replicax.Variable, params)
            self.optimizer = replicax.Optimizer(tx)
        leaves = jax.tree.leaves(self.params, is_leaf=lambda v: isinstance(v, replicax.Variable))
        self.strategy = strategy

        def step(x, y):
            y = strategy.assign_to_logical_device(y, len(stages) - 1)

            def loss_of():
                total = 0.0
                for part, target in zip(jnp.split(x, microbatches), jnp.split(y, microbatches), strict=True):
                    h = part
                    for k, (p, stage) in enumerate(zip(self.params, stages, strict=True)):
                        h = strategy.assign_to_logical_device(h, k)
                        h = stage({name: v.value for name, v in p.items()}, h)
                    error = ((h - target) ** 2).mean(axis=range(1, h.ndim))
                    total += replicax.compute_average_loss(error, global_batch_size=BATCH)
                return total

            loss, gradients = replicax.value_and_grad(loss_of, leaves)()
            self.optimizer.apply_gradients(zip(gradients, leaves, strict=True))
            return replicax.get_replica_context().all_reduce("sum", loss)

        self.step = step

    def batch(self, x, y):
        [batch] = self.strategy.distribute_dataset([(x, y)])
        return batch


def data_for(model):
    shape = model[2]
    return random(BATCH, *shape, seed=1), random(BATCH, *shape, seed=2)


@contextlib.contextmanager
def nothing_compiled():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    try:
        yield
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


def bytes_by_device(variables) -> collections.Counter:
    found: collections.Counter = collections.Counter()
    for v in variables:
        for shard in v.slot.array.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


# --- the numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "replicas", "stages", "microbatches"),
    [
        pytest.param(mlp, 1, 2, 4, marks=pytest.mark.soak),
        (mlp, 2, 3, 2),
        pytest.param(convolutions, 1, 2, 2, marks=pytest.mark.soak),
        pytest.param(transformer, 2, 2, 1, marks=pytest.mark.soak),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_a_pipeline_reaches_the_numbers_of_one_device(make, replicas, stages, microbatches):
    model, tx, steps = make(stages), optax.adam(1e-2, eps=1e-4), 4
    x, y = data_for(model)
    expected_losses, expected = trained_on_one_device(model, tx, x, y, steps)

    strategy = strategy_of(replicas, stages)
    pipeline = Pipeline(strategy, model, tx, microbatches)
    batch = pipeline.batch(x, y)
    losses = [strategy.run(pipeline.step, args=batch)]
    with nothing_compiled():
        losses += [strategy.run(pipeline.step, args=batch) for _ in range(steps - 1)]

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for k, (found, wanted) in enumerate(zip(pipeline.params, expected, strict=True)):
        for name, variable in found.items():
            np.testing.assert_allclose(variable.numpy(), wanted[name], atol=1e-5)
            devices = set(strategy.extended.logical_devices[:, k])
            assert variable.slot.array.sharding.device_set == devices
    assert strategy.extended.trace_count(pipeline.step) == 1

    report = strategy.extended.trace(pipeline.step, args=batch).placement()
    slots_and_parameters = [3 * sum(p.nbytes for p in stage.values()) for stage in model[0]]
    slots_and_parameters[0] += 4  # Adam's count of the steps
    assert [d.variable_bytes for d in report.devices] == slots_and_parameters
    variables = jax.tree.leaves(pipeline.params, is_leaf=lambda v: isinstance(v, replicax.Variable))
    there = bytes_by_device([*variables, *pipeline.optimizer.variables])
    for devices in strategy.extended.logical_devices:
        assert [there[d] for d in devices] == slots_and_parameters

    # Each microbatch's activations go on, and their gradients back; nothing else but numbers is sent.
    sent = {(t.origin, t.target): t for t in report.transfers}
    for k in range(stages - 1):
        activations = x.nbytes // replicas
        assert activations <= sent[k, k + 1].bytes <= activations + 16
        assert sent[k + 1, k].bytes == activations
        assert sent[k + 1, k].values == microbatches
    assert all(t.bytes <= 16 for (a, b), t in sent.items() if abs(a - b) > 1)

    # All gradients of a stage are summed at once, and with them the loss, where it is.
    collectives = [strategy.extended.trace(pipeline.step, args=batch).collectives(k) for k in range(stages)]
    assert [len(found) for found in collectives] == [int(replicas > 1)] * stages


def test_microbatches_share_their_programs():
    counts = []
    for microbatches in (3, 7):
        strategy = strategy_of(1, 2)
        model = mlp(2)
        pipeline = Pipeline(strategy, model, optax.sgd(1e-2), microbatches)
        x, y = random(4 * microbatches, WIDTH), random(4 * microbatches, WIDTH)
        plan = strategy.extended.trace(pipeline.step, args=pipeline.batch(x, y)).plan
        counts.append((len(plan.launches), len({id(p) for p in plan.compiled()})))
    (launches, programs), (more_launches, more_programs) = counts
    assert more_launches > launches + 4
    assert more_programs - programs < (more_launches - launches) / 2


def test_microbatches_print_and_call_what_each_does(capsys):
    strategy = strategy_of(1, 2)

    def prints(x):
        for name in ("first", "second"):
            h = strategy.assign_to_logical_device(x + 1, 1)
            jax.debug.print(name + " {}", h)
            x = strategy.assign_to_logical_device(h * 2, 0)
        return x

    def calls(x):
        for on_host in (np.negative, np.square):
            h = strategy.assign_to_logical_device(x + 1, 1)
            x = strategy.assign_to_logical_device(jax.pure_callback(on_host, jax.typeof(h), h) * 2, 0)
        return x

    strategy.run(prints, args=(1.0,))
    assert capsys.readouterr().out == "first 2.0\nsecond 5.0\n"
    assert float(strategy.run(calls, args=(1.0,))) == 2 * (1 - 2 * 2) ** 2


@pytest.mark.soak
def test_both_executors_agree():
    model = mlp(2)
    x, y = data_for(model)
    found = []
    for executors in (("compiled", "compiled"), ("compiled", "per_replica")):
        strategy = strategy_of(2, 2)
        pipeline = Pipeline(strategy, model, optax.sgd(1e-2), 1)
        batch = pipeline.batch(x, y)
        losses = [float(strategy.run(pipeline.step, args=batch, options=replicax.RunOptions(e))) for e in executors]
        found.append((losses, [v.numpy() for p in pipeline.params for v in p.values()]))
        assert pipeline.params[1]["w"].layout.logical_device == 1
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


KINDS = "all-reduce", "all-gather", "reduce-scatter"
OPTIMIZERS = {"clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), "lamb": optax.lamb(1e-2)}


def test_penalties_and_losses_of_one_stage_count_in_another():
    strategy = strategy_of(1, 2)
    x, w = random(16, 8), random(8, 16, seed=1)

    def loss(w, x, assigned):
        h = assigned(x @ w, 1)
        return (h**2).mean() + 0.01 * assigned((w**2).sum(), 1) + 0.1 * assigned(jnp.abs(h).mean(), 0)

    with strategy.scope():
        v = replicax.Variable(w, name="w")
    found = strategy.run(lambda x: jax.grad(loss)(v.value, x, strategy.assign_to_logical_device), args=(x,))
    np.testing.assert_allclose(found, jax.grad(loss)(w, x, lambda value, _: value), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "size", "groups", "microbatches"),
    [
        ("clipped", 2, 2, 1),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [("lamb", 2, 2, 1), ("clipped", 4, 1, 2)]),
    ],
)
def test_what_goes_from_region_to_region_stays_in_pieces(name, size, groups, microbatches):
    model, tx = mlp(2), OPTIMIZERS[name]
    x, y = data_for(model)
    _, expected = trained_on_one_device(model, tx, x, y, 2)
    pieces = replicax.variables.GroupPartitioner(size, over_all(size, min_bytes=0))
    strategy = strategy_of(size * groups, 2, partitioner=pieces)
    pipeline = Pipeline(strategy, model, tx, microbatches)
    batch = pipeline.batch(x, y)
    for _ in range(2):
        strategy.run(pipeline.step, args=batch)
    for found, wanted in zip(pipeline.params, expected, strict=True):
        for key, variable in found.items():
            np.testing.assert_allclose(variable.numpy(), wanted[key], atol=1e-5)
    for v in pipeline.optimizer.variables:
        if v.ndim:
            assert v.slot.array.addressable_shards[0].data.size == v.size // size
    # A gradient is scattered where it is summed, also if its update waits for the norm of those of other stages.
    program = strategy.extended.trace(pipeline.step, args=batch)
    for device in range(2):
        sizes = {kind: [c.bytes for c in program.collectives(device) if c.kind == kind] for kind in KINDS}
        assert sizes["reduce-scatter"]
        assert sizes["all-gather"]
        assert max(sizes["all-reduce"], default=0) < 4 * WIDTH * WIDTH / (1 if groups > 1 else size)


def test_programs_of_pieces_get_the_same_compiler_options_as_other_steps():
    """By default XLA's compiler for CPUs joins all sums at the end of a program, up to where all are in memory."""
    kinds = []
    for logical in (1, 2):
        strategy = replicax.ShardedStrategy([f"cpu:{i}" for i in range(2 * logical)], num_logical_devices=logical)
        with strategy.scope():
            v = replicax.Variable(np.ones((64, 64), np.float32))

        def step(x, strategy=strategy, v=v):
            x = x if strategy.extended.num_logical_devices == 1 else strategy.assign_to_logical_device(x, 1)
            v.assign_add(v)
            return [replicax.get_replica_context().all_reduce("sum", factor * x) for factor in (2.0, 3.0)]

        x = strategy.distribute_values_from_function(lambda _: np.ones(8, np.float32))
        kinds.append([(c.kind, c.arrays) for c in strategy.extended.trace(step, args=(x,)).collectives()])
    assert kinds == [[("all-reduce", 1)] * 2] * 2


@pytest.mark.parametrize(
    ("rows", "replicas", "options"),
    [
        pytest.param(1, 4, {}, marks=pytest.mark.soak),
        (2, 4, {"partitioner": over_all(2, min_bytes=0), "replicas_at_once": 2}),
        pytest.param(2, 8, {"replicas_at_once": 2}, marks=pytest.mark.soak),
        pytest.param(2, 4, {"partitioner": over_all(2, min_bytes=0)}, marks=pytest.mark.soak),
    ],
)
def test_replicas_may_share_the_devices_of_a_pipeline(rows, replicas, options):
    model, tx = mlp(2), OPTIMIZERS["clipped"]
    x, y = data_for(model)
    losses, expected = trained_on_one_device(model, tx, x, y, 2)
    strategy = strategy_of(rows, 2, num_replicas=replicas, **options)
    pipeline = Pipeline(strategy, model, tx, 2)
    batch = pipeline.batch(x, y)
    found = [strategy.run(pipeline.step, args=batch) for _ in range(2)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for variables, wanted in zip(pipeline.params, expected, strict=True):
        for key, variable in variables.items():
            np.testing.assert_allclose(variable.numpy(), wanted[key], atol=1e-5)
    report = strategy.extended.trace(pipeline.step, args=batch).placement()
    # x goes to the first device and y to the last: a device has those of all of its replicas.
    assert [d.argument_bytes for d in report.devices] == [x.nbytes // rows, y.nbytes // rows]


@pytest.mark.usefixtures("young_heap")
def test_what_a_step_closes_over_is_only_on_the_devices_that_use_it():
    """The copy on all devices, with which the step was captured, is free when the pipeline is there."""
    strategy = strategy_of(2, 2, num_replicas=4)
    table = np.arange(1237, dtype=np.float32)

    def step(x):
        return jnp.sum(jnp.asarray(table)) + strategy.assign_to_logical_device(x, 1) * 2

    x = strategy.distribute_values_from_function(lambda _: np.float32(1))
    program = strategy.extended.trace(step, args=(x,))
    gc.collect()
    sizes = {len(array.devices()) for array in jax.live_arrays() if array.shape == table.shape}
    assert strategy.extended.mesh.size not in sizes
    assert program.program.constants == []


@pytest.mark.parametrize("splits", soak_except([False, True], True), ids=["mirrored", "split"])
def test_replicas_may_be_on_several_workers(splits):
    def loss_of(ws):
        return jnp.mean((jnp.tanh(workers_placed.batch() @ ws[0]) @ ws[1]) ** 2)

    expected, ws = [], workers_placed.weights()
    for _ in range(3):
        loss, gradients = jax.value_and_grad(loss_of)(ws)
        ws = [w - 0.1 * g for w, g in zip(ws, gradients, strict=True)]
        expected.append(loss)
    for losses, found, refused in processes.run(workers_placed.train, 3, splits, workers=2, devices=2):
        assert "belong to several: choose a device assignment that keeps them together" in refused
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for a, b in zip(found, ws, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


# --- variables ------------------------------------------------------------------------------------------------


def test_variables_can_be_there_from_the_start():
    strategy = strategy_of(2, 2)
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.ones((8, 8)), name="w", logical_device=1)
        optimizer = replicax.Optimizer(optax.adam(1e-2))
        optimizer.build([w])
    devices = set(strategy.extended.logical_devices[:, 1])
    assert w.slot.array.sharding.device_set == devices
    mu, nu = (v for v in optimizer.variables if v.shape == (8, 8))
    assert mu.slot.array.sharding.device_set == nu.slot.array.sharding.device_set == devices
    w.assign(np.zeros((8, 8)))
    assert w.slot.array.sharding.device_set == devices
    assert w.numpy().sum() == 0
    assert len(strategy.local_results(w)) == 2
    with strategy.scope():
        with pytest.raises(ValueError, match="'v' .*no logical device 2: a replica has 2"):
            replicax.Variable(1.0, name="v", logical_device=2)
        with pytest.raises(ValueError, match="choose one of partition_dimensions and logical_device"):
            replicax.Variable(np.ones(4), partition_dimensions=[2], logical_device=1)


def test_on_read_variables_live_on_a_device_too():
    strategy = strategy_of(2, 2)
    with strategy.scope():
        total = replicax.Variable(np.zeros(8, np.float32), synchronization="on_read", aggregation="sum", name="total")

    def step(x):
        replica = replicax.get_replica_context().replica_id_in_sync_group
        total.assign_add(strategy.assign_to_logical_device(x, 1) * (1 + replica))

    for executor in ("compiled", "per_replica", "compiled"):
        strategy.run(step, args=(jnp.ones(8),), options=replicax.RunOptions(executor))
        assert total.slot.array.sharding.device_set == set(strategy.extended.logical_devices[:, 1])
    assert [float(v[0]) for v in strategy.local_results(total)] == [3, 6]
    assert float(total.numpy()[0]) == 9
    total.assign(np.full(8, 4.0, np.float32))
    assert [float(v[0]) for v in strategy.local_results(total)] == [2, 2]


def test_a_program_from_before_its_variables_moved_finds_them():
    strategy = strategy_of(1, 2)
    with strategy.scope():
        w = replicax.Variable(random(8, 8), name="w")
    evaluate = lambda x: jnp.sum(x @ w)  # noqa: E731
    x = jnp.ones((2, 8))
    before = strategy.run(evaluate, args=(x,))
    strategy.run(lambda x: strategy.assign_to_logical_device(x, 1) @ w, args=(x,))
    assert w.layout.logical_device == 1
    np.testing.assert_allclose(strategy.run(evaluate, args=(x,)), before, rtol=1e-6)


def test_results_go_on_to_reduce_and_the_next_step():
    strategy = strategy_of(2, 2)

    def step(x):
        replica = replicax.get_replica_context().replica_id_in_sync_group
        return strategy.assign_to_logical_device(x, 1) * replica

    result = strategy.run(step, args=(jnp.ones((2, 8)),))
    assert strategy.reduce("sum", result)[0, 0] == 1
    assert strategy.gather(result, 0).shape == (4, 8)
    again = strategy.run(step, args=(result,))
    np.testing.assert_array_equal(strategy.local_results(again)[1], np.ones((2, 8)))
    plain = strategy.run(lambda x: x + 1, args=(result,))
    np.testing.assert_array_equal(strategy.local_results(plain)[1], 2 * np.ones((2, 8)))


def test_a_value_that_somebody_holds_is_not_overwritten():
    strategy = strategy_of(1, 2)
    with strategy.scope():
        w = replicax.Variable(np.ones((8, 8), np.float32), name="w")

    def step(x):
        h = strategy.assign_to_logical_device(x, 1) @ w
        w.assign_add(jnp.ones((8, 8)))
        return h, w.value

    x = jnp.ones((2, 8))
    _, first = strategy.run(step, args=(x,))
    held = w.value
    _, second = strategy.run(step, args=(x,))
    assert [float(v[0, 0]) for v in (first, held, second)] == [2, 2, 3]


# --- the schedule -----------------------------------------------------------------------------------------------


def regions_of(stages: int, microbatches: int, sink: float = 0.0) -> list[Region]:
    """A pipeline with a forward and a backward region of cost 1 and 2 for each stage and microbatch."""
    regions = []
    for m in range(microbatches):
        for k in range(stages):
            needs = {("f", m, k - 1): None} if k else {}
            makes = {("f", m, k): None, ("kept", m, k): None}
            regions.append(Region(k, [len(regions)], needs, makes, 1.0, {("f", m, k)} if k < stages - 1 else set()))
    for m in reversed(range(microbatches)):
        for k in reversed(range(stages)):
            needs = {("kept", m, k): None} | ({("b", m, k + 1): None} if k < stages - 1 else {("f", m, k): None})
            makes = {("b", m, k): None, ("g", m, k): None}
            regions.append(Region(k, [len(regions)], needs, makes, 2.0, {("b", m, k)} if k else set()))
    return regions


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (2, 4), (4, 4), (4, 16)])
def test_devices_work_at_the_same_time(stages, microbatches):
    order = schedule(regions_of(stages, microbatches))
    free, made = collections.Counter(), {}
    alive, most = 0, 0
    for region in order:
        start = max([free[region.device], *(made[v] for v in region.needs)])
        free[region.device] = start + region.cost
        made.update(dict.fromkeys(region.makes, start + region.cost))
        if region.device == 0:
            alive += sum(v[0] == "kept" for v in region.makes) - sum(
                v[0] == "kept" for v in region.needs if v not in region.makes
            )
            most = max(most, alive)
    # As long as anybody's: each device is busy but while the pipeline fills and drains.
    assert max(free.values()) == 3 * (microbatches + stages - 1)
    assert most <= stages  # what is kept for the backward pass does not grow with the microbatches


def test_dispatch_does_not_wait_for_devices():
    strategy = strategy_of(1, 2)
    with strategy.scope():
        ws = [replicax.Variable(0.01 * np.eye(128, dtype=np.float32), name=f"w{k}") for k in range(2)]

    def stage(w, h):
        return jax.lax.fori_loop(0, 400, lambda _, h: jnp.tanh(h @ w), h)

    def step(x):
        outputs = []
        for part in jnp.split(x, 4):
            h = stage(ws[0].value, part)
            outputs.append(stage(ws[1].value, strategy.assign_to_logical_device(h, 1)))
        return outputs

    x = jnp.ones((64, 128))
    jax.block_until_ready(strategy.run(step, args=(x,)))
    results = strategy.run(step, args=(x,))
    assert not results[-1].is_ready()  # the call has come back, and the devices are at work
    jax.block_until_ready(results)


@pytest.mark.parametrize("replicas", soak_except([1, 2], 2))
def test_a_padded_batch_through_a_pipeline(replicas) -> None:
    strategy = replicax.Strategy(
        replicax.StrategyExtended(np.array(jax.devices()[: 2 * replicas]).reshape(replicas, 2))
    )
    with strategy.scope():
        first = replicax.Variable(jnp.ones((3, 4)), name="first")
        second = replicax.Variable(jnp.ones((4, 2)), name="second")

    def step(x):
        hidden = strategy.assign_to_logical_device(x @ first, 1)
        outputs = hidden @ second
        return replicax.compute_average_loss(outputs.sum(-1)), outputs

    batches = [np.arange(24.0, dtype=np.float32).reshape(8, 3), np.arange(9.0, dtype=np.float32).reshape(3, 3)]
    dataset = strategy.distribute_dataset(batches, replicax.InputOptions(partial_batch="pad"))
    for element, batch in zip(dataset, batches, strict=True):
        expected = batch @ np.ones((3, 4)) @ np.ones((4, 2))
        share, outputs = strategy.run(step, args=(element,))
        np.testing.assert_allclose(strategy.reduce("sum", share), expected.sum(-1).mean(), rtol=1e-6)
        np.testing.assert_allclose(strategy.gather(outputs, 0), expected, rtol=1e-6)
        np.testing.assert_allclose(strategy.reduce("mean", outputs, axis=0), expected.mean(0), rtol=1e-6)
    assert strategy.extended.trace_count(step) == 1


@pytest.mark.parametrize("replicas", soak_except([1, 2], 2))
@pytest.mark.parametrize("partial", soak_except(["exact", "pad"], "pad"))
def test_run_steps_runs_a_pipeline_step_by_step(replicas, partial) -> None:
    batches = [random(n, 3, seed=i) for i, n in enumerate([8, 8, 8, 8, 6])]

    def trained(steps: int | None):
        """The variables after a pass, how many steps each call has run, and what the last step has set."""
        strategy = strategy_of(replicas, 2)
        with strategy.scope():
            first, second = (
                replicax.Variable(random(3, 4), name="first"),
                replicax.Variable(random(4, 2), name="second"),
            )
            count = replicax.Variable(0, name="count")
            seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
            optimizer = replicax.Optimizer(optax.adam(0.01))

        def step(x):
            def loss():
                hidden = strategy.assign_to_logical_device(jnp.tanh(x @ first), 1)
                return replicax.compute_average_loss(jnp.square(hidden @ second - 1).sum(-1))

            share, gradients = replicax.value_and_grad(loss, [first, second])()
            optimizer.apply_gradients(zip(gradients, [first, second], strict=True))
            count.assign_add(1)
            seen.assign_add(x.shape[0])
            return replicax.get_replica_context().all_reduce("sum", share)

        def step_of_many(ctx, x):
            ctx.set_last_step_output("loss", step(x), "mean")
            ctx.set_non_tensor_output("name", "a pipeline")

        iterator = iter(strategy.distribute_dataset(batches, replicax.InputOptions(partial_batch=partial)))
        if steps is None:
            losses = [float(strategy.run(step, args=(x,))) for x in iterator]
            done = [1] * len(losses)
        else:
            contexts = []
            while sum(ctx.steps for ctx in contexts) < len(batches):
                contexts.append(strategy.run_steps(step_of_many, iterator, steps))
            losses, done = [float(ctx.last_step_outputs["loss"]) for ctx in contexts], [ctx.steps for ctx in contexts]
            assert {ctx.non_tensor_outputs["name"] for ctx in contexts} == {"a pipeline"}
        assert [v.layout.logical_device for v in (first, second)] == [0, 1]
        assert strategy.extended.trace_count(step if steps is None else step_of_many) <= 2  # 6 rows are another shape
        return [v.numpy() for v in (first, second)], (int(count), int(seen.read_value())), losses, done

    values, counters, losses, _ = trained(None)
    for steps, groups in ((2, [2, 2, 1]), (9, [5])):
        found_values, found_counters, found_losses, done = trained(steps)
        assert done == groups
        assert found_counters == counters
        for found, expected in zip(found_values, values, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        np.testing.assert_allclose(found_losses, [losses[n - 1] for n in np.cumsum(groups)], rtol=1e-6)


def test_a_pipeline_that_fails_midway_leaves_the_elements_to_come(monkeypatch) -> None:
    from replicax.execution.many_steps import loop

    strategy = strategy_of(1, 2)
    with strategy.scope():
        total = replicax.Variable(0.0, name="total", logical_device=1)

    def step(ctx, x):
        total.assign_add(strategy.assign_to_logical_device(x, 1).sum())

    def fails(*args, **named):
        if float(total) == 1 + 2:
            raise RuntimeError("a device is gone")
        return run(*args, **named)

    run = loop.run
    iterator = iter(strategy.distribute_dataset([np.float32([n, 0]) for n in (1, 2, 3, 4)]))
    with monkeypatch.context() as patched:
        patched.setattr(loop, "run", fails)
        with pytest.raises(RuntimeError, match="a device is gone"):
            strategy.run_steps(step, iterator, 4)
    assert float(total) == 1 + 2
    assert strategy.run_steps(step, iterator, 4).steps == 2
    assert float(total) == 1 + 2 + 3 + 4
