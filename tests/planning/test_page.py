"""The page and the tables: whole, legible for machines, and in need of nothing from outside."""

from __future__ import annotations

import dataclasses
import html
import html.parser
import io
import re

import jax
import jax.numpy as jnp
import pytest
import rich.console
from matplotlib.figure import Figure

import replicax
from replicax.planning.render import charts
from replicax.planning.render.page import page
from replicax.planning.render.tables import print_plan, sections

CHIP = replicax.planning.Chip("card<1>", flops=1e15, memory=1e9, bandwidth=3e12, link=50e9, links=9, sources=("a & b",))


@pytest.fixture(scope="module")
def plan():
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((64, 64)), name="<w> & co")

    def step(x):
        return replicax.get_replica_context().all_reduce("sum", jnp.sin(x @ w)), x @ w

    return replicax.plan(strategy, step, jax.ShapeDtypeStruct((32, 64), jnp.float32), chip=CHIP)


class Checker(html.parser.HTMLParser):
    """Follows the tags of a page."""

    VOID = frozenset(["meta", "br", "img", "hr", "link", "input"])

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.wanted: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attributes) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "action", "srcset") and not value.startswith("#"):
                self.wanted.append(value)

    def handle_startendtag(self, tag, attributes) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag) -> None:
        assert self.open, f"</{tag}> ends nothing"
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def test_the_page_is_whole_and_self_contained(plan, tmp_path) -> None:
    plan.write_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    found = checked(text)
    assert found.wanted == []
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(found.seen)
    assert "@import" not in text
    assert "url(http" not in text
    assert found.seen.count("svg") == 4
    for section in sections(plan):
        assert section.title in found.text
        for row in section.rows:
            assert all(cell in found.text for cell in row)
    assert "<w> & co" in found.text
    assert plan.verdict in found.text
    assert "prediction" in found.text
    assert "card<1>" in found.text


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def bars_of(figure: Figure) -> dict[str, tuple[float, float, str]]:
    """The begin and the end of each bar, in bytes or seconds by the unit of the axis, and the words beside it."""
    [axes] = figure.axes
    unit = UNITS[axes.get_xlabel().split()[0]]
    found = {}
    names = [label.get_text() for label in axes.get_yticklabels()]
    drawn = [(container, bar) for container in axes.containers for bar in container]
    for i, (part, bar) in enumerate(drawn):
        words = names[i] + " " + axes.texts[i].get_text() if names else part.get_label()
        name, amount = re.fullmatch(r"(.*?) ([\d,.]+ \S+)", words).groups()
        found[name] = (bar.get_x() * unit, (bar.get_x() + bar.get_width()) * unit, amount)
    return found


def test_bars_are_as_long_as_their_words_say(plan) -> None:
    memory, bounds, step = map(
        bars_of, (charts.memory_picture(plan), charts.time_picture(plan), charts.step_picture(plan))
    )
    for begin, end, amount in (*memory.values(), *bounds.values(), *step.values()):
        number, unit = amount.split()
        assert end - begin == pytest.approx(float(number.replace(",", "")) * UNITS[unit], rel=0.01)
    for bars, whole in ((memory, plan.memory.total), (step, plan.timeline.seconds)):
        ends = [0.0, *(end for _, end, _ in bars.values())]
        assert [begin for begin, _, _ in bars.values()] == pytest.approx(ends[:-1])  # one after the other
        assert ends[-1] == pytest.approx(whole)
    assert {name: end for name, (_, end, _) in bounds.items()} == pytest.approx(
        {name: getattr(plan.estimate, name) for name in ("compute", "memory", "communication")}
    )
    plan = dataclasses.replace(plan, scaling=[dataclasses.replace(p, exposed=p.exposed / 2) for p in plan.scaling])
    left, right = charts.scaling_picture(plan).axes
    seconds, waits = (line.get_ydata() for line in left.get_lines())
    unit = UNITS[left.get_title(loc="left").split()[-1]]
    assert [s * unit for s in seconds] == pytest.approx([p.seconds for p in plan.scaling])
    assert [s * unit for s in waits] == pytest.approx([p.exposed for p in plan.scaling])
    assert list(right.get_lines()[0].get_ydata()) == [p.efficiency for p in plan.scaling]
    assert all(list(line.get_xdata()) == [1, 2, 4] for line in (*left.get_lines(), *right.get_lines()))
    assert [axes.xaxis.get_major_formatter()(4096) for axes in (left, right)] == ["4,096", "4,096"]


def test_on_a_phone_a_row_of_a_wide_table_has_the_names_of_its_columns(plan) -> None:
    text = page(plan)
    for section in sections(plan):
        start = text.index(f"<h2>{section.title}</h2>")
        wide = '<div class="table wide">' in text[start : text.index("</section>", start)]
        assert wide == (len(section.columns) > 4)
        for column, cell in zip(section.columns, section.rows[0], strict=True):
            if name := column.lstrip(">"):
                assert f' data-column="{name}">{html.escape(cell)}</td>' in text
    assert "@media (max-width" in text


def test_a_plan_is_a_line_in_a_session_and_tables_in_a_notebook(plan) -> None:
    assert repr(plan) == f"<Plan of {plan.title}: {plan.verdict}>"
    found = checked(plan._repr_html_())
    assert "style" not in found.seen  # it would be that of the whole notebook
    for section in sections(plan):
        assert section.title in found.text
        assert all(cell in found.text for row in section.rows for cell in row)
    unnamed = dataclasses.replace(plan, step="<lambda>")
    assert unnamed.title in checked(unnamed._repr_html_()).text


@pytest.mark.parametrize(("fits", "mark", "colour"), [(True, "fits", 32), (False, "not", 31), (None, "unknown", 33)])
def test_the_verdict_is_coloured(plan, fits, mark, colour) -> None:
    other = dataclasses.replace(plan, fits=fits, words="too <large>", estimate=None, timeline=None, scaling=())
    assert fits is None or other.verdict.startswith("fits: needs " if fits else "does not fit: needs ")
    text = page(other)
    assert f'<div class="verdict {mark}">' in text
    assert "too <large>" in checked(text).text
    assert checked(text).seen.count("svg") == 1
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    print_plan(other, console)
    assert f"\x1b[{colour}m{other.verdict}" in console.file.getvalue()


def test_collectives_are_waited_for_as_long_as_they_are_not_hidden(plan) -> None:
    timeline = dataclasses.replace(plan.timeline, seconds=8.0, communication=4.0, exposed=1.0)
    found = {s.title: s for s in sections(dataclasses.replace(plan, timeline=timeline))}
    rows = {what: rest for what, *rest in found["Predicted time of one step"].rows}
    assert rows["collectives"] == ["4 s", "75.0% of it hidden"]
    assert rows["waiting for collectives"] == ["1 s", "12.5%"]


@pytest.mark.parametrize("width", [80, 160])
def test_the_tables(plan, width: int) -> None:
    console = rich.console.Console(file=io.StringIO(), width=width)
    print_plan(plan, console)
    text = console.file.getvalue()
    assert text.splitlines()[0] == plan.title
    assert text.splitlines()[1] == plan.verdict
    for section in sections(plan):
        assert section.title in text
        for column, *cells in zip(section.columns, *section.rows, strict=True):
            assert all(word in text for word in column.lstrip(">").split())  # folded between words at most
            is_folded = column in ("name", "where", "why", "what", "type", "over", "bound by", "")
            assert is_folded or all(cell in text for cell in cells)
    assert "all-reduce" in text
    assert "replica" in text
    assert "A prediction, no measurement" in text
    assert max(map(len, text.splitlines()[3:])) <= width


def test_a_narrow_terminal_goes_without_columns_that_can_be_spared(plan) -> None:
    row = dataclasses.replace(plan.collectives[0], where="while/body/some/long/way/to/it")
    shown = {}
    for width in (62, 160):
        console = rich.console.Console(file=io.StringIO(), width=width)
        print_plan(dataclasses.replace(plan, collectives=(row,)), console)
        table = console.file.getvalue().partition("Collectives of one step")[2]
        heading, _, rest = re.split(r"(─+)", table, maxsplit=1)
        cells = next(line for line in rest.splitlines() if "all-reduce" in line)
        shown[width] = {*heading.split()}, cells.split()
    heading, cells = shown[160]
    assert "where" in heading
    assert cells[-1] == row.where
    assert shown[62] == (heading - {"where"}, cells[:-1])


def test_the_speed_is_that_of_all_replicas_together() -> None:
    strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    shapes = {"text": (2, 16), "translation": (2, 24), "label": (2,)}
    element = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    plan = replicax.plan(strategy, lambda x: x["text"].sum() + x["translation"].sum(), element, chip=CHIP)
    assert (plan.examples, plan.tokens) == (4 * 2, 24)
    assert plan.examples_per_second * plan.timeline.seconds == pytest.approx(4 * 2)
    assert plan.tokens_per_second * plan.timeline.seconds == pytest.approx(4 * 2 * 24)


def test_of_a_long_buffer_the_line_is_whole_on_80_columns(plan) -> None:
    long = {"type": "bfloat16[4,4096,12,50257]", "name": "transpose(jvp(checkpoint))/while/body/dot_general"}
    alike = {"bytes": 2**20, "count": 32, **long}
    buffer = dataclasses.replace(plan.memory.buffers[0], where="language_model.py:1234", **alike)
    found = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, buffers=(buffer,)))
    console = rich.console.Console(file=io.StringIO(), width=80)
    print_plan(found, console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    at = next(i for i, line in enumerate(lines) if line.endswith("language_model.py:1234"))
    assert lines[at].split()[:4] == ["32.00", "MiB", "32", "×"]
    heading = next(line for line in lines if line.split()[-1:] == ["line"])
    start = heading.index("type")
    folded = [line[start : heading.index("kind")].strip() for line in lines[at : at + 5]]
    assert "".join(folded).startswith(long["type"])
    assert max(map(len, lines[3:])) <= 80


def test_every_section_says_what_its_numbers_are(plan) -> None:
    found = {s.title: s for s in sections(plan)}
    assert all(len(row) == len(s.columns) for s in found.values() for row in s.rows)
    assert "no measurement" in found["Work of one device in one step"].note
    assert "no measurement" in found["Predicted scaling"].note


def test_of_several_slices_collectives_have_two_rows(plan) -> None:
    [use] = plan.collectives
    both = (use, dataclasses.replace(use, axes=("slice",), bytes=3 * 2**20, count=2))
    one, two = (
        {label: amount for s in sections(found) if s.title.startswith("Work of") for label, amount, _ in s.rows}
        for found in (plan, dataclasses.replace(plan, slices=2, collectives=both))
    )
    assert one.pop("collectives") == two.pop("collectives inside of each slice")
    assert two.pop("collectives between slices") == "6.00 MiB"
    assert one == two


def test_control_characters_reach_neither_the_page_nor_the_terminal(plan) -> None:
    odd = "w\x1b[31m\x00\x9b\ud800[bold]"
    buffer = dataclasses.replace(plan.memory.buffers[0], name=odd) if plan.memory.buffers else None
    memory = dataclasses.replace(plan.memory, buffers=() if buffer is None else (buffer,))
    found = dataclasses.replace(plan, step=odd, words=f"two\nlines {odd}", memory=memory)
    text = io.StringIO()
    print_plan(found, rich.console.Console(file=text, width=200, color_system=None))
    for shown in (page(found), text.getvalue()):
        assert "w\\x1b[31m\\x00\\x9b\\ud800[bold] on 4 replicas" in shown
        assert not {"\x1b", "\x00", "\x9b", "\ud800"} & set(shown)
    assert "two\nlines" in page(found)
