"""The script of 2018 trains, on any number of towers and both executors; and what was changed in it is what is said."""

from __future__ import annotations

import ast
import contextlib
import pathlib
import re

import numpy as np
import pytest

import replicax
from examples import towers
from replicax.compat import v1 as tf
from tests.programs.programs import third_party


@third_party
@pytest.mark.parametrize(
    "executor",
    [
        pytest.param(contextlib.nullcontext, id="compiled"),
        pytest.param(replicax.debug, id="exact", marks=pytest.mark.soak),  # tests/compat has each of its parts
    ],
)
def test_the_script_of_2018(executor: type, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = 4
    if executor is replicax.debug:  # two steps
        epochs = 1
        images, labels = towers.load_data()
        monkeypatch.setattr(towers, "load_data", lambda: (images[:256], labels[:256]))
    expected = towers.train(tf.OneDeviceStrategy("cpu:0"), epochs)
    with executor():
        found = towers.train(tf.MirroredStrategy(["cpu:0", "cpu:1"]), epochs)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert [step for step, _, _ in found] == [k * len(towers.load_data()[0]) // 128 for k in range(1, epochs + 1)]
    if executor is contextlib.nullcontext:
        assert found[-1][2] > 0.85


# --- what was changed in it -----------------------------------------------------------------------------

EXAMPLES = pathlib.Path(towers.__file__).parent
SECTION = (EXAMPLES.parent / "docs" / "towers.md").read_text().partition("## A longer script")[2].partition("\n## ")[0]


def rows_of(heading: str) -> list[tuple[str, str]]:
    """The table of the document that begins with a heading: pairs of code."""
    _, table = SECTION.split(f"| {heading} |")
    return re.findall(r"^\| `(.+)` \| `(.+)` \|$", table.partition("\n\n")[0], re.MULTILINE)


def lines_of(name: str) -> list[str]:
    """A script without its docstring and its imports, from its first statement that is neither."""
    text = (EXAMPLES / name).read_text()
    begin = next(node for node in ast.parse(text).body[1:] if not isinstance(node, ast.Import | ast.ImportFrom))
    return text.splitlines()[begin.lineno - 1 :]


def test_nothing_was_changed_but_imports_names_of_operations_and_the_line_that_the_document_lists() -> None:
    names, lines = dict(rows_of("in the original")), dict(rows_of("line of the original"))
    operation = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True)))
    used: set[str] = set()

    def changed(line: str) -> str:
        code = line.strip()
        if code in lines:
            used.add(code)
            return line.replace(code, lines[code])
        used.update(operation.findall(line))
        return operation.sub(lambda found: names[found.group()], line)

    assert [changed(line) for line in lines_of("towers_tensorflow.py")] == lines_of("towers.py")
    assert used == {*names, *lines}  # the document lists nothing that was not changed
    assert (len(names), len(lines)) == (15, 1)


def test_the_calls_of_towers_are_in_the_original() -> None:
    text = "\n".join(lines_of("towers_tensorflow.py"))
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert {
        "MirroredStrategy", "apply_gradients", "batch_reduce", "call_for_each_tower", "compute_gradients",
        "distribute_dataset", "fetch", "get_or_create_global_step", "get_tower_context", "get_variable",
        "last_step_outputs", "make_one_shot_iterator", "merge_call", "num_towers", "run_steps_on_dataset", "scope",
        "set_last_step_output", "tower_local_var_scope", "variable_scope",
    } <= names  # fmt: skip
