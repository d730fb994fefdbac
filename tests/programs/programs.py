"""The form of the programs that test_programs.py runs, and what plain JAX on one device makes of them.

A program is a step for one replica, in ordinary JAX. The other files ``programs_*.py`` hold the programs, a
theme each. Several are run together as one program, so that there is one to compile. What a program computes is
told by the same function without Replicax: on each replica's input in turn, or, where replicas communicate, by a
function of all the inputs at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import replicax
from replicax.values import Stacked

AXIS = "replica"
"""What collectives of ``jax.lax`` call the axis along which the replicas lie."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One program.

    Attributes:
      name: what it is called.
      step: what one replica computes: ``step(x, *shared)``.
      localities: ``"T"`` or ``"M"`` for each leaf of its result, in order.
      data: makes a replica's own argument, of locality T, from the replica's number.
      shared: makes the further arguments, the same on every replica.
      across: makes the results of all replicas from the list of their arguments; by default each replica's
        result is that of ``step``, jitted.
      variables: whether the leaves of ``shared`` are Replicax variables under Replicax. (The reference always
        gets plain arrays.)
      differ: whether results of locality T are to differ between replicas. Without it the locality is an upper
        bound, because replicas agree for a reason that no dataflow can see.
    """

    name: str
    step: Callable[..., Any]
    localities: str
    data: Callable[[int], Any]
    shared: Callable[[], tuple[Any, ...]]
    across: Callable[..., list[Any]] | None
    variables: bool
    differ: bool

    @property
    def theme(self) -> str:
        """That of the file in which it stands."""
        return self.step.__module__.rpartition("programs_")[2]

    def reference(self, replicas: int) -> list[Any]:
        """What each of the replicas should get, computed without Replicax."""
        xs = [self.data(i) for i in range(replicas)]
        if self.across is not None:
            return self.across(xs, *self.shared())
        jitted = jax.jit(self.step)  # which JAX keeps: it compiles once for all calls
        return [jitted(x, *self.shared()) for x in xs]


PROGRAMS: list[Program] = []


def program(
    localities: str,
    data: Callable[[int], Any],
    *,
    shared: Callable[[], tuple[Any, ...]] = tuple,
    across: Callable[..., list[Any]] | None = None,
    variables: bool = False,
    differ: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a step; see :class:`Program`."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        assert all(p.name != step.__name__ for p in PROGRAMS), step.__name__
        PROGRAMS.append(Program(step.__name__, step, localities, data, shared, across, variables, differ))
        return step

    return register


def bundle(name: str, programs: Sequence[Program]) -> Program:
    """One program of several that are alike in ``variables`` and ``differ``; its arguments and results are theirs."""
    programs = sorted(programs, key=lambda p: p.name)  # in which order JAX takes a dict's entries
    alone = [p for p in programs if p.across is None]

    def run(some: Sequence[Program], xs: Any, shared: Any) -> dict[str, Any]:
        results = {}
        for p in some:
            try:
                results[p.name] = p.step(xs[p.name], *shared[p.name])
            except Exception as error:
                error.add_note(f"the program is {p.name}")
                raise
        return results

    jitted = jax.jit(functools.partial(run, alone))

    def across(xs: list[Any], shared: Any) -> list[Any]:
        results = [jitted(x, shared) for x in xs]
        for p in programs:
            if p.across is not None:
                everyone = p.across([x[p.name] for x in xs], *shared[p.name])
                results = [{**result, p.name: own} for result, own in zip(results, everyone, strict=True)]
        return results

    return Program(
        name,
        functools.partial(run, programs),
        "".join(p.localities for p in programs),
        lambda replica: {p.name: p.data(replica) for p in programs},
        lambda: ({p.name: p.shared() for p in programs},),
        across,
        programs[0].variables,
        programs[0].differ,
    )


def bundles(programs: Sequence[Program], size: int) -> list[Program]:
    """All of them, together with others of their theme."""
    alike: dict[Any, list[Program]] = {}
    for p in programs:
        alike.setdefault((p.theme, p.variables, p.differ), []).append(p)
    found = []
    for (theme, *_), some in alike.items():
        count = -(-len(some) // size)
        for own in (some[i::count] for i in range(count)):
            found.append(bundle(f"{theme}: {', '.join(p.name for p in own)}", own))
    return found


def by_replica(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The reference ``fn(replica_id, x, *shared)`` of a program that asks for its replica's number."""

    jitted = jax.jit(fn)

    def across(xs: list[Any], *shared: Any) -> list[Any]:
        return [jitted(np.int32(i), x, *shared) for i, x in enumerate(xs)]

    return across


def third_party(step: Callable[..., Any]) -> Callable[..., Any]:
    """Flax and Optax promote dtypes and ranks as NumPy does; our own code here is not allowed to."""

    @functools.wraps(step)
    def relaxed(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return step(*args, **kwargs)

    return relaxed


def components(value: replicax.PerReplica) -> list[Any]:
    """A value's components, on the host: ``value.values`` compiles a program for each of their shapes and devices."""
    match value.form:
        case Stacked(array) if array.size and not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            return list(np.asarray(array))
    return list(value.values)


# --- data -----------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> Callable[[int], np.ndarray[Any, Any]]:
    """Data drawn anew for each replica."""

    def data(replica: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([seed, replica]).normal(size=shape).astype(np.float32)

    return data


def integers(low: int, high: int, *shape: int) -> Callable[[int], np.ndarray[Any, Any]]:
    """Integers drawn anew for each replica."""

    def data(replica: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([1, replica]).integers(low, high, size=shape, dtype=np.int32)

    return data


def weights(*shapes: tuple[int, ...]) -> Callable[[], tuple[np.ndarray[Any, Any], ...]]:
    """Shared arrays of these shapes."""

    def shared() -> tuple[np.ndarray[Any, Any], ...]:
        rng = np.random.default_rng(9)
        return tuple((0.5 * rng.normal(size=shape)).astype(np.float32) for shape in shapes)

    return shared


def together(**makers: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    """A dict of data."""
    return lambda replica: {name: make(replica) for name, make in makers.items()}
