"""Initial values that differ between workers: all start with the chief's."""

from __future__ import annotations

from tests import processes
from tests.variables import workers_initial_values


def test_a_difference_in_any_part_of_a_split_variable_is_seen() -> None:
    zeros = [[0.0, 0.0]] * 4
    assert processes.run(workers_initial_values.split_variables, workers=2, devices=2) == [[zeros, zeros]] * 2


def test_an_array_of_all_workers_is_a_value_and_stays_its_owners() -> None:
    found = processes.run(workers_initial_values.from_an_array_of_all, workers=2, devices=2)
    assert found == [[[1.0, 2.0, 3.0, 4.0]] * 4 + [own] for own in ([0.0, 1.0], [2.0, 3.0])]
