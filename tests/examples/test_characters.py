"""The character model, as its users run it: two worker processes, each with files of its own."""

from __future__ import annotations

import re

from tests import processes


def test_two_workers_learn_from_real_text() -> None:
    [printed] = processes.run_programs([["examples/characters.py", "--files", "3"]], timeout=120)
    bits = [float(x) for x in re.findall(r"([\d.]+) bits per character", printed)]
    assert bits[0] > bits[1]
    assert min(bits) < 4
    assert "policy   FILE (AUTO: there are 3 files for 2 worker(s))" in printed
    owners = re.findall(r"worker (\d) reads (\d+) of 3 file\(s\)", printed)
    assert owners == [("0", "2"), ("1", "1")]
