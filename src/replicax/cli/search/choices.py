"""The choices that a search varies: values of the plan's options, and of the user's function's arguments."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from replicax.cli.command_line import InputError

OPTIONS = ("strategy", "logical", "microbatches")
"""Choices that are options of ``replicax plan``; all others are arguments of the function, as ``--with`` gives them."""

DECLARED = "SEARCH"
"""The name by which a program offers choices: a dict from names to values."""


@dataclasses.dataclass(frozen=True)
class SearchCase:
    """One combination of choices.

    >>> SearchCase((("strategy", "sharded"), ("remat", "none"))).arguments()
    ['--strategy', 'sharded', '--with', 'remat=none']
    """

    values: tuple[tuple[str, str], ...]  # the name and the value of each choice, as on the command line

    def arguments(self) -> list[str]:
        """The arguments of ``replicax plan`` for this case."""
        found: list[str] = []
        for name, value in self.values:
            found += [f"--{name}", value] if name in OPTIONS else ["--with", f"{name}={value}"]
        return found

    def __str__(self) -> str:
        return ", ".join(value if name == "strategy" else f"{name} {value}" for name, value in self.values)


def parsed(texts: Sequence[str]) -> dict[str, list[str]]:
    """The choices of a command line: ``NAME=VALUE,VALUE``.

    >>> parsed(["strategy=mirrored,groups:4", "remat=none,layers"])
    {'strategy': ['mirrored', 'groups:4'], 'remat': ['none', 'layers']}
    """
    choices: dict[str, list[str]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        values = rest.split(",")
        if not equals or not name.isidentifier() or not all(values):
            raise InputError(f"--search: expected NAME=VALUE,VALUE, such as microbatches=1,2,4, got {text!r}")
        if name in choices:
            raise InputError(f"--search has {name} twice: give all of its values at once")
        choices[name] = _checked_values(name, values, "--search")
    return choices


def declared(module: Any) -> dict[str, list[str]]:
    """The choices that a program offers in its ``SEARCH``, or none."""
    offered = getattr(module, DECLARED, {})
    where = f"{DECLARED} of {getattr(module, '__name__', 'the program')}"
    if not isinstance(offered, Mapping) or not all(isinstance(name, str) for name in offered):
        raise InputError(f"{where} must be a dict from names to lists of values, got {offered!r}")
    choices = {}
    for name, values in offered.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InputError(f"{where} must have a list of values of {name!r}, got {values!r}")
        choices[name] = _checked_values(name, [_as_text(value) for value in values], where)
    return choices


def default_choices(replicas: int, slices: int) -> dict[str, list[str]]:
    """The choices for programs that offer none.

    Groups of variables are the slices if there are several, and otherwise about as many as a group has replicas.

    >>> default_choices(64, 1)
    {'strategy': ['mirrored', 'sharded', 'groups:8'], 'microbatches': ['1', '2', '4']}
    """
    group = replicas // slices if slices > 1 else 1
    if slices == 1:
        while group * group < replicas and replicas % (2 * group) == 0:
            group *= 2
    groups = [f"groups:{group}"] if 1 < group < replicas else []
    several = ["mirrored", "sharded", *groups] if replicas > 1 else ["mirrored"]
    return {"strategy": several, "microbatches": ["1", "2", "4"]}


def cases_of(choices: Mapping[str, Sequence[str]]) -> list[SearchCase]:
    """All combinations; the last name varies fastest.

    >>> [str(case) for case in cases_of({"strategy": ["mirrored", "sharded"], "microbatches": ["1", "2"]})]
    ['mirrored, microbatches 1', 'mirrored, microbatches 2', 'sharded, microbatches 1', 'sharded, microbatches 2']
    """
    rows: Iterator[tuple[str, ...]] = itertools.product(*choices.values())
    return [SearchCase(tuple(zip(choices, row, strict=True))) for row in rows]


def _checked_values(name: str, values: list[str], where: str) -> list[str]:
    if not values:
        raise InputError(f"{where} has no value of {name}")
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise InputError(f"{where} has a value of {name} twice: {', '.join(twice)}")
    return values


def _as_text(value: Any) -> str:
    """A text that ``--with`` reads as this value."""
    if not isinstance(value, str):
        return repr(value)
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return repr(value)
