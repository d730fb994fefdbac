"""What was saved by any number of replicas in any number of processes is restored by any other, and goes on.

Variables, optimizer slots, sums of replicas, metrics, random keys and arrays are those that were saved, and the input
goes on with the next example.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests import processes
from tests.checkpoint import matrix_runs
from tests.checkpoint.matrix_runs import BATCH, EXAMPLES, NAMES, OWN_FILES, Placement, Restored, Saved, Stream

GRID = [
    Placement(workers, replicas, kind)
    for workers in (1, 2, 3)
    for replicas in (1, 2, 3, 8)
    for kind in ("mirrored", "sharded", "groups")
    if replicas >= workers  # a replica has a device at least, and that is one worker's
    if kind != "groups" or replicas == 8  # others are no pairs, or a single one
]
SOME = [Placement(1, 3, "sharded"), Placement(2, 2, "mirrored")]
"""From one process onto several, and from several onto one; test_workers.py has three."""


def test_each_placement_goes_on_from_each(tmp_path) -> None:
    matrix = Matrix(SOME, tmp_path, is_new=False)
    assert matrix.problems() == []


@pytest.mark.soak
def test_each_placement_of_the_grid_goes_on_from_each(tmp_path) -> None:
    matrix = Matrix(GRID, tmp_path, is_new=True)
    assert len(matrix.restored) == 21 * 21
    assert matrix.problems() == []


class Matrix:
    """Placements of which each has saved, and then each has restored what any has saved.

    Args:
      placements: all of them.
      folder: for files and checkpoints.
      is_new: whether what is restored into has never run; otherwise the runs that have saved restore, which need not be
        compiled again.

    Attributes:
      saved: by placement, what each of its processes has saved.
      restored: by source and placement, what each of the placement's processes has found.
    """

    def __init__(self, placements: Sequence[Placement], folder: pathlib.Path, is_new: bool) -> None:
        matrix_runs.write_files(folder)
        self._folder = str(folder)
        self._is_new = is_new
        groups = [list(group) for _, group in itertools.groupby(placements, lambda placement: placement.workers)]
        self.saved: dict[Placement, list[Saved]] = {}
        for group in groups:
            self.saved |= self._each(matrix_runs.save, group, not is_new)
        self.restored: dict[tuple[Placement, Placement], list[Restored]] = {}
        for group in groups:
            self.restored |= self._each(matrix_runs.restore, group, placements)

    def _each(self, fn: Any, group: Sequence[Placement], *args: Any) -> dict[Any, list[Any]]:
        """What each of the processes of a group returns."""
        workers = group[0].workers
        if workers == 1:
            results = [fn(group, self._folder, *args)]
        else:
            devices = [max(counts) for counts in zip(*(p.devices for p in group), strict=True)]
            results = processes.run(
                fn, group, self._folder, *args, workers=workers, devices=devices, timeout=1200, fresh=self._is_new
            )
        return {key: [result[key] for result in results] for key in results[0]}

    def problems(self) -> list[str]:
        """What is not as it should be."""
        whole = {
            name: [int(x) for batch in dataset for x in batch]
            for name, dataset in zip(NAMES, matrix_runs.datasets(self._folder, BATCH), strict=True)
        }
        assert [len(set(ids)) for ids in whole.values()] == [EXAMPLES] * len(NAMES)
        found = []
        for (source, onto), results in self.restored.items():
            began = joined(saved.stream for saved in self.saved[source])
            rest, others = (joined(getattr(r, name) for r in results) for name in ("stream", "other_stream"))
            wrong = []
            for name, order in whole.items():
                for after in (rest, others):
                    seen = [example for element in began[name] + after[name] for example in element]
                    if sorted(seen) != sorted(order):
                        wrong.append(f"{name}: not each example once")
                    elif name != OWN_FILES and seen != order:
                        wrong.append(f"{name}: in another order")
            for result, own in zip(results, self.saved[onto], strict=True):
                wrong += [f"{n}: restored as another" for n in unlike(self.saved[source][0].values, result.values)]
                wrong += [] if result.has_array else ["array: restored as another"]
                if source == onto:
                    wrong += [] if result.stream == own.rest else ["reads something else than without a restore"]
                    wrong += [f"{n}: becomes another" for n in unlike(own.last, result.last)]
                else:
                    wrong += [f"{n}: becomes another" for n in unlike(own.last, result.last, rounding=True)]
            found += [f"{source} onto {onto}: {what}" for what in wrong]
        return found


def joined(streams: Iterable[Stream]) -> Stream:
    """What all workers have read, element by element, in the order of their replicas."""
    everyones = list(streams)
    return {
        name: [list(itertools.chain(*parts)) for parts in zip(*(stream[name] for stream in everyones), strict=True)]
        for name in NAMES
    }


def unlike(expected: dict[str, Any], found: dict[str, Any], rounding: bool = False) -> list[str]:
    """The names of values that differ.

    Args:
      expected, found: values by name.
      rounding: whether sums may have been taken in another order; otherwise only those of a metric, which has been
        shared out among other replicas.
    """
    assert expected.keys() == found.keys()
    close = {"loss": 1e-6} if not rounding else {"loss": 1e-4, "w": 1e-3, "b": 1e-2, "slot 0": 1e-2, "slot 1": 1e-2}
    return [
        name
        for name, value in expected.items()
        if not (np.allclose(found[name], value, close[name], close[name]) if name in close else found[name] == value)
    ]
