"""One replica's step of a Keras model, with access to the others.

One rule splits a model's computation: *what a model computes from a batch is a mean over its rows*. So the loss, the
gradients and the statistics of the batch are the means of the replicas' own, weighted by their numbers of rows. That
holds for losses, ``add_loss``, regularizers and the user's own losses; the few parts of Keras that compute something
other than a mean are patched while the step runs (see :mod:`.patches`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import context
from replicax.models.keras.batches import Batch


class _Running(threading.local):
    step: ReplicaStep | None = None


_running = _Running()


def running_step() -> ReplicaStep | None:
    """The Keras step that runs on this thread."""
    return _running.step


class ReplicaStep:
    """One replica's step."""

    def __init__(self, batch: Batch) -> None:
        self.replica = context.current_replica()
        self.rows = batch.rows  # of all replicas
        self.own_rows = batch.own_rows
        self._sizes = batch.sizes
        self._copies = batch.copies
        self.several = self.replica.num_replicas_in_sync > 1
        self._inside: set[str] = set()
        # Whether a metric that sums over rows has summed those of all replicas; ``None`` while no metric sums.
        self.number_is_common: bool | None = None
        self.layers_losses: dict[int, Any] = {}  # that layers have added, by the layers' ids

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Mark this step as running on this thread, while its Python runs."""
        before, _running.step = _running.step, self
        try:
            yield
        finally:
            _running.step = before

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[bool]:
        """Yield whether ``what``, which acts for all replicas, is the outermost of its kind; false for those inside."""
        is_outermost = what not in self._inside
        self._inside.add(what)
        try:
            yield is_outermost
        finally:
            if is_outermost:
                self._inside.discard(what)

    def mean(self, values: Sequence[Any]) -> list[Any]:
        """The means over the whole batch, from the means over each replica's rows. One all-reduce."""
        if not self.several or not values:
            return list(values)
        if len(set(self._sizes)) == 1:
            return list(self.replica.all_reduce("mean", list(values)))
        share = self.own_rows / self.rows
        return list(self.replica.all_reduce("sum", [v * jnp.asarray(share, v.dtype) for v in values]))

    def means_in(self, tree: Any, is_mean: Callable[[Any], bool]) -> Any:
        """A pytree with :meth:`mean` of its leaves that are means over this replica's rows. One all-reduce."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        own = [i for i, leaf in enumerate(leaves) if is_mean(leaf)]
        for i, mean in zip(own, self.mean([jnp.asarray(leaves[i]) for i in own]), strict=True):
            leaves[i] = mean
        return jax.tree_util.tree_unflatten(structure, leaves)

    def sum(self, values: Sequence[Any]) -> list[Any]:
        """The sums over the whole batch, from the sums over each replica's rows. One all-reduce."""
        if not self.several or not values:
            return list(values)
        sums = self.replica.all_reduce("sum", list(values))
        return [s if self._copies == 1 else _quotient(s, self._copies) for s in sums]

    def as_mean(self, total: Any) -> Any:
        """Scale a sum over this replica's rows so that its :meth:`mean` is the sum over all rows."""
        if not self.several or self.rows == self.own_rows:
            return total
        return total * jnp.asarray(self.rows / self.own_rows, total.dtype)

    def gather(self, value: Any) -> Any:
        """The array of all rows, from an array of this replica's rows."""
        return self.replica.all_gather(value, axis=0)[: len(value) if self._copies > 1 else None]

    def of_each(self, value: Any) -> Any:
        """``[replicas, …]``: each replica's value, for a differentiable mean over the replicas.

        The loss of a batch is the mean of the replicas' losses, weighted by their numbers of rows, and so is a
        gradient. A cotangent that comes from the loss of another replica must have that replica's weight.
        """
        if len(set(self._sizes)) == 1:
            return self.replica.all_gather(value[None], axis=0)
        weight = self.own_rows * len(self._sizes) / self.rows
        return _scaled_gradient(self.replica.all_gather(_scaled_gradient(value, 1 / weight)[None], axis=0), weight)

    @property
    def weights(self) -> Any:
        """Each replica's part of the batch's rows: float32 ``[replicas]``."""
        return jnp.asarray([size / (self.rows * self._copies) for size in self._sizes], jnp.float32)


def _quotient(total: Any, count: int) -> Any:
    return total // count if jnp.issubdtype(total.dtype, jnp.integer) else total / count


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scaled_gradient(value: Any, factor: float) -> Any:
    """``value``, whose gradient is multiplied by ``factor``."""
    return value


def _forward(value: Any, factor: float) -> tuple[Any, None]:
    return value, None


def _backward(factor: float, residuals: None, cotangent: Any) -> tuple[Any]:
    return (cotangent * jnp.asarray(factor, cotangent.dtype),)


_scaled_gradient.defvjp(_forward, _backward)
