"""Objects among the arguments of a step: what it reads there is what is there now, at each call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import replicax


class Part:
    def __init__(self) -> None:
        self.rate = 1.0


class Config:
    def __init__(self) -> None:
        self.scale, self.part, self.weights, self.seen = 2.0, Part(), [1.0, 2.0], 0

    @property
    def doubled(self) -> float:
        return self.scale * 2

    def total(self) -> float:
        return sum(self.weights)

    def __call__(self, x: Any) -> Any:
        return x + self.part.rate


@dataclasses.dataclass
class Settings:
    scale: float = 2.0


def helper(config: Any) -> float:
    return config.scale


CHANGES = {
    "a number": (lambda x, c: x * c.scale, lambda c: setattr(c, "scale", 5.0)),
    "by a property": (lambda x, c: x * c.doubled, lambda c: setattr(c, "scale", 5.0)),
    "by a method": (lambda x, c: x * c.total(), lambda c: c.weights.append(4.0)),
    "by a call": (lambda x, c: c(x), lambda c: setattr(c.part, "rate", 5.0)),
    "by a function": (lambda x, c: x * helper(c), lambda c: setattr(c, "scale", 5.0)),
    "of a part": (lambda x, c: x * c.part.rate, lambda c: setattr(c.part, "rate", 5.0)),
    "another part": (lambda x, c: x * c.part.rate, lambda c: setattr(c, "part", Part())),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_is_seen(pair: replicax.Strategy, how: str) -> None:
    step, change = CHANGES[how]
    config = Config()
    for _ in range(2):
        for _ in range(2):
            assert float(pair.run(step, args=(3.0, config))) == step(3.0, config)
        change(config)
        config.seen += 1  # of which the step knows nothing
    assert pair.extended.trace_count(step) == 2


def test_dataclasses_and_sets(pair: replicax.Strategy) -> None:
    settings, names = Settings(), {"a"}
    for _ in range(2):
        assert float(pair.run(lambda x, s: x * s.scale, args=(1.0, settings))) == settings.scale
        assert float(pair.run(lambda x, names: x * len(names), args=(1.0, names))) == len(names)
        settings.scale = 3.0
        names.add("b")


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
        replicax.errors.RetraceWarning, match=r"args\[1\]: was .*Config.* with scale=9.0, .*, now .*scale=10.0"
    ):
        run_often()
