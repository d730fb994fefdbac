"""Environment variables that hold for a while, and those for XLA's threads and a GPU's memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The variables, a new and an old one, that set the part of a GPU's memory that JAX takes."""

_DEFAULT_FRACTION = 0.75
"""The part without them."""


@contextlib.contextmanager
def environment_values(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def environment_defaults(values: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Set these environment variables unless they are set already."""
    return environment_values({name: value for name, value in values.items() if name not in os.environ})


def chosen_threads(environment: Mapping[str, str]) -> int | None:
    """The number of threads that ``NPROC`` lets XLA have; ``None`` if it is unset, or no number, which XLA ignores."""
    try:
        return max(1, int(environment.get("NPROC", "")))
    except ValueError:
        return None


def usable_cores() -> int:
    """The number of cores that this process may use; those of the machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_limit(environment: Mapping[str, str] = os.environ) -> int:
    """The number of XLA's threads: the variable ``NPROC``, or one for each core that this process may use."""
    return chosen_threads(environment) or usable_cores()


def threads_for(devices: int) -> int:
    """The number of XLA's threads that a process needs for so many CPU devices.

    Replicas wait for each other in these threads: with fewer than two a device they wait for ever.
    """
    return 2 * devices


def memory_fraction(environment: Mapping[str, str]) -> float:
    """The fraction that JAX takes; the default if the environment has none, or no number above 0.

    >>> memory_fraction({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}), memory_fraction({})
    (0.9, 0.75)
    """
    text = next((environment[name] for name in FRACTION_VARIABLES if environment.get(name)), "")
    return fraction_in(text) or _DEFAULT_FRACTION


def fraction_in(text: str) -> float | None:
    """The fraction that ``text`` is; ``None`` if it is no number above 0."""
    try:
        fraction = float(text)
    except ValueError:
        return None
    return fraction if math.isfinite(fraction) and fraction > 0 else None
