from __future__ import annotations

import dataclasses
import gc
import threading

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax

EXECUTORS = pytest.mark.parametrize("executor", ["compiled", "per_replica"])


# --- functions of which nothing runs --------------------------------------------------------------------


async def asynchronous(*args):
    return args


async def asynchronous_generator(*args):
    yield args


def generator(*args):
    yield args


NOT_RUN = pytest.mark.parametrize(
    ("fn", "what"),
    [
        (asynchronous, "asynchronous is an async function"),
        (asynchronous_generator, "asynchronous_generator is an async function"),
        (generator, "generator has yielded instead of returning"),
        (lambda *xs: (x for x in xs), "<lambda> has yielded"),
    ],
)


@EXECUTORS
@NOT_RUN
def test_a_step_of_which_nothing_runs(strategy, fn, what, executor) -> None:
    with pytest.raises(TypeError, match=f"strategy.run: {what}"):
        strategy.run(fn, args=(1.0,), options=replicax.RunOptions(executor))


@EXECUTORS
def test_a_result_that_has_not_run(pair, executor) -> None:
    with pytest.raises(TypeError, match="generator expression"):
        pair.run(lambda x: {"a": x, "b": (y for y in [x])}, args=(1.0,), options=replicax.RunOptions(executor))


@NOT_RUN
def test_other_functions_of_which_nothing_runs(pair, fn, what) -> None:
    with pair.scope():
        v = replicax.Variable(1.0, name="v")
    batches = iter(pair.distribute_dataset([np.ones(2)]))

    def merging():
        replicax.get_replica_context().merge_call(fn)

    calls = {
        "strategy.run_steps": lambda: pair.run_steps(fn, batches, 1),
        "merge_call": lambda: pair.run(merging),
        "value_and_grad": lambda: pair.run(replicax.value_and_grad(fn, [v])),
        "extended.update": lambda: pair.extended.update(v, fn),
        "distribute_values_from_function": lambda: pair.distribute_values_from_function(fn),
        "variable 'w': the initial value": lambda: replicax.Variable(fn, name="w"),
    }
    for method, call in calls.items():
        with pytest.raises(TypeError, match=f"{method}.*: {what}"):
            call()
    assert float(v) == 1


def test_an_async_dataset_function(pair) -> None:
    for fn in (asynchronous, asynchronous_generator):
        with pytest.raises(TypeError, match="dataset_fn is an async function"):
            pair.distribute_datasets_from_function(fn)


# --- contexts that nobody keeps -------------------------------------------------------------------------


@pytest.mark.usefixtures("young_heap")
def test_a_context_that_nobody_keeps_is_not_left(pair) -> None:
    seen = []

    def in_a_notebook() -> None:
        pair.scope().__enter__()
        gc.collect()
        seen.append(replicax.get_strategy() is pair)
        replicax.debug().__enter__()
        gc.collect()
        pair.run(lambda x: seen.append(isinstance(x, jax.core.Tracer)), args=(1.0,))

    thread = threading.Thread(target=in_a_notebook)  # whose contexts end with it
    thread.start()
    thread.join()
    assert seen == [True, False, False]


def test_scope_and_debug_decorate_functions(pair) -> None:
    @pair.scope()
    def look(again: bool) -> bool:
        return replicax.get_strategy() is pair and (not again or look(False))

    assert look(True)
    assert look(True)
    seen = []
    replicax.debug()(lambda: pair.run(lambda x: seen.append(isinstance(x, jax.core.Tracer)), args=(1.0,)))()
    with replicax.debug():
        replicax.debug()(lambda: None)()  # the outer one goes on
        pair.run(lambda x: seen.append(isinstance(x, jax.core.Tracer)), args=(1.0,))
    assert seen == [False] * 4


def test_an_exception_goes_through_a_scope_that_an_interrupt_has_left_on_top(pair) -> None:
    @pair.scope()
    def interrupted() -> None:
        pair.scope().__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(replicax.errors.ContextError, match="without having been entered"):
        pair.scope().__exit__(None, None, None)


# --- mutable arrays -------------------------------------------------------------------------------------


@EXECUTORS
def test_a_mutable_array_is_no_result_and_no_argument(strategy, executor) -> None:
    options = replicax.RunOptions(executor)
    with pytest.raises(TypeError, match=r"returned a mutable array \(jax.new_ref\).*return its value, ref\[...\]"):
        strategy.run(lambda x: {"ref": jax.new_ref(x)}, args=(jnp.ones(3),), options=options)
    with pytest.raises(TypeError, match=r"args\[0\]\['ref'\] is a mutable array.*pass its value, ref\[...\]"):
        strategy.run(lambda x: x["ref"][...], args=({"ref": jax.new_ref(jnp.ones(3))},), options=options)

    def inside(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...]

    assert strategy.run(inside, args=(jnp.ones(2),), options=options).tolist() == [2, 2]


def test_a_mutable_array_from_outside_or_freed(pair) -> None:
    ref = jax.new_ref(jnp.ones(3))
    with pytest.raises(TypeError, match=r"reads_it uses a mutable array .* made outside of it.*leave them at 'ignore'"):
        pair.run(named("reads_it", lambda: ref[...]))

    def freed(then):
        def step(x):
            ref = jax.new_ref(x)
            jax.free_ref(ref)
            then(ref)

        return step

    with pytest.raises(ValueError, match="freed twice"):
        pair.run(freed(jax.free_ref), args=(1.0,))
    with pytest.raises(ValueError, match="used after it was freed"):
        pair.run(freed(lambda ref: ref[...]), args=(1.0,))


def named(name, fn):
    fn.__name__ = name
    return fn


# --- arguments that are changed in place ----------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Net:
    """A module that may be changed in place, of a library that Replicax does not know."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, x):
        return x @ self.kernel

    def tree_flatten(self):
        return (self.kernel,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def trained(net, x):
    loss, gradient = jax.value_and_grad(lambda kernel: (Net(kernel)(x) ** 2).mean())(net.kernel)
    net.kernel = net.kernel - 0.1 * gradient
    return loss


X = np.ones((4, 3), np.float32)


@EXECUTORS
def test_a_module_that_is_updated_in_place_would_not_be_trained(strategy, executor) -> None:
    options = replicax.RunOptions(executor)
    net = Net(jnp.ones((3, 2)))
    with pytest.raises(TypeError, match=r"args\[0\], of type Net, was changed in place .*the change would be lost"):
        strategy.run(trained, args=(net, X), options=options)
    with pytest.raises(TypeError, match=r"kwargs\['net'\], of type Net, was changed in place"):
        strategy.run(trained, kwargs={"net": net, "x": X}, options=options)


@EXECUTORS
def test_a_module_whose_new_state_leaves_the_step(strategy, executor) -> None:
    options = replicax.RunOptions(executor)
    net = Net(jnp.ones((3, 2)))

    def step(net, x):
        trained(net, x)
        return net

    [batch] = strategy.distribute_dataset([X])
    new = strategy.run(step, args=(net, batch), options=options)
    assert not np.allclose(strategy.local_results(new.kernel)[0], net.kernel)
    assert strategy.run(lambda net, x: net(x), args=(net, X), options=options).shape == (4, 2)


@EXECUTORS
@pytest.mark.parametrize("change", [lambda net: net.kernel + 1, lambda net: 0.0, lambda net: np.zeros((3, 2))])
def test_a_change_would_be_lost_of_a_module_beside_what_is_trained(pair, executor, change) -> None:
    with pair.scope():
        w = replicax.Variable(jnp.ones(3))

    def step(net, returned, x):
        net.kernel, returned.kernel = change(net), returned.kernel + 1
        w.assign_add(w.value)
        return returned

    args = Net(jnp.arange(6).reshape(3, 2)), Net(jnp.ones((3, 2))), X
    with pytest.raises(TypeError, match=r"args\[0\], of type Net, was changed in place .*the change would be lost"):
        pair.run(step, args=args, options=replicax.RunOptions(executor))
    assert w.numpy().tolist() == [1, 1, 1]


@EXECUTORS
def test_a_counter_of_a_random_stream_may_count_on(pair, executor) -> None:
    def step(stream, x):
        stream.kernel = stream.kernel + 1
        return x.sum() * stream.kernel.astype(jnp.float32)

    stream = Net(jnp.uint32(4))
    assert float(pair.run(step, args=(stream, X), options=replicax.RunOptions(executor))) == 60
    assert int(stream.kernel) == 4


def test_a_module_that_is_captured_and_updated_in_place(pair) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(x):
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    with pytest.raises(
        ValueError,
        match=r"step 'step' at .*test_step_call.py:\d+: .* changes an object of Flax NNX that is no argument. "
        r"Pass it as an argument: .*functools.partial\(step, model, optimizer\).*\nFlax says: .*different trace level",
    ):
        pair.run(step, args=(X,))
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((model, optimizer)))


def test_a_module_that_a_loss_captures_and_updates_in_place(pair) -> None:
    generator, discriminator = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def step(generator, discriminator, x, captures):
        if captures:
            return nnx.grad(lambda generator: (discriminator(generator(x)) ** 2).mean())(generator)
        return nnx.grad(lambda generator, other: (other(generator(x)) ** 2).mean())(generator, discriminator)

    [x] = pair.distribute_dataset([np.ones((4, 3), np.float32)])
    with pytest.raises(
        flax.errors.TraceContextError,
        match=r"takes each object that it changes.*\(generator, discriminator\)\), or uses",
    ):
        pair.run(step, args=(generator, discriminator, x, True))
    pair.run(step, args=(generator, discriminator, x, False))
    assert discriminator.mean[...].any()


class Trainer:
    def __init__(self) -> None:
        self.params, self.momentum, self.cache = {"w": jnp.ones(3)}, jnp.zeros(3), None
        self.steps = 0

    def step(self, x):
        self.steps += 1
        self.cache = jax.grad(lambda params: x[0] @ params["w"])(self.params)["w"]
        self.momentum = 0.9 * self.momentum + replicax.get_replica_context().all_reduce("mean", self.cache)
        self.params["w"] = self.params["w"] - self.momentum
        return self.params["w"]


COMPILED, PLAIN = EXECUTORS = [replicax.RunOptions("compiled"), replicax.RunOptions("per_replica")]


@pytest.mark.parametrize("options", EXECUTORS)
def test_arrays_that_an_object_keeps_would_not_be_trained(strategy, options) -> None:
    trainer = Trainer()
    if options is PLAIN and strategy.num_replicas_in_sync == 1:  # which does what the Python says
        strategy.run(trainer.step, args=(X,), options=options)
        assert trainer.params["w"].tolist() == (1 - X[0]).tolist()
        return
    for step, args in ((trainer.step, (X,)), (Trainer.step, (trainer, X))):
        with pytest.raises(
            TypeError, match=r"^Trainer\.\w+ was read by the step, which then set it.*replicax.as_variables"
        ):
            strategy.run(step, args=args, options=options)
        assert [trainer.params["w"].tolist(), trainer.momentum.tolist()] == [[1, 1, 1], [0, 0, 0]]


class Logger:
    def __init__(self) -> None:
        self.last, self.losses, self.named = None, [], {"scale": jnp.ones(()), "loss": 0.0, "new": jnp.zeros(())}
        self.fails = False

    def step(self, x):
        self.named["loss"] = x.sum() * jax.jit(lambda: self.named["scale"])()
        self.named["new"] = x.sum()
        self.losses.append(self.named["loss"])
        if self.last is not self.losses[-1]:
            self.last = self.losses[-1]
        if self.fails:
            raise ValueError("a mistake of the user's")
        return self.named["loss"]


@pytest.mark.parametrize("options", EXECUTORS)
def test_a_step_may_leave_values_in_an_object_that_no_step_reads(strategy, options) -> None:
    logger = Logger()
    for rows in (3, 3, 2, 4):  # traced three times
        assert float(strategy.run(logger.step, args=(jnp.ones(rows),), options=options)) == rows


def test_an_object_keeps_no_traced_value_of_a_step_that_fails(strategy) -> None:
    logger = Logger()
    logger.fails, logger.losses = True, [{"first": 0.5}]
    alias = logger.losses[0]

    def step(x):
        alias.update(first=x.sum(), other=x)
        return logger.step(x)

    with pytest.raises(ValueError, match="a mistake of the user's"):
        strategy.run(step, args=(X,))
    assert logger.last is None
    assert {name: float(value) for name, value in logger.named.items()} == {"scale": 1, "loss": 0, "new": 0}
    assert alias == {"first": 0.5}
    assert logger.losses[0] is alias


def test_a_number_that_a_step_has_read_of_an_array_would_stay(strategy) -> None:
    def step(logger, x):
        scale = float(logger.last)
        logger.last = jnp.where(jnp.isfinite(x[0] * scale), 2.0, 1.0)

    logger = Logger()
    logger.last = jnp.ones(())
    with pytest.raises(TypeError, match=r"^Logger\.last was read by the step, which then set it"):
        strategy.run(step, args=(logger, X))
    assert float(logger.last) == 1


@pytest.mark.parametrize("options", EXECUTORS)
def test_an_item_that_an_object_keeps_is_used_in_a_program_inside(pair, options) -> None:
    logger = Logger()

    def step(logger, x):
        logger.named["scale"] = jax.jit(lambda x: x * logger.named["scale"])(x)

    with pytest.raises(TypeError, match=r"^Logger\.named was read by the step, which then set it"):
        pair.run(step, args=(logger, X), options=options)
    assert float(logger.named["scale"]) == 1


weights = jnp.ones(3)


def captured(trainer, params, bias):
    """Steps that change what they capture."""

    def of_object(x):
        return trainer.step(x)

    def of_dict(x):
        params["w"] = params["w"] - x[0]

    def of_cell(x):
        nonlocal bias
        bias = x[0] - bias

    def of_module(x):
        global weights
        weights = jnp.where(x[0] > 2, x[0], weights)

    return [of_object, of_dict, of_cell, of_module], lambda: [trainer.params["w"], params["w"], bias, weights]


@pytest.mark.parametrize("options", EXECUTORS)
def test_arrays_that_a_step_captures_would_not_be_trained(pair, options) -> None:
    steps, values = captured(Trainer(), {"w": jnp.ones(3)}, jnp.ones(3))
    for step, name in zip(steps, ("Trainer.params", "'params'", "'bias'", "'weights'"), strict=True):
        with pytest.raises(TypeError, match=f"^{name} was read by the step, which then set it"):
            pair.run(step, args=(X,), options=options)
    assert [value.tolist() for value in values()] == [[1] * 3] * 4


@pytest.mark.parametrize("options", EXECUTORS)
def test_an_operation_whose_result_is_its_operand_sets_nothing(pair, options) -> None:
    trainer, w = Trainer(), jnp.ones(3)

    def step(x):
        return jax.lax.stop_gradient(trainer.params["w"]) + jnp.asarray(w) * trainer.params["w"] * x[0]

    [first, *_] = pair.local_results(pair.run(step, args=(X,), options=options))
    np.testing.assert_array_equal(first, 1 + X[0] * np.ones(3))


def test_a_module_is_filled_with_variables(pair) -> None:
    with pair.scope():
        kernel = replicax.Variable(jnp.full((3, 2), 2.0), name="kernel")

    def shown(net, x):
        net.kernel = kernel.value
        return net(x)

    assert pair.run(shown, args=(Net(jnp.ones((3, 2))), X)).tolist() == [[6.0, 6.0]] * 4


def test_plain_containers_and_frozen_objects_may_be_changed(pair) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: jax.Array

    def step(batch, frozen):
        batch["x"] = batch["x"] / 2
        return (batch["x"] + dataclasses.replace(frozen, x=frozen.x * 2).x).sum()

    assert float(pair.run(step, args=({"x": jnp.ones(2)}, Frozen(jnp.ones(2))))) == 5
