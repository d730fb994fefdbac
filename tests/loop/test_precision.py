"""Precision: what a step computes in bfloat16 and float16, beside the same in plain JAX on one device."""

from __future__ import annotations

import functools
import pathlib
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.loop import Precision
from replicax.loop.wrapped_steps import precision as precision_module
from tests.conftest import logical_strategy, strategy_of

STRATEGIES = {
    "one": lambda: strategy_of(1),
    "two": lambda: strategy_of(2),
    "sharded": lambda: replicax.ShardedStrategy(["cpu:0", "cpu:1"]),
    "logical": lambda: logical_strategy(2, 2),
}
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


pytestmark = pytest.mark.usefixtures("promotion_of_dtypes")


class MLP:
    """A small model, its parameters a pytree of variables."""

    def __init__(self, strategy: replicax.Strategy, tx: Any = None) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.params = replicax.as_variables(parameters())
            self.optimizer = replicax.Optimizer(tx or optax.adam(0.01))
            self.seen = replicax.Mean("seen")
            self.norm = replicax.Variable(np.zeros(4, np.float32), name="norm", trainable=False, aggregation="mean")
        self.dtypes: list[str] = []

    def loss_of(self, params: Any, batch: Any) -> Any:
        self.dtypes += [params["a"].dtype.name, batch["x"].dtype.name, self.norm.dtype.name]
        self.norm.assign(0.9 * self.norm.value + 0.1 * jnp.mean(batch["x"].astype(jnp.float32), 0))
        losses = losses_of(params, batch)
        self.seen.update(losses)
        return replicax.compute_average_loss(losses)

    def step(self, batch: Any) -> Any:
        loss, gradients = replicax.value_and_grad(self.loss_of, self.params)(self.params, batch)
        self.optimizer.apply_gradients(gradients, self.params)
        return {"loss": loss}


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(4, 8)).astype(np.float32), "b": rng.normal(size=(8, 1)).astype(np.float32)}


def losses_of(params: Any, batch: Any) -> Any:
    out = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    return jnp.square(out[:, 0].astype(jnp.float32) - batch["y"].astype(jnp.float32))


def batches(sizes: tuple[int, ...] = (8, 8, 8, 5)) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {"x": rng.normal(size=(n, 4)).astype(np.float32), "y": rng.normal(size=n).astype(np.float32)} for n in sizes
    ]


def by_plain_jax(data: Any, dtype: Any, scale: float | None) -> tuple[Any, list[float], list[float]]:
    """The same on one device: parameters, losses and loss scales."""
    params, tx, good = jax.tree.map(jnp.asarray, parameters()), optax.adam(0.01), 0
    state, update = tx.init(params), jax.jit(tx.update)
    found, scales = [], []

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def differentiated(params: Any, half: Any, scale: float) -> Any:
        loss = jnp.mean(losses_of(jax.tree.map(lambda p: p.astype(dtype), params), half))
        return loss * scale, loss

    for batch in data:
        half = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), batch)
        (_, loss), gradients = differentiated(params, half, scale or 1.0)
        found.append(float(loss))
        if scale is not None:
            gradients = jax.tree.map(functools.partial(jnp.multiply, 1 / scale), gradients)
            if not all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients)):
                scale, good = max(scale / 2, 1.0), 0
                scales.append(scale)
                continue
            good += 1
            if good == precision_module.PERIOD:
                scale, good = scale * 2, 0
            scales.append(scale)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, found, scales


@pytest.mark.parametrize(
    ("name", "executor", "kind"),
    [
        ("two", "per replica", "fp16"),
        ("sharded", "compiled", "bf16"),
        ("logical", "compiled", "fp16"),
        pytest.param("one", "compiled", "bf16", marks=pytest.mark.soak),
        pytest.param("two", "compiled", "fp16", marks=pytest.mark.soak),
    ],
)
def test_a_step_computes_what_plain_jax_does(name: str, executor: str, kind: str) -> None:
    model = MLP(STRATEGIES[name]())
    with model.strategy.scope():
        precision = Precision(kind, loss_scale=1024.0 if kind == "fp16" else None)
    losses = []
    options = replicax.RunOptions(executor="per_replica") if executor == "per replica" else None
    sizes = (8, 8, 5) if executor == "compiled" else (8, 8)
    for batch in model.strategy.distribute_dataset(batches(sizes)):
        share = model.strategy.run(precision(model.step), args=(batch,), options=options)["loss"]
        losses.append(float(model.strategy.reduce("sum", share)) if name != "one" else float(share))
    wanted, plain, _ = by_plain_jax(batches(sizes), DTYPES[kind], precision.loss_scale)
    assert set(model.dtypes) == {DTYPES[kind].dtype.name, "float32"}
    np.testing.assert_allclose(losses, plain, rtol=3e-3)
    for key, value in wanted.items():
        assert model.params[key].dtype == jnp.float32
        # Sums in half precision depend on their order; a step of Adam is 0.01.
        np.testing.assert_allclose(model.params[key].numpy(), value, atol=4e-3)


def test_a_step_that_overflows_on_one_replica_is_skipped_on_all_and_changes_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(precision_module, "PERIOD", 2)
    monkeypatch.setattr(precision_module, "FIRST", 2.0**9)
    data = batches((8,) * 7)
    data[2]["y"][7] = 6e4  # the last example, which the second replica has
    model = MLP(strategy_of(2))
    with model.strategy.scope():
        precision = Precision("fp16")
    scales, states = [], []
    for batch in model.strategy.distribute_dataset(data):
        model.strategy.run(precision(model.step), args=(batch,))
        scales.append(precision.loss_scale)
        variables = [*model.params.values(), *model.optimizer.variables, model.norm, *model.seen.variables.values()]
        states.append([np.asarray(v.read_value()) for v in variables])
    _, _, wanted = by_plain_jax(data, jnp.float16, 2.0**9)
    assert scales == wanted
    assert scales[2] == scales[1] / 2
    for before, after in zip(states[1], states[2], strict=True):
        np.testing.assert_array_equal(before, after)
    assert any((before != after).any() for before, after in zip(states[2], states[3], strict=True))
    for state in states:
        assert all(np.isfinite(value).all() for value in state)


def test_the_loss_scale_stays_between_1_and_the_largest(monkeypatch: Any) -> None:
    monkeypatch.setattr(precision_module, "PERIOD", 1)
    monkeypatch.setattr(precision_module, "FIRST", 2.0)
    monkeypatch.setattr(precision_module, "LARGEST", 8.0)
    model = MLP(strategy_of(2))
    with model.strategy.scope():
        precision = Precision("fp16")
    data, scales = batches((8,) * 7), []
    for batch in data[:3]:
        batch["y"][:] = np.inf
    for batch in model.strategy.distribute_dataset(data):
        model.strategy.run(precision(model.step), args=(batch,))
        scales.append(precision.loss_scale)
    assert scales == [1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_loss_scaling_is_one_all_reduce_of_a_scalar() -> None:
    for name, compared in (("two", (None, "bf16", "fp16")), ("sharded", (None, "fp16"))):
        kinds: dict[str | None, list[str]] = {}
        for kind in compared:
            model = MLP(STRATEGIES[name]())
            with model.strategy.scope():
                step = model.step if kind is None else Precision(kind)(model.step)
            batch = next(iter(model.strategy.distribute_dataset(batches((8,)))))
            found = model.strategy.extended.trace(step, args=(batch,)).collectives()
            kinds[kind] = [c.kind for c in found]
            small = [c for c in found if c.kind == "all-reduce" and c.bytes == 4]
        assert kinds.get("bf16", kinds[None]) == kinds[None]
        assert sorted(kinds["fp16"]) == sorted([*kinds[None], "all-reduce"])
        assert small


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=pytest.mark.soak), "fp16"])
def test_train_computes_the_same_joined_or_not_and_over_an_interruption(kind: Any, tmp_path: pathlib.Path) -> None:
    data = batches((8, 8, 8, 8))
    data[1]["y"][7] = 6e4  # which overflows in each pass
    found, scales = [], []
    for name, per_call in (("one by one", 1), ("joined", 4), ("interrupted", 1)):
        model = MLP(strategy_of(2))
        for steps in (5, 12) if name == "interrupted" else (12,):
            if name == "interrupted":
                model = MLP(strategy_of(2))
            run = replicax.train(
                model.step, model.strategy.distribute_dataset(data), steps, log_every=4, steps_per_call=per_call,
                checkpoints=tmp_path if name == "interrupted" else None, precision=kind, progress=False,
            )  # fmt: skip
        found.append([v.numpy() for v in (*model.params.values(), *model.optimizer.variables, model.norm)])
        scales.append(run.numbers.get("loss_scale"))
    assert run.resumed_at == 5
    assert scales == [2.0**12 if kind == "fp16" else None] * 3
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "kinds", [(None, "fp16"), ("fp16", None), pytest.param(("fp16", "bf16"), marks=pytest.mark.soak)], ids=str
)
def test_a_resumed_run_may_have_another_precision_and_other_metrics(kinds: Any, tmp_path: pathlib.Path) -> None:
    there = MLP(strategy_of(2))
    data = batches((8, 8, 8))
    passes = iter(there.strategy.distribute_dataset(data))
    for kind in kinds:
        here = MLP(strategy_of(2))
        checkpoint = replicax.Checkpoint(params=here.params, optimizer=here.optimizer, norm=here.norm)
        run = replicax.train(
            here.step, here.strategy.distribute_dataset(data), 6 if kind == kinds[0] else 9, precision=kind,
            checkpoints=replicax.CheckpointManager(checkpoint, tmp_path), progress=False,
            metrics=[here.seen] if kind == "fp16" else [],
        )  # fmt: skip
        replicax.train(there.step, passes, 6 if kind == kinds[0] else 3, precision=kind, progress=False)
    assert run.resumed_at == 6
    assert run.numbers.get("loss_scale", 2.0**15) == 2.0**15
    for name in ("a", "b"):
        np.testing.assert_array_equal(here.params[name].numpy(), there.params[name].numpy())


def test_the_loss_scale_is_saved_and_restored(tmp_path: pathlib.Path) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        first, second = Precision("fp16", loss_scale=8.0), Precision("fp16")
    replicax.Checkpoint(precision=first).save(tmp_path / "one")
    replicax.Checkpoint(precision=second).restore(tmp_path / "one")
    assert second.loss_scale == 8.0


def test_another_object_of_the_same_precision_finds_the_program() -> None:
    model = MLP(strategy_of(2))
    batch = next(iter(model.strategy.distribute_dataset(batches((8,)))))
    for _ in range(3):
        model.strategy.run(Precision("bf16")(model.step), args=(batch,))
    assert model.strategy.extended.trace_count(Precision("bf16")(model.step)) == 1


def test_a_number_of_a_step_that_was_skipped_does_not_stop_at_nan() -> None:
    data = batches((8,) * 4)
    data[1]["x"][7] = np.inf
    model = MLP(strategy_of(2))
    run = replicax.train(
        model.step, model.strategy.distribute_dataset(data), 4, precision="fp16", stop_at_nan=True, log_every=1,
        progress=False,
    )  # fmt: skip
    assert run.numbers["loss_scale"] == 2.0**14
    with pytest.raises(FloatingPointError, match="step 2"):
        replicax.train(
            model.step, model.strategy.distribute_dataset(data), 4, precision="bf16", stop_at_nan=True, progress=False
        )


class More(NamedTuple):
    y: Any


def test_keys_of_the_batch_stay_as_they_are() -> None:
    found = {}

    def step(batch: Any) -> Any:
        found.update({key: batch[key].dtype.name for key in ("x", "y")}, nested=batch["more"].y.dtype.name)
        return replicax.value_and_grad(lambda: (batch["x"] * v.value).sum().astype(jnp.float32), [v])()[0]

    strategy = strategy_of(1)
    with strategy.scope():
        v = replicax.Variable(1.0)
    x = np.ones(3, np.float32)
    out = strategy.run(Precision("bf16", keep=["y"])(step), args=({"x": x, "y": x, "more": More(x)},))
    assert found == {"x": "bfloat16", "y": "float32", "nested": "float32"}
    assert out.dtype == jnp.float32


def test_variables_that_are_not_trained_stay_as_they_are() -> None:
    found = {}
    strategy = strategy_of(1)
    with strategy.scope():
        weight, average = replicax.Variable(1.0), replicax.Variable(1.0, trainable=False)

    def step(x: Any) -> Any:
        def loss() -> Any:
            found.update(weight=weight.value.dtype.name, average=average.value.dtype.name)
            return replicax.compute_average_loss(x * weight.value)

        return replicax.value_and_grad(loss, [weight])()[0]

    strategy.run(Precision("bf16")(step), args=(np.ones(3, np.float32),))
    assert found == {"weight": "bfloat16", "average": "float32"}


def test_nnx_scales_and_unscales_by_itself() -> None:
    nnx = pytest.importorskip("flax.nnx")
    strategy = strategy_of(2)
    with strategy.scope():
        precision = Precision("fp16")
        model = nnx.Linear(4, 1, dtype=jnp.float16, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            losses = jnp.square(model(batch["x"])[:, 0].astype(jnp.float32) - batch["y"].astype(jnp.float32))
            return precision.scale(replicax.compute_average_loss(losses))

        _, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, precision.unscale(gradients))

    data = batches((8, 8, 8))
    data[1]["x"][7] = np.inf
    before = []
    for batch in strategy.distribute_dataset(data):
        strategy.run(precision(step), args=(model, optimizer, batch))
        before.append(np.asarray(model.kernel[...]))
    assert precision.loss_scale == 2.0**14
    np.testing.assert_array_equal(before[0], before[1])
    assert (before[1] != before[2]).any()
    assert int(optimizer.step[...]) == 2
    run = replicax.train(
        functools.partial(step, model, optimizer), strategy.distribute_dataset(data), 2, precision=precision,
        progress=False,
    )  # fmt: skip
    assert run.step == 2


def test_unscaling_leaves_the_indices_of_rows_and_gradients_of_integers() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        precision = Precision("fp16", loss_scale=8.0)
        table = replicax.Variable(np.zeros((4, 2), np.float32))
        optimizer = replicax.Optimizer(optax.sgd(1.0))

    def step(rows: Any) -> None:
        def loss(given: Any) -> Any:
            return precision.scale(replicax.compute_average_loss(given["rows"].sum(1)))

        given = {"rows": table.value[rows].astype(jnp.float16), "count": rows.size}
        gradients = jax.grad(loss, allow_int=True)(given)
        gradients["rows"] = replicax.IndexedSlices(gradients["rows"], rows, (4, 2))
        optimizer.apply_gradients([(precision.unscale(gradients)["rows"], table)])

    [batch] = strategy.distribute_dataset([np.int32([0, 1, 1, 3])])
    strategy.run(precision(step), args=(batch,))
    assert table.numpy()[:, 0].tolist() == [-0.25, -0.5, 0.0, -0.25]


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"kind": "fp8"}, ValueError, "kind must be 'bf16' or 'fp16', got 'fp8'"),
        ({"kind": jnp.bfloat16}, ValueError, "kind must be 'bf16' or 'fp16'"),
        ({"kind": "fp16", "loss_scale": True}, ValueError, "a positive number, or None, got True"),
        ({"kind": "fp16", "loss_scale": 0}, ValueError, "a positive number, or None, got 0"),
        ({"kind": "fp16", "loss_scale": "dynamic"}, ValueError, "loss_scale must be 'auto'"),
        ({"kind": "bf16", "keep": "y"}, TypeError, r"for one: keep=\[key\]"),
        ({"kind": "bf16", "keep": None}, TypeError, "keep must be a list of keys of the batch, got None"),
    ],
)
def test_arguments_are_checked(kwargs: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Precision(**kwargs)


def test_float16_without_a_loss_scale_warns() -> None:
    with pytest.warns(UserWarning, match="gradients below 6e-8 become 0 .* compute in 'bf16'"):
        Precision("fp16", loss_scale=None)


def test_a_step_that_would_not_compute_in_this_precision_is_told() -> None:
    strategy = strategy_of(1)
    with strategy.scope():
        v = replicax.Variable(1.0)
        precision = Precision("fp16")

    def without_gradients(x: Any) -> Any:
        return (x * v.value).sum()

    def without_update(x: Any) -> Any:
        return replicax.value_and_grad(lambda: (x * v.value).sum(), [v])()[0]

    x = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="calls no replicax.value_and_grad"):
        strategy.run(Precision("bf16")(without_gradients), args=(x,))
    with pytest.raises(ValueError, match="an overflow would not be noticed"):
        strategy.run(precision(without_update), args=(x,))
    with pytest.raises(ValueError, match="has a precision already: wrap it once"):
        strategy.run(Precision("bf16")(Precision("bf16")(without_update)), args=(x,))
    with pytest.raises(TypeError, match="without_update: a step with a loss scale stays in the process that has"):
        pickle.dumps(precision(without_update))
    again = pickle.loads(pickle.dumps(Precision("bf16", keep=["y"])(replicax.compute_average_loss)))
    assert (again.fn, repr(again.precision)) == (replicax.compute_average_loss, "Precision('bfloat16')")
    with pytest.raises(replicax.errors.ContextError, match="inside a step that is wrapped"):
        precision.unscale([v])
    dataset = strategy.distribute_dataset([x])
    with pytest.raises(ValueError, match="takes 'bf16', 'fp16' or a replicax.loop.Precision"):
        replicax.train(without_update, dataset, 1, precision="half")  # type: ignore[arg-type]


def test_what_a_step_would_change_in_a_copy_is_told() -> None:
    from flax import nnx

    model = MLP(strategy_of(2))

    def step(seen: Any, batch: Any) -> None:
        model.step(batch)
        seen[...] += 1

    with pytest.raises(TypeError, match=r"args\[0\], of type Variable, was changed in place .*change would be lost"):
        model.strategy.run(Precision("bf16")(step), args=(nnx.Variable(jnp.float32(0)), batches()[0]))


def test_a_step_may_cast_by_itself() -> None:
    """One without ``value_and_grad``: gradients that come back through the cast are float32."""
    strategy = strategy_of(2)
    with strategy.scope():
        w = replicax.Variable(np.ones(4, np.float32), name="w")
    precision = Precision("bf16")
    dtypes = []

    def step(x: Any) -> Any:
        def loss_of(value: Any) -> Any:
            cast = precision.cast({"w": value, "variable": w, "steps": 3})
            dtypes.append((cast["w"].dtype.name, cast["variable"].dtype.name, cast["steps"]))
            return jnp.sum(x @ cast["w"])

        return jax.grad(loss_of)(w.value)

    [batch] = strategy.distribute_dataset([np.ones((8, 4), np.float32)])
    gradient = strategy.reduce("sum", strategy.run(precision(step), args=(batch,)))
    assert dtypes == [("bfloat16", "bfloat16", 3)]
    assert (gradient.dtype.name, gradient.tolist()) == ("float32", [8.0] * 4)
    with strategy.scope(), pytest.raises(replicax.errors.ContextError, match="step is a step: call it by strategy.run"):
        precision(step)(batch)
