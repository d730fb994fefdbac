"""Placement: which layout a new variable gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax.topology.partition import parted
from replicax.variables.dtypes import is_key
from replicax.variables.layout import Copies, Layout, Mirrored
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

    Args:
      variable: the variable.
      partitioner: splits it over the replicas; by default the strategy's.
      partition_dimensions: split it over the logical devices of each replica; then the default does not.

    Raises:
      ValueError: partition dimensions that don't fit; see :meth:`replicax.Strategy.split_to_logical_devices`. Both a
        partitioner and partition dimensions. A partitioner that returns something else than it should.
    """
    extended = variable.strategy.extended
    replicas = extended.num_replicas
    usual = extended.default_layout
    if partition_dimensions is None:
        if replicas == 1:
            return usual
        if variable.is_on_read:
            return Copies(replicas)
        chosen = None if is_key(variable.dtype) else partitioner or extended.partitioner
        split = layout_by(chosen, variable.name, variable.shape, variable.dtype, replicas)
        if isinstance(split, Mirrored):
            return usual
        if extended.lockstep.several:
            raise ValueError(
                f"{variable.describe()}: a variable can be split over the replicas of one process only; under "
                f"{variable.strategy!r} use Variable without a partitioner"
            )
        return split
    if partitioner is not None:
        raise ValueError(
            f"{variable.describe()} can't be split over the replicas and over the logical devices of each: choose one "
            "of partitioner and partition_dimensions"
        )
    if usual.home is not None and not variable.is_on_read:
        raise ValueError(
            f"{variable.describe()} is to be on {usual.home.platform}:{usual.home.id}, and can't be split over logical "
            "devices: leave partition_dimensions out"
        )
    axes = parted(variable.shape, partition_dimensions, extended.num_logical_devices, variable.describe())
    return Copies(replicas, axes=axes) if variable.is_on_read and replicas > 1 else Mirrored(axes=axes)


def on_host(value: Any, dtype: Any) -> np.ndarray[Any, Any] | None:
    """A NumPy array as an array of JAX's dtype, which no device has seen; ``None`` for anything else."""
    if not isinstance(value, np.ndarray):
        return None
    wanted = jax.dtypes.canonicalize_dtype(value.dtype if dtype is None else dtype)
    return None if dtype is not None and wanted != dtype else value.astype(wanted)
