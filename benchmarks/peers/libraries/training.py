"""What a peer has to offer: a training that has begun."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass
class Training:
    """A model, its optimizer and its batch, where the library keeps them.

    Attributes:
      parameters: how many numbers are trained, as the library counts them.
      steps: ``steps(n)`` trains for ``n`` steps, waits until all is done, and returns a loss. ``n`` is a multiple of
        ``stride``, and with one stride the loss is that of its last step: the mean over the global batch, before that
        step's update.
      stride: how many steps one dispatch has.
      close: ends what else runs.
      children: process ids of the other replicas, where each has a process of its own.
    """

    parameters: int
    steps: Callable[[int], float]
    stride: int = 1
    close: Callable[[], None] = lambda: None
    children: tuple[int, ...] = ()
