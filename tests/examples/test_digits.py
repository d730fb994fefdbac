"""The digits: the example by itself, and the pictures and the report of ``replicax demo``."""

import re

import jax
import numpy as np

import replicax
from examples import digits, digits_demo, digits_pictures


def test_the_example_runs_by_itself(capsys, monkeypatch):
    monkeypatch.setattr(digits, "EPOCHS", 1)
    train, test = digits.load_data()
    few = tuple(a[: 2 * digits.BATCH] for a in train), tuple(a[:64] for a in test)
    monkeypatch.setattr(digits, "load_data", lambda: few)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        digits.main()
    epochs = re.findall(r"^epoch +(\d+) +loss [\d.]+ +test accuracy +[\d.]+%", capsys.readouterr().out, re.MULTILINE)
    assert epochs == ["1"]


def test_each_replica_is_drawn_with_its_examples(tmp_path, monkeypatch, pair):
    texts = []
    write = digits_pictures.Page.text
    monkeypatch.setattr(
        digits_pictures.Page,
        "text",
        lambda page, x, y, text, *args, **kw: (texts.append(text), write(page, x, y, text, *args, **kw)),
    )
    with pair.scope():
        training = digits_demo.Training(variables=[replicax.Variable(np.zeros((3, 2), np.float32), name="kernel")])
    digits_pictures.draw_replicas(tmp_path / "a.png", pair, np.zeros((8, 8, 8, 1), np.float32), training, title="t")
    assert {"replica 0", "replica 1", "0–3", "4–7", "device cpu:0", "device cpu:1"} <= set(texts)
    assert [texts.count(each) for each in ("4 examples", "kernel", "3×2")] == [2, 2, 2]
