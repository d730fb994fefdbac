"""How replicas talk to each other: options of collectives, a ring, and a watch over who has come."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.devices.mesh import REPLICA_AXIS
from replicax.enums import parse_enum


class CommunicationImplementation(enum.Enum):
    """What carries a collective out.

    >>> import replicax
    >>> replicax.CommunicationImplementation("ring")
    <CommunicationImplementation.RING: 'ring'>
    """

    AUTO = "auto"
    """What XLA has for the devices."""
    RING = "ring"
    """Each replica sends to its neighbour only, in ``2 (n - 1)`` rounds for a sum; the result is the same to the bit
    on every replica and in every run."""
    NCCL = "nccl"
    """NVIDIA's library, through which XLA talks between GPUs; an error on other devices."""


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of a collective.

    Attributes:
      bytes_per_pack: the most that one all-reduce may carry; several are made one after the other, so that the first
        can start while the last arrays are still being computed. An array that is larger goes alone. 0: all
        arrays in one. Gathers go array by array, whatever this says.
      timeout_seconds: how long a replica may wait in this collective for the others, before an error names those
        that are missing; ``None`` for ever. A compiled step with such a collective is watched, which costs two
        calls of the host in each, and ``run`` returns when it is done. With several workers it takes up to twice the
        time until all have noticed. After the error the variables that the step
        was to write are lost, and the devices may stay busy.
      implementation: ``"auto"``, ``"ring"``, ``"nccl"`` or a :class:`CommunicationImplementation`.

    Raises:
      ValueError: a negative size, a timeout that is not positive, an unknown implementation.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> options = replicax.CommunicationOptions(bytes_per_pack=8, implementation="ring")
    >>> sums = strategy.run(lambda x: replicax.get_replica_context().all_reduce("sum", x, options), args=([1, 2, 3],))
    >>> [int(s) for s in sums]
    [2, 4, 6]
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_pack, bool) or not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            raise ValueError(f"CommunicationOptions: bytes_per_pack must be an int, 0 or more: {self.bytes_per_pack!r}")
        timeout = self.timeout_seconds
        is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and 0 < timeout < math.inf):
            raise ValueError(f"CommunicationOptions: timeout_seconds must be a positive number or None: {timeout!r}")
        implementation = parse_enum(
            CommunicationImplementation, self.implementation, "CommunicationOptions: implementation"
        )
        object.__setattr__(self, "implementation", implementation)

    def check(self, platform: str, what: str) -> None:
        """Raise unless devices of ``platform`` can do what is asked for.

        Raises:
          ValueError: they are no GPUs, and NCCL is asked for.
        """
        if self.implementation is CommunicationImplementation.NCCL and platform not in ("gpu", "cuda"):
            raise ValueError(
                f"{what}: implementation='nccl' is for NVIDIA GPUs, but the replicas run on {platform}; use 'auto'"
            )


def checked_options(options: Any, platform: str, what: str) -> CommunicationOptions | None:
    """``options``, if they are such and ``platform`` has what they ask for.

    Raises:
      TypeError: they are something else.
      ValueError: see :meth:`CommunicationOptions.check`.
    """
    if options is None:
        return None
    if not isinstance(options, CommunicationOptions):
        raise TypeError(f"{what}: options must be CommunicationOptions or None, got {options!r}")
    options.check(platform, what)
    return options


def after(array: Any, token: Any) -> Any:
    """``array``, but not before ``token``, which is not empty, has been computed."""
    array, token = lax.optimization_barrier((array, token))
    # XLA on CPU forgets barriers half-way. There, a choice that always falls the same way, as no compiler knows.
    return lax.platform_dependent(
        array,
        jnp.real(token.reshape(-1)[0]).astype(jnp.float32),
        cpu=lambda x, t: jnp.where(t > jnp.inf, jnp.zeros_like(x), x),
        default=lambda x, _: x,
    )


# --- a ring ---------------------------------------------------------------------------------------------


def ring_sum(array: Any) -> Any:
    """The sum of the replicas' arrays: each passes partial sums of a part of it to its neighbour, and then totals."""
    n, mine = lax.axis_size(REPLICA_AXIS), lax.axis_index(REPLICA_AXIS)
    flat = array.reshape(-1)
    part = -(-flat.size // n)
    parts = jnp.pad(flat, (0, n * part - flat.size)).reshape(n, part)

    def add(step: Any, total: Any) -> Any:
        return _to_neighbour(total) + lax.dynamic_index_in_dim(parts, (mine - step - 1) % n, keepdims=False)

    total = lax.fori_loop(0, n - 1, add, lax.dynamic_index_in_dim(parts, mine, keepdims=False))
    gathered = _around(total, (mine + 1) % n, n)
    return gathered.reshape(-1)[: flat.size].reshape(array.shape)


def ring_gather(array: Any, axis: int) -> Any:
    """The replicas' arrays, one after the other along ``axis``; each passes on what it gets."""
    n = lax.axis_size(REPLICA_AXIS)
    parts = _around(array, lax.axis_index(REPLICA_AXIS), n)
    return jnp.concatenate([parts[i] for i in range(n)], axis)


def _around(part: Any, position: Any, n: int) -> Any:
    """``[n, *shape]``: every replica's part, at the position that it says."""

    def step(_: Any, state: Any) -> Any:
        parts, part, position = state
        part, position = _to_neighbour(part), (position - 1) % n  # what a neighbour has is one place before
        return parts.at[position].set(part), part, position

    start = jnp.zeros((n, *part.shape), part.dtype).at[position].set(part)
    parts, _, _ = lax.fori_loop(0, n - 1, step, (start, part, position))
    return parts


def _to_neighbour(array: Any) -> Any:
    n = lax.axis_size(REPLICA_AXIS)
    return lax.ppermute(array, REPLICA_AXIS, [(i, (i + 1) % n) for i in range(n)])


# --- who has come ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Late:
    """A collective in which replicas have waited for too long.

    Attributes:
      timeout: how many seconds they had.
      number: which of the step's collectives it is.
      arrived: to how many collectives each replica has come.
      waiting: the replicas that wait in one.
    """

    timeout: float
    number: int
    arrived: dict[int, int]
    waiting: tuple[int, ...]

    def joined(self, others: Sequence[Late]) -> Late:
        """The same, with what other workers know of their replicas."""
        arrived = dict(pair for late in others for pair in late.arrived.items())
        return dataclasses.replace(
            self, arrived=arrived, waiting=tuple(replica for late in others for replica in late.waiting)
        )

    def __str__(self) -> str:
        missing = [i for i, n in self.arrived.items() if n < self.number]
        there = sorted(i for i in self.waiting if i not in missing)
        return f"replica(s) {there} have waited for more than {self.timeout} s in a collective " + (
            f"for replica(s) {missing}, which have not come" if missing else "that does not end"
        )


class Watch:
    """Knows which replicas wait in a watched collective, and since when; one program runs watched at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.start(())

    def start(self, replicas: Sequence[int]) -> None:
        """A program in which these replicas take part, this worker's, is about to run."""
        with self._lock:
            self._arrived = dict.fromkeys(replicas, 0)
            self._waiting: dict[int, tuple[float, float]] = {}

    def arrive(self, replica: int, timeout: float) -> None:
        """A replica has come to a collective, in which it may wait for so many seconds."""
        with self._lock:
            if replica in self._arrived:
                self._arrived[replica] += 1
                self._waiting[replica] = time.monotonic(), timeout

    def leave(self, replica: int) -> None:
        """A replica has got what it was waiting for."""
        with self._lock:
            self._waiting.pop(replica, None)

    def overdue(self) -> Late | None:
        """What is known, if somebody has waited for too long."""
        with self._lock:
            now = time.monotonic()
            for replica, (since, timeout) in self._waiting.items():
                if now - since > timeout:
                    return Late(timeout, self._arrived[replica], dict(self._arrived), tuple(self._waiting))
        return None


watch = Watch()


def watched(arrays: Sequence[Any], timeout: float | None, collective: Any) -> list[Any]:
    """``collective(arrays)``; with a timeout, the :data:`watch` is told who comes and who leaves."""
    if timeout is None or not arrays:
        return list(collective(arrays))
    zero = jax.ShapeDtypeStruct((), jnp.float32)
    replica = lax.axis_index(REPLICA_AXIS)

    def come(r: Any, *_: Any) -> Any:
        watch.arrive(int(np.ravel(r)[0]), timeout)
        return np.zeros(np.shape(r), np.float32)

    def go(r: Any, *_: Any) -> Any:
        watch.leave(int(np.ravel(r)[0]))
        return np.zeros(np.shape(r), np.float32)

    # A batch comes and goes as one.
    ready = jax.pure_callback(come, zero, replica, *_first_elements(arrays), vmap_method="broadcast_all")
    results = list(collective([after(arrays[0], ready), *arrays[1:]]))
    done = jax.pure_callback(go, zero, replica, *_first_elements(results), vmap_method="broadcast_all")
    return [after(results[0], done), *results[1:]]


def _first_elements(arrays: Sequence[Any]) -> list[Any]:
    return [lax.stop_gradient(a.reshape(-1)[:1]) for a in arrays]
