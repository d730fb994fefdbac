"""Changing some rows of a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax.errors import LocalityError
from replicax.indexed_slices import IndexedSlices, check_rows
from replicax.values import PerReplica
from replicax.variables.aggregation import Aggregation
from replicax.variables.store import ConcreteStore, current_store


class RowUpdates:
    """The part of a variable that takes :class:`IndexedSlices`."""

    aggregation: Aggregation
    shape: Any
    dtype: Any
    is_stacked: Any
    is_on_read: Any
    describe: Any
    check_casts: Any
    _in_replica: Any
    _combined_value: Any
    _write: Any

    def scatter_add(self, slices: IndexedSlices) -> Any:
        """Add rows, combined over the replicas as in :meth:`assign`, and return the variable.

        Args:
          slices: the rows; their ``shape`` is the variable's. Combining them takes two all-gathers of the rows. A
            variable split by its rows changes in pieces; a variable split along another dim is gathered.

        Raises:
          TypeError, ValueError: not an :class:`IndexedSlices`, or of another shape or kind of dtype; or an index is out
            of range, if its value is known (see :class:`IndexedSlices`). Otherwise such a row is left out.
          LocalityError, TraceError: as :meth:`assign`.
        """
        return self._scatter(slices, lambda value, s: value.at[s.indices].add(s.values), "scatter_add")

    def scatter_sub(self, slices: IndexedSlices) -> Any:
        """Subtract rows; see :meth:`scatter_add`."""
        return self._scatter(slices, lambda value, s: value.at[s.indices].add(-s.values), "scatter_sub")

    def scatter_update(self, slices: IndexedSlices) -> Any:
        """Set rows; see :meth:`scatter_add`.

        Raises:
          ValueError: also if the variable is on-write with aggregation sum or mean: a row that only some replicas set
            has no sum.
        """
        if self.aggregation in (Aggregation.SUM, Aggregation.MEAN) and not self.is_on_read:
            raise ValueError(
                f"{self.describe()}: scatter_update can't combine rows by {self.aggregation.value!r}, because only "
                "some replicas may set a row; use scatter_add, or aggregation 'only_first_replica'"
            )
        return self._scatter(slices, lambda value, s: value.at[s.indices].set(s.values), "scatter_update")

    def _scatter(self, slices: IndexedSlices, change: Callable[[Any, IndexedSlices], Any], method: str) -> Any:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"{self.describe()}: {method} takes IndexedSlices, got {slices!r}")
        if tuple(slices.shape) != self.shape:
            raise ValueError(f"{self.describe()}: {method} got rows of an array of shape {tuple(slices.shape)}")
        if isinstance(slices.values, PerReplica) or isinstance(slices.indices, PerReplica):
            raise LocalityError(
                f"{self.describe()}: {method} got {slices!r}, rows of each replica. Combine them first with "
                "strategy.reduce, or call it inside a step."
            )
        if isinstance(current_store(), ConcreteStore) and not isinstance(slices.indices, jax.core.Tracer):
            check_rows(slices.indices, self.shape, f"{self.describe()}: {method}")
        self.check_casts(jnp.asarray(slices.values))
        slices = IndexedSlices(jnp.asarray(slices.values, self.dtype), slices.indices, self.shape)
        if self._in_replica():
            slices = self._combined_value(slices)
        elif self.is_stacked:
            raise ValueError(
                f"{self.describe()}: {method} in cross-replica context would change every copy; call it inside a step"
            )
        variable: Any = self
        return self._write(change(current_store().read(variable), slices))
