"""What one replica's step of a Keras model knows of the others, while it runs.

One rule makes a replica's part of what Keras computes: *what a model computes of a batch is a mean over its rows*. So
the batch's loss, its gradients and its statistics are the replicas' own, averaged with the numbers of their rows. That
is right as it stands for losses, ``add_loss``, regularizers and losses of the user's own making; the few places of
Keras that make something else than a mean are replaced while the step runs (see :mod:`.replaced_parts`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import context
from replicax.models.keras.divided_batches import Batch


class _Running(threading.local):
    step: ReplicaStep | None = None


_running = _Running()


def running_step() -> ReplicaStep | None:
    """The step of a Keras model that runs on this thread."""
    return _running.step


class ReplicaStep:
    """One replica's step.

    Args:
      batch: this replica's.

    Attributes:
      rows: how many rows all replicas have together.
      own_rows: how many this one has.
      replica: its context.
      number_is_common: whether the metric that adds up this replica's rows has made one number of all rows instead;
        ``None`` while no metric adds up.
      layers_losses: what layers have added to its loss, by the layers' ids, where Keras keeps it with the layer.
    """

    def __init__(self, batch: Batch) -> None:
        replica = context.get_replica_context()
        assert replica is not None
        self.replica = replica
        self.rows = batch.rows
        self.own_rows = batch.own_rows
        self._sizes = batch.sizes
        self._copies = batch.copies
        self._several = replica.num_replicas_in_sync > 1
        self._inside: set[str] = set()
        self.number_is_common: bool | None = None
        self.layers_losses: dict[int, Any] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the Python of the step runs, on this thread."""
        before, _running.step = _running.step, self
        try:
            yield
        finally:
            _running.step = before

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[bool]:
        """While something acts for all replicas that may call others of its kind; false if it is one of these."""
        is_outermost = what not in self._inside
        self._inside.add(what)
        try:
            yield is_outermost
        finally:
            if is_outermost:
                self._inside.discard(what)

    @property
    def several(self) -> bool:
        """Whether there are several replicas."""
        return self._several

    def mean(self, values: Sequence[Any]) -> list[Any]:
        """The values of the whole batch, of which each replica has the means over its rows. One all-reduce."""
        if not self._several or not values:
            return list(values)
        if len(set(self._sizes)) == 1:
            return list(self.replica.all_reduce("mean", list(values)))
        share = self.own_rows / self.rows
        return list(self.replica.all_reduce("sum", [v * jnp.asarray(share, v.dtype) for v in values]))

    def sum(self, values: Sequence[Any]) -> list[Any]:
        """The values of the whole batch, of which each replica has the sums over its rows. One all-reduce."""
        if not self._several or not values:
            return list(values)
        sums = self.replica.all_reduce("sum", list(values))
        return [s if self._copies == 1 else _divided(s, self._copies) for s in sums]

    def as_mean(self, total: Any) -> Any:
        """A sum over this replica's rows as a mean, in the sense that :meth:`mean` of it is the sum over all rows."""
        if not self._several or self.rows == self.own_rows:
            return total
        return total * jnp.asarray(self.rows / self.own_rows, total.dtype)

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """All rows, of arrays that have this replica's. One all-gather for each."""
        if not self._several:
            return list(values)
        return [self.replica.all_gather(v, axis=0)[: len(v) if self._copies > 1 else None] for v in values]

    def of_each(self, value: Any) -> Any:
        """``[replicas, …]``: what each replica has, for a mean over them of which gradients are taken.

        The loss of a batch is the mean of the replicas' with their numbers of rows, and so is a gradient. What comes
        back here from the loss of another replica has to have that one's weight, and not this one's.
        """
        if not self._several:
            return value[None]
        if len(set(self._sizes)) == 1:
            return self.replica.all_gather(value[None], axis=0)
        weight = self.own_rows * len(self._sizes) / self.rows
        return _scaled(self.replica.all_gather(_scaled(value, 1 / weight)[None], axis=0), weight)

    @property
    def weights(self) -> Any:
        """How much of the batch's rows each replica has: float32 ``[replicas]``."""
        return jnp.asarray([size / (self.rows * self._copies) for size in self._sizes], jnp.float32)


def _divided(total: Any, count: int) -> Any:
    return total // count if jnp.issubdtype(total.dtype, jnp.integer) else total / count


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scaled(value: Any, factor: float) -> Any:
    """``value``, whose gradient is multiplied by ``factor``."""
    return value


def _forward(value: Any, factor: float) -> tuple[Any, None]:
    return value, None


def _backward(factor: float, residuals: None, cotangent: Any) -> tuple[Any]:
    return (cotangent * jnp.asarray(factor, cotangent.dtype),)


_scaled.defvjp(_forward, _backward)
