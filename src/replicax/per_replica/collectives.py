"""Collectives of the per-replica executor: linear primitives, computed when all replicas have reached them.

They are JAX primitives, so gradients and batching follow the same rules as in a compiled program: each replica
differentiates its own loss.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax import _jax
from replicax.collectives import (
    COMBINED,
    ReduceOp,
    ReplicaExamples,
    check_other_dims,
    checked_axes,
    divide,
    of_key_data,
    summable,
)
from replicax.communication import CommunicationOptions
from replicax.devices.host_values import as_array, is_key
from replicax.execution.program.marks import asks_p
from replicax.execution.tracing.communicator import leaves_of, merge_here
from replicax.locality import M, R, T
from replicax.padding.questions import Question
from replicax.per_replica.eager.eager_trace import EagerTrace
from replicax.per_replica.rendezvous import Offers, Rendezvous

if TYPE_CHECKING:
    from replicax.per_replica.array_facts import Localities, Places


class PerReplicaCommunicator:
    """A :class:`replicax.collectives.Communicator` by which one replica reaches the others, through the rendezvous."""

    rendezvous: Rendezvous

    def __init__(
        self,
        replica: int,
        device: jax.Device,
        localities: Localities,
        places: Places | None,
        examples: ReplicaExamples | None,
        options: CommunicationOptions | None,
    ) -> None:
        self._timeout = None if options is None else options.timeout_seconds
        self.replica = replica
        self.device = device
        self._localities = localities
        self._places = places
        self.examples = examples
        self._trace = EagerTrace(device)
        self._gathers = 0

    def computing(self) -> AbstractContextManager[Any]:
        """Compute on this replica's device, apart from the step's own operations."""
        return _jax.set_current_trace(self._trace)

    def add(self, offers: Sequence[Sequence[Any]]) -> list[Any]:
        """The sums of the replicas' arrays, on this replica's device."""
        for column in zip(*offers, strict=True):
            kinds = [f"{a.dtype.name}{list(jnp.shape(a))}" for a in column]  # JAX may hand on a float of Python
            if len(set(kinds)) > 1:
                raise ValueError(
                    f"all_reduce: the replicas' arrays must have one shape and dtype, got {', '.join(kinds)}"
                )
        arrays = jax.device_put([a for offer in offers for a in offer], self.device)
        add = _sum_function(len(offers))
        with self.computing():
            totals = self._trace.apply(add, arrays)
            return add(*arrays) if totals is None else totals

    def exchange(
        self, collective: str, offer: Any, timeout: float | None = None, rows: tuple[int, int] | None = None
    ) -> Offers:
        """Every replica's contribution to ``collective``; see :meth:`Rendezvous.exchange`."""
        return self.rendezvous.exchange(self.replica, collective, offer, timeout, rows)

    def gathered(self, collective: str, array: Any) -> list[jax.Array]:
        """Every replica's array, on this replica's device."""
        return [jax.device_put(a, self.device) for a in self.exchange(collective, array)]

    def replica_id(self) -> Any:
        with _jax.outside_tracing():
            replica = jnp.int32(self.replica) + 0
        self._localities.note(replica, T)
        return replica

    def all_reduce(self, op: ReduceOp, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        if not arrays:
            return []  # nothing to wait for, nor does a compiled program
        timeout = self._timeout if options is None else options.timeout_seconds
        arrays = [summable(as_array(a, COMBINED), op) for a in arrays]
        totals: list[Any] = sum_p.bind(*arrays, communicator=self, timeout=timeout)
        return totals if op is ReduceOp.SUM else [divide(total, self.rendezvous.count) for total in totals]

    def sum_unless_reduced(self, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        sums = [summable(as_array(a, COMBINED)) for a in arrays]
        own = [i for i, array in enumerate(sums) if self._localities.of(array) is not R]
        for i, total in zip(own, self.all_reduce(ReduceOp.SUM, [sums[i] for i in own], options), strict=True):
            sums[i] = total
        return sums

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        array = as_array(array, COMBINED)
        timeout = self._timeout if options is None else options.timeout_seconds
        if timeout is not None:
            self.exchange("all_gather", None, timeout)
        [axis] = checked_axes(axis, array.shape, "all_gather")
        self._gathers += 1
        return whole_p.bind(array, communicator=self, axis=axis, number=self._gathers)

    def from_first(self, array: Any) -> Any:
        array = as_array(array, COMBINED)
        if is_key(array.dtype):
            return of_key_data(self.from_first, array)
        if array.ndim:  # the others' arrays may have another size
            size = self.exchange("the first replica's value", array.shape[0])[0]
            return jax.lax.slice_in_dim(self.all_gather(array, 0), 0, size)
        own = jnp.where(self.replica == 0, array, jnp.zeros_like(array))  # all take part in its derivative, too
        return self.all_reduce(ReduceOp.SUM, [own])[0].astype(array.dtype)

    def add_up(self, count: int) -> int:
        return sum(self.exchange("adding up sizes", count))

    def has_examples_along(self, value: Any, dim: int, what: str, **errors: str) -> Any:
        assert self.examples is not None
        place_of = None if self._places is None else self._places.of  # without them, of micro-batches
        question = Question(dim, what, self.examples.mask.shape[0], place_of, **errors)
        return asks_p.bind(jax.lax.stop_gradient(value), question=question)

    def components(self, value: Any) -> Sequence[Any]:
        if isinstance(value, jax.core.Tracer):
            whole = self.all_gather(value[None], 0)
            return [whole[i] for i in range(whole.shape[0])]
        with _jax.outside_tracing():
            everyone = [jnp.copy(jax.device_put(v, self.device)) for v in self.exchange("local_results", value)]
        for array in everyone:
            self._localities.note(array, M)
        return everyone

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        everyone = self.exchange(
            "merge_call", [self._localities.is_of_step(leaf) for leaf in leaves_of((args, kwargs))]
        )
        if len({len(theirs) for theirs in everyone}) > 1:
            raise ValueError("merge_call: the replicas' arguments differ in structure")
        computed = [any(column) for column in zip(*everyone, strict=True)]
        return merge_here(self, self.rendezvous.count, fn, args, kwargs, computed)


def _sum(*arrays: Any, communicator: PerReplicaCommunicator, timeout: float | None) -> list[Any]:
    offers = communicator.exchange(f"all_reduce of {len(arrays)} arrays", arrays, timeout)
    if offers.result is None:  # the first replica to go on adds up for all
        offers.result = communicator.add(offers)
    return jax.device_put(offers.result, communicator.device)


def _sums(*arrays: Any, replicas: int) -> list[Any]:
    """The sums of the replicas' arrays: ``arrays`` has equally many of each replica."""
    n = len(arrays) // replicas
    if replicas == 1:
        return [a + jnp.zeros_like(a) for a in arrays]
    return [functools.reduce(operator.add, arrays[i::n]) for i in range(n)]


@functools.lru_cache(maxsize=64)
def _sum_function(replicas: int) -> Callable[..., list[Any]]:
    return functools.partial(_sums, replicas=replicas)


def _whole(x: Any, *, communicator: PerReplicaCommunicator, axis: int, number: int) -> Any:
    arrays = communicator.gathered("all_gather", x)
    check_other_dims([a.shape for a in arrays], axis, "all_gather: the replicas' arrays")
    if len({a.dtype for a in arrays}) > 1:
        dtypes = ", ".join(a.dtype.name for a in arrays)
        raise ValueError(f"all_gather: the replicas' arrays must have one dtype, got {dtypes}")
    with communicator.computing():
        return jnp.concatenate(arrays, axis)


def _part(x: Any, *, communicator: PerReplicaCommunicator, axis: int, size: int, number: int) -> Any:
    # Replicas without rows may not come: JAX drops derivatives of some operations whose results have no elements.
    collective, rows = f"the gradient of all_gather number {number}", (size, x.shape[axis])
    offers = communicator.exchange(collective, (x, size), rows=rows)
    start = sum(offer[1] for offer in offers[: communicator.replica] if offer is not None)
    received = [jax.device_put(offer[0], communicator.device) for offer in offers if offer is not None]
    with communicator.computing():
        pieces = [jax.lax.slice_in_dim(ct, start, start + size, axis=axis) for ct in received]
        return sum(pieces[1:], start=pieces[0])


sum_p = _jax.collective_primitive("replicax_sum", _sum, is_compiled=False)
"""``ys = sum xs``: the sums of all replicas' arrays, in one collective."""

whole_p: _jax.Primitive = _jax.linear_primitive(
    "replicax_whole",
    _whole,
    lambda aval, *, communicator, axis, number: _jax.resized(aval, axis, communicator.add_up(aval.shape[axis])),
    lambda ct, aval, *, axis, **params: part_p.bind(ct, axis=axis, size=aval.shape[axis], **params),
)
"""``y = whole x``: all replicas' arrays, one after the other along ``axis``."""

part_p: _jax.Primitive = _jax.linear_primitive(
    "replicax_part",
    _part,
    lambda aval, *, axis, size, **_: _jax.resized(aval, axis, size),
    lambda ct, _, *, size, **params: whole_p.bind(ct, **params),
)
"""``y = part x``: this replica's part of the sum of all replicas' arrays; the transpose of ``whole``."""
