"""The character model, as its users run it: two worker processes, each with files of its own."""

from __future__ import annotations

import re

from tests import processes


def test_two_workers_learn_from_real_text() -> None:
    command = ["examples/characters.py", "--text", "docs/*.md", "--files", "3", "--epochs", "3"]
    [printed] = processes.run_programs([command], timeout=120)
    bits = [float(x) for x in re.findall(r"epoch \d   step +\d+   ([\d.]+) bits per character", printed)]
    assert len(bits) == 3  # too few lines for 20 steps: one at the end of each epoch
    assert bits == sorted(bits, reverse=True)
    assert min(bits) < 5
    assert "policy   FILE (AUTO: there are 3 files for 2 worker(s))" in printed
    owners = re.findall(r"worker (\d) reads (\d+) of 3 file\(s\)", printed)
    assert owners == [("0", "2"), ("1", "1")]
