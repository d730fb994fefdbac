"""The page and the tables: whole, legible for machines, and in need of nothing from outside."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import html.parser
import io
import re

import jax
import jax.numpy as jnp
import matplotlib as mpl
import pytest
import rich.console
from matplotlib.figure import Figure

import replicax
from replicax.planning.cost import Cost
from replicax.planning.estimate import Estimate, ScalingPoint
from replicax.planning.memory import Memory
from replicax.planning.render import charts
from replicax.planning.render.page import page
from replicax.planning.render.tables import print_plan, sections
from replicax.planning.report import CollectiveRow, Stage
from replicax.planning.timeline.prediction import DearKernel, Exposed, Timeline

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
    with pytest.raises(TypeError, match=r"Plan.write_html\(path\)"):
        plan.write_html(3)
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
    assert all(text in found.text for text in ("<w> & co", plan.verdict, "prediction", "card<1>", "a & b"))


def test_a_step_that_does_next_to_nothing() -> None:
    strategy = replicax.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        v = replicax.Variable(jnp.ones(4))
    for step in (lambda: None, lambda: jnp.sin(v.value)):
        idle = replicax.plan(strategy, step, chip=CHIP)
        text = checked(page(idle)).text
        assert all(section.title in text for section in sections(idle))
        assert "Collectives" not in text


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
    times = {"arithmetic": 3e-9, "launches": 2e-9, "between_slices": 1e-9}
    plan = dataclasses.replace(plan, estimate=dataclasses.replace(plan.estimate, **times))
    pictures = charts.memory_picture(plan), charts.time_picture(plan), charts.step_picture(plan)
    memory, bounds, step = map(bars_of, pictures)
    [capacity] = pictures[0].axes[0].lines
    unit = UNITS[pictures[0].axes[0].get_xlabel().split()[0]]
    assert [x * unit for x in capacity.get_xdata()] == pytest.approx([plan.memory.capacity] * 2)
    assert pictures[0].axes[0].texts[-1].get_position()[0] < capacity.get_xdata()[0]  # its words end before it
    for begin, end, amount in (*memory.values(), *bounds.values(), *step.values()):
        number, unit = amount.split()
        assert end - begin == pytest.approx(float(number.replace(",", "")) * UNITS[unit], rel=0.01)
    for bars, whole in ((memory, plan.memory.total), (step, plan.timeline.seconds)):
        ends = [0.0, *(end for _, end, _ in bars.values())]
        assert [begin for begin, _, _ in bars.values()] == pytest.approx(ends[:-1])  # one after the other
        assert ends[-1] == pytest.approx(whole)
    assert {name: end for name, (_, end, _) in bounds.items()} == pytest.approx(
        {
            name.replace("_", " "): getattr(plan.estimate, name)
            for name in ("compute", "memory", "communication", *times)
        }
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
    nothing = {"estimate": None, "timeline": None, "scaling": ()}
    nothing |= {"chip": None, "memory": dataclasses.replace(plan.memory, capacity=None)} if fits is None else {}
    other = dataclasses.replace(plan, fits=fits, words="too <large>", **nothing)
    assert other.verdict.startswith({True: "fits: needs ", False: "does not fit: needs ", None: "needs "}[fits])
    text = page(other)
    assert f'<div class="verdict {mark}">' in text
    assert "too <large>" in checked(text).text
    assert checked(text).seen.count("svg") == 1
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    print_plan(other, console)
    assert f"\x1b[{colour}m{other.verdict}" in console.file.getvalue()


NUMBERS = """\
Logical devices
device | >programs | >memory | >matrix products | >reads and writes | >sends | >time
1 | 2 | 15.00 KiB | 2 kFLOP | 5.00 KiB | 7.00 KiB | 8 s
Memory of one device
| >bytes |
arguments | 9.00 KiB | variables, the batch, arrays that the step closes over
outputs | 3.00 KiB | besides variables, which are updated in place
temporaries | 2.00 KiB | as the compiler has laid them out
program | 1.00 KiB | with its constants
all together | 15.00 KiB |
there is | 60.00 KiB | 25.0% of it; JAX takes 75% of 80.00 KiB, or as XLA_CLIENT_MEM_FRACTION says
in the host's memory | 11.00 KiB | for each device, besides
When the memory is fullest
| >bytes | > |
activations | 3.00 KiB | 20.0% | kept for the backward pass
Work of one device in one step
| >amount | >at least
matrix products | 2 kFLOP | 1 s
other arithmetic | 3 kFLOP | 5 s
reads and writes of memory | 5.00 KiB | 2 s
collectives inside of each slice | 10.00 KiB | 3 s
collectives between slices | 5.00 KiB | 4 s
operations | 6 | 6 s
a step, if all this overlaps | | 6 s
Predicted time of one step
| > |
a step | 8 s | by its compiled schedule
examples a second | 2 | of all replicas together
tokens a second | 64 | 8 on each device, at 32 in an example
model FLOPs utilization (MFU) | 25.0% | of the chip's peak
hardware FLOPs utilization | 50.0% | with what the backward pass computes a second time
kernels: product | 2 s | 25.0%
collectives | 4 s | 75.0% of it hidden
waiting for collectives | 1 s | 12.5%
waiting for copies beside kernels | 500 ms | 6.2%
The dearest kernels
>together | >count | what | bound by | type | name | line
2 s | 3 × | product | memory | f32[2] | dot | model.py:7
Collectives of one step
kind | >count | >bytes of one | axes | >devices | >together | over | where
all-reduce | 3 × | 1.00 KiB | replica | 4 | 1.5 s | NVLink | here
all-reduce | 5 × | 1.00 KiB | slice | 2 | 10 s | | there
send | 7 × | 1.00 KiB | logical0 | 2 | 7 s | | there
Collectives that are not hidden
>waiting | >of | what | >count | >bytes of one | why | line
1 s | 4 s | all-reduce | 3 × | 1.00 KiB | too short | model.py:9
Predicted scaling
>replicas | >chips | >collectives | >not hidden | >a step | >efficiency
8 | 2 × 2x2 | 4 s | 1 s | 8 s | 50.0%
"""


@pytest.fixture
def numbers(plan):
    """A plan in which each number is another one."""
    memory = Memory(9 * 2**10, 7 * 2**10, 4 * 2**10, 2 * 2**10, 2**10, 60 * 2**10, peak={"activations": 3 * 2**10})
    memory = dataclasses.replace(memory, host=11 * 2**10)
    cost = Cost(matrix_flops=2000, other_flops=3000, bytes=5 * 2**10, unknown_loops=("a", "b"), launches=6)
    collectives = (
        CollectiveRow("all-reduce", 2**10, ("replica",), 4, 3, "here", 0.5, "NVLink"),
        CollectiveRow("all-reduce", 2**10, ("slice",), 2, 5, "there", 2.0),
        CollectiveRow("send", 2**10, ("logical0",), 2, 7, "there", 1.0),
    )
    kernel = DearKernel("dot", "product", "f32[2]", 3, 2.0, 7, 8, "memory", "model.py:7")
    wait = Exposed("all-reduce", 2**10, 3, 4.0, 1.0, "too short", "model.py:9")
    timeline = Timeline(8.0, 7.0, 4.0, 1.0, 7, 6, 0.25, 0.5, {"product": 2.0}, (kernel,), (wait,), 0.5, ("a_call",))
    of_stage = {"memory": memory, "cost": cost, "collectives": collectives, "timeline": timeline}
    return dataclasses.replace(
        plan,
        **{
            "platform": "gpu",
            "trace_seconds": 1.25,
            "compile_seconds": 2.5,
            "devices": 8,
            "replicas": 4,
            "slices": 2,
            "examples": 16,
            "tokens": 32,
            **of_stage,
        },
        chip=dataclasses.replace(CHIP, memory=80 * 2**10, network=5e9),
        estimate=Estimate(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        scaling=(ScalingPoint(8, (2, 2), 8.0, 4.0, 1.0, 0.5, 2),),
        stages=(Stage(1, 2, estimate=Estimate(6.0, 5.0, 4.0, 3.0), **of_stage),),
    )


def test_each_number_stands_where_its_name_says(numbers) -> None:
    found = numbers
    tables = list(sections(found))
    lines = [line for s in tables for line in (s.title, *map(" | ".join, (s.columns, *s.rows)))]
    assert [" ".join(line.split()) for line in lines] == NUMBERS.splitlines()
    notes = {s.title: s.note for s in tables}
    assert "no measurement" in notes["Predicted scaling"]
    assert notes["Predicted time of one step"].endswith("may take much longer: a_call.")
    work = notes["Work of one device in one step"]
    assert re.match(r"A bound, no measurement: FLOPs / 1 PFLOP/s .* 3 TB/s of a card<1> .* a chip sends 5 GB/s\.", work)
    assert re.search(r"Bound by launches\. .* each is counted once: a, b\.$", work)
    [stage] = found.to_dict()["stages"]
    assert (stage["estimate"]["at_least"], stage["estimate"]["bound_by"]) == (6.0, "compute")
    assert stage["timeline"]["hidden"] == 0.75


LOOKS = {"page": "70325a8a7506feb9", "page of nothing": "fade14b8f155665b", "terminal": "ecbd0d88cdb2c4b5"}


def test_what_is_drawn_and_printed_looks_as_it_did(numbers, tmp_path) -> None:
    console = rich.console.Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    print_plan(numbers, console)
    shown = {"terminal": console.file.getvalue()}
    point = ScalingPoint(8, (2, 2), 0.0, 0.0, 0.0, 0.0)
    idle = {"memory": Memory(0, 0, 0, 0, 0), "estimate": Estimate(0.0, 0.0, 0.0), "timeline": None, "scaling": (point,)}
    with mpl.rc_context({"svg.fonttype": "none"}):
        for name, one in (("page", numbers), ("page of nothing", dataclasses.replace(numbers, **idle))):
            shown[name] = re.sub(r'(id="|#)[^")]+|matplotlib version [\d.]+', "", page(one))
    found = {}
    for name, text in shown.items():
        rounded = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.0f}", text)  # of points in pictures
        (tmp_path / name).write_text(text, encoding="utf-8")
        found[name] = hashlib.sha256(rounded.encode()).hexdigest()[:16]
    assert found == LOOKS, f"look at the files in {tmp_path}; if they are right, write these digests into LOOKS"


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


def test_control_characters_reach_neither_the_page_nor_the_terminal(plan) -> None:
    odd = "w\x1b[31m\x00\x9b\ud800[bold]"
    memory = dataclasses.replace(plan.memory, buffers=(dataclasses.replace(plan.memory.buffers[0], name=odd),))
    found = dataclasses.replace(plan, step=odd, words=f"two\nlines {odd}", memory=memory)
    text = io.StringIO()
    print_plan(found, rich.console.Console(file=text, width=200, color_system=None))
    for shown in (page(found), text.getvalue()):
        assert "w\\x1b[31m\\x00\\x9b\\ud800[bold] on 4 replicas" in shown
        assert not {"\x1b", "\x00", "\x9b", "\ud800"} & set(shown)
    assert "two\nlines" in page(found)
