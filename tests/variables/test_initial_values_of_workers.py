"""Initial values that differ between workers: all start with the chief's."""

from __future__ import annotations

from tests import processes
from tests.variables import workers_initial_values


def test_a_difference_in_any_part_of_a_split_variable_is_seen() -> None:
    zeros = [[0.0, 0.0]] * 4
    assert processes.run(workers_initial_values.split_variables, workers=2, devices=2) == [[zeros, zeros]] * 2
