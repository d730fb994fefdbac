from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import types

import jax.numpy as jnp
import pytest

from replicax.execution.tracing.function_key import function_key, key_after_tracing

rate = 0.5
table = [1, 2]


class Table(dict):
    pass


def helper(x):
    return x * rate


def uses_globals(x):
    return helper(x) + len(table)


def make(captured):
    return lambda x: x + captured


def test_other_captured_values_are_another_step() -> None:
    values = [1, 2, 1.0, True, "1", None, (1,), [1], {"a": 1}, 0.0, -0.0, jnp.sin, jnp.cos, jnp.ones(1), object()]
    keys = {function_key(make(value)) for value in values}
    assert len(keys) == len(values)


def a_dict(kind):
    captured = kind(a=1)
    captured["itself"] = captured
    return make(captured), lambda: captured.__setitem__("a", 2)


def a_dict_of_one_item_that_gets_another_name():
    captured = {"a": object()}
    return make(captured), lambda: captured.__setitem__("b", captured.pop("a"))


def a_name_that_is_bound_later():
    held = None

    def fn():
        return held  # noqa: F821

    def change():
        nonlocal held
        held = 1

    del held
    return fn, change


def a_deque():
    captured = collections.deque([1], maxlen=1)
    return make(captured), lambda: captured.append(2)


def a_list_in_a_frozen_dataclass():
    config = dataclasses.make_dataclass("Config", ["names"], frozen=True)(["a"])
    return make({"config": config}), lambda: config.names.append("b")


def a_name_that_is_rebound(make, other):
    held = make()

    def change():
        nonlocal held
        held = other

    return (lambda: held), change


def a_name_without_a_value():
    held = 1
    fn = lambda: held  # noqa: E731
    [cell] = fn.__closure__
    del cell.cell_contents
    return fn, lambda: setattr(cell, "cell_contents", 2)


def a_function(attribute, new):
    def helper(x, y=1):
        return x + y

    return (lambda x: helper(x)), lambda: setattr(helper, attribute, new)


@pytest.mark.parametrize(
    ("captured", "args"),
    [
        *((a_dict, (kind,)) for kind in (dict, collections.OrderedDict, collections.Counter, Table)),
        (a_dict_of_one_item_that_gets_another_name, ()),
        (a_name_that_is_bound_later, ()),
        (a_deque, ()),
        (a_list_in_a_frozen_dataclass, ()),
        (a_name_that_is_rebound, (int, 1)),
        (a_name_that_is_rebound, (type("Model", (), {}), None)),  # the only one that held the object
        (a_name_that_is_rebound, (lambda: [make, a_deque, make], [make, a_deque, a_deque])),
        (a_name_without_a_value, ()),
        (a_function, ("__code__", (lambda x, y: x).__code__)),
        (a_function, ("__defaults__", (2,))),
        (a_function, ("__kwdefaults__", {"y": 2})),
        (lambda: (uses_globals, lambda: globals().update(rate=0.25)), ()),  # read by a function that it calls
    ],
)
def test_what_a_function_captures_may_change(captured, args) -> None:
    fn, change = captured(*args)
    before = function_key(fn)
    assert function_key(fn) is before
    change()
    assert function_key(fn) != before
    globals().update(rate=0.5)


@pytest.mark.usefixtures("young_heap")
def test_a_key_dies_with_what_it_captures() -> None:
    class Model:
        pass

    model = Model()
    key = function_key(make(model))
    assert not key.is_dead
    del model
    gc.collect()
    assert key.is_dead


def test_what_tracing_changes_does_not_tell_steps_apart() -> None:
    calls, count = [], 0

    def step():
        nonlocal count
        count += 1
        calls.append(count)

    for _ in range(3):  # as the cache does when it traces a new program
        before = function_key(step)
        step()
        after = key_after_tracing(step, before)
        assert function_key(step) == after
    assert before == after  # it has learnt


def test_of_a_dict_only_the_items_that_tracing_changes_do_not_tell_steps_apart() -> None:
    state = {"calls": 0, "rate": 1.0}

    def step():
        state["calls"] += 1
        state["new"] = state["calls"]

    before = function_key(step)
    step()
    after = key_after_tracing(step, before)
    step()
    assert function_key(step) == after
    state["rate"] = 2.0
    assert function_key(step) != after


def test_a_frozen_dataclass_is_what_its_fields_are() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int
        names: list = dataclasses.field(default_factory=list)
        late: int = dataclasses.field(init=False)

    def keyed(config):
        return function_key(lambda: config)

    one, same, other = Config(1), Config(1), Config(2)
    assert keyed(one) != keyed(same)  # a field is not set: not by value
    for config in (one, same, other):
        object.__setattr__(config, "late", 3)
    assert keyed(one) == keyed(same) != keyed(other)
    object.__setattr__(same, "hidden", 5)
    assert keyed(one) != keyed(same)


@pytest.mark.parametrize(
    "bound",
    [
        lambda step, value: functools.partial(step, y=value),
        lambda step, value: functools.partial(functools.partial(step, value)),
        lambda step, value: types.MethodType(lambda self, x: step(self, x), value),
        lambda step, value: lambda x, y=value: step(x, y),
        lambda step, value: lambda x, *, y=value: step(x, y),
        lambda step, value: functools.partial(lambda inner, x: inner(x), functools.partial(step, value)),
    ],
    ids=["keyword", "partial of partial", "method", "default", "keyword default", "partial in a partial"],
)
def test_what_is_bound_to_a_function_belongs_to_it(pair, bound) -> None:
    def step(x, y):
        return x * y

    found = [float(pair.run(bound(step, value), args=(3.0,))) for value in (2.0, 5.0, 2.0)]
    assert found == [6, 15, 6]
    assert function_key(bound(step, 2.0)) == function_key(bound(step, 2.0))
