"""Draws a slice in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from replicax.tpu.assignment import DeviceAssignment
from replicax.tpu.core_owners import MUTED, PAPER, CoreOwners, core_owners
from replicax.tpu.topology import Topology


def show(topology: Topology, assignment: DeviceAssignment | None = None) -> None:
    """Print the slice: a row of chips for each y, the planes of chips side by side, hosts apart."""
    picture = core_owners(topology, assignment)
    console = Console(highlight=False)
    labels = max(len(picture.label(at)) for at in np.ndindex(picture.owner.shape)) + 2
    width, apart = next(
        ((width, apart) for width, apart in ((labels, True), (1, True)) if _fits(picture, width, console.width)),
        (1, False),
    )
    planes = [_plane(picture, z, width, apart) for z in picture.layers()]
    console.print(Text(repr(topology if assignment is None else assignment)))
    console.print()
    console.print(Columns(planes, padding=(1, 4)))
    console.print(Text.assemble("\n", *_legend(picture, width, apart)))


def _fits(picture: CoreOwners, width: int, room: int) -> bool:
    chips, _, _, cores = picture.owner.shape
    return chips * (cores * width + 1) + int(_borders_of_hosts(picture, axis=0).sum()) <= room


def _borders_of_hosts(picture: CoreOwners, axis: int) -> np.ndarray:
    """The columns (``axis`` 0) or rows (1) of chips after which another host begins: bool ``[chips]``."""
    topology = picture.topology
    tasks = np.full(picture.owner.shape, -1)
    at = tuple(np.moveaxis(topology.device_coordinates, -1, 0))
    tasks[at] = np.arange(topology.num_tasks)[:, None]
    changes = np.diff(np.moveaxis(tasks, axis, 0), axis=0).any(axis=(1, 2, 3))
    return np.append(changes, False)


def _plane(picture: CoreOwners, z: int, width: int, apart: bool) -> Text:
    columns, rows = _borders_of_hosts(picture, axis=0), _borders_of_hosts(picture, axis=1)
    text = Text(no_wrap=True)
    if len(picture.layers()) > 1:
        text.append(f"z = {z}\n", style=MUTED)
    for y in range(len(rows)):
        if y:
            text.append("\n\n" if apart and rows[y - 1] else "\n")
        for x in range(len(columns)):
            if x and apart:
                text.append(" " * (1 + columns[x - 1]))
            for core in range(picture.owner.shape[3]):
                text.append(*_core(picture, (x, y, z, core), width))
    return text


def _core(picture: CoreOwners, at: tuple[int, ...], width: int) -> tuple[str, str]:
    """The label of a core, and its style."""
    owner = picture.owner[at]
    if owner < 0:
        return ("·" if owner == -1 else "×").center(width), MUTED
    label = picture.label(at).center(width) if width > 1 else _DIGITS[owner % len(_DIGITS)]
    return label, f"bold {PAPER} on {picture.colour(at)}"


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def _legend(picture: CoreOwners, width: int, apart: bool) -> Iterator[str | tuple[str, str]]:
    if width > 1:
        yield f"a core: {picture.legend()}"
    else:
        yield f"a core: {picture.whose}, counted in {_DIGITS[:3]}…{_DIGITS[-1]}, again and again"
    if (picture.owner == -1).any():
        yield ("   ·", MUTED)
        yield " no replica's"
    if (picture.owner == -2).any():
        yield ("   ×", MUTED)
        yield " missing"
    yield "   x goes right, y down" + (", hosts lie apart" if apart and picture.topology.num_tasks > 1 else "")
