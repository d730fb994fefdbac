"""Objects among the arguments of a step: what it reads there is what is there now, at each call."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import replicax


class Part:
    def __init__(self) -> None:
        self.rate = 1.0

    def scaled(self, x: Any) -> Any:
        return x * self.rate


def timed(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        return fn(*args)

    return call


class Sub(Part):
    def scaled(self, x: Any) -> Any:
        return super().scaled(x)

    @timed
    def decorated(self, x: Any) -> Any:
        return x * self.rate

    def __getitem__(self, name: str) -> float:
        return getattr(self, name)

    def __mul__(self, x: Any) -> Any:
        return x * self.rate


@dataclasses.dataclass(slots=True)
class Slots:
    rate: float = 1.0


class Fields:
    """Keeps its attributes in a dict, as some classes for configurations do."""

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._fields[name] = value


@dataclasses.dataclass
class Named:
    rate: float = 1.0

    def __hash__(self) -> int:
        return hash("Named")


@dataclasses.dataclass(unsafe_hash=True)
class Hashed:
    rate: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    rates: dict[str, float]

    @property
    def rate(self) -> float:
        return self.rates["rate"]


class Net:
    def __init__(self) -> None:
        self.training = False

    def __call__(self, x: Any) -> Any:
        return x * 2 if self.training else x


class Config:
    def __init__(self) -> None:
        self.scale, self.part, self.seen = 2.0, Part(), 0


def helper(part: Any) -> float:
    return part.rate


def set_rate(part: Any) -> None:
    part.rate = 2.0


def set_item(rates: Any) -> None:
    rates[0] = 2.0


def class_of_rates() -> Any:
    class Rates:
        rate = 1.0

        @classmethod
        def scaled(cls, x: Any) -> Any:
            return x * cls.rate

        def by_type(self, x: Any) -> Any:
            return (lambda: x * type(self).rate)()

        @property
        def by_property(self) -> float:
            return self.__class__.rate

        def __neg__(self) -> float:
            return type(self).rate

    return Rates


def scaled_by(rates: list[float]) -> Callable[..., Any]:
    return lambda x: x * rates[0]


def with_default(rates: list[float]) -> Callable[..., Any]:
    return lambda x, rates=rates: x * rates[0]


def with_attribute() -> Any:
    def fn() -> None: ...

    fn.rate = 1.0  # type: ignore[attr-defined]
    return fn


READS = {
    "by a method": (Part, lambda x, p: p.scaled(x), set_rate),
    "by a function of this module": (Part, lambda x, p: x * helper(p), set_rate),
    "of another part": (
        lambda: types.SimpleNamespace(part=Part(), other=Slots(2.0)),
        lambda x, n: x * n.part.rate,
        lambda n: setattr(n, "part", n.other),
    ),
    "by a function of another module": (Part, lambda x, p: x * operator.attrgetter("rate")(p), set_rate),
    "by super()": (Sub, lambda x, p: p.scaled(x), set_rate),
    "by a decorated method": (Sub, lambda x, p: p.decorated(x), set_rate),
    "by an item": (Sub, lambda x, p: x * p["rate"], set_rate),
    "by an operator": (Sub, lambda x, p: p * x, set_rate),
    "in slots that are empty": (lambda: Slots.__new__(Slots), lambda x, p: x * getattr(p, "rate", 1.0), set_rate),
    "in slots": (Slots, lambda x, p: x * p.rate, set_rate),
    "in a dict behind __getattr__": (lambda: Fields(rate=1.0), lambda x, p: x * p.rate, set_rate),
    "in a namespace": (lambda: types.SimpleNamespace(rate=1.0), lambda x, p: x * p.rate, set_rate),
    "with a hash of its own": (Named, lambda x, p: x * p.rate, set_rate),
    "with a hash of its fields": (Hashed, lambda x, p: x * p.rate, set_rate),
    "in a frozen dataclass": (
        lambda: Frozen({"rate": 1.0}),
        lambda x, p: x * p.rate,
        lambda p: p.rates.update(rate=2.0),
    ),
    "far inside": (
        lambda: types.SimpleNamespace(a=[Fields(b={"c": Fields(part=Part())})]),
        lambda x, n: x * n.a[0].b["c"].part.rate,
        lambda n: set_rate(n.a[0].b["c"].part),
    ),
    "of the class": (lambda: type("Trial", (), {"rate": 1.0})(), lambda x, p: x * p.rate, set_rate),
    "by vars": (Part, lambda x, p: x * vars(p)["rate"], set_rate),
    "in a copy": (Part, lambda x, p: x * copy.copy(p).rate, set_rate),
    "in a deep copy": (Slots, lambda x, p: x * copy.deepcopy(p).rate, set_rate),
    "in a deque": (lambda: collections.deque([1.0]), lambda x, d: x * d[0], set_item),
    "in an array": (lambda: array.array("d", [1.0]), lambda x, a: x * a[0], set_item),
    "in a deque of it": (
        lambda: types.SimpleNamespace(rates=collections.deque([1.0])),
        lambda x, n: x * n.rates[0],
        lambda n: set_item(n.rates),
    ),
    "of a class itself": (class_of_rates, lambda x, c: x * c.rate, set_rate),
    "of its base": (
        lambda: type("Sub", (class_of_rates(),), {}),
        lambda x, c: x * c.rate,
        lambda c: set_rate(c.__base__),
    ),
    "by a class method": (lambda: class_of_rates()(), lambda x, r: r.scaled(x), lambda r: set_rate(type(r))),
    "by the class in a method": (lambda: class_of_rates()(), lambda x, r: r.by_type(x), lambda r: set_rate(type(r))),
    "by the class in a property": (
        lambda: class_of_rates()(),
        lambda x, r: x * r.by_property,
        lambda r: set_rate(type(r)),
    ),
    "by the class in an operator": (lambda: class_of_rates()(), lambda x, r: x * -r, lambda r: set_rate(type(r))),
    "by the class in the step": (
        lambda: class_of_rates()(),
        lambda x, r: x * type(r).rate,
        lambda r: set_rate(type(r)),
    ),
    "of a function": (with_attribute, lambda x, f: x * f.rate, set_rate),
    "by a closure": (lambda: scaled_by([1.0]), lambda x, f: f(x), lambda f: set_item(f.__closure__[0].cell_contents)),
    "by a default": (lambda: with_default([1.0]), lambda x, f: f(x), lambda f: set_item(f.__defaults__[0])),
    "by another default": (
        lambda: with_default([1.0]),
        lambda x, f: f(x),
        lambda f: setattr(f, "__defaults__", ([2.0],)),
    ),
    "by a bound method": (lambda: Part().scaled, lambda x, f: f(x), lambda f: set_rate(f.__self__)),
    "by a partial": (lambda: functools.partial(Part.scaled, Part()), lambda x, f: f(x), lambda f: set_rate(f.args[0])),
    "by a method of another object": (
        lambda: types.SimpleNamespace(loss=Part().scaled),
        lambda x, n: n.loss(x),
        lambda n: set_rate(n.loss.__self__),
    ),
}


@pytest.mark.parametrize("how", READS)
def test_a_change_is_seen_however_it_is_read(pair: replicax.Strategy, how: str) -> None:
    make, step, change = READS[how]
    part = make()
    for rate in (1.0, 1.0, 2.0, 2.0):
        if rate == 2.0:
            change(part)
        assert float(pair.run(step, args=(1.0, part))) == rate
    assert pair.extended.trace_count(step) == 2
    assert float(pair.run(lambda x: x, args=(1.0,))) == 1.0  # no key is lost


class Trainer:
    rate = 1.0

    def step(self, x: Any, factor: float = 1.0) -> Any:
        total = replicax.Variable(0.0, name="total")
        total.assign_add(x * self.rate)
        return total.value

    def __call__(self, x: Any) -> Any:
        return self.step(x)


def call(fn: Callable[..., Any], x: Any) -> Any:
    return fn(x)


BOUND = {
    "a method": lambda trainer: trainer.step,
    "a partial": lambda trainer: functools.partial(Trainer.step, trainer),
    "a partial of a method": lambda trainer: functools.partial(trainer.step, factor=2.0),
    "a callable object": lambda trainer: trainer,
    "a partial with a method": lambda trainer: functools.partial(call, trainer.step),
}


@pytest.mark.parametrize("what", BOUND)
def test_a_step_reads_what_its_object_is_now_and_keeps_its_variables(pair: replicax.Strategy, what: str) -> None:
    trainer = Trainer()
    totals = []
    for trainer.rate in (1.0, 1.0, 2.0, 1.0):
        totals.append(float(pair.run(BOUND[what](trainer), args=(1.0,))))
    assert totals == [1.0, 2.0, 4.0, 5.0]
    assert pair.extended.trace_count(BOUND[what](trainer)) == 2


factor, calls = 1.0, 0


def times_factor(x: Any) -> Any:
    global calls
    calls += 1
    return x * factor


class Times:
    def __call__(self, x: Any) -> Any:
        return times_factor(x)

    def __mul__(self, x: Any) -> Any:
        return x * factor

    @property
    def factor(self) -> float:
        return factor


READ_BY = {
    "a function": (lambda x, f: f(x), times_factor),
    "a partial": (lambda x, f: f(), functools.partial(times_factor, 1.0)),
    "a function in a container": (lambda x, d: d["f"][0](x), {"f": [times_factor]}),
    "a function that has captured it": (lambda x, f: f(x), timed(times_factor)),
    "a method": (lambda x, t: t(x), Times()),
    "a property": (lambda x, t: x * t.factor, Times()),
    "an operator": (lambda x, t: t * x, Times()),
}


@pytest.mark.parametrize("how", READ_BY)
def test_a_global_that_a_function_reads_may_change(pair: replicax.Strategy, how: str) -> None:
    global factor
    step, argument = READ_BY[how]
    for factor in (1.0, 1.0, 2.0, 2.0):
        assert float(pair.run(step, args=(1.0, argument))) == factor
    assert pair.extended.trace_count(step) == 2


def test_an_attribute_that_one_step_sets_is_an_input_of_others(pair: replicax.Strategy) -> None:
    def train(x: Any, net: Net) -> Any:
        net.training = True
        return net(x)

    def predict(x: Any, net: Net) -> Any:
        return net(x)

    for net in (Net(), Net()):
        for training in (False, True, False):
            net.training = training
            assert float(pair.run(predict, args=(1.0, net))) == (2.0 if training else 1.0)
            assert float(pair.run(train, args=(1.0, net))) == 2.0
    assert pair.extended.trace_count(train) == 2  # one for each object
    assert pair.extended.trace_count(predict) == 4


def test_classes_are_as_before_when_a_step_has_been_traced(pair: replicax.Strategy) -> None:
    def step(x: Any, fields: Fields) -> Any:
        return x * fields.missing

    before = dict(vars(Fields))
    with pytest.raises(AttributeError, match="missing"):
        pair.run(step, args=(1.0, Fields()))
    assert dict(vars(Fields)) == before


def test_two_threads_trace_steps_with_one_object(pair: replicax.Strategy) -> None:
    part, entered, results = Part(), threading.Barrier(2), {}

    def run(number: int) -> None:
        def step(x: Any, part: Part) -> Any:
            entered.wait(10)
            return x * part.rate * number

        for _ in range(2):
            results[number] = float(pair.run(step, args=(1.0, part)))

    for rate in (1.0, 2.0):
        part.rate = rate
        threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {1: rate, 2: 2 * rate}
    assert not {"__getattribute__", "__setattr__"} & vars(Part).keys()


def test_steps_that_overlap_as_plain_python_change_a_class_once() -> None:
    part, seen, options = Part(), [], replicax.RunOptions("per_replica")
    first, other = (replicax.MirroredStrategy(jax.devices()[i : i + 1]) for i in range(2))

    def short(part: Part) -> None:
        seen.append((part.rate, Part.__getattribute__)[1])

    def long(part: Part) -> None:
        for _ in range(3):
            thread = threading.Thread(target=other.run, args=(short, (part,)), kwargs={"options": options})
            thread.start()
            thread.join()

    first.run(long, args=(part,), options=options)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert not {"__getattribute__", "__setattr__"} & vars(Part).keys()


def test_equal_objects_made_anew_are_the_same_to_a_step(pair: replicax.Strategy) -> None:
    def step(x: Any, hashed: Hashed) -> Any:
        return x * hashed.rate

    for rate in (1.0, 1.0, 2.0, 2.0, 1.0):
        assert float(pair.run(step, args=(1.0, Hashed(rate)))) == rate
    assert pair.extended.trace_count(step) == 2


def test_a_step_that_is_an_object(pair: replicax.Strategy) -> None:
    class Step:
        def __call__(self, x: Any, config: Config) -> Any:
            return x * config.scale

    step, config = Step(), Config()
    for scale in (2.0, 3.0):
        config.scale = scale
        config.part.parts = {Part(), Part()}
        assert float(pair.run(step, args=(1.0, config))) == scale


def test_what_the_step_itself_changes_is_no_input(pair: replicax.Strategy) -> None:
    config = Config()

    def step(x: Any, config: Config) -> Any:
        config.seen += 1
        return x * config.scale

    for _ in range(3):
        pair.run(step, args=(1.0, config))
    assert config.seen == pair.extended.trace_count(step) == 1


def test_the_warning_of_many_traces_names_the_attribute(pair: replicax.Strategy) -> None:
    config = Config()

    def run_often() -> None:
        for i in range(11):
            config.scale = float(i)
            pair.run(lambda x, c: x * c.scale, args=(1.0, config))

    with pytest.warns(
        replicax.errors.RetraceWarning, match=r"args\[1\]: was .*Config.* with scale=9.0, now .*scale=10.0"
    ):
        run_often()


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    width: float

    @functools.cached_property
    def twice(self) -> float:
        return 2 * self.width

    def step(self) -> Any:
        return replicax.Variable(self.width, name="v") + self.twice


def test_frozen_objects_have_variables_of_their_own_and_may_cache_what_they_compute(pair: replicax.Strategy) -> None:
    first, second = FrozenModel(1.0), FrozenModel(2.0)
    assert [float(pair.run(f.step)) for f in (first, second, first)] == [3.0, 6.0, 3.0]


def test_an_object_that_has_gone_is_not_none(pair: replicax.Strategy) -> None:
    config = Config()
    config.part = Part()

    def step(x: Any, config: Config) -> Any:
        return x if config.part is None else 2 * x

    assert float(pair.run(step, args=(1.0, config))) == 2.0
    config.part = None
    assert float(pair.run(step, args=(1.0, config))) == 1.0


def test_programs_of_objects_that_have_gone_are_dropped(pair: replicax.Strategy) -> None:
    def step(x: Any, config: Config) -> Any:
        return x * len(config.part)

    gone = []
    for _ in range(3):
        config, array = Config(), np.ones(3)
        config.part = [array]
        gone.append(weakref.ref(array))
        pair.run(step, args=(1.0, config))
    del config, array
    pair.run(lambda x: x, args=(1.0,))  # another program
    assert [ref() is None for ref in gone] == [True, True, False]  # warnings compare the last one
