"""Flax NNX under strategies: the same losses, parameters, statistics and metrics as NNX alone has."""

from __future__ import annotations

import functools
import gc
import linecache
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax
from tests.models.nets import CNN, MLP, Transformer, arrays, batches, check_alike, made, train_step, train_step_alone
from tests.programs.programs import third_party


def mirrored(replicas):
    return replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def sharded(replicas):
    partitioner = replicax.variables.FixedShardsPartitioner(replicas)
    return replicax.ShardedStrategy([f"cpu:{i}" for i in range(replicas)], partitioner)


def trained(strategy, objects, data, step=train_step):
    return [strategy.run(step, args=(*objects, batch)) for batch in strategy.distribute_dataset(data)]


WIDE = functools.partial(CNN, axis=replicax.REPLICA_AXIS)
KINDS = {"mlp": (MLP, MLP), "cnn": (CNN, WIDE), "transformer": (Transformer, Transformer)}
# Not Adam: some gradients are nothing but rounding (of a bias before a batch normalisation), and Adam makes them large.
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


@functools.cache
@third_party
def alone(kind):
    objects = made(KINDS[kind][0], CLIPPED)
    for batch in batches():
        train_step_alone(*objects, batch)
    return arrays(*objects), {name: float(value) for name, value in objects[2].compute().items()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", [mirrored, sharded])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@third_party
def test_a_model_trains_as_on_one_device(kind, replicas, place) -> None:
    strategy = place(replicas)
    with strategy.scope():
        objects = made(KINDS[kind][0] if replicas == 1 else KINDS[kind][1], CLIPPED)
    trained(strategy, objects, batches())
    expected, metrics = alone(kind)
    check_alike(arrays(*objects), expected)
    for name, value in objects[2].compute().items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-5)
    assert strategy.extended.trace_count(train_step) == 1
    pieces = {not value[...].is_fully_replicated for value in jax.tree.leaves(nnx.state(objects[:2]))}
    assert (True in pieces) == (place is sharded and replicas > 1)


@third_party
def test_shardings_that_a_model_names_are_the_strategys_matter() -> None:
    def found(init):
        with strategy.scope(), nnx.use_eager_sharding(False):
            model = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        def step(model, optimizer, x):
            grads = nnx.grad(lambda model: replicax.compute_average_loss(model(x).sum(-1)))(model)
            optimizer.update(model, grads)

        [x] = strategy.distribute_dataset([np.ones((4, 4), np.float32)])
        strategy.run(step, args=(model, optimizer, x))
        return model.kernel[...]

    strategy, init = sharded(2), nnx.initializers.lecun_normal()
    kernel, named = found(init), found(nnx.with_partitioning(init, ("fsdp", "tp")))
    np.testing.assert_array_equal(named, kernel)
    assert named.sharding == kernel.sharding
    assert not kernel.is_fully_replicated


class Trainer(nnx.Module):
    def __init__(self):
        self.model, self.optimizer, _ = made(MLP, optax.sgd(0.1, momentum=0.9))

    def step(self, batch, average=replicax.compute_average_loss):
        def loss_fn(model):
            return average(jnp.square(model(batch["x"])).sum(-1))

        loss, gradients = nnx.value_and_grad(loss_fn)(self.model)
        self.optimizer.update(self.model, gradients)
        return loss

    def shifted(self, by, batch):
        return self.step(jax.tree.map(lambda x: x + by, batch))

    def step_of_many(self, ctx, batch):
        ctx.set_last_step_output("loss", self.step(batch), "sum")

    def __call__(self, batch):
        self.step(batch)


METHODS = {
    "run": lambda trainer, strategy, data: strategy.run(trainer.step, args=tuple(data)),
    "a part of it": lambda trainer, strategy, data: strategy.run(functools.partial(trainer.shifted, 0), tuple(data)),
    "a part of it by name": lambda trainer, strategy, data: strategy.run(
        functools.partial(trainer.shifted, by=0), kwargs={"batch": next(iter(data))}
    ),
    "the module itself": lambda trainer, strategy, data: strategy.run(trainer, args=tuple(data)),
    "run_steps": lambda trainer, strategy, data: strategy.run_steps(trainer.step_of_many, iter(data), 1),
    "train": lambda trainer, strategy, data: replicax.train(trainer.step, data, 1, progress=False),
    "accumulated": lambda trainer, strategy, data: replicax.train(trainer.step, data, 1, accumulate=2, progress=False),
}


@pytest.mark.parametrize("call", METHODS.values(), ids=METHODS.keys())
@third_party
def test_a_step_may_be_a_method_of_a_module(pair, call) -> None:
    trainer, alone = Trainer(), Trainer()
    call(trainer, pair, pair.distribute_dataset(batches(1)))
    nnx.jit(functools.partial(Trainer.step, average=jnp.mean))(alone, batches(1)[0])
    check_alike(arrays(trainer), arrays(alone), 1e-4)


@third_party
def test_the_module_of_a_method_is_saved(pair, tmp_path) -> None:
    first, second = Trainer(), Trainer()
    for trainer in (first, second):
        replicax.train(trainer.step, pair.distribute_dataset(batches(1)), 1, checkpoints=tmp_path, progress=False)
    check_alike(arrays(second.model, second.optimizer), arrays(first.model, first.optimizer))


def test_a_method_without_arguments(pair) -> None:
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def step(self):
            self.count[...] += replicax.get_replica_context().all_reduce("sum", 1.0)

    counter = Counter()
    for _ in range(3):
        pair.run(counter.step)
    assert float(counter.count[...]) == 6.0
    assert pair.extended.trace_count(Counter.step) == 1
    with pytest.raises(TypeError, match="fn must be callable"):
        pair.run(counter)
    with pytest.raises(flax.errors.TraceContextError, match=r"step '<lambda>', in step .* Pass it as an argument"):
        pair.run(lambda: counter.step())


@third_party
def test_on_the_per_replica_executor(pair) -> None:
    objects, expected = (made(MLP, optax.sgd(0.1, momentum=0.9)) for _ in range(2))
    with replicax.debug():
        trained(pair, objects, batches(1))
    train_step_alone(*expected, batches(1)[0])
    check_alike(arrays(*objects), arrays(*expected), 1e-4)


@third_party
def test_many_steps_in_one_dispatch(pair) -> None:
    objects = made(WIDE, CLIPPED)

    def step(model, optimizer, metrics, ctx, x, y):
        ctx.set_last_step_output("loss", train_step(model, optimizer, metrics, {"x": x, "y": y}), "sum")

    pairs = [(batch["x"], batch["y"]) for batch in batches()]
    iterator = iter(pair.distribute_dataset(pairs))
    for _ in range(2):
        pair.run_steps(functools.partial(step, *objects), iterator, 2)
    check_alike(arrays(*objects), alone("cnn")[0])
    assert pair.extended.trace_count(step) == 1


@third_party
def test_a_last_batch_that_is_smaller(pair) -> None:
    data = [*batches(1), {name: value[:5] for name, value in batches(2)[1].items()}]
    expected = made(MLP, CLIPPED)
    for batch in data:
        train_step_alone(*expected, batch)
    objects = made(MLP, CLIPPED)
    trained(pair, objects, data)
    check_alike(arrays(*objects), arrays(*expected))
    assert float(objects[2].compute()["accuracy"]) == pytest.approx(float(expected[2].compute()["accuracy"]))

    padded = made(MLP, CLIPPED)
    options = replicax.InputOptions(partial_batch="pad")
    for batch in pair.distribute_dataset(data, options):
        pair.run(train_step, args=(*padded, batch))
    check_alike(arrays(*padded), arrays(*expected))


SETTINGS = {
    "tree mode": lambda: nnx.set_graph_mode(False),
    "a mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@third_party
def test_settings_of_the_user(pair, setting) -> None:
    with setting():
        objects = made(MLP, CLIPPED)
        trained(pair, objects, batches())
    check_alike(arrays(*objects), alone("mlp")[0])


# --- batch statistics, random streams ---------------------------------------------------------------------


@third_party
def test_statistics_of_each_replica_are_averaged(pair) -> None:
    model, x = CNN(rngs=nnx.Rngs(0)), batches(1)[0]["x"]
    halves = [CNN(rngs=nnx.Rngs(0)) for _ in range(2)]
    forward = nnx.jit(lambda half, part: half(part))
    for half, part in zip(halves, (x[:4], x[4:]), strict=True):
        forward(half, part)
    [batch] = pair.distribute_dataset([x])
    pair.run(lambda model, x: model(x), args=(model, batch))
    expected = np.mean([half.norm.var[...] for half in halves], 0)
    np.testing.assert_allclose(model.norm.var[...], expected, rtol=1e-6)


@third_party
def test_streams_differ_between_replicas_and_count_alike(pair) -> None:
    rngs = nnx.Rngs(0, params=1)
    dropout = nnx.Dropout(0.5, rngs=rngs)

    def step(dropout, rngs):
        ones = jnp.ones(64)
        return dropout(ones), dropout(ones), rngs.params.normal(3), rngs.normal((2, 2))

    first = [pair.local_results(r) for r in pair.run(step, args=(dropout, rngs))]
    drawn = [np.asarray(x) for results in first[:2] for x in results]
    assert len({x.tobytes() for x in drawn}) == 4  # two replicas, two calls
    assert first[2][0].tolist() == first[2][-1].tolist()  # initial values are alike
    assert first[3][0].tolist() != first[3][1].tolist()
    assert int(rngs.default.count[...]) == 1 + int(dropout.rngs.count[...] == 2)
    again = pair.local_results(pair.run(step, args=(dropout, rngs))[0])
    assert again[0].tobytes() not in {x.tobytes() for x in drawn}


@third_party
def test_one_replica_draws_what_nnx_draws_alone() -> None:
    strategy, kind = mirrored(1), functools.partial(CNN, rate=0.5)
    objects, expected = made(kind, CLIPPED), made(kind, CLIPPED)
    trained(strategy, objects, batches(2))
    for batch in batches(2):
        train_step_alone(*expected, batch)
    check_alike(arrays(*objects), arrays(*expected))


# --- the user's objects between steps -----------------------------------------------------------------------


@third_party
def test_what_is_assigned_between_steps_counts(strategy) -> None:
    model = MLP(rngs=nnx.Rngs(0))
    step = lambda model, x: model.first(x).sum()  # noqa: E731
    strategy.run(step, args=(model, jnp.ones((2, 6))))
    model.first.kernel[...] = jnp.zeros((6, 16))
    model.first.bias = nnx.Param(jnp.ones(16))  # another nnx.Variable, so another program
    assert float(strategy.run(step, args=(model, jnp.ones((2, 6))))) == 32
    assert strategy.extended.trace_count(step) == 2
    model.first.bias.set_value(own := np.zeros(16, np.float32))
    for value in (1, 2):
        own[:] = value
        assert float(strategy.run(step, args=(model, jnp.ones((2, 6))))) == 32 * value


@pytest.mark.parametrize("place", [pytest.param(mirrored, marks=pytest.mark.soak), sharded])
@third_party
def test_what_is_read_between_steps_stays(place) -> None:
    strategy = place(2)
    objects = made(MLP)
    trained(strategy, objects, batches(1))
    model = objects[0]
    kept = {
        "array": model.first.kernel[...],
        "view": np.asarray(model.last.kernel[...]),
        "arrays": nnx.as_pure(nnx.state(model)),
        "copy": nnx.clone(model),
    }
    before = jax.tree.map(np.array, kept)
    trained(strategy, objects, batches(3))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), kept, before))
    assert not np.allclose(model.first.kernel[...], before["array"])


@third_party
def test_arrays_that_nobody_else_has_are_overwritten(pair) -> None:
    objects = made(MLP)
    trained(pair, objects, batches(2))
    old = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(objects[0]))]
    kept = old[0]  # and nobody has the others after the next line
    pointers = [a.addressable_data(0).unsafe_buffer_pointer() for a in old]
    del old
    trained(pair, objects, batches(1))
    assert not kept.is_deleted()
    new = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(objects[0]))]
    assert {a.addressable_data(0).unsafe_buffer_pointer() for a in new} & set(pointers)


@third_party
def test_static_parts_are_compared_by_value(pair) -> None:
    model = CNN(rngs=nnx.Rngs(0), rate=0.5)
    traced = []

    def step(model, x):
        traced.append(model.dropout.deterministic)
        return model(x)

    for mode in (model.train, model.eval, model.train, model.eval):
        mode()
        pair.run(step, args=(model, jnp.ones((2, 6))))
    other = nnx.view(model, deterministic=False, use_running_average=False)
    pair.run(step, args=(other, jnp.ones((2, 6))))
    assert traced == [False, True]
    assert np.allclose(other.norm.mean[...], model.norm.mean[...])  # they share it


@third_party
def test_shared_parts_stay_shared(pair) -> None:
    model = Transformer(rngs=nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    before = np.array(model.embed.embedding[...])

    def step(model, optimizer, x):
        assert optimizer.model is model
        assert model.head.embed is model.embed
        gradients = nnx.grad(lambda model: replicax.compute_average_loss(model(x).sum(-1)))(model)
        optimizer.update(gradients)

    [batch] = pair.distribute_dataset([batches(1)[0]["x"]])
    pair.run(step, args=(model, optimizer, batch))
    assert not np.allclose(before, model.embed.embedding[...])


@third_party
@pytest.mark.usefixtures("young_heap")
def test_variables_end_with_the_objects(pair) -> None:
    def count():
        gc.collect()
        return len(pair.extended.variables._variables)

    before = count()
    objects = made(MLP)
    trained(pair, objects, batches(1))
    assert count() > before
    del objects
    assert count() == before


@third_party
def test_one_model_under_two_strategies(pair) -> None:
    objects = made(MLP, CLIPPED)
    for strategy, batch in zip([pair, mirrored(4), pair, pair], batches(), strict=True):
        trained(strategy, objects, [batch])
    check_alike(arrays(*objects), alone("mlp")[0])


@third_party
def test_a_checkpoint_goes_on_under_another_strategy(pair, tmp_path) -> None:
    objects = made(WIDE, CLIPPED)
    trained(pair, objects, batches()[:2])
    replicax.Checkpoint(model=objects[0], others=objects[1:]).save(tmp_path / "a")
    fresh = made(WIDE, CLIPPED)
    fresh[0].norm.mean[...] = jnp.ones(4)
    checkpoint = replicax.Checkpoint(model=fresh[0], others=fresh[1:])
    before = fresh[0].conv
    checkpoint.restore(tmp_path / "a")
    assert checkpoint.model is fresh[0]
    assert fresh[0].conv is before
    trained(sharded(4), fresh, batches()[2:])
    check_alike(arrays(*fresh), alone("cnn")[0])


def test_a_checkpoint_restores_a_variable_and_a_state_in_place(tmp_path) -> None:
    def objects():
        return nnx.Variable(jnp.ones(2)), nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    (count, model), (new_count, new_model) = objects(), objects()
    count[...], model.mean[...] = jnp.full(2, 4.0), jnp.full(3, 5.0)
    replicax.Checkpoint(count=count, state=nnx.state(model)).save(tmp_path / "a")
    checkpoint = replicax.Checkpoint(count=new_count, state=nnx.state(new_model))
    checkpoint.restore(tmp_path / "a")
    assert checkpoint.count is new_count
    assert checkpoint.state["mean"] is new_model.mean
    assert (new_count[...].tolist(), new_model.mean[...].tolist()) == ([4, 4], [5, 5, 5])


# --- mistakes ------------------------------------------------------------------------------------------------


class Sowing(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(6, 4, rngs=rngs)
        self.table, self.mode = jnp.ones(4), 1

    def __call__(self, x):
        h = self.linear(x)
        self.h = nnx.Intermediate(h)
        return h


def changes_an_attribute(model, x):
    model.mode = 3
    return model.linear(x)


def replaces_an_array(model, x):
    model.table = model.table * 2


def assigns_its_own(model, x):
    model.linear.bias[...] = x.mean(0)[:4]


def another_shape(model, x):
    model.linear.bias.set_value(jnp.zeros(3))


ITS_OWN = r"(?s)'sowing/linear/bias'.*, of an NNX object, .* differs between.*test_nnx\.py:\d+ \(assigns_its_own"
MISTAKES = {
    "sown": (lambda model, x: model(x), TypeError, r"structure.*sowing/h is new.*nnx.pop"),
    "attribute": (changes_an_attribute, TypeError, "structure of an NNX object: the attribute 'mode' was 1, now 3\\."),
    "array": (replaces_an_array, TypeError, r"sowing/table was changed by the step.*nnx.Variable"),
    "its own": (assigns_its_own, replicax.errors.LocalityError, ITS_OWN),
    "shape": (another_shape, ValueError, r"'sowing/linear/bias'.*shape \(3,\); expected \(4,\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@third_party
def test_what_cannot_leave_a_step(pair, mistake) -> None:
    step, error, message = MISTAKES[mistake]
    model = Sowing(rngs=nnx.Rngs(0))
    before = arrays(model)
    [batch] = pair.distribute_dataset([batches(1)[0]["x"]])
    with pytest.raises(error, match=message):
        pair.run(step, args=(model, batch))
    check_alike(arrays(model), before, 0)
    popped = pair.run(lambda model, x: (model(x), nnx.pop(model, nnx.Intermediate))[0], args=(model, batch))
    assert len(pair.local_results(popped)) == 2


@third_party
def test_an_argument_that_is_assigned_as_it_is_has_no_line(pair) -> None:
    class Last(nnx.Module):
        def __init__(self):
            self.batch = nnx.Variable(jnp.zeros((2, 6)))

    [batch] = pair.distribute_dataset([np.ones((4, 6), np.float32)])
    with pytest.raises(replicax.errors.LocalityError, match=r"(?s)'last/batch'.*nnx\.Cache\)$"):
        pair.run(lambda model, x: model.batch.set_value(x), args=(Last(), batch))


class Decoder(nnx.Module):
    def __init__(self):
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=True, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.attention(x)


@third_party
def test_each_replica_may_keep_its_own_cache_of_attention_as_the_error_says(pair) -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.normal(size=(4, 1, 8)).astype(np.float32) for _ in range(3)]
    model, alone = Decoder(), Decoder()
    model.attention.init_cache((2, 3, 8))
    alone.attention.init_cache((4, 3, 8))
    with pytest.raises(replicax.errors.LocalityError, match=r"(?s)own = nnx.state\(model, nnx.Cache\).*test_nnx\.py"):
        pair.run(lambda model, x: model(x), args=(model, next(iter(pair.distribute_dataset(tokens)))))

    def step(model, own, x):
        graphdef, _, rest = nnx.split(model, nnx.Cache, ...)
        copy = nnx.merge(graphdef, own, rest, copy=True)
        return copy(x), nnx.state(copy, nnx.Cache)

    own, alone_step = nnx.state(model, nnx.Cache), nnx.jit(lambda alone, x: alone(x))
    for x, token in zip(pair.distribute_dataset(tokens), tokens, strict=True):
        expected = alone_step(alone, token)
        y, own = pair.run(step, args=(model, own, x))
        np.testing.assert_allclose(np.concatenate(pair.local_results(y)), expected, rtol=1e-5, atol=1e-6)


@third_party
def test_evaluation_has_two_ways_and_a_third_is_told_them(pair) -> None:
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    ones = np.ones((4, 6), np.float32)

    def evaluates(model, x):
        model.eval()
        return model(x)

    message = (
        r"has called train\(\) or eval\(\) .* sets deterministic: .*before strategy.run\(…\).*nnx.view\(model, deter"
    )
    with pytest.raises(TypeError, match=message):
        pair.run(evaluates, args=(model, ones))
    assert not model.deterministic
    viewed = pair.run(lambda model, x: nnx.view(model, deterministic=True)(x), args=(model, ones))
    np.testing.assert_array_equal(viewed, ones)
    model.eval()
    np.testing.assert_array_equal(pair.run(lambda model, x: model(x), args=(model, ones)), ones)


@third_party
@pytest.mark.parametrize("executor", ["compiled", pytest.param("per_replica", marks=pytest.mark.soak)])
def test_gradients_and_losses_that_are_reduced_already_are_taken_as_they_are(pair, executor) -> None:
    def step(model, optimizer, metric, x, reduced):
        loss, gradients = nnx.value_and_grad(lambda model: replicax.compute_average_loss(model(x).sum(-1)))(model)
        if reduced:
            loss, gradients = replicax.get_replica_context().all_reduce("sum", (loss, gradients))
        metric.update(loss=loss)
        optimizer.update(model, gradients)

    [batch] = pair.distribute_dataset([batches(1)[0]["x"]])
    found = []
    for reduced in (False, True):
        model, optimizer, _ = made(MLP)
        metric = nnx.metrics.Average("loss")
        for _ in range(2):
            args = model, optimizer, metric, batch, reduced
            pair.run(step, args=args, options=replicax.RunOptions(executor=executor))
        found.append((arrays(model), metric.compute()))
    check_alike(found[1][0], found[0][0], 1e-6)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-6)


@third_party
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_number_without_influence_on_the_loss_stays(pair, executor) -> None:
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale, self.unused = nnx.Param(jnp.float32(2.0)), nnx.Param(jnp.float32(3.0))

    def step(model, optimizer, x):
        gradients = nnx.grad(lambda model: replicax.compute_average_loss(x * model.scale[...]))(model)
        gradients.unused[...] = jnp.zeros(())
        optimizer.update(model, gradients)

    model = Scaled()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    [batch] = pair.distribute_dataset([np.arange(4, dtype=np.float32)])
    pair.run(step, args=(model, optimizer, batch), options=replicax.RunOptions(executor=executor))
    assert (float(model.scale[...]), float(model.unused[...])) == (0.5, 3.0)


@third_party
def test_a_loss_reaches_the_transformation_inside_multi_steps(pair) -> None:
    def step(average, model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: average(jnp.square(model(x)[:, 0] - 1)))(model)
        optimizer.update(model, gradients, value=loss)

    alone = nnx.jit(functools.partial(step, jnp.mean))
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0)  # never better, so it reduces
    found = []
    for run in (lambda *args: pair.run(functools.partial(step, replicax.compute_average_loss), args), None):
        model = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.chain(optax.sgd(0.1), plateau), 2), wrt=nnx.Param)
        data = [batch["x"] for batch in batches()]
        for x in pair.distribute_dataset(data) if run else data:
            (run or alone)(model, optimizer, x)
        found.append(arrays(model, optimizer))
    check_alike(*found)


@third_party
@pytest.mark.parametrize("executor", ["compiled", pytest.param("per_replica", marks=pytest.mark.soak)])
def test_a_line_search_sees_the_loss_of_the_whole_batch(pair, executor) -> None:
    def step(average, model, optimizer, x):
        def loss_of(model):
            return average(jnp.square(model(x)[:, 0] - 1))

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        graph = nnx.graphdef(model)
        value_fn = lambda parameters: loss_of(nnx.merge(graph, parameters))  # noqa: E731
        optimizer.update(model, gradients, value=loss, grad=gradients, value_fn=value_fn)

    options, alone = replicax.RunOptions(executor=executor), nnx.jit(functools.partial(step, jnp.mean))
    found = []
    for run in (
        lambda *args: pair.run(functools.partial(step, replicax.compute_average_loss), args, options=options),
        None,
    ):
        model = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
        data = [batch["x"] for batch in batches()]
        for x in pair.distribute_dataset(data) if run else data:
            (run or alone)(model, optimizer, x)
        found.append(arrays(model))
    check_alike(*found)


@third_party
def test_a_model_that_an_accumulated_step_makes_is_told(pair) -> None:
    def step(model, optimizer, batch):
        gradients = nnx.grad(lambda model: replicax.compute_average_loss(model(batch["x"]).sum(-1)))(model)
        optimizer.update(nnx.clone(model), gradients)

    step, data = functools.partial(step, *made(MLP)[:2]), pair.distribute_dataset(batches(1))
    with pytest.raises(TypeError, match="must be arguments of the step, or parts of one, got a MLP that the step has"):
        replicax.train(step, data, 1, accumulate=2, progress=False)


@third_party
def test_a_number_that_is_no_share(pair) -> None:
    metric = nnx.metrics.Average("rate")
    with pytest.raises(replicax.errors.LocalityError, match=r"rate is a number.*scale_regularization_loss"):
        pair.run(lambda metric, x: metric.update(rate=x * 2), args=(metric, jnp.float32(3)))
    share = replicax.scale_regularization_loss
    pair.run(lambda metric, x: metric.update(rate=share(x * 2)), args=(metric, jnp.float32(3)))
    assert float(metric.compute()) == 6


def mean_as_loss(model, optimizer, batch):
    def loss_fn(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return losses.mean()  # wrong

    optimizer.update(model, nnx.grad(loss_fn)(model))


def penalty_as_it_is(model, optimizer, batch):
    def loss_fn(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
        return replicax.compute_average_loss(losses) + 1e-4 * penalty  # wrong

    optimizer.update(model, nnx.value_and_grad(loss_fn)(model)[1])


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("step", "text"),
    [(mean_as_loss, "a mean over one replica's own examples"), (penalty_as_it_is, "the same on every replica")],
)
@third_party
def test_a_loss_that_is_no_share(pair, kind, step, text) -> None:
    model, optimizer, _ = made(KINDS[kind][1])
    [batch] = pair.distribute_dataset(batches(1))
    with pytest.warns(replicax.errors.ShareWarning, match=text) as found:
        pair.run(step, args=(model, optimizer, batch))
    assert len(found) == 1
    assert "# wrong" in linecache.getline(found[0].filename, found[0].lineno)


def changes_a_variable(model, count, state):
    count[...] += 1


def changes_a_state(model, count, state):
    state["mean"][...] += 1


def merges(model, count, state, copy=False):
    nnx.merge(nnx.graphdef(model), state, copy=copy)(jnp.ones((4, 3)))


@pytest.mark.parametrize("step", [changes_a_variable, changes_a_state, merges])
@pytest.mark.parametrize("trains", [False, True])
@third_party
def test_changes_of_a_variable_or_a_state_would_be_lost(pair, step, trains) -> None:
    def whole(model, count, state):
        step(model, count, state)
        if trains:
            model.scale[...] += 1

    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    args = model, nnx.Variable(jnp.int32(1)), nnx.state(nnx.clone(model))
    for fn, rest in (
        (whole, args),
        (functools.partial(whole, *args[:2]), args[2:]),
        (functools.partial(whole, *args), ()),
    ):
        with pytest.raises(TypeError, match=r"of type (Variable|State), was changed in place .*change would be lost"):
            pair.run(fn, args=rest)


@third_party
def test_a_variable_or_a_state_that_a_step_changes_leaves_it_or_is_a_copy(pair) -> None:
    def step(model, count, state, rngs):
        changes_a_variable(model, count, state)
        merges(model, count, state, copy=True)
        nnx.merge(nnx.graphdef(nnx.Rngs(0)), rngs).normal(3)  # its count goes on
        return {"new": count}

    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    new = pair.run(step, args=(model, nnx.Variable(jnp.int32(1)), nnx.state(model), nnx.state(nnx.Rngs(0))))
    assert int(new["new"][...]) == 2
    assert not model.mean[...].any()


@third_party
def test_mutable_arrays_in_a_model(pair) -> None:
    with nnx.var_defaults(ref=True):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"linear/bias is an nnx.Variable with hijax=True or ref=True"):
        pair.run(lambda model: None, args=(model,))


def linear_step(model, *args) -> None:
    pass


LINEAR = "was a Linear (known by its structure and variables), now another"
MADE_ANEW = {
    f"args[0]: {LINEAR}": lambda: (linear_step, nnx.Linear(1, 1, rngs=nnx.Rngs(0))),
    f"the captured value 'args[0]': {LINEAR}": lambda: (
        functools.partial(linear_step, nnx.Linear(1, 1, rngs=nnx.Rngs(0))),
    ),
    "args[0]: was a Mean that is gone, now the Python value Mean('mean')": lambda: (linear_step, replicax.Mean()),
    "args[0]: was a variable, now another": lambda: (linear_step, replicax.Variable(1.0)),
}


@pytest.mark.parametrize("change", MADE_ANEW)
@third_party
def test_objects_that_are_made_for_each_call_are_told(change) -> None:
    strategy = mirrored(2)

    def run_often() -> None:
        for _ in range(11):
            step, *args = MADE_ANEW[change]()
            strategy.run(step, args=args)

    with pytest.warns(replicax.errors.RetraceWarning, match=re.escape(change) + ".*objects, such as models.*, once"):
        run_often()
