"""Checkpoints of every format that there has been can be restored; see saved/save.py."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest

import replicax
from replicax.checkpoint.storage import index
from replicax.checkpoint.storage.manifest import DamagedError
from tests.checkpoint.saved import save
from tests.conftest import strategy_of

SAVED = pathlib.Path(save.__file__).parent
FORMATS = sorted(SAVED.glob("format-*"))


def test_each_format_is_here() -> None:
    assert [path.name for path in FORMATS] == [f"format-{i + 1}" for i in range(index.FORMAT)]
    for path in FORMATS:
        for name in ("one-process", "2-workers"):
            assert json.loads((path / name / "index.json").read_text())["format"] == int(path.name[7:])


def test_an_index_of_a_later_format_is_refused() -> None:
    content = json.loads((FORMATS[-1] / "one-process" / "index.json").read_text())
    later = json.dumps({**content, "format": index.FORMAT + 1})
    with pytest.raises(DamagedError, match=f"it has format {index.FORMAT + 1}, and .* reads up to {index.FORMAT}"):
        index.loads_index(later)


@pytest.mark.parametrize("name", ["one-process", "2-workers"])
@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.name)
def test_it_is_restored(path, name) -> None:
    strategy = strategy_of(3)
    expected = replicax.Checkpoint(**save.objects(replicax.MirroredStrategy(["cpu:0", "cpu:1"])))
    found = replicax.Checkpoint(**save.objects(strategy))
    for variable in (found.model["w"], found.model["half"], *found.optimizer.variables):
        variable.assign(variable.value * 0)
    found.loss.reset()
    found.model["total"].assign(0.0)
    found.array, found.host, found.step, found.note, found.rate = found.array * 0, found.host * 0, 0, "", 0.0
    next(found.data)
    found.restore(path / name)
    for one, other in zip(
        [found.model["w"], found.model["half"], *found.optimizer.variables],
        [expected.model["w"], expected.model["half"], *expected.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert jax.random.key_data(found.model["key"].value).tolist() == [0, 11]
    assert float(found.model["total"].read_value()) == 7.0
    assert float(found.loss.result()) == 1.5
    assert found.array.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(found.host, [1.0, np.nan])
    assert (found.step, found.note, found.rate, found.nothing) == (12, "größer", float("inf"), None)
    places = (strategy, found.data), (expected.model["w"].strategy, expected.data)
    ours, theirs = (np.asarray(where.gather(next(data), 0)).tolist() for where, data in places)
    assert ours == theirs
