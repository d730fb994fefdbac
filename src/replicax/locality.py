"""Locality: whether replicas may differ in a value."""

from __future__ import annotations

import enum


class Locality(enum.Enum):
    """Whether replicas may differ in a value.

    Localities are ordered ``MIRRORED``, ``REDUCED``, ``PER_REPLICA``. The locality of a result is the greatest of its
    operands', written ``a | b``.

    >>> import replicax
    >>> replicax.Locality.MIRRORED | replicax.Locality.PER_REPLICA
    <Locality.PER_REPLICA: 'T'>
    """

    MIRRORED = "M"
    """The same on every replica: each has computed it by itself, from values that are the same everywhere."""
    REDUCED = "R"
    """The same on every replica, because a collective made it so. Counts as mirrored, but must not be reduced again."""
    PER_REPLICA = "T"
    """It may differ between replicas."""

    def __or__(self, other: Locality) -> Locality:
        if self is other or other is M:
            return self
        return other if self is M else T


M, R, T = Locality.MIRRORED, Locality.REDUCED, Locality.PER_REPLICA
