"""The report of a placed program: the place of each operation and byte."""

from __future__ import annotations

import collections
import dataclasses

from replicax.system.quantities import bytes_in_words


@dataclasses.dataclass(frozen=True)
class DeviceReport:
    """The variables, operations and bytes of one logical device of a replica.

    Attributes:
      logical_device: its number.
      regions: how many programs are launched there in a run.
      operations: how many operations of each kind they have.
      variables: how many variables live there.
      variable_bytes: their size on one device: parameters, and an optimizer's slots.
      argument_bytes: of the step's arguments, those that are used there, on one device.
      temporary_bytes: what the greediest of the programs needs while it runs, as its compiler tells.
    """

    logical_device: int
    regions: int
    operations: collections.Counter[str]
    variables: int
    variable_bytes: int
    argument_bytes: int
    temporary_bytes: int


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The values sent from one logical device to another in a run, for one replica."""

    origin: int
    target: int
    values: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class PlacementReport:
    """The place of each operation and byte of a step; see :meth:`PlacedExecutable.placement`. Print it."""

    name: str
    devices: tuple[DeviceReport, ...]
    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        lines = [f"{self.name} on {len(self.devices)} logical devices, each of one replica:"]
        for d in self.devices:
            lines.append(
                f"  {d.logical_device}: {d.operations.total()} operations in {d.regions} programs; "
                f"{d.variables} variables of {bytes_in_words(d.variable_bytes)}, "
                f"arguments {bytes_in_words(d.argument_bytes)}, temporaries {bytes_in_words(d.temporary_bytes)}"
            )
            common = ", ".join(f"{name} {count}" for name, count in d.operations.most_common(6))
            lines.append(f"     {common}")
        for t in self.transfers:
            lines.append(f"  {t.origin} → {t.target}: {t.values} values, {bytes_in_words(t.bytes)}")
        return "\n".join(lines)
