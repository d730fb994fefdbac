"""The last batch of an epoch, with each mode: whatever is about its examples is about all of them, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax import InputOptions
from tests.conftest import logical_strategy, strategy_of

BATCH = 8
FULL = np.arange(1.0, BATCH + 1, dtype=np.float32)


def close(a, b) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5)


class Step:
    """Everything that is about examples, of a model whose derivative is infinite at 0."""

    def __init__(self, strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = replicax.Variable(2.0, name="w")
            self.mean = replicax.Mean()

    def __call__(self, batch):
        def loss():
            losses = self.w.read_value() * jnp.sqrt(batch["x"] * self.w.read_value())
            return replicax.compute_average_loss(losses), losses

        (share, losses), gradients = replicax.value_and_grad(loss, [self.w], has_aux=True)()
        self.mean.update(losses)
        replica = replicax.get_replica_context()
        inside = replica.merge_call(lambda s, v: s.reduce("mean", v, axis=0), args=(losses,))
        return share, gradients[0], losses, inside

    def check(self, element, examples) -> None:
        self.mean.reset()
        share, gradient, losses, inside = self.strategy.run(self, args=(element,))
        expected = 2 * np.sqrt(2 * examples)
        close(self.strategy.reduce("sum", share), expected.mean())
        close(self.strategy.reduce("sum", gradient), 0.75 * expected.mean())
        close(self.strategy.reduce("mean", losses, axis=0), expected.mean())
        close(self.strategy.reduce("sum", losses, axis=0), expected.sum())
        close(self.strategy.reduce("mean", element["x"], axis=0), examples.mean())
        close(inside, expected.mean())
        close(self.mean.result(), expected.mean())
        if isinstance(losses, replicax.PerReplica):
            close(self.strategy.gather(losses, axis=0), expected)
            close(np.concatenate(self.strategy.local_results(losses)), expected)
        for value in jax.tree.leaves((share, gradient, losses, inside)):  # padding, too
            parts = value.values if isinstance(value, replicax.PerReplica) else [value]
            assert not any(np.isnan(part).any() for part in parts)


@pytest.mark.covering(1)
@pytest.mark.parametrize("partial", ["exact", "pad", "drop"])
@pytest.mark.parametrize("size", [1, 6, 7])
def test_the_last_batch(strategy, size, partial) -> None:
    step = Step(strategy)
    batches = [{"x": FULL}, {"x": FULL[:size]}]
    elements = list(strategy.distribute_dataset(batches, InputOptions(partial_batch=partial)))
    kept = [b["x"] for b in batches if partial != "drop" or len(b["x"]) == BATCH]
    assert len(elements) == len(kept)
    for element, examples in zip(elements, kept, strict=True):
        step.check(element, examples)
    if partial != "exact":
        assert strategy.extended.trace_count(step) == 1


def test_the_mean_over_six_of_eight_has_the_denominator_six(pair) -> None:
    [_, last] = pair.distribute_dataset([FULL, FULL[:6]], InputOptions(partial_batch="pad"))
    assert float(pair.reduce("mean", last, axis=0)) == 3.5
    assert float(pair.reduce("sum", pair.run(replicax.compute_average_loss, args=(last,)))) == 3.5
    assert repr(last) == "PerReplica(float32[4], 2 replicas, 6 of 8 rows are examples: [1. 2. 3.], [4. 5. 6.])"


@pytest.mark.parametrize(
    ("partial", "message"),
    [
        ("pad", "element 1 has 4 examples for a replica, after elements of 3: .* no more"),
        ("drop", "element 1 has 8 examples, after elements of 6: .* no more. Put a full one first"),
    ],
)
def test_an_element_that_is_larger_than_the_first_has_no_room(pair, partial, message) -> None:
    elements = pair.distribute_dataset([FULL[:6], FULL], InputOptions(partial_batch=partial))
    with pytest.raises(ValueError, match=message):
        list(elements)


def test_the_spec_traces_the_program_of_all_batches(strategy) -> None:
    batches = [{"x": FULL}, {"x": FULL}, {"x": FULL[:5]}]
    dataset = strategy.distribute_dataset(batches, InputOptions(partial_batch="pad"))
    step = Step(strategy)
    program = strategy.extended.trace(step, args=(dataset.element_spec,))
    assert program.compiled_text()
    for element, batch in zip(dataset, batches, strict=True):
        assert strategy.extended.trace(step, args=(element,)) is program
        step.check(element, batch["x"])
    assert strategy.extended.trace_count(step) == 1


@pytest.mark.parametrize("partial", ["exact", "drop"])
def test_the_spec_says_whether_there_may_be_padding(pair, partial) -> None:
    kinds = {
        mode: type(pair.distribute_dataset([FULL], InputOptions(partial_batch=mode)).element_spec)
        for mode in (partial, "pad")
    }
    assert kinds[partial] is jax.ShapeDtypeStruct
    assert issubclass(kinds["pad"], jax.ShapeDtypeStruct)
    assert kinds["pad"] is not jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    ("replicas", "batches", "expected"),
    [
        (3, [FULL, FULL[:4]], [[1, 2, 2], [3, 4, 4], [2, 2, 2]]),
        (4, [FULL, FULL[:3], FULL[:0]], [[1, 1]] * 4),  # an empty one takes the last row of the element before
        (2, [np.ones((4, 2)), np.ones((0, 3))], [[[0, 0, 0]] * 2] * 2),  # nor has that one such rows
    ],
)
def test_rows_are_filled_up_with_real_ones(replicas, batches, expected) -> None:
    *_, last = strategy_of(replicas).distribute_dataset(batches, InputOptions(partial_batch="pad"))
    assert [np.asarray(v).tolist() for v in last.values] == expected


def test_a_row_to_fill_up_with_is_no_part_of_a_buffer_that_is_filled_again() -> None:
    def refilled():
        buffer = FULL.copy()
        yield buffer
        buffer[:] = np.nan
        yield buffer[:0]

    dataset = strategy_of(4).distribute_dataset(refilled, InputOptions(partial_batch="pad", prefetch=0))
    [_, nothing] = dataset
    assert [np.asarray(v).tolist() for v in nothing.values] == [[2, 2]] * 4


def test_an_epoch_without_any_example_is_zero_and_no_nan(strategy) -> None:
    [_, nothing] = strategy.distribute_dataset([FULL, FULL[:0]], InputOptions(partial_batch="pad"))
    with strategy.scope():
        mean = replicax.Mean()
    strategy.run(mean.update, args=(nothing,))
    share = strategy.run(replicax.compute_average_loss, args=(nothing,))
    assert float(strategy.reduce("sum", share)) == 0
    assert float(strategy.reduce("mean", nothing, axis=0)) == 0
    assert float(mean.result()) == 0
    assert strategy.gather(nothing, axis=0).shape == (0,)


def test_an_element_without_padding_may_come_before_one_with_it(pair) -> None:
    [full] = pair.distribute_dataset([FULL])
    [_, last] = pair.distribute_dataset([FULL, FULL[:6]], InputOptions(partial_batch="pad"))
    for values in ((full, last), (last, full)):
        found = sorted(float(mean) for mean in pair.reduce("mean", values, axis=0))
        assert found == [3.5, 4.5]


def test_a_padded_element_in_parts_is_padded() -> None:
    strategy = logical_strategy(2, 2)
    [_, last] = strategy.distribute_dataset([FULL, FULL[:6]], InputOptions(partial_batch="pad"))
    assert float(strategy.reduce("mean", strategy.split_to_logical_devices(last, [2]), axis=0)) == 3.5


@pytest.mark.soak
def test_replicas_of_several_logical_devices() -> None:
    strategy = replicax.Strategy(replicax.StrategyExtended(np.array(jax.devices()[:4]).reshape(2, 2)))
    step = Step(strategy)
    batches = [{"x": FULL}, {"x": FULL[:5]}]
    dataset = strategy.distribute_dataset(batches, InputOptions(partial_batch="pad"))
    strategy.extended.trace(step, args=(dataset.element_spec,))
    for element, batch in zip(dataset, batches, strict=True):
        split = strategy.split_to_logical_devices(element, [2])
        assert split["x"].form.array.addressable_shards[0].data.shape == (1, 2)
        step.check(element, batch["x"])
        step.check(split, batch["x"])
    assert strategy.extended.trace_count(step) == 1
