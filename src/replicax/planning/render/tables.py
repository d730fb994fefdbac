"""A plan as tables on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from replicax.planning.render.numbers import printable
from replicax.planning.render.table_rows import Section, sections

if TYPE_CHECKING:
    import rich.console
    import rich.table

    from replicax.planning.report import Plan


def print_plan(plan: Plan, console: rich.console.Console) -> None:
    """Print the tables of a plan."""
    colour = {True: "green", False: "red", None: "yellow"}[plan.fits]
    console.print(f"[bold]{escape(plan.title)}[/]", soft_wrap=True)
    console.print(f"[{colour}]{escape(plan.verdict)}[/]", soft_wrap=True)
    console.print(
        f"traced in {plan.trace_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s; mesh "
        + escape(" × ".join(f"{name} {size:,}" for name, size in plan.mesh.items())),
        soft_wrap=True,
    )
    for section in sections(plan):
        console.print()
        console.print(_table(section))
        if section.note:
            console.print(f"[dim]{escape(section.note)}[/]")
    if plan.chip is not None and plan.chip.sources:
        console.print(
            f"\n[dim]The figures of {escape(plan.chip.name)} are from {escape('; '.join(plan.chip.sources))}[/]"
        )


def _table(section: Section) -> rich.table.Table:
    from rich import box
    from rich.table import Table

    table = Table(title=section.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, cells in zip(section.columns, zip(*section.rows, strict=True), strict=True):
        heading, right, long = column.lstrip(">"), column.startswith(">"), column in ("name", "where", "")
        # Where there is little room long names are folded, and headings between words; numbers stay whole.
        width = 0 if long else max(map(len, [*cells, *heading.split()]), default=0)
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(heading, justify=justify, min_width=width, overflow="fold")
    for row in section.rows:
        table.add_row(*map(escape, row))
    return table


def escape(text: str) -> str:
    """``text`` as it stands on a terminal."""
    import rich.markup

    return rich.markup.escape(printable(text))
