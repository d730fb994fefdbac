"""Communication between replicas: options of collectives, a ring, and a watch for missing replicas."""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.argument_checks import checked_integer, is_number, parse_enum
from replicax.devices.mesh import REPLICA_AXIS


class CommunicationImplementation(enum.Enum):
    """The implementation of a collective.

    >>> import replicax
    >>> replicax.CommunicationImplementation("ring")
    <CommunicationImplementation.RING: 'ring'>
    """

    AUTO = "auto"
    """XLA's own implementation for the devices."""
    RING = "ring"
    """Each replica sends to its neighbour only, in ``2 (n - 1)`` rounds for a sum over n replicas. The result is the
    same to the bit on every replica and in every run."""
    NCCL = "nccl"
    """NVIDIA's library, which XLA uses between GPUs; an error on other devices."""


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of a collective.

    Attributes:
      bytes_per_pack: the largest number of bytes in one all-reduce. If there are more, several all-reduces run one
        after the other, so that the first can start while the last arrays are still being computed. A larger array has
        a separate all-reduce. 0: one all-reduce for all arrays. It does not affect gathers, one for each array.
      timeout_seconds: how many seconds a replica may wait in this collective for the others, before an error names the
        missing replicas; ``None`` for ever. A timeout costs two host callbacks in each collective, and ``run`` waits
        until the step has ended. With several workers it takes up to twice the time until all have noticed. After the
        error the variables that the step writes are lost, and the devices may stay busy.
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
        size = checked_integer(self.bytes_per_pack, "CommunicationOptions: bytes_per_pack", least=0)
        object.__setattr__(self, "bytes_per_pack", size)
        timeout = self.timeout_seconds
        if timeout is not None and not (is_number(timeout) and 0 < timeout < math.inf):
            raise ValueError(f"CommunicationOptions: timeout_seconds must be a positive number or None: {timeout!r}")
        implementation = parse_enum(
            CommunicationImplementation, self.implementation, "CommunicationOptions: implementation"
        )
        object.__setattr__(self, "implementation", implementation)

    def check(self, platform: str, what: str) -> None:
        """Raise unless devices of ``platform`` support these options.

        Raises:
          ValueError: NCCL is requested, but the devices are not GPUs.
        """
        if self.implementation is CommunicationImplementation.NCCL and platform not in ("gpu", "cuda"):
            raise ValueError(
                f"{what}: implementation='nccl' is for NVIDIA GPUs, but the replicas run on {platform}; use 'auto'"
            )


def checked_options(options: Any, platform: str, what: str) -> CommunicationOptions | None:
    """``options``, if of the right type and supported by ``platform``; otherwise an error that begins with ``what``."""
    if options is None:
        return None
    if not isinstance(options, CommunicationOptions):
        raise TypeError(f"{what}: options must be CommunicationOptions or None, got {options!r}")
    options.check(platform, what)
    return options


def after(array: Any, token: Any) -> Any:
    """``array``, but not before ``token``, which is not empty, has been computed."""
    array, token = lax.optimization_barrier((array, token))
    # XLA on CPU drops barriers. There, use a choice with a constant condition that no compiler knows.
    return lax.platform_dependent(
        array,
        jnp.real(token.reshape(-1)[0]).astype(jnp.float32),
        cpu=lambda x, t: jnp.where(t > jnp.inf, jnp.zeros_like(x), x),
        default=lambda x, _: x,
    )


# --- a ring ---------------------------------------------------------------------------------------------


def ring_sum(array: Any) -> Any:
    """The sum of the replicas' arrays: each replica passes partial sums of a part to its neighbour, then the totals."""
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
    """The replicas' arrays, one after the other along ``axis``; each replica passes on the parts that it receives."""
    n = lax.axis_size(REPLICA_AXIS)
    parts = _around(array, lax.axis_index(REPLICA_AXIS), n)
    return jnp.concatenate([parts[i] for i in range(n)], axis)


def _around(part: Any, position: Any, n: int) -> Any:
    """``[n, *shape]``: every replica's part, at its position."""

    def step(_: Any, state: Any) -> Any:
        parts, part, position = state
        part, position = _to_neighbour(part), (position - 1) % n  # a neighbour's part is one place before
        return parts.at[position].set(part), part, position

    start = jnp.zeros((n, *part.shape), part.dtype).at[position].set(part)
    parts, _, _ = lax.fori_loop(0, n - 1, step, (start, part, position))
    return parts


def _to_neighbour(array: Any) -> Any:
    n = lax.axis_size(REPLICA_AXIS)
    return lax.ppermute(array, REPLICA_AXIS, [(i, (i + 1) % n) for i in range(n)])


# --- missing replicas -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Late:
    """A collective in which replicas have waited for too long."""

    timeout: float  # how many seconds they had
    number: int  # of the collective, among those of the step
    arrived: dict[int, int]  # the number of collectives that each replica has reached
    waiting: tuple[int, ...]  # the replicas that wait in a collective

    def joined(self, others: Sequence[Late]) -> Late:
        """Add the replicas of other workers."""
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
    """Records which replicas wait in a watched collective, and since when; one watched program runs at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.start(())

    def start(self, replicas: Sequence[int]) -> None:
        """Start watching a program on these replicas of this worker."""
        with self._lock:
            self._arrived = dict.fromkeys(replicas, 0)
            self._waiting: dict[int, tuple[float, float]] = {}

    def arrive(self, replica: int, timeout: float) -> None:
        """Note that a replica has reached a collective, in which it may wait for ``timeout`` seconds."""
        with self._lock:
            if replica in self._arrived:
                self._arrived[replica] += 1
                self._waiting[replica] = time.monotonic(), timeout

    def leave(self, replica: int) -> None:
        """Note that a replica has the result of the collective."""
        with self._lock:
            self._waiting.pop(replica, None)

    def overdue(self) -> Late | None:
        """The collective in which a replica has waited for too long, if there is one."""
        with self._lock:
            now = time.monotonic()
            for replica, (since, timeout) in self._waiting.items():
                if now - since > timeout:
                    return Late(timeout, self._arrived[replica], dict(self._arrived), tuple(self._waiting))
        return None


watch = Watch()


def watched(arrays: Sequence[Any], timeout: float | None, collective: Any, replicas: Any = None) -> list[Any]:
    """``collective(arrays)``; with a timeout, each replica reports to :data:`watch` when it arrives and leaves.

    If replicas share a device, they arrive together: then ``replicas`` has their numbers.
    """
    if timeout is None or not arrays:
        return list(collective(arrays))
    zero = jax.ShapeDtypeStruct((), jnp.float32)
    numbers = lax.axis_index(REPLICA_AXIS)[None] if replicas is None else replicas

    def for_each(note: Callable[[int], None]) -> Callable[..., Any]:
        def call(numbers: Any, *_: Any) -> Any:
            for replica in np.unique(numbers):
                note(int(replica))
            return np.zeros(np.shape(numbers)[:-1], np.float32)

        return call

    arrive, leave = for_each(lambda replica: watch.arrive(replica, timeout)), for_each(watch.leave)
    # Under vmap one call handles a whole batch.
    ready = jax.pure_callback(arrive, zero, numbers, *_first_elements(arrays), vmap_method="broadcast_all")
    results = list(collective([after(arrays[0], ready), *arrays[1:]]))
    done = jax.pure_callback(leave, zero, numbers, *_first_elements(results), vmap_method="broadcast_all")
    return [after(results[0], done), *results[1:]]


def _first_elements(arrays: Sequence[Any]) -> list[Any]:
    return [lax.stop_gradient(a.reshape(-1)[:1]) for a in arrays]
