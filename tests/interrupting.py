"""Interrupts at a chosen moment."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable
from typing import Any


def interrupted_at(moment: int, work: Callable[[], object], start: types.CodeType | None = None) -> bool:
    """Do ``work``, and send an interrupt at the given moment, if there is one; or else return ``False``.

    Python runs handlers of signals at the beginning of its functions, after calls of others, and in loops.

    Args:
      moment: counted from 1.
      work: what is interrupted.
      start: of the function with whose first call the counting begins; ``None``: at once.
    """
    seen, has_begun = 0, start is None

    def look(frame: types.FrameType, event: str, argument: Any) -> None:
        nonlocal seen, has_begun
        has_begun = has_begun or frame.f_code is start
        if has_begun and event in ("call", "c_return"):
            seen += 1
            if seen == moment:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    try:
        sys.setprofile(look)
        work()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:  # threading.Condition.wait was about to take its lock again, which `with` releases
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
    finally:
        sys.setprofile(None)
    return seen >= moment
