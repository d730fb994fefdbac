"""Names, shapes and dtypes are compared before anything changes; all that does not fit is listed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from tests.checkpoint.runs import Run
from tests.conftest import strategy_of


def variable(*shape: int, dtype=np.float32, value: float = 1.0) -> replicax.Variable:
    return replicax.Variable(np.full(shape, value, dtype))


def test_everything_that_does_not_fit_is_listed_and_nothing_changes(tmp_path) -> None:
    replicax.Checkpoint(
        model={"w": variable(2, 3), "bias": variable(3), "old": variable(1)}, step=3, key=np.zeros(2)
    ).save(tmp_path / "a")
    model = {"w": variable(3, 2, value=0), "biases": variable(3, value=0), "x": variable(1, dtype=np.int32, value=0)}
    checkpoint = replicax.Checkpoint(
        model={**model, "old": variable(1, dtype=np.int32, value=0)}, step=np.ones(1), key=0
    )
    with pytest.raises(ValueError, match="does not fit the objects") as caught:
        checkpoint.restore(tmp_path / "a")
    lines = str(caught.value).splitlines()
    assert lines[1:] == [
        "  in the checkpoint there is no model/biases, float32[3] (did you rename model/bias?)",
        "  in the checkpoint there is no model/x, int32[1]",
        "  the checkpoint also has model/bias, float32[3]",
        "  they differ in model/old: saved was float32[1], here is int32[1]",
        "  they differ in model/w: saved was float32[2,3], here is float32[3,2]",
        "  they differ in step: saved was the plain value 3, here is float64[1]",
        "  they differ in key: saved was float64[2], here is the plain value 0",
        "To restore only what is in both: restore(path, partial=True).",
    ]
    assert all(not v.numpy().any() for v in model.values())
    assert checkpoint.key == 0


@pytest.mark.parametrize(
    ("here", "saved"),
    [
        (0, jnp.int32(7)),
        (0, jnp.uint8(7)),
        (0.0, jnp.bfloat16(0.5)),
        (False, jnp.array(True)),
        (0j, jnp.complex64(1 + 2j)),
        (0.0, np.float64(0.1)),  # JAX has no 64 bits
        (np.int64(0), jnp.int32(7)),
        (np.zeros(2), jnp.ones(2)),
    ],
)
def test_a_program_resumes_with_the_arrays_that_a_step_made_of_its_numbers(tmp_path, here, saved) -> None:
    replicax.Checkpoint(x=saved).save(tmp_path / "a")
    found = replicax.Checkpoint(x=here).restore(tmp_path / "a")["x"]
    assert found.dtype == saved.dtype
    np.testing.assert_array_equal(found, saved)
    assert isinstance(found, jax.Array) == (isinstance(saved, jax.Array) and type(here) in (int, float, bool, complex))


def test_a_number_that_was_saved_before_a_step_made_an_array_of_it(tmp_path) -> None:
    replicax.Checkpoint(step=3, rate=0.5, done=True, large=1e300).save(tmp_path / "a")
    checkpoint = replicax.Checkpoint(step=jnp.uint8(7), rate=np.float32(1), done=jnp.array(False), large=jnp.ones(()))
    checkpoint.restore(tmp_path / "a")
    assert checkpoint.large == np.inf  # as in a step
    assert (checkpoint.step, checkpoint.rate, checkpoint.done) == (3, 0.5, True)
    assert (checkpoint.step.dtype, type(checkpoint.rate), checkpoint.done.dtype) == (jnp.uint8, np.float32, bool)


@pytest.mark.parametrize("saved", [np.float64(0.1), np.arange(3.0), np.int64(7), np.arange(3, dtype=np.float16)])
def test_a_numpy_array_that_was_saved_before_a_step_made_an_array_of_it(tmp_path, saved) -> None:
    checkpoint = replicax.Checkpoint(x=saved)
    checkpoint.save(tmp_path / "a")
    checkpoint.x = jnp.asarray(saved) + 1
    checkpoint.restore(tmp_path / "a")
    np.testing.assert_array_equal(checkpoint.x, saved)
    assert checkpoint.x.dtype == saved.dtype
    for other in (jnp.zeros(2, jnp.bfloat16), replicax.Variable(jnp.zeros(np.shape(saved), jnp.bfloat16))):
        with pytest.raises(ValueError, match="they differ in x"):
            replicax.Checkpoint(x=other).restore(tmp_path / "a")


def test_what_is_computed_has_the_same_dtypes_after_a_restore(tmp_path) -> None:
    """The type of a number is weak, and so are those of arrays that steps make of numbers alone."""
    saved = {"rate": jnp.asarray(0.5), "step": jnp.asarray(3), "bias": jnp.full(2, 4.0), "strong": jnp.float32(1)}
    checkpoint = replicax.Checkpoint(state={"rate": 0.5, "step": 3, "bias": jnp.zeros(2), "strong": 1.0})
    checkpoint.save(tmp_path / "numbers")
    replicax.Checkpoint(state=saved).save(tmp_path / "a")
    found = checkpoint.restore(tmp_path / "a")["state"]
    assert {name: x.tolist() for name, x in found.items()} == {name: x.tolist() for name, x in saved.items()}
    assert {name: x.weak_type for name, x in found.items()} == {name: x.weak_type for name, x in saved.items()}
    checkpoint.state |= {"rate": jnp.asarray(0.1), "bias": jnp.ones(2)}  # of the same layout, but for weak types
    checkpoint.save(tmp_path / "b")
    state = checkpoint.restore(tmp_path / "b")["state"]
    assert (state["rate"].weak_type, state["bias"].weak_type) == (True, False)
    state = checkpoint.restore(tmp_path / "numbers")["state"]
    assert [state[name].weak_type for name in ("rate", "step", "strong")] == [True, True, False]


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (jnp.int32(0), False),
        (jnp.array(True), 0),
        (jnp.float32(0), 0),
        (jnp.int32(0), 0.0),
        (jnp.zeros(1, jnp.int32), 0),
        (jax.random.key(0), 0),
        (np.int32(0), None),
        (2**40, jnp.int32(0)),
        (-1, jnp.uint8(0)),
        (np.float32(0), np.float16(0)),
    ],
)
def test_numbers_of_another_kind_differ(tmp_path, saved, here) -> None:
    replicax.Checkpoint(x=saved).save(tmp_path / "a")
    with pytest.raises(ValueError, match="they differ in x: saved was"):
        replicax.Checkpoint(x=here).restore(tmp_path / "a")


def test_long_lists_are_cut(tmp_path) -> None:
    replicax.Checkpoint(model=[np.zeros(1)] * 50).save(tmp_path / "a")
    with pytest.raises(ValueError, match="… and 29 more"):
        replicax.Checkpoint(model=[np.zeros(1)] * 1).restore(tmp_path / "a")


def test_a_part_on_request(tmp_path) -> None:
    replicax.Checkpoint(model={"w": variable(2), "head": variable(3)}, step=7).save(tmp_path / "a")
    model = {"w": variable(2, value=0), "new": variable(4, value=0)}
    data = iter(strategy_of(1).distribute_dataset([np.zeros(2)]))
    checkpoint = replicax.Checkpoint(model=model, step=0, more="text", data=data)
    checkpoint.restore(tmp_path / "a", partial=True)
    assert model["w"].numpy().tolist() == [1, 1]
    assert model["new"].numpy().tolist() == [0] * 4
    assert (checkpoint.step, checkpoint.more) == (7, "text")
    with pytest.raises(ValueError, match=r"they differ in model/w: saved was float32\[2\], here is float32\[5\]"):
        replicax.Checkpoint(model={"w": variable(5)}).restore(tmp_path / "a", partial=True)


def test_another_optimizer(tmp_path) -> None:
    v = variable(2)
    optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
    optimizer.build([v])
    replicax.Checkpoint(model=[v], optimizer=optimizer).save(tmp_path / "a")
    other = replicax.Optimizer(optax.adam(0.1))
    with pytest.raises(ValueError, match="optimizer has other state than was saved: is it another transformation"):
        replicax.Checkpoint(model=[v], optimizer=other).restore(tmp_path / "a")
    with pytest.raises(ValueError, match="they differ in optimizer: saved was an optimizer, here is the plain value 0"):
        replicax.Checkpoint(model=[v], optimizer=0).restore(tmp_path / "a", partial=True)
    assert other.parameters is None  # as it was
    assert other.variables == []


@pytest.mark.parametrize("order", ["ba", "axb", "b"])
def test_an_optimizer_whose_slots_would_go_to_other_variables(tmp_path, order) -> None:
    model = {name: variable(2) for name in "abx"}
    optimizer = replicax.Optimizer(optax.adam(0.1))
    optimizer.build([model["a"], model["b"]])
    replicax.Checkpoint(model={"a": model["a"], "b": model["b"]}, optimizer=optimizer).save(tmp_path / "a")
    part = {name: model[name] for name in order}
    other = replicax.Optimizer(optax.adam(0.1))
    other.build(list(part.values()))
    message = r"in optimizer, variable \[.\]: saved was model/., here is model/.\nGive an optimizer .* the order"
    with pytest.raises(ValueError, match=message):
        replicax.Checkpoint(model=part, optimizer=other).restore(tmp_path / "a", partial=True)
    renamed = replicax.Checkpoint(net={"a": model["a"], "b": model["b"]}, optimizer=optimizer)
    renamed.restore(tmp_path / "a", partial=True)


# --- slots that are not there yet -----------------------------------------------------------------------


@pytest.mark.parametrize("tree", [lambda w, b: {"w": w, "b": (b,)}, lambda w, b: [w, b], lambda w, b: (w, [b, None])])
def test_slots_are_made_where_no_step_has_run(tmp_path, tree) -> None:
    def made(value: float):
        w, b = variable(3, value=value), variable(2, value=value)
        return w, b, replicax.Optimizer(optax.adam(0.1))

    w, b, optimizer = made(1.0)
    idle = replicax.Optimizer(optax.adam(0.1))
    replicax.Checkpoint(idle=idle, w=w, b=b, optimizer=optimizer).save(tmp_path / "before")
    optimizer.build(tree(w, b))
    for slot in optimizer.variables:
        slot.assign(slot.value * 0 + 5)
    replicax.Checkpoint(idle=idle, w=w, b=b, optimizer=optimizer).save(tmp_path / "after")
    w, b, other = made(0.0)
    checkpoint = replicax.Checkpoint(idle=idle, w=w, b=b, optimizer=other)
    checkpoint.restore(tmp_path / "before")
    assert other.variables == []
    checkpoint.restore(tmp_path / "after")
    assert jax.tree.structure(other.parameters) == jax.tree.structure(tree(w, b))
    assert [slot.numpy().tolist() for slot in other.variables] == [s.numpy().tolist() for s in optimizer.variables]
    checkpoint.restore(tmp_path / "before")  # its slots begin anew
    assert all(not slot.numpy().any() for slot in other.variables)


def test_containers_of_others_need_a_build_first(tmp_path) -> None:
    class Model(dict):
        pass

    v = variable(2)
    optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
    optimizer.build(Model(v=v))
    replicax.Checkpoint(v=v, optimizer=optimizer).save(tmp_path / "a")
    other = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
    checkpoint = replicax.Checkpoint(v=v, optimizer=other)
    with pytest.raises(
        ValueError, match=r"state of optimizer, which has none here yet.*call optimizer.build\(variables\)"
    ):
        checkpoint.restore(tmp_path / "a")
    other.build(Model(v=v))
    checkpoint.restore(tmp_path / "a")


# --- iterators ------------------------------------------------------------------------------------------


def test_an_iterator_that_cannot_go_on_leaves_all_as_it_was(tmp_path) -> None:
    run = Run.of(strategy_of(2))
    run.go(2)
    run.checkpoint.save(tmp_path / "a")
    other = Run.of(strategy_of(2), seed=1)
    other.go(1)
    more = iter(other.strategy.distribute_dataset(other.strategy.make_numpy_dataset(np.arange(7.0)).batch(2)))
    run_twice = replicax.Checkpoint(first=run.data, second=run.data)
    run_twice.save(tmp_path / "b")
    before, coming = other.values(), other.data.get_state()
    with pytest.raises(ValueError, match="second: this is the state of another dataset"):
        replicax.Checkpoint(first=other.data, second=more).restore(tmp_path / "b")
    with pytest.raises(ValueError, match="they differ in second: saved was an iterator, here is the plain value None"):
        replicax.Checkpoint(first=other.data, second=None).restore(tmp_path / "b")
    assert other.values() == before
    assert other.data.get_state() == coming
    assert len(other.coming()) == 8
    left = run.data.get_state()
    run.data.close()
    with pytest.raises(ValueError, match="second: this is the state of another dataset"):
        replicax.Checkpoint(first=run.data, second=more).restore(tmp_path / "b")
    run.data.close()
    run.checkpoint.restore(tmp_path / "a")  # a closed one goes on
    assert run.data.get_state() == left
