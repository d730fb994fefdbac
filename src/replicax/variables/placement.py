"""Placement: which layout a new variable gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax.topology.partition import parted
from replicax.variables.dtypes import is_key
from replicax.variables.layout import Copies, Layout, Mirrored, Split
from replicax.variables.partitioners import layout_by

if TYPE_CHECKING:
    from replicax.variables.partitioners import Partitioner
    from replicax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class Stored:
    """An initial value that is on its devices already.

    Attributes:
      array: the stored array.
      layout: how it is stored.
      shape: of the value.
    """

    array: jax.Array
    layout: Layout
    shape: tuple[int, ...]


def layout_for(
    variable: Variable, partitioner: Partitioner | None, partition_dimensions: Sequence[int] | None
) -> Layout:
    """How ``variable``, of which the rest is known, is to lie on the devices of its strategy.

    Raises:
      ValueError: partition dimensions that don't fit; see :meth:`replicax.Strategy.split_to_logical_devices`. What
        the partitioner says is none for each dim.
    """
    extended = variable.strategy.extended
    layout = _over_replicas(variable, partitioner)
    if partition_dimensions is None:
        return layout
    if layout.home is not None:
        raise ValueError(
            f"{variable.describe()} is to be on {layout.home}, and can't be split over logical devices: leave "
            "partition_dimensions out"
        )
    axes = parted(variable.shape, partition_dimensions, extended.num_logical_devices, variable.describe())
    if isinstance(layout, Split):  # each piece is in parts, too
        parts = partition_dimensions[layout.dim]
        layout = dataclasses.replace(layout, piece=-(-layout.piece // parts) * parts)
    assert isinstance(layout, Mirrored | Copies | Split)
    return dataclasses.replace(layout, axes=axes)


def _over_replicas(variable: Variable, partitioner: Partitioner | None) -> Layout:
    extended = variable.strategy.extended
    replicas = extended.num_replicas
    if replicas == 1:
        return extended.default_layout
    if variable.is_on_read:
        return Copies(replicas)
    split = layout_by(
        None if is_key(variable.dtype) else partitioner, variable.name, variable.shape, variable.dtype, replicas
    )
    return extended.default_layout if isinstance(split, Mirrored) else split


def on_host(value: Any, dtype: Any) -> np.ndarray[Any, Any] | None:
    """A NumPy array as an array of JAX's dtype, which no device has seen; ``None`` for anything else."""
    if not isinstance(value, np.ndarray):
        return None
    wanted = jax.dtypes.canonicalize_dtype(value.dtype if dtype is None else dtype)
    return None if dtype is not None and wanted != dtype else value.astype(wanted)
