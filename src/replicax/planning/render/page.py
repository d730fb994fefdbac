"""A plan as one HTML page that needs nothing from outside."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from replicax.planning.render.tables import Section, sections
from replicax.system.printable import printable

if TYPE_CHECKING:
    from replicax.planning.report import Plan

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #22262b; background: #fff; margin: 2rem auto; max-width: 70rem;
  padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
.verdict { display: inline-block; margin: .7rem 0; padding: .25rem .8rem; border-radius: .4rem; font-weight: 600; }
.fits { background: #e0f2e4; color: #17642b; } .not { background: #fbe3e5; color: #9b1c2b; }
.unknown { background: #fdf3d6; color: #6d5200; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th { color: #565d68; font-weight: 600; text-align: left; vertical-align: bottom; }
th, td { padding: .22rem 1rem .22rem 0; border-bottom: 1px solid #e9ecf1; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.long { word-break: break-all; min-width: 8rem; }
.note, footer { color: #565d68; font-size: .85rem; max-width: 50rem; }
pre { white-space: pre-wrap; background: #f5f6f8; padding: .7rem 1rem; border-radius: .4rem; }
svg { max-width: 100%; height: auto; display: block; }
@media (max-width: 50rem) {
  th, td { padding-right: .6rem; }
  td + td { overflow-wrap: anywhere; }
  .wide thead { display: none; }
  .wide tr { display: block; padding: .35rem 0; border-bottom: 1px solid #e9ecf1; }
  .wide td { display: block; padding: 0; border: 0; text-align: left; white-space: normal; }
  .wide td:empty { display: none; }
  .wide td[data-column]::before { content: attr(data-column) ": "; color: #565d68; }
}
"""
_LONG = ("name", "type", "where")  # columns whose texts may be broken anywhere
_WIDE = 4  # a table of more columns has a block for each row on a phone


def page(plan: Plan) -> str:
    """The page of a plan."""
    from replicax.planning.render import charts  # it loads Matplotlib

    kind = {True: "fits", False: "not", None: "unknown"}[plan.fits]
    drawn = {"Memory of one device": charts.memory_picture(plan)}
    if plan.estimate is not None:
        drawn["Work of one device in one step"] = charts.time_picture(plan)
    if plan.timeline is not None and plan.timeline.seconds:
        drawn["Predicted time of one step"] = charts.step_picture(plan)
    if plan.scaling:
        drawn["Predicted scaling"] = charts.scaling_picture(plan)
    parts = []
    for section in sections(plan):
        picture = charts.as_svg(drawn[section.title]) if section.title in drawn else ""
        parts.append(f"<section><h2>{escape(section.title)}</h2>{picture}{_table(section)}</section>")
    words = f"<pre>{escape(plan.words)}</pre>" if plan.words else ""
    mesh = " × ".join(f"{name} {size:,}" for name, size in plan.mesh.items())
    about = (
        f"{plan.strategy}; mesh {mesh}; traced in {plan.trace_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s."
    )
    sources = ""
    if plan.chip is not None and plan.chip.sources:
        sources = f"<p>The figures of {escape(plan.chip.name)} are from {escape('; '.join(plan.chip.sources))}.</p>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plan.title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{escape(plan.title)}</h1><div class="verdict {kind}">{escape(plan.verdict)}</div>'
        f'<p class="note">{escape(about)}</p>{words}{"".join(parts)}'
        f"<footer>{sources}<p>Memory is what the compiler has laid out. FLOPs, bytes and collectives are counted in "
        f"the compiled program. Times are predictions by formula, and no measurements.</p></footer></body></html>\n"
    )


def fragment(plan: Plan) -> str:
    """The tables of a plan, as a part of another page."""
    tables = "".join(f"<h4>{escape(section.title)}</h4>{_table(section)}" for section in sections(plan))
    return f"<p><b>{escape(plan.title)}</b><br>{escape(plan.verdict)}</p>{tables}"


def _table(section: Section) -> str:
    names = [column.lstrip(">") for column in section.columns]

    def row(cells: tuple[str, ...], *, heading: bool = False) -> str:
        tag, joined = "th" if heading else "td", ""
        for column, name, text in zip(section.columns, names, cells, strict=True):
            kind = "number" if column.startswith(">") else "long" if name in _LONG else ""
            classes = f' class="{kind}"' if kind else ""
            label = f' data-column="{escape(name)}"' if name and not heading else ""
            joined += f"<{tag}{classes}{label}>{escape(text)}</{tag}>"
        return f"<tr>{joined}</tr>"

    head = row(tuple(names), heading=True)
    body = "".join(row(cells) for cells in section.rows)
    note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
    kind = "table wide" if len(names) > _WIDE else "table"
    return f'<div class="{kind}"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>{note}'


def escape(text: str) -> str:
    """``text`` as it stands in a page."""
    return html.escape(printable(text))
