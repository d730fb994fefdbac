"""Samples of steps: how long this worker's devices wait for its host between two steps, and how much it computes.

Workers that meet in each step take equally long for it, however slow one of them is. What tells the slow one is that
the others wait for it, and it for nobody. Inside of a program that can't be seen from the host. But two things can:

- the *gap*: from the end of a program until the host launches the next one. While it lasts this worker's devices have
  nothing to do, and the others' devices, whose programs are launched, wait in their first collective. A host that is
  ahead of its devices, as it usually is, has no gap.
- on CPUs, for how many seconds the processors have worked on a program. To wait for another worker takes none.

A thread that looks every moment would cost more than the answer is worth. So at most one step in each interval of the
pulse is looked at closely; of steps that are longer than it, all are.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import statistics
import threading

KEPT = 9
"""Over how many samples medians are taken."""
LOOKS = 60
"""How often it is looked at most for one sample."""
QUICKEST = 0.3e-3
"""Seconds between two looks, at least."""


@dataclasses.dataclass(frozen=True)
class StepSample:
    """One step.

    Attributes:
      gap: for how many seconds the devices have had nothing to do before it.
      waited: for how many seconds of these the host has waited for input.
    """

    gap: float
    waited: float


class StepSamples:
    """The last samples, and how long steps take in all.

    Attributes:
      count: of how many steps it is known how long they took.
    """

    def __init__(self) -> None:
        self._samples: collections.deque[StepSample] = collections.deque(maxlen=KEPT)
        self._steps: collections.deque[tuple[float, float, float]] = collections.deque(maxlen=KEPT)
        self._last: tuple[int, float, float, float] | None = None
        self.count = 0

    def add(self, number: int, ended_at: float, next_at: float, waited: float) -> None:
        """A step has been seen to end, and the next one to be launched.

        Args:
          number: of the call.
          ended_at: when it has ended.
          next_at: when the next one was launched, be it before that; or would have been, had the host not waited for
            other workers.
          waited: for how many seconds in between the host has waited for input.
        """
        gap = max(0.0, next_at - ended_at)
        self._samples.append(StepSample(gap, min(gap, waited)))
        now = number, ended_at, *_processor_seconds()
        if self._last is not None and number > self._last[0]:
            calls, seconds, ran, wanted = (a - b for a, b in zip(now, self._last, strict=True))
            self._steps.append((seconds / calls, ran / calls, wanted / calls))
            self.count += 1
        self._last = now

    def interrupted(self) -> None:
        """Something else than steps has been done."""
        self._last = None

    def medians(self) -> tuple[float, float, float]:
        """How long a call takes, how much of the gap is waiting for input, and how long the device's threads work.

        Their work includes the time for which they were ready to run, and others had the processors.
        """
        period = statistics.median(seconds for seconds, _, _ in self._steps)
        waited = statistics.median(sample.waited for sample in self._samples)
        return period, waited, statistics.median(wanted for _, _, wanted in self._steps)

    def gaps(self) -> tuple[float, float]:
        """The low and the high quartile of the gaps."""
        return _quartiles([sample.gap for sample in self._samples])

    def computed(self) -> tuple[float, float]:
        """Those of the seconds for which the threads of the device have run for a call."""
        return _quartiles([ran for _, ran, _ in self._steps])


def _quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    quarter = (len(ordered) - 1) // 4
    return ordered[quarter], ordered[-1 - quarter]


def _processor_seconds() -> tuple[float, float]:
    """For how many seconds the threads of this process have run, and have run or wanted to, but for those of Python.

    What Python does between two steps is in the gap already, and what it does beside them, such as reading ahead or
    writing a checkpoint, nobody waits for.
    """
    ran = wanted = 0
    ours = {str(thread.native_id) for thread in threading.enumerate()}
    for thread in os.listdir("/proc/self/task"):
        if thread in ours:
            continue
        with contextlib.suppress(OSError, ValueError), open(f"/proc/self/task/{thread}/schedstat") as file:
            running, waiting, _ = file.read().split()
            ran += int(running)
            wanted += int(running) + int(waiting)
    return ran / 1e9, wanted / 1e9


def look_interval(period: float) -> float:
    """How many seconds to let pass between two looks at a step that takes ``period``.

    >>> from replicax.workers.step_samples import look_interval
    >>> look_interval(0.001), look_interval(2.0)
    (0.0003, 0.05)
    """
    return min(0.05, max(QUICKEST, period / 40))
