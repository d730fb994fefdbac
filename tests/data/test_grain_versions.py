"""Replicax with a Grain that lacks names: the same batches, and a warning that says what is lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.forked import ROOT, import_path

IN_ORDER = "Datasets are read in order only: every worker reads every batch"
ANY_PLACE, SAME_BATCHES = "and other batch sizes) 7", "but not with another batch size: nothing but the order is known"


@pytest.mark.parametrize(
    ("hidden", "warning", "resumes"),
    [
        (["BatchMapDataset", "FilterMapDataset"], f"(FilterMapDataset, BatchMapDataset). {IN_ORDER}", SAME_BATCHES),
        pytest.param(
            ["BatchMapDataset._batch_size"],
            f"(BatchMapDataset._batch_size). {IN_ORDER}",
            SAME_BATCHES,
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["MapDataset._parents"],
            f"SourceMapDataset._parents, _WithSeedMapDataset._parents, ShuffleMapDataset._parents, …). {IN_ORDER}",
            SAME_BATCHES,
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["ShuffleMapDataset._seed"],
            "(ShuffleMapDataset._seed). Workers can't compare their seeds",
            ANY_PLACE,
            marks=pytest.mark.soak,
        ),
        pytest.param(["MapDataset._getitems"], "", ANY_PLACE, marks=pytest.mark.soak),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_grain_that_lacks_names(hidden, warning, resumes) -> None:
    program = [sys.executable, "-m", "tests.data.hidden_names", *hidden]
    environment = os.environ | {"PYTHONPATH": import_path(), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert warning in done.stdout
    assert resumes in done.stdout
    assert bool(warning) == ("Install a newer Replicax" in done.stdout)


def test_batches_of_another_size_need_grains_public_node(monkeypatch) -> None:
    from grain import experimental

    from replicax._grain import nodes

    monkeypatch.delattr(experimental, "RebatchIterDataset")
    with pytest.raises(RuntimeError, match="can't be read in batches of 5 rows, as this version of Grain has no"):
        nodes.rebatched([], 5)
