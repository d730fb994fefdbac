"""The age of this process."""

from __future__ import annotations

import os
import time


def process_age() -> float:
    """The seconds since this process began; 0 where that is not known."""
    try:
        with open("/proc/self/stat") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError, ValueError, IndexError):  # not Linux
        return 0.0
