"""SVG as text: shapes and text, in colours that suit light and dark pages.

The viewer draws the text in its own font; so the width of text is estimated, on the safe side.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

_STYLE = """
text { font-family: Helvetica, Arial, sans-serif; }
.b { font-weight: bold; }
.page { fill: #FFFFFF; } .panel { fill: #F3F5F8; } .bar { fill: #DFE4EB; }
.ink { fill: #22262B; } .muted { fill: #66707D; } .rest { fill: #FFFFFF; stroke: #C4CAD3; }
.line { stroke: #C4CAD3; fill: none; } .cut { stroke: #FFFFFF; } .link { stroke: #66707D; fill: none; }
.dot { fill: #66707D; } .full { fill: #4477AA; }
@media (prefers-color-scheme: dark) {
  .page { fill: #14171B; } .panel { fill: #1D2228; } .bar { fill: #343B45; }
  .ink { fill: #E8EBEF; } .muted { fill: #A2ABB7; } .rest { fill: #14171B; stroke: #4A535F; }
  .line { stroke: #4A535F; } .cut { stroke: #14171B; } .link { stroke: #A2ABB7; } .dot { fill: #A2ABB7; }
}
"""
_NARROW, _WIDE = frozenset("ilj.,:;|!'()[] ftr-"), frozenset("mwMWO@%—×GQ")


def width_of(text: str, size: float, bold: bool = False) -> float:
    """An estimate of the width of a line, in the units of ``size``."""
    units = sum(0.34 if c in _NARROW else 0.86 if c in _WIDE else 0.68 if c.isupper() else 0.56 for c in text)
    return units * size * (1.06 if bold else 1.0)


def lines_of(text: str, size: float, room: float) -> list[str]:
    """Wrap ``text`` at spaces into lines of at most the width ``room``, unless a single word is wider."""
    lines: list[str] = []
    for word in text.split():
        if lines and width_of(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def cut_to(text: str, size: float, room: float, bold: bool = False) -> str:
    """Truncate ``text`` if it is too wide."""
    if width_of(text, size, bold) <= room:
        return text
    while text and width_of(f"{text}…", size, bold) > room:
        text = text[:-1]
    return f"{text.rstrip()}…"


class Drawing:
    """A picture to which shapes are added, each above the earlier ones. Positions are in pixels from the upper left."""

    def __init__(self) -> None:
        self._things: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> None:
        """A rectangle with a class of the style or a colour, such as ``#4477AA``."""
        corners = f' rx="{_number(radius)}"' if radius else ""
        place = " ".join(f'{k}="{_number(v)}"' for k, v in (("x", x), ("y", y), ("width", width), ("height", height)))
        self._things.append(f"<rect {place}{corners}{_look(kind)}/>")

    def line(self, points: Sequence[tuple[float, float]], kind: str, width: float = 1) -> None:
        """A line through points."""
        path = "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        self._things.append(f'<path d="M{path}" stroke-width="{_number(width)}"{_look(kind)}/>')

    def dot(self, x: float, y: float, radius: float, kind: str) -> None:
        """A disc."""
        place = f'cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"'
        self._things.append(f"<circle {place}{_look(kind)}/>")

    def text(self, x: float, y: float, text: str, size: float, kind: str = "ink", anchor: str = "start") -> None:
        """A line of text with its base line at ``y``; ``x`` is its start, middle or end."""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        place = f'x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}"'
        self._things.append(f"<text {place}{at}{_look(kind)}>{escape(text)}</text>")

    def under(self, other: Drawing) -> Drawing:
        """Combine both, with ``other`` on top."""
        both = Drawing()
        both._things = [*self._things, *other._things]
        return both

    def document(self, width: float, height: float, title: str) -> str:
        """The complete SVG, as the text of a file."""
        size, label = f"{_number(width)} {_number(height)}", f"aria-label={quoteattr(title)}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" {label}>',
                f"<style>{_STYLE}</style>",
                f'<rect width="100%" height="100%" rx="8"{_look("page")}/>',
                *self._things,
                "</svg>\n",
            ]
        )


def _look(kind: str) -> str:
    return f' fill="{kind}"' if kind.startswith("#") else f' class="{kind}"'


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
