"""Integers that 32 bits don't hold are an error wherever values of the host go to devices, and never another number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.devices.host_values import as_array, check_integers

BIG = np.array([1, 2**40])
MESSAGE = r" has the integer 1099511627776( at \[1\])?, but u?int32 goes from .*'jax_enable_x64', True"
PER_REPLICA = replicax.RunOptions(executor="per_replica")


def raises(name: str):
    return pytest.raises(replicax.errors.IntegerRangeError, match=name + MESSAGE)


@pytest.mark.parametrize("value", [BIG, 2**40, np.int64(2**40), np.uint64(2**40), [1, 2**40], [[1], [np.int64(2**40)]]])
def test_whatever_has_such_an_integer(value) -> None:
    with raises("x"):
        check_integers(value, "x")
    assert float(as_array(value, "x", "float32").max()) == 2**40  # floats round


@pytest.mark.parametrize(
    "value", [np.array([-(2**31), 2**31 - 1]), 7, np.uint64(2**32 - 1), np.zeros(0, int), [], "x", 1e300, True, None]
)
def test_what_fits_is_let_pass(value) -> None:
    check_integers(value, "x")


def test_limits_are_those_of_the_dtype_that_is_wanted() -> None:
    check_integers(np.array([-8, 7]), "x", jnp.int4)
    for value, dtype in ((np.array([8]), jnp.int4), (-1, jnp.uint32), (np.int16(300), np.int8)):
        with pytest.raises(
            replicax.errors.IntegerRangeError,
            match="x has the integer .* goes from .* Choose a dtype|x64.*smaller ones",
        ):
            check_integers(value, "x", dtype)
    with jax.enable_x64(True):
        check_integers(BIG, "x")
        with pytest.raises(OverflowError, match="int64 goes from .* Choose a dtype that has it"):
            check_integers(2**63, "x")


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_arguments_of_a_step(strategy, options) -> None:
    ran = []
    with raises(r"args\[1\]\['ids'\]"):
        strategy.run(lambda x, batch: ran.append(0), args=(1.0, {"ids": BIG}), options=options)
    with raises(r"kwargs\['n'\]"):
        strategy.run(lambda n: ran.append(0), kwargs={"n": 2**40}, options=options)
    with raises(r"args\[0\]"):
        strategy.run(lambda n: ran.append(0), args=(np.int64(2**40),), options=options)
    assert not ran
    small = strategy.run(lambda x: x + 1, args=(np.array([1, 2]),), options=options)  # such arrays go on working
    assert small.tolist() == [2, 3]


def test_variables_say_their_names_and_keep_their_values(strategy) -> None:
    with strategy.scope():
        v = replicax.Variable(np.array([3, 4]), name="v")
        small = replicax.Variable(0, dtype="int8", name="small")
        f = replicax.Variable(np.zeros(2, np.float32), name="f")
        one = replicax.Variable(np.float32(0), name="one")
        for initial in (BIG, BIG.tolist(), lambda: BIG):
            with raises("variable 'w': the initial value"):
                replicax.Variable(initial, name="w")
        with pytest.raises(ValueError, match="variable 'w': the initial value has the integer 300 .* int8"):
            replicax.Variable(np.array([300]), dtype="int8", name="w")
    for change in (v.assign, v.assign_add, lambda x: strategy.run(lambda: v.assign(x))):
        for value in (BIG, BIG.tolist()):
            with raises(r"variable 'v' \(int32\[2\]\): the value to assign"):
                change(value)
    for number in (300, np.int64(-129), np.array(300)):
        with pytest.raises(ValueError, match=r"variable 'small' \(int8\[\]\): the value to assign has the integer"):
            small.assign(number)
    assert v.numpy().tolist() == [3, 4]
    assert int(small.assign(-128)) == -128
    assert f.assign(BIG).numpy().tolist() == [1, 2**40]  # and not what int32 makes of it
    assert float(f.assign([2**40, 0])[0]) == float(one.assign(np.int64(2**40))) == 2**40


def test_elements_of_a_dataset(strategy) -> None:
    batches = [{"id": np.arange(4)}, {"id": np.array([0, 1, 2, 2**40])}]
    for options in (None, replicax.InputOptions(prefetch=0), replicax.InputOptions(partial_batch="pad")):
        iterator = iter(strategy.distribute_dataset(batches, options))
        next(iterator)
        with pytest.raises(
            replicax.errors.IntegerRangeError, match=r"^element 1\['id'\] has the integer 1099511627776 at"
        ):
            next(iterator)
        with pytest.raises(replicax.errors.IntegerRangeError, match="jax_enable_x64"):
            strategy.run_steps(lambda ctx, x: None, iter(strategy.distribute_dataset(batches[1:], options)), 1)


def test_a_dataset_under_64_bits_set_for_this_thread_only(pair) -> None:
    with jax.enable_x64(True):
        [element] = pair.distribute_dataset([{"id": np.array([0, 2**40])}])
    assert [v.tolist() for v in pair.local_results(element["id"])] == [[0], [2**40]]


def test_values_of_each_replica(strategy) -> None:
    for value in (BIG, 2**40):
        with raises(r"distribute_values_from_function: the value\['n'\] of replica 0"):
            strategy.distribute_values_from_function(lambda ctx, value=value: {"n": value})
        with raises(r"replicate_to_logical_devices: \['n'\]"):
            strategy.replicate_to_logical_devices({"n": value})


def test_what_acts_across_replicas(pair) -> None:
    with raises(r"extended.broadcast_to: tensor\['x'\]"):
        pair.extended.broadcast_to({"x": BIG})
    with raises("strategy.reduce: the value"):
        pair.reduce("mean", BIG, axis=0)
    for collective in ("all_reduce", "all_gather"):
        with raises(rf"ReplicaContext.{collective}: the value\['x'\]"):
            pair.run(
                lambda c=collective: getattr(replicax.get_replica_context(), c)(
                    *(({"x": BIG}, 0) if c == "all_gather" else ("sum", {"x": BIG}))
                )
            )
    with raises("IndexedSlices: indices"):
        replicax.IndexedSlices(np.zeros((2, 1)), BIG, (2**41, 1))  # which has these rows


@pytest.mark.parametrize("options", [None, PER_REPLICA], ids=["compiled", "per_replica"])
def test_losses_and_metrics_make_floats_of_integers_at_once(pair, options) -> None:
    with pair.scope():
        mean = replicax.Mean()
    values = np.array([2**40, 2**40])

    def step():
        mean.update(values)
        return replicax.compute_average_loss(values, sample_weight=values)

    share = pair.run(step, options=options)
    assert float(pair.reduce("sum", share)) == 2.0**80
    assert float(mean.result()) == 2.0**40


def test_masked_arrays_are_refused_wherever_their_mask_would_be_lost(pair) -> None:
    masked, plain = np.ma.masked_array([1.0, 100.0], [False, True]), np.ones(2)
    with pair.scope():
        mean, v = replicax.Mean(), replicax.Variable(plain)
    for use in (
        lambda: list(pair.distribute_dataset([plain, masked])),
        lambda: pair.make_numpy_dataset({"x": masked}),
        lambda: pair.run(lambda: mean.update(masked)),
        lambda: pair.run(lambda: replicax.compute_average_loss(plain, sample_weight=masked)),
        lambda: v.assign(masked),
        lambda: replicax.Checkpoint(x=masked),
    ):
        with pytest.raises(TypeError, match="is a masked array, whose mask would be lost"):
            use()
