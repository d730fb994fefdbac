from __future__ import annotations

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax


@pytest.fixture
def w(pair):
    with pair.scope():
        return replicax.Variable(jnp.ones(3), name="w")


def branches(batch, scale=1.0):
    if batch["x"].sum() > 0:
        return scale
    return batch


def helper(y):
    return float(y.sum())


def calls_helper(scale, x):
    return helper(x * scale)


def loops(*, x):
    while x.sum() > 0:
        x = x - 1
    return x


def to_numpy(*values):
    return np.asarray(values[1])


def sizes(x):
    return [1, 2, 3][x.astype(int)[0]]


def shapes(x):
    return jnp.zeros(x.astype(int)[0])


def leaves_out(x):
    return x[x > 0]


def by_replica(x):
    return x if replicax.get_replica_context().replica_id_in_sync_group > 0 else -x


X = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("step", "args", "kwargs", "error", "where", "instead"),
    [
        (
            branches,
            ({"x": X},),
            {},
            jax.errors.TracerBoolConversionError,
            r"'branches' at .*test_step_errors.py:\d+: `if batch\[\"x\"\].sum\(\) > 0:` .* the argument batch\['x'\]\.",
            "jnp.where.*jax.lax.cond.*replicax.debug",
        ),
        (
            calls_helper,
            (2.0, X),
            {},
            jax.errors.ConcretizationTypeError,
            r"'calls_helper', in helper at .*: `return float\(y.sum\(\)\)` .* the arguments scale, x\.",
            "Keep it an array.*jax.debug.print",
        ),
        (
            loops,
            (),
            {"x": X},
            jax.errors.TracerBoolConversionError,
            r"`while x.sum\(\) > 0:` .* argument x\.",
            "while_loop",
        ),
        (to_numpy, (X, X), {}, jax.errors.TracerArrayConversionError, r"argument args\[1\]\.", "jax.numpy in place of"),
        (sizes, (X,), {}, jax.errors.TracerIntegerConversionError, "'sizes' at .* argument x", "take it from a shape"),
        (shapes, (X,), {}, TypeError, "'shapes' at .* argument x", "take it from a shape"),
        (leaves_out, (X,), {}, jax.errors.NonConcreteBooleanIndexError, "'leaves_out' at ", r"jnp.where\(mask"),
        (by_replica, (X,), {}, jax.errors.TracerBoolConversionError, "'by_replica' at .* the step computes", "cond"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_asking_for_a_value(pair, step, args, kwargs, error, where, instead) -> None:
    with pytest.raises(error, match=rf"(?s)^step .*{where}.*{instead}.*JAX says: \S") as caught:
        pair.run(step, args=args, kwargs=kwargs)
    assert "capture.py" not in str(caught.value)
    assert not replicax.has_strategy()


def test_printing_in_order_is_for_one_device(strategy, capfd) -> None:
    def step(x):
        return jax.lax.fori_loop(0, 2, lambda i, x: (jax.debug.print("{}", i, ordered=True), x)[1], x)

    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(ValueError, match=r"ordered=True at .*test_step_errors.py.*: JAX can't do that on several"):
            strategy.run(step, args=(X,))
        return
    strategy.run(step, args=(X,))
    assert capfd.readouterr().out == "0\n1\n"


def test_asking_for_the_value_of_a_variable(pair, w) -> None:
    def step():
        w.assign(w + 1)
        return 1 if w.sum() > 0 else 2

    with pytest.raises(
        jax.errors.TracerBoolConversionError, match=r"the step computes \(it has read the variable 'w'\)"
    ):
        pair.run(step)
    assert w.numpy().tolist() == [1.0, 1.0, 1.0]
    with replicax.debug():
        assert pair.run(step) == 1


def test_of_many_variables_some_are_named(pair) -> None:
    with pair.scope():
        variables = [replicax.Variable(1.0, name=name) for name in "abcde"]
    for count, said in ((4, r"'a', 'b', 'c', 'd'\)"), (5, r"'a', 'b', 'c', 'd', …\)")):
        with pytest.raises(jax.errors.TracerBoolConversionError, match=rf"it has read the variables {said}"):
            pair.run(lambda count=count: bool(sum(v.value for v in variables[:count])))


def test_asking_inside_a_gradient_a_loop_and_a_partial(pair, w) -> None:
    def loss(x):
        y = (w * x).sum()
        return y if y > 0 else -y

    def step(x):
        return replicax.value_and_grad(loss, [w])(x)

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"step 'step', in loss at .*`return y if y > 0"):
        pair.run(step, args=(X,))

    def body(c, _):
        return (c if c > 0 else -c), None

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"(?s)in body at .*JAX says: .*the argument c"):
        pair.run(lambda x: jax.lax.scan(body, x.sum(), None, length=2), args=(X,))
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"depends on the argument named\['x'\]"):
        pair.run(lambda *, named: 1 if named["x"] > 0 else 2, kwargs={"named": {"x": 1.0}})
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"depends on the argument batch\['x'\]"):
        pair.run(functools.partial(branches, scale=3.0), args=({"x": X},))


def test_the_counter_of_a_loop_in_debug_mode(pair) -> None:
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda i, total: total + i.astype(x.dtype), x)

    assert pair.run(step, args=(X,)).tolist() == [4, 4, 4]
    words = r"step 'step', in <lambda> at .*py:\d+: `.*` asks a Python number for 'astype', .*counter of a fori_loop"
    with replicax.debug(), pytest.raises(AttributeError, match=words):
        pair.run(step, args=(X,))


def test_asking_in_a_step_of_many(pair) -> None:
    def step(ctx, x, y):
        if y > 1:
            ctx.set_last_step_output("x", x, "sum")

    batches = iter(pair.distribute_dataset([(np.ones(2), np.ones(2))]))
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"step 'step' at .* the argument element\[1\]\."):
        pair.run_steps(step, batches, 1)


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_variable_where_lax_wants_an_array(pair, w, executor) -> None:
    x = jnp.ones((1, 1, 4))
    with pair.scope():
        model = {"kernel": replicax.Variable(jnp.ones((1, 1, 2)), name="kernel"), "activation": jax.nn.relu}

    def convolve(model, x):
        return model["activation"](jax.lax.conv_general_dilated(x, model["kernel"], (1,), "VALID"))

    options = replicax.RunOptions(executor)
    with pytest.raises(
        ValueError, match=r"in convolve at .*`return model.*jax.lax, which takes arrays. .*variable.value.*jax.tree"
    ):
        pair.run(lambda x: convolve(model, x), args=(x,), options=options)
    cured = pair.run(lambda x: convolve(jax.tree.map(lambda v: v, model), x), args=(x,), options=options)
    assert cured.tolist() == [[[2.0, 2.0, 2.0]]]

    def loss(x):
        return convolve(jax.tree.map(lambda v: v, model), x).sum()

    _, [gradient] = pair.run(
        lambda x: replicax.value_and_grad(loss, [model["kernel"]])(x),
        args=(pair.distribute_values_from_function(lambda ctx: x),),
        options=options,
    )
    assert pair.local_results(gradient)[0].tolist() == [[[3.0, 3.0]]]


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_an_element_that_is_a_tuple_is_one_argument(pair, executor) -> None:
    def step(x, y):
        return x + y

    said = (
        r"step\(\) missing 1 required positional argument: 'y'. An element of a dataset is one argument, .*args=batch"
    )
    batches = pair.distribute_dataset([(X, X)])
    options = replicax.RunOptions(executor=executor)
    for batch in batches:
        with pytest.raises(TypeError, match=said):
            pair.run(step, args=(batch,), options=options)
        pair.run(step, args=batch, options=options)
    with pytest.raises(TypeError, match=said):
        replicax.train(step, batches, steps=1, progress=False)


@pytest.mark.filterwarnings("ignore:Python iterable type")  # JAX's, which does not name the argument
@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_a_dataset_or_an_iterator_is_no_batch(pair, executor) -> None:
    examples = pair.make_numpy_dataset((X, X)).batch(2)
    dataset = pair.distribute_dataset(examples)
    options = replicax.RunOptions(executor=executor)
    for given in (examples, dataset, iter(dataset), (x for x in [X])):
        said = rf"^args\[0\]\['x'\] is a {type(given).__name__}, but a step takes one batch.*for batch in.*run_steps"
        with pytest.raises(TypeError, match=said):
            pair.run(lambda batch: batch["x"], args=({"x": given},), options=options)


def test_pytrees_that_are_iterators_settings_of_datasets_and_files_are_arguments(pair) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Keys:
        key: jax.Array

        def __iter__(self):
            return self

        def __next__(self):
            return jax.random.fold_in(self.key, 1)

    @dataclasses.dataclass(frozen=True)
    class Settings:
        element_spec: tuple[int, ...] = (3,)

    key = jax.random.key(0)
    drawn = pair.run(lambda keys, its: jax.random.normal(next(keys), its.element_spec), args=(Keys(key), Settings()))
    np.testing.assert_array_equal(drawn, jax.random.normal(jax.random.fold_in(key, 1), (3,)))
    file = io.StringIO()  # Python's files are iterators
    pair.run(lambda file, x: jax.debug.callback(lambda x: file.write(f"{x} "), x), args=(file, 7))
    jax.effects_barrier()
    assert file.getvalue() == "7 7 "


def test_a_call_with_too_few_arguments_inside_of_the_step_is_the_users(pair) -> None:
    def inner(x, y):
        return x + y

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'$"):
        pair.run(lambda x: inner(x), args=(X,))
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'x' and 'y'$"):
        pair.run(inner)


def test_other_errors_stay_as_they_are(pair) -> None:
    def step(x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine$"):
        pair.run(step, args=(X,))


def test_a_tuple_that_is_one_argument(pair) -> None:
    def step(batch):
        return batch[0] + batch[1]

    batch = (np.ones(4), np.ones(4))
    with pytest.raises(
        TypeError, match=r"takes 1 positional argument but 2 were given\. .*args=\(batch,\), with a comma"
    ):
        pair.run(step, args=batch)

    def inside(batch):
        return step(*batch)

    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given$"):
        pair.run(inside, args=(batch,))


def test_a_step_that_jax_must_not_trace_is_named(pair) -> None:
    jax.config.update("jax_no_tracing", True)
    try:
        with pytest.raises(RuntimeError, match=r"<function leaves_out at .*'no_tracing' is set"):
            pair.run(leaves_out, args=(1.0,))
    finally:
        jax.config.update("jax_no_tracing", False)
