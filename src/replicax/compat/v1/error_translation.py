"""Translates errors of the core to the API with towers, and accepts argument names of other revisions."""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from replicax import _jax

_P = ParamSpec("_P")
_R = TypeVar("_R")

# From the longest to the shortest. Words in paths or in other names stay unchanged.
_START, _END = r"(?<![\w/\\.'-])", r"(?![\w/\\]|[.-]\w)"
_WORDS = [
    (r"replicax\.get_replica_context\(\)\.all_reduce", "get_tower_context().merge_call, and in it distribution.reduce"),
    (r", or its all_reduce and all_gather", ""),
    (r"(?:replicax\.)?get_replica_context\(\)", "get_tower_context()"),
    (r"strategy\.run\(step, args=\((\w+),\)\)", r"distribution.call_for_each_tower(step, \1)"),
    (r"strategy\.run_steps\(fn, iterator, steps\)", "distribution.run_steps_on_dataset(fn, iterator, iterations)"),
    (r"strategy\.reduce\(op, value, axis\)", "distribution.reduce(aggregation, value)"),
    (r"strategy\.run_steps", "distribution.run_steps_on_dataset"),
    (r"strategy\.run(?!_)", "distribution.call_for_each_tower"),
    (r"strategy\.local_results", "distribution.unwrap"),
    (r"strategy\.(?=reduce\b|scope\b)", "distribution."),
    (r"strategy\.(?=gather\b)", "distribution.strategy."),
    (r"(?:strategy\.)?extended\.", "distribution."),
    (r"(reduce|broadcast)_to\b", r"\1"),
    (r"lambda strategy, value: …, args=\(value,\)", "lambda distribution, value: …, value"),
    (r"lambda strategy, value: (.*?), args=\(value,\)\)", r"lambda distribution, value: \1, value)"),
    (r"\breduce_op\b", "aggregation"),
    (r"only_first_replica", "only_first_tower"),
    (r"ONLY_FIRST_REPLICA", "ONLY_FIRST_TOWER"),
    (r"(?<![\w/\\])(?:replicax\.)?ReplicaContext\b", "TowerContext"),
    (r"\bsteps must be an int", "iterations must be an int"),
    (r"a PerReplica value", "a PerDevice value"),
    (r"PerReplica", "PerDevice"),
    (r"(cross|per)-replica", r"\1-tower"),
    (r"an on-read (?=variable)", "a tower-local "),
    (r"on-read (?=variable)", "tower-local "),
    (_START + r"replica(s?)" + _END, r"tower\1"),
    (_START + r"Replica(s?)" + _END, r"Tower\1"),
]
_PATTERNS = [(re.compile(pattern), words) for pattern, words in _WORDS]


def translated(text: str) -> str:
    """Translate a message of the core.

    >>> translated("a replica context, and all replicas of /tmp/replica.py; strategy.local_results(value)")
    'a tower context, and all towers of /tmp/replica.py; distribution.unwrap(value)'
    """
    for pattern, words in _PATTERNS:
        text = pattern.sub(words, text)
    return text


class TranslatedErrors(contextlib.ContextDecorator):
    """Errors that the core raises inside come out in tower words; what the user's own code raises stays as it is."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        if error is not None and error.args and isinstance(error.args[0], str) and _is_ours(error):
            error.args = (translated(error.args[0]), *error.args[1:])


translating_errors = TranslatedErrors()


def _is_ours(error: BaseException) -> bool:
    """Return whether the frame that raised belongs to Replicax; or it is an error of JAX's, which Replicax explains."""
    return _jax.raised_by(error).startswith("replicax.") or type(error).__module__.startswith("jax.")


def also(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let parameters have other names, too, those of another revision of the documents: ``other="parameter"``."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for other, name in names.items():
                if other in kwargs:
                    if name in kwargs:
                        raise TypeError(f"{function.__name__}: {other} and {name} are one argument; pass one of them")
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        vars(wrapper)["also_named"] = names
        return wrapper

    return decorate
