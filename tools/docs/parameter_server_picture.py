"""Draws the picture of docs/parameter_server.md: ``tools/docs/parameter_server_picture.py [folder]``, or into docs/.

Which server has which rows is what Replicax chooses for the variables of a strategy; nothing is placed by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import optax

import replicax
from replicax.drawing.svg import Drawing
from replicax.parameter_server.server.shards import ShardChoice, Shards
from replicax.tpu.core_owners import COLOURS

DOCS = Path(__file__).parents[2] / "docs"
WIDTH, MARGIN, GAP = 900.0, 24.0, 20.0
WORKERS, SERVERS = 3, 2


def variables() -> tuple[replicax.ParameterServerStrategy, list[tuple[str, tuple[int, ...], Shards]]]:
    """A strategy, and the name, shape and shards of each of its variables and of their slots."""
    strategy = replicax.ParameterServerStrategy(
        num_workers=WORKERS,
        num_servers=SERVERS,
        variable_partitioner=replicax.variables.MinSizePartitioner(min_shard_bytes=16 << 10, max_shards=SERVERS),
    )
    with strategy.scope():
        model = [
            replicax.Variable(np.zeros((20_000, 16), np.float32), name="table"),
            replicax.Variable(np.zeros((1000, 16), np.float32), name="w"),
            replicax.Variable(np.zeros(16, np.float32), name="b"),
        ]
        optimizer = replicax.Optimizer(optax.sgd(0.1, momentum=0.9))
        optimizer.build(model)
    choice = ShardChoice(SERVERS, strategy.variable_partitioner)
    placed = [(v.name, v.shape, choice.shards_of(v)) for v in model]
    return strategy, placed


def box(drawing: Drawing, x: float, y: float, width: float, height: float, title: str, *lines: str) -> None:
    """A process, with what it does."""
    drawing.box(x, y, width, height, "panel", 8)
    drawing.text(x + 14, y + 24, title, 15, "ink b")
    for number, line in enumerate(lines):
        drawing.text(x + 14, y + 46 + 18 * number, line, 12.5, "muted")


def middles_of(count: int) -> tuple[float, list[float]]:
    """How wide each of ``count`` boxes beside each other is, and where their middles are."""
    width = (WIDTH - 2 * MARGIN - (count - 1) * GAP) / count
    return width, [MARGIN + i * (width + GAP) + width / 2 for i in range(count)]


def server(
    drawing: Drawing, x: float, y: float, width: float, number: int, placed: list[tuple[str, tuple[int, ...], Shards]]
) -> None:
    """A server: each variable as a bar, of which the part is filled that this server has."""
    words = "parts of variables, and the optimizer's state of the same rows"
    box(drawing, x, y, width, 66 + 34 * len(placed), f"server {number}", words)
    room = width - 28 - 70 - 128
    for place, (name, shape, shards) in enumerate(placed):
        top, left = y + 60 + 34 * place, x + 14 + 70
        drawing.text(x + 14, top + 15, name, 13)
        drawing.box(left, top, room, 20, "rest", 3)
        if number not in shards.bounds:
            drawing.text(left + room + 10, top + 15, "—", 12.5, "muted")
            continue
        start, stop = shards.bounds[number]
        from_, to = (start / shape[0], stop / shape[0]) if shards.is_split else (0.0, 1.0)
        drawing.box(left + from_ * room, top, (to - from_) * room, 20, COLOURS[number], 3)
        words = f"rows {start} to {stop - 1}" if shards.is_split else "whole"
        drawing.text(left + room + 10, top + 15, words, 12.5, "muted")


def main(folder: Path) -> None:
    strategy, placed = variables()
    drawing = Drawing()
    y = MARGIN
    box(
        drawing,
        MARGIN,
        y,
        middles_of(1)[0],
        74,
        "coordinator: your program",
        "creates variables, schedules functions, fetches results; reads and assigns variables, saves checkpoints",
    )
    y += 74
    third, middles = middles_of(strategy.num_workers)
    for middle in middles:
        drawing.line([(middle, y), (middle, y + 44)], "link", 1.5)
    drawing.text(middles[0] + 10, y + 27, "functions, each with a number", 12.5, "muted")
    y += 44
    for number, middle in enumerate(middles):
        box(
            drawing,
            middle - third / 2,
            y,
            third,
            92,
            f"worker {number}",
            "runs steps on copies of w and b,",
            "pulled before each, if they changed;",
            "of the table: the rows of its batch",
        )
    y += 92
    half, centres = middles_of(strategy.num_servers)
    for middle in middles:
        for centre in centres:
            drawing.line([(middle, y), (centre, y + 70)], "link", 1.5)
    drawing.box((WIDTH - 380) / 2, y + 24, 380, 22, "page", 4)
    words = "values up, gradients down: one call for each server and step"
    drawing.text(WIDTH / 2, y + 39, words, 12.5, "muted", "middle")
    y += 70
    for number, centre in enumerate(centres):
        server(drawing, centre - half / 2, y, half, number, placed)
    y += 66 + 34 * len(placed) + MARGIN
    title = "Who holds what: a coordinator, three workers with copies, two servers with parts of variables"
    (folder / "parameter-server.svg").write_text(drawing.document(WIDTH, y, title))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
