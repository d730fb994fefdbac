"""Colours for the parts of a variable: one for each different content."""

from __future__ import annotations

import colorsys

from replicax.drawing.holdings import Holding
from replicax.tpu.core_owners import COLOURS


def colours_of(holding: Holding) -> dict[tuple[int, int], str]:
    """The colour of each device and copy: one for each different content."""
    contents: dict[tuple[object, int], int] = {}
    numbers = {
        (i, copy): contents.setdefault((part.bounds, part.first + copy), len(contents))
        for i, part in enumerate(holding.parts)
        if part is not None
        for copy in range(part.copies)
    }
    many = len(contents) > len(COLOURS)
    return {at: _hue(n, len(contents)) if many else COLOURS[n] for at, n in numbers.items()}


def _hue(number: int, count: int) -> str:
    """Return one of ``count`` colours of the rainbow."""
    red, green, blue = colorsys.hls_to_rgb(number / count, 0.5 if number % 2 else 0.38, 0.55)
    return f"#{round(255 * red):02X}{round(255 * green):02X}{round(255 * blue):02X}"
