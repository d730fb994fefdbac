"""What people write wrong, in all of the API: an error that helps, before anything runs, and everything as it was.

A row is what is wrong, the call, the exception, and the part of its message that helps. After each the variables have
their values, the contexts are left, and a right step runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.misuses.combining import COMBINING
from tests.misuses.places import INPUT, PLACES
from tests.misuses.running import RUNNING
from tests.misuses.training import TRAINING
from tests.misuses.variables import VARIABLES
from tests.misuses.world import right_step, state_of, world

ALL = [*RUNNING, *VARIABLES, *COMBINING, *TRAINING, *INPUT, *PLACES]


@pytest.fixture(scope="module")
def w() -> Any:
    return world()


@pytest.mark.parametrize(("call", "error", "helps"), [row[1:] for row in ALL], ids=[row[0] for row in ALL])
def test_misuse(w: Any, call: Any, error: Any, helps: str) -> None:
    before = state_of(w)
    with pytest.raises(error, match=helps):
        call(w)
    assert state_of(w) == before
    assert float(w.s.run(right_step, args=(w.v, w.x))) == 9.0


def test_no_row_is_there_twice() -> None:
    assert len({row[0] for row in ALL}) == len(ALL)
