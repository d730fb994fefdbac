"""Eight emulated devices for every test, a compiler that hurries, and no silent promotion in our own code."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest

import replicax
from tests import processes
from tests._jax.contexts import keep_contexts
from tests._jax.executables import keep_executables
from tests.compat import documents
from tests.compiler import HURRIED
from tests.soaking import soak_except

os.environ.update(HURRIED)
os.environ["KERAS_BACKEND"] = "jax"  # the pages on Keras are run where it is installed
keep_contexts()
keep_executables()
# A shell that runs the tests in the background has them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
replicax.use_cpu_devices(8)
# A few examples, the same in every run; `make soak` draws more, and others each time.
hypothesis.settings.register_profile("test", max_examples=5, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("soak", max_examples=50, deadline=None, print_blob=True)
hypothesis.settings.load_profile("test")
# JAX would make a key of each program, even without a folder for it.
jax.config.update("jax_enable_compilation_cache", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# The note that JAX adds to exceptions, when it leaves out frames, is part of the message to some versions of doctest.
jax.config.update("jax_traceback_filtering", "off")


def strategy_of(replicas: int) -> replicax.MirroredStrategy:
    """A MirroredStrategy on the first ``replicas`` devices."""
    return replicax.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def shared_strategy(replicas: int, devices: int) -> replicax.MirroredStrategy:
    """So many replicas on the first ``devices`` devices, of which each has several."""
    return replicax.MirroredStrategy([f"cpu:{i}" for i in range(devices)], num_replicas=replicas)


def logical_strategy(replicas: int, logical: int, partitioner: Any = None) -> replicax.Strategy:
    """A strategy of so many replicas with so many logical devices each."""
    devices = np.array(jax.devices()[: replicas * logical], dtype=object).reshape(replicas, logical)
    return replicax.Strategy(replicax.StrategyExtended(devices, partitioner))


@contextlib.contextmanager
def as_readers_have_it() -> Iterator[None]:
    """JAX's own promotion of dtypes and ranks, not this suite's strict one."""
    settings = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
    before = {setting: getattr(jax.config, setting) for setting in settings}
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    finally:  # workers that are threads have taken over the readers' settings for the whole process
        for setting, value in before.items():
            jax.config.update(setting, value)


@contextlib.contextmanager
def leaving_no_arrays() -> Iterator[None]:
    """Check that the block leaves no array behind, with the garbage collector off."""
    gc.disable()
    try:
        before = len(jax.live_arrays())
        yield
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


# What breaks with two replicas breaks with four; `pair` is for what is about two, and tests of one replica say so.
@pytest.fixture(params=soak_except([1, 2, 4], 4), ids="{}-replicas".format)
def strategy(request: pytest.FixtureRequest) -> replicax.MirroredStrategy:
    return strategy_of(request.param)


@pytest.fixture
def pair() -> replicax.MirroredStrategy:
    return strategy_of(2)


@pytest.fixture
def promotion_of_dtypes() -> Iterator[None]:
    """JAX's own, which Optax's arithmetic needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def ordinary_promotion() -> Iterator[None]:
    """JAX's own, of dtypes and of ranks, as users have it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def young_heap() -> None:
    """``gc.collect`` in the test looks only through what the test itself has made, and not for a second through all.

    What other tests have left is freed first, as it would stay for good in a heap that is frozen.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every test leaves the stack of contexts as it found it, and Ctrl-C to Python."""
    yield
    assert not replicax.has_strategy()
    assert not replicax.in_cross_replica_context()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def pytest_report_header() -> str:
    return documents.where()


def pytest_collection_finish() -> None:
    """What is there before the first test stays; to look through all of it again and again would take a while."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_sessionfinish() -> None:
    processes.close_all()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a grid marked ``covering(n)``, leave to ``make soak`` what no combination of n values needs."""
    items.sort(key=_comes_early, reverse=True)
    grids: dict[tuple[Any, ...], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("soak") is not None:
            continue
        if (mark := item.get_closest_marker("covering")) is not None:
            grids[item.parent, getattr(item, "originalname", ""), *mark.args].append(item)
    for (_, _, strength), grid in grids.items():
        for item in _not_needed(grid, strength):
            item.add_marker(pytest.mark.soak)


def _comes_early(item: pytest.Item) -> int:
    """2 for tests that share processes, 1 for those whose file starts some: the quick ones fill what is left.

    A process that has nothing to do takes the last tests of another one: of those, none needs what many share.
    """
    module = vars(getattr(item, "module", None) or object)
    starts_processes = any(name in module for name in ("processes", "launched", "Launch", "subprocess"))
    shares_processes = not {"coordinator", "outcomes"}.isdisjoint(getattr(item, "fixturenames", ()))
    return starts_processes + (starts_processes and shares_processes)


def _not_needed(grid: list[Any], strength: int) -> list[Any]:
    """Those that are left when each combination of ``strength`` parameters' values has been taken, evenly."""
    # A value of a parameter is one object in all of the tests that have it.
    values = {item: [(name, id(value)) for name, value in sorted(item.callspec.params.items())] for item in grid}
    missing = {c for item in grid for c in itertools.combinations(values[item], strength)}
    taken: collections.Counter[tuple[str, int]] = collections.Counter()
    left = list(grid)
    while missing:
        new = {item: missing.intersection(itertools.combinations(values[item], strength)) for item in left}
        best = max(left, key=lambda item: (len(new[item]), -sum(taken[v] for v in values[item])))
        left.remove(best)
        missing -= new[best]
        taken.update(values[best])
    return left
