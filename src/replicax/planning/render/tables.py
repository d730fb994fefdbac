"""A plan as tables: what it says in rows of words, and these rows on the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replicax.hlo.collective_instructions import SLICE_AXIS
from replicax.planning.chip_specs import MEMORY_FRACTION
from replicax.planning.report import Plan
from replicax.planning.timeline.peak import ACTIVATIONS, COPIES, OTHERS, VARIABLES
from replicax.planning.timeline.prediction import Timeline
from replicax.system.printable import printable
from replicax.system.quantities import bytes_in_words, count_in_words, seconds_in_words

_Cells = dict[str, Callable[[Any], str]]
_WAITS = 10


@dataclasses.dataclass(frozen=True)
class Section:
    """A table."""

    title: str  # above it
    columns: tuple[str, ...]  # the headings; those that begin with ``>`` are of numbers
    rows: tuple[tuple[str, ...], ...]  # a text for each column
    note: str = ""  # below it
    spare: tuple[str, ...] = ()  # columns that narrow terminals do without, the first one first

    def without(self, column: str) -> Section:
        """The table without a column."""
        kept = [i for i, name in enumerate(self.columns) if name != column]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return dataclasses.replace(self, columns=tuple(self.columns[i] for i in kept), rows=rows)


def sections(plan: Plan) -> Iterator[Section]:
    """The tables of a plan, in order."""
    if plan.stages:
        yield _stages(plan)
    yield _memory(plan)
    if plan.memory.peak:
        yield _peak(plan)
    if plan.memory.buffers:
        yield _buffers(plan)
    yield _work(plan)
    if plan.timeline is not None:
        yield _step(plan, plan.timeline)
        if plan.timeline.dearest:
            yield _dearest(plan.timeline)
    if plan.collectives:
        yield _collectives(plan)
    if plan.timeline is not None and plan.timeline.waits:
        yield _table_of_waits(plan.timeline)
    if plan.scaling:
        yield _scaling(plan)


def _stages(plan: Plan) -> Section:
    cells: _Cells = {
        "device": lambda stage: str(stage.logical_device),
        ">programs": lambda stage: str(stage.programs),
        ">memory": lambda stage: bytes_in_words(stage.memory.total),
        ">matrix products": lambda stage: f"{count_in_words(stage.cost.matrix_flops)}FLOP",
        ">reads and writes": lambda stage: bytes_in_words(stage.cost.bytes),
        ">sends": lambda stage: bytes_in_words(sum(c.bytes * c.count for c in stage.collectives if c.kind == "send")),
        ">time": lambda stage: "" if stage.timeline is None else seconds_in_words(stage.timeline.seconds),
    }
    note = (
        "The step is a pipeline: each logical device of a replica runs programs of its own. Below, the memory is that "
        "of the one that needs most, and the rest is about the one that is busy longest. The time for which they wait "
        "for each other is not counted."
    )
    return _section("Logical devices", plan.stages, cells, note)


def _memory(plan: Plan) -> Section:
    memory = plan.memory
    rows = [
        ("arguments", bytes_in_words(memory.arguments), "variables, the batch, arrays that the step closes over"),
        ("outputs", bytes_in_words(memory.outputs - memory.aliased), "besides variables, which are updated in place"),
        ("temporaries", bytes_in_words(memory.temporaries), "as the compiler has laid them out"),
        ("program", bytes_in_words(memory.code), "with its constants"),
        ("all together", bytes_in_words(memory.total), ""),
    ]
    if memory.capacity is not None:
        share = f"{memory.total / memory.capacity:.1%} of it"
        if plan.platform == "gpu" and plan.chip is not None and memory.capacity < plan.chip.memory:
            part, whole = memory.capacity / plan.chip.memory, bytes_in_words(int(plan.chip.memory))
            share += f"; JAX takes {part:.0%} of {whole}, or as {MEMORY_FRACTION} says"
        rows.append(("there is", bytes_in_words(memory.capacity), share))
    if memory.host:
        rows.append(("in the host's memory", bytes_in_words(memory.host), "for each device, besides"))
    return Section("Memory of one device", ("", ">bytes", ""), tuple(rows))


def _peak(plan: Plan) -> Section:
    total = plan.memory.total or 1
    rows = [
        (kind, bytes_in_words(size), f"{size / total:.1%}", _MEANINGS.get(kind, ""))
        for kind, size in plan.memory.peak.items()
    ]
    return Section("When the memory is fullest", ("", ">bytes", ">", ""), tuple(rows))


_MEANINGS = {
    VARIABLES: "with an optimizer's slots",
    COPIES: "pieces of other devices, or another dtype",
    ACTIVATIONS: "kept for the backward pass",
    OTHERS: "gradients, what kernels work on, and gaps",
}


def _buffers(plan: Plan) -> Section:
    cells: _Cells = {
        ">bytes": lambda b: bytes_in_words(b.bytes * b.count),
        ">": lambda b: f"{b.count} ×" if b.count > 1 else "",
        "type": lambda b: b.type,
        "kind": lambda b: b.kind,
        "name": lambda b: _end_of(b.name),
        "line": lambda b: b.where,
    }
    note = "Temporaries need not all be alive at the same time; of those that share a place the largest is listed."
    return _section("The largest buffers", plan.memory.buffers, cells, note)


def _work(plan: Plan) -> Section:
    cost, estimate = plan.cost, plan.estimate
    times = [""] * 4
    arithmetic = ""
    if estimate is not None:
        seconds = (estimate.compute, estimate.memory, estimate.communication, estimate.between_slices)
        times = [seconds_in_words(s) for s in seconds]
        arithmetic = seconds_in_words(estimate.arithmetic) if estimate.arithmetic else ""
    between = sum(c.bytes * c.count for c in plan.collectives if SLICE_AXIS in c.axes)
    inside = sum(c.bytes * c.count for c in plan.collectives) - between
    rows = [
        ("matrix products", f"{count_in_words(cost.matrix_flops)}FLOP", times[0]),
        ("other arithmetic", f"{count_in_words(cost.other_flops)}FLOP", arithmetic),
        ("reads and writes of memory", bytes_in_words(cost.bytes), times[1]),
        ("collectives", bytes_in_words(inside), times[2]),
    ]
    if plan.slices > 1:
        rows[-1:] = [
            ("collectives inside of each slice", bytes_in_words(inside), times[2]),
            ("collectives between slices", bytes_in_words(between), times[3]),
        ]
    notes = []
    if estimate is not None and plan.chip is not None:
        if estimate.launches:
            rows.append(("operations", f"{cost.launches:,}", seconds_in_words(estimate.launches)))
        how = "as nothing overlaps" if estimate.is_serial else "if all this overlaps"
        rows.append((f"a step, {how}", "", seconds_in_words(estimate.at_least)))
        notes.append(
            f"A bound, no measurement: FLOPs / {count_in_words(plan.chip.flops)}FLOP/s (or the peak for their dtype), "
            f"bytes / {count_in_words(plan.chip.bandwidth)}B/s of a {plan.chip.name} chip, and the formulas for "
            "collectives. "
            + (f"Between slices a chip sends {count_in_words(plan.chip.network)}B/s. " if plan.slices > 1 else "")
            + f"Bound by {estimate.bound_by}."
        )
    if cost.unknown_loops:
        notes.append(
            f"It is not known how often these loops run; each is counted once: {', '.join(cost.unknown_loops)}."
        )
    return Section("Work of one device in one step", ("", ">amount", ">at least"), tuple(rows), " ".join(notes))


def _step(plan: Plan, timeline: Timeline) -> Section:
    rows = [("a step", seconds_in_words(timeline.seconds), "by its compiled schedule")]
    if plan.examples_per_second is not None:
        rows.append(("examples a second", count_in_words(plan.examples_per_second), "of all replicas together"))
    if plan.tokens_per_second is not None:
        each = count_in_words(plan.tokens_per_second / plan.devices)
        where = f"{each} on each device, at {plan.tokens:,} in an example"
        rows.append(("tokens a second", count_in_words(plan.tokens_per_second), where))
    if timeline.model_flops:
        rows.append(("model FLOPs utilization (MFU)", f"{timeline.utilization:.1%}", "of the chip's peak"))
        again = "with what the backward pass computes a second time"
        rows.append(("hardware FLOPs utilization", f"{timeline.hardware_utilization:.1%}", again))
    rows += [
        (f"kernels: {kind}", seconds_in_words(s), f"{s / timeline.seconds:.1%}") for kind, s in timeline.by_kind.items()
    ]
    if timeline.communication:
        rows.append(("collectives", seconds_in_words(timeline.communication), f"{timeline.hidden:.1%} of it hidden"))
        rows.append(
            (
                "waiting for collectives",
                seconds_in_words(timeline.exposed),
                f"{timeline.exposed / timeline.seconds:.1%}",
            )
        )
    if timeline.copying:
        share = f"{timeline.copying / timeline.seconds:.1%}"
        rows.append(("waiting for copies beside kernels", seconds_in_words(timeline.copying), share))
    note = (
        "A prediction, no measurement: kernels and collectives by formula, in the order in which the compiler has "
        "scheduled them; see replicax.planning.timeline."
    )
    if timeline.opaque:
        note += (
            " What these calls compute is not known; they are timed by the bytes that they take and give, and may take "
            f"much longer: {', '.join(timeline.opaque)}."
        )
    return Section("Predicted time of one step", ("", ">", ""), tuple(rows), note)


def _dearest(timeline: Timeline) -> Section:
    cells: _Cells = {
        ">together": lambda k: seconds_in_words(k.seconds),
        ">count": lambda k: f"{k.count:,} ×",
        "what": lambda k: k.kind,
        "bound by": lambda k: k.bound_by,
        "type": lambda k: _end_of(k.type),
        "name": lambda k: _end_of(k.name),
        "line": lambda k: k.where,
    }
    return _section("The dearest kernels", timeline.dearest, cells, spare=("name", "type"))


def _table_of_waits(timeline: Timeline) -> Section:
    cells: _Cells = {
        ">waiting": lambda w: seconds_in_words(w.exposed),
        ">of": lambda w: seconds_in_words(w.seconds),
        "what": lambda w: w.kind,
        ">count": lambda w: f"{w.count:,} ×",
        ">bytes of one": lambda w: bytes_in_words(w.bytes),
        "why": lambda w: w.why,
        "line": lambda w: w.where,
    }
    spare = (">bytes of one", ">count")
    return _section("Collectives that are not hidden", timeline.waits[:_WAITS], cells, spare=spare)


def _collectives(plan: Plan) -> Section:
    cells: _Cells = {
        "kind": lambda c: c.kind,
        ">count": lambda c: f"{c.count} ×",
        ">bytes of one": lambda c: bytes_in_words(c.bytes),
        "axes": lambda c: " × ".join(c.axes) or "none",
        ">devices": lambda c: f"{c.participants:,}",
        ">together": lambda c: "" if c.seconds is None else seconds_in_words(c.seconds * c.count),
        **({"over": lambda c: c.way} if any(c.way for c in plan.collectives) else {}),
        "where": lambda c: _end_of(c.where),
    }
    note = "" if plan.estimate is None else "Times by formula; see replicax.planning.network."
    return _section("Collectives of one step", plan.collectives, cells, note, spare=("where",))


def _scaling(plan: Plan) -> Section:
    cells: _Cells = {
        ">replicas": lambda p: f"{p.replicas:,}",
        ">chips": lambda p: (f"{p.slices} × " if p.slices > 1 else "") + "x".join(map(str, p.chips)),
        ">collectives": lambda p: seconds_in_words(p.communication),
        ">not hidden": lambda p: seconds_in_words(p.exposed),
        ">a step": lambda p: seconds_in_words(p.seconds),
        ">efficiency": lambda p: f"{p.efficiency:.1%}",
    }
    note = (
        "A prediction by formula, no measurement: a replica's batch stays as it is, so only the collectives change. "
        "Efficiency: the speed of each replica as a share of one alone."
    )
    return _section("Predicted scaling", plan.scaling, cells, note)


def _section(title: str, items: Iterable[Any], cells: _Cells, note: str = "", spare: tuple[str, ...] = ()) -> Section:
    """A row for each of ``items``; ``cells`` has what to write of it under each heading."""
    rows = tuple(tuple(cell(item) for cell in cells.values()) for item in items)
    return Section(title, tuple(cells), rows, note, spare)


def _end_of(name: str) -> str:
    """The last 44 characters of a long name, whose end tells more than its beginning."""
    return name if len(name) <= 44 else "…" + name[-43:]


# --- on the terminal ------------------------------------------------------------------------------------


def print_plan(plan: Plan, console: Console) -> None:
    """Print the tables of a plan."""
    colour = {True: "green", False: "red", None: "yellow"}[plan.fits]
    mesh = " × ".join(f"{name} {size:,}" for name, size in plan.mesh.items())
    times = f"traced in {plan.trace_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s; mesh {mesh}"
    for line, style in ((plan.title, "bold"), (plan.verdict, colour), (times, "")):
        console.print(_text(line, style), soft_wrap=True)
    for section in sections(plan):
        console.print()
        console.print(_table(section, console.width))
        if section.note:
            console.print(_text(section.note, "dim"))
    if plan.chip is not None and plan.chip.sources:
        console.print()
        console.print(_text(f"The figures of {plan.chip.name} are from {'; '.join(plan.chip.sources)}", "dim"))


def _table(section: Section, room: int) -> Table:
    table = Table(
        title=section.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    spare = list(section.spare)
    while spare and sum(_sizes(section)[2]) > room - 2 * len(section.columns):
        section = section.without(spare.pop(0))
    for column, width in zip(section.columns, _widths(section, room - 2 * len(section.columns)), strict=True):
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.lstrip(">"), justify=justify, width=width, overflow="fold")
    for row in section.rows:
        table.add_row(*map(_text, row))
    return table


_CUT, _FOLDED = ("name", "where", "type"), ("why", "what", "over", "bound by", "")
_LEAST, _WORD = 10, 16


def _widths(section: Section, room: int) -> list[int]:
    """Return the width of each column, so that all together fit into ``room``.

    Where there is too little room, headings are folded between words, and then texts, and long names anywhere, the
    widest first. Numbers and lines of the source stay whole on 80 columns; on fewer, Rich folds them as well.
    """
    widths, folded, shortest = _sizes(section)
    for least in (folded, shortest):
        while sum(widths) > room and (able := [i for i, width in enumerate(widths) if width > least[i]]):
            widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _sizes(section: Section) -> tuple[list[int], list[int], list[int]]:
    """Return each column's width in one line, with its heading folded between words, and with all folded."""
    cells = [max(map(cell_len, map(printable, texts)), default=0) for texts in zip(*section.rows, strict=True)]
    headings = [column.lstrip(">") for column in section.columns]
    widths = [max(cell, cell_len(heading)) for cell, heading in zip(cells, headings, strict=True)]
    folded = [max(cell, *map(cell_len, heading.split() or [""])) for cell, heading in zip(cells, headings, strict=True)]
    shortest = []
    for width, heading, texts in zip(folded, headings, zip(*section.rows, strict=True), strict=True):
        word = max((cell_len(printable(w)) for text in texts for w in text.split()), default=0)
        least = {**dict.fromkeys(_CUT, _LEAST), **dict.fromkeys(_FOLDED, max(_LEAST, min(word, _WORD)))}
        shortest.append(min(width, least.get(heading, width)))
    return widths, folded, shortest


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)
