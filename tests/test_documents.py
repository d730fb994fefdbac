"""Every Python block of the README and the documents runs, top to bottom, as a reader would run it."""

from __future__ import annotations

import doctest
import pathlib
import re

import jax
import pytest

import replicax

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages on packages that only `make integrations` installs, and that its tests run.
FOREIGN = {"keras.md"}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.name not in FOREIGN], ids=lambda p: p.name)
def test_examples(path: pathlib.Path) -> None:
    namespace: dict[str, object] = {"__name__": path.stem}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in BLOCK.findall(path.read_text()):
            if ">>>" in block:
                test = doctest.DocTestParser().get_doctest(block, namespace, path.name, str(path), 0)
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
                runner.run(test, clear_globs=False)
                assert runner.failures == 0, block
                namespace = test.globs
            else:
                exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_the_reference_lists_every_public_name() -> None:
    listed = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reference.md").read_text()))
    assert set(replicax.__all__) <= listed
