"""Programs as users bring them: each name of TensorFlow and Keras in them is told of, but for plain operations."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

from replicax.cli import main
from replicax_migrate.uses import find_uses

PROGRAMS = pathlib.Path(__file__).parent / "programs"
PLAIN = r"cast|add_n|range|zeros|int32|int64|float32|random\.normal|keras\.(layers\.\w+|datasets.*)|data\.AUTOTUNE"
"""Operations, dtypes and layers: they have the same name, or nearly so, in ``jax.numpy`` and Keras 3."""


def dotted_names(tree: ast.Module) -> set[str]:
    """The longest dotted names that begin with ``tf`` or ``keras``, without ``tf``."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in inner]
    return {
        match[1]
        for node in nodes
        if (match := re.fullmatch(r"(?:tf\.)?((?<=tf\.)[\w.]+|keras\.[\w.]+)", ast.unparse(node)))
    }


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_every_name_is_told_of(program: pathlib.Path) -> None:
    tree = ast.parse(program.read_text())
    told = {re.sub(r"^(import |tf\.)", "", use.name) for use in find_uses(tree, program.read_text().split("\n"))}
    names = dotted_names(tree)
    assert len(names) >= 5
    assert [
        n for n in sorted(names) if not re.fullmatch(PLAIN, n) and not any(f"{n}.".startswith(f"{t}.") for t in told)
    ] == []


def test_what_of_a_keras_program_stays_is_not_to_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(PROGRAMS / "keras_fit.py")]) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert "27 names in 1 file: 5 with a name of today, 17 that stay, " in summary
    [board] = [line for line in lines if "TensorBoard" in line]
    assert "the same for model.fit, with KERAS_BACKEND=jax" in board
    assert "needs TensorFlow installed" in board


def test_the_parts_of_a_loop_have_their_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(PROGRAMS / "custom_loop.py")]) == 0
    out = capsys.readouterr().out
    for name, answer in {
        "tf.GradientTape": "replicax.value_and_grad(loss_fn, variables), in the step; loss_fn takes the place of",
        "tf.function": "nothing to do: strategy.run compiles the step with XLA; leave the decorator out",
        "tf.keras.metrics.SparseCategoricalAccuracy": "the same in model.compile, of Keras 3; in a step of your own "
        "replicax.Accuracy",
        "optimizer.get_scaled_loss": "of Keras 3, scale_loss(loss)",
        "tf.print": "jax.debug.print",
    }.items():
        assert f"{name} → {answer}" in out


def test_a_program_without_distribution_is_not_told_of_its_steps() -> None:
    text = (
        "import tensorflow as tf\nx = tf.Variable(0.0)\n@tf.function\ndef f():\n    with tf.GradientTape() as t: ...\n"
    )
    assert find_uses(ast.parse(text), text.split("\n")) == []
    text += "s = tf.distribute.get_strategy()\n"
    assert {"tf.Variable", "tf.function", "tf.GradientTape"} < {
        use.name for use in find_uses(ast.parse(text), text.split("\n"))
    }


def test_a_session_and_its_iterators_can_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(PROGRAMS / "session.py")]) == 0
    out = capsys.readouterr().out
    assert "iterator.initializer → iter(dataset), anew for each pass" in out
    assert "tf.Session → nothing to do: calls run immediately" in out


def test_modules_of_keras_outside_of_it() -> None:
    text = "import tensorflow as tf\nscope = tf.distribute.get_strategy().scope()\n"
    text += "a, b, c = tf.metrics.Mean(), tf.optimizers.Adam(), tf.losses.Huber()\n"
    told = {use.name: use.counterpart.today for use in find_uses(ast.parse(text), text.split("\n"))}
    for name, answer in {
        "tf.metrics.Mean": "Mean",
        "tf.optimizers.Adam": "Optimizer",
        "tf.losses.Huber": "Opt",
    }.items():
        assert told[name].startswith("the same in model.compile, of Keras 3; in a step of your own")
        assert answer in told[name]
