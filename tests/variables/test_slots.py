"""Variables that are written together share a list; whatever else happens, each keeps its own value."""

import gc
import random
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.variables.lost_arrays import LostArray
from replicax.variables.slots import coalesced, store_all


@pytest.fixture
def five(pair):
    with pair.scope():
        return [replicax.Variable(float(10 * i), name=f"v{i}") for i in range(5)]


def values(variables):
    return [float(v) for v in variables]


def test_a_program_finds_the_list_that_it_left(pair, five) -> None:
    """Otherwise each call would collect the arrays of all variables anew."""

    def step():
        for v in five:
            v.assign_add(1.0)

    pair.run(step)
    group = coalesced(tuple(v.slot for v in five))
    pair.run(step)
    assert coalesced(tuple(v.slot for v in five)) is group
    assert values(five) == [2, 12, 22, 32, 42]


def test_programs_that_write_other_sets_in_other_orders_in_turn(pair, five) -> None:
    def add(*which):
        for i in which:
            five[i].assign_add(float(i + 1))

    expected = values(five)
    rng = random.Random(0)
    programs = [(0, 1, 2), (2, 1, 0), (1, 3), (4,), (0, 1, 2, 3, 4), (3, 4)]
    for _ in range(40):
        which = rng.choice(programs)
        pair.run(lambda which=which: add(*which))
        for i in which:
            expected[i] += i + 1
        assert values(five) == expected


def test_some_are_overwritten_without_being_read(pair, five) -> None:
    def step(x):
        five[3].assign(x)  # not read
        five[1].assign_add(five[0])
        five[4].assign(five[2] + x)  # not read
        five[2].assign_add(x)

    for x in (1.0, 2.0):
        program = pair.extended.trace(step, args=(x,))
        assert program.written[: len(program.donated)] == program.donated == (five[1].slot, five[2].slot)
        pair.run(step, args=(x,))
    assert values(five) == [0, 10, 23, 2, 23]


@pytest.mark.usefixtures("young_heap")
def test_one_that_goes_frees_its_array_and_no_other(pair) -> None:
    with pair.scope():
        kept = replicax.Variable(jnp.ones(3))

    def use():
        with pair.scope():
            gone = replicax.Variable(jnp.ones(3))

        def step():
            kept.assign_add(gone)
            gone.assign_add(kept)

        pair.run(step)
        return weakref.ref(gone.slot.array)

    array = use()
    gc.collect()
    assert array() is None
    assert kept.numpy().tolist() == [2, 2, 2]
    pair.run(lambda: kept.assign_add(jnp.ones(3)))
    assert kept.numpy().tolist() == [3, 3, 3]


@pytest.mark.parametrize("how", ["assigned", "stored with others", "lost", "regrouped", "gone"])
def test_arrays_stored_between_programs_are_the_next_program_s(pair, five, how) -> None:
    def step():
        for v in five:
            v.assign_add(1.0)

    for _ in range(6):
        pair.run(step)
    slots = tuple(v.slot for v in five)
    array = jnp.copy(slots[1].array)
    if how == "assigned":
        five[1].assign(3.0)
    elif how == "stored with others":
        store_all({slot: jnp.copy(slot.array) for slot in slots})
    elif how == "lost":
        slots[1].array = LostArray("somebody has it")
    elif how == "regrouped":
        coalesced(slots[:2])
    else:
        slots[1].release()
    slots[1].array = array
    pair.run(step)
    assert float(five[1]) == 17


def test_what_somebody_has_read_is_kept_and_nothing_is_compiled_for_it(strategy, caplog) -> None:
    """The next step gets copies, of numbers and of random keys, made without a program for each shape."""
    with strategy.scope():
        numbers = [replicax.Variable(np.full((17, i), float(i), np.float32)) for i in (3, 4, 5)]
        key = replicax.Variable(jax.random.key(7))

    def step():
        for v in numbers:
            v.assign_add(jnp.ones_like(v.value))
        key.assign(jax.random.split(key.value)[0])

    strategy.run(step)
    read, read_key = [v.value for v in numbers], key.value
    data = jax.random.key_data(read_key)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        strategy.run(step)
    assert not [r for r in caplog.records if "ompil" in r.getMessage()]
    assert [float(x[0, 0]) for x in read] == [4, 5, 6]
    assert [float(v.numpy()[16, 2]) for v in numbers] == [5, 6, 7]
    assert (jax.random.key_data(read_key) == data).all()
    assert (jax.random.key_data(key.value) != data).any()
