"""The pictures of ``digits_demo.py``: how the training went, and where the replicas are.

They are drawn on figures of their own and not on ``pyplot``'s: nothing global, and no display needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

if TYPE_CHECKING:
    import replicax

    from .digits_demo import Training

# Paul Tol's bright colours, which stay apart for the colour-blind too, and two more.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCA011", "#3BAFD0", "#AA3377", "#E0702B", "#3A9E8C")
INK, MUTED, LINE, SHARED, PAPER = "#22262B", "#6B7280", "#C4CAD3", "#E9ECF1", "#FFFFFF"
DPI = 160


def draw_training(path: Path, trainings: dict[str, Training], *, title: str, target: float | None = None) -> None:
    """Loss and test accuracy of two trainings, one laid over the other.

    Args:
      path: of the PNG.
      trainings: the one to show and the one to compare it with, by name.
      title: printed on top.
      target: an accuracy to mark.
    """
    figure = Figure(figsize=(11, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1), facecolor=PAPER)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold")
    left, right = figure.subplots(1, 2)
    first = next(iter(trainings.values()))
    epochs = len(first.accuracies)
    steps = len(first.losses) // epochs
    at_epoch = np.arange(1, epochs + 1)
    styles: list[dict[str, Any]] = [
        {"color": COLOURS[0], "linewidth": 3},
        {"color": COLOURS[6], "linewidth": 1.4, "linestyle": (0, (3, 2))},
    ]
    if epochs == 1:  # a line needs two points
        styles = [{**style, "marker": "o", "markersize": size} for style, size in zip(styles, (10, 5), strict=True)]

    at_step = np.arange(1, len(first.losses) + 1) / steps
    left.plot(at_step, first.losses, color=COLOURS[0], alpha=0.3, linewidth=1, label="each step")
    for (name, training), style in zip(trainings.items(), styles, strict=True):
        left.plot(at_epoch - 0.5, np.reshape(training.losses, (epochs, steps)).mean(axis=1), label=name, **style)
        right.plot(at_epoch, training.accuracies, label=f"{name}: {training.accuracies[-1]:.2%}", **style)
    if max(first.losses) > 10 * min(first.losses):
        left.set_yscale("log")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter(NullFormatter())
    left.set_title("training loss, mean over the global batch", loc="left", color=INK)
    left.legend(frameon=False, labelcolor=INK)

    if target is not None:
        right.axhline(target, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
        right.text(epochs, target, f"target {target:.0%}", va="top", ha="right", color=MUTED, fontsize=9)
    lowest = min(min(training.accuracies) for training in trainings.values())
    right.set_ylim(max(0.0, lowest - 0.03), 1.01)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.set_title("test accuracy", loc="left", color=INK)
    right.legend(frameon=False, labelcolor=INK, loc="lower right")
    for axes in (left, right):
        axes.set_xlabel("epoch", color=INK)
        axes.set_xlim(0, epochs + 0.02 * epochs)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color=SHARED, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LINE)
        axes.tick_params(colors=MUTED, which="both")
    figure.savefig(path, dpi=DPI)


def draw_replicas(path: Path, strategy: replicax.Strategy, images: Any, training: Training, *, title: str) -> None:
    """Which replica is on which device, which slice of the global batch it gets, where the variables are.

    Args:
      path: of the PNG.
      strategy: whose replicas to draw.
      images: a global batch, ``[batch, height, width, 1]``, from 0 to 1.
      training: what trained on such batches: its variables and collectives.
      title: printed on top.
    """
    devices = strategy.extended.worker_devices
    n, share = len(devices), len(images) // len(devices)
    detailed = n <= 8
    columns, gap = min(n, 8 if n <= 32 else 16), 0.2 if n <= 32 else 0.1
    rows = -(-n // columns)
    width = min((WIDTH - 2 * MARGIN - gap * (columns - 1)) / columns, 3.4)
    height = 1.92 + CHIP * len(training.variables) if detailed else 1.0
    first = (WIDTH - columns * (width + gap) + gap) / 2
    top = 2.55 if detailed else 1.95
    bottom = top + rows * (height + gap) - gap
    page = Page(height=bottom + (1.2 if detailed else 1.0))
    page.text(MARGIN, 0.4, title, 14, weight="bold", ha="left")
    in_pieces = strategy.extended.partitioner is not None
    caption = ONLY if n == 1 else PIECES if in_pieces else EACH
    page.text(MARGIN, 0.72, caption, 9.5, color=MUTED, ha="left")

    bar, slice_width = 1.35, (WIDTH - 2 * MARGIN) / n
    page.text(MARGIN, bar - 0.15, f"global batch of {len(images)} examples", ha="left")
    for i, device in enumerate(devices):
        colour = COLOURS[i % len(COLOURS)]
        span = f"{i * share}–{(i + 1) * share - 1}" if share > 1 else str(i)
        row, column = divmod(i, columns)
        at, x, y = MARGIN + i * slice_width, first + column * (width + gap), top + row * (height + gap)
        name = f"{device.platform}:{device.id}"
        page.rectangle(at, bar, slice_width, 0.38, colour)
        if n <= 16:
            page.text(at + slice_width / 2, bar + 0.19, span, weight="bold", color=PAPER)
        page.box(x, y, width, height, PAPER, edge=LINE)
        if detailed:
            page.beam(at, slice_width, bar + 0.38, x, width, y, colour)
            page.text(x + width / 2, y + 0.17, f"device {name}", 8.5, color=MUTED)
            page.replica(x, y + 0.32, width, i, images[i * share : (i + 1) * share], colour)
            page.variables(x, y + 1.85, width, training.variables)
            if column and not in_pieces:
                page.text(x - gap / 2, y + 1.77 + CHIP * len(training.variables) / 2, "=", 15, color=MUTED)
            if n > 1:
                page.arrow(x + width / 2, bottom + 0.04, bottom + 0.4)
        else:
            page.small_device(x, y, width, (name, f"replica {i}", span), len(training.variables), colour)
    end = bottom + (0.42 if detailed else 0.25)
    page.box(MARGIN, end, WIDTH - 2 * MARGIN, 0.42, INK)
    page.text(WIDTH / 2, end + 0.21, meeting(training, n), 10, color=PAPER)
    page.figure.savefig(path, dpi=DPI)


EACH = "Each replica works on its slice of the global batch. Every device has the same copy of every variable."
PIECES = "Each replica works on its slice of the global batch. Every device has a piece of each variable of some size."
ONLY = "The replica works on the whole batch, and its device has the only copy of every variable."


def meeting(training: Training, n: int) -> str:
    if n == 1:
        return "One replica has all the gradients: there is nothing to reduce."
    if each := sum(training.bytes_of("reduce-scatter")):
        return (
            f"Summed over the {n} replicas, the gradients are scattered: each gets its pieces, {each:,} bytes per step"
        )
    sizes = training.bytes_of("all-reduce")
    times = "one all-reduce per step sums" if len(sizes) == 1 else f"{len(sizes)} all-reduces per step sum"
    return f"{times} the gradients of all variables over the {n} replicas: {sum(sizes):,} bytes"


# --- a page ---------------------------------------------------------------------------------------------

WIDTH, MARGIN, CHIP = 12.0, 0.45, 0.34  # in inches, like all lengths here


class Page:
    """A page to draw on, measured in inches from its upper left corner."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
        self._axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
        self._axes.axis("off")

    def text(self, x: float, y: float, text: str, size: float = 9, *, color: str = INK, **style: Any) -> None:
        style = {"ha": "center", "va": "center", **style}
        self._axes.text(x, y, text, fontsize=size, color=color, **style)

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=PAPER, linewidth=1))

    def box(self, x: float, y: float, width: float, height: float, colour: str, edge: str = "none") -> None:
        """A rectangle with rounded corners."""
        shape = "round,pad=0,rounding_size=0.06"
        self._axes.add_patch(
            FancyBboxPatch((x, y), width, height, shape, facecolor=colour, edgecolor=edge, linewidth=1.2)
        )

    def beam(self, x: float, width: float, y: float, to_x: float, to_width: float, to_y: float, colour: str) -> None:
        """Light from one edge on another."""
        corners = [(x, y), (x + width, y), (to_x + to_width, to_y), (to_x, to_y)]
        self._axes.add_patch(Polygon(corners, closed=True, facecolor=colour, alpha=0.18, linewidth=0))

    def arrow(self, x: float, y: float, to_y: float) -> None:
        """A vertical arrow with two heads."""
        self._axes.add_patch(
            FancyArrowPatch((x, y), (x, to_y), arrowstyle="<|-|>", mutation_scale=10, color=INK, linewidth=1.2)
        )

    def replica(self, x: float, y: float, width: float, index: int, images: Any, colour: str) -> None:
        """A replica, with as many images of its slice as there is room for."""
        self.box(x + 0.08, y, width - 0.16, 1.4, colour)
        self.text(x + width / 2, y + 0.18, f"replica {index}", 10.5, color=PAPER, weight="bold")
        space, room = 0.03, width - 0.3
        across = round(room / 0.31)
        side = (room + space) / across - space
        across = min(across, -(-len(images) // 2))  # in two lines
        shown = images[: 2 * across]
        start = x + width / 2 - (across * (side + space) - space) / 2
        ramp = LinearSegmentedColormap.from_list("replica", [PAPER, colour])
        for i, image in enumerate(shown):
            line, column = divmod(i, across)
            at_x, at_y = start + column * (side + space), y + 0.38 + line * (side + space)
            extent = (at_x, at_x + side, at_y + side, at_y)
            self._axes.imshow(image[..., 0], ramp, vmin=0, vmax=1, extent=extent, aspect="auto", zorder=3)
        self.text(
            x + width / 2, y + 1.22, "1 example" if len(images) == 1 else f"{len(images)} examples", 9, color=PAPER
        )

    def variables(self, x: float, y: float, width: float, variables: list[replicax.Variable]) -> None:
        """A copy of each variable."""
        for i, variable in enumerate(variables):
            top = y + i * CHIP
            self.box(x + 0.08, top, width - 0.16, CHIP - 0.04, SHARED)
            self.text(x + width / 2, top + 0.1, variable.name, 7.5)
            self.text(x + width / 2, top + 0.22, "×".join(map(str, variable.shape)) or "scalar", 6, color=MUTED)

    def small_device(
        self, x: float, y: float, width: float, names: tuple[str, str, str], variables: int, colour: str
    ) -> None:
        """The inside of a device, its replica and slice (``names``), where there is little room."""
        device, replica, span = names
        small = width < 1
        self.text(x + width / 2, y + 0.14, device, 6 if small else 8, color=MUTED)
        self.box(x + 0.06, y + 0.26, width - 0.12, 0.42, colour)
        self.text(x + width / 2, y + 0.38, replica, 5.8 if small else 8.5, color=PAPER)
        self.text(x + width / 2, y + 0.56, span, 5.8 if small else 7.5, color=PAPER)
        self.box(x + 0.06, y + 0.73, width - 0.12, 0.2, SHARED)
        self.text(x + width / 2, y + 0.83, f"{variables} variables", 5.2 if small else 7)
