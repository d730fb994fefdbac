"""The walk through a schedule: what runs beside what, and which collectives are waited for."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from replicax.hlo.collective_instructions import ProgramDevices
from replicax.hlo.instructions import parse
from replicax.planning.chip_specs import Chip
from replicax.planning.timeline.prediction import Timeline, timeline_of
from replicax.planning.timeline.user_lines import SourceLines
from replicax.planning.timeline.walk import NOT_ASYNCHRONOUS, NOTHING_BESIDE, QUEUED, TOO_SHORT, Run, ScheduleWalk

CHIP = Chip("chip", flops=1e9, memory=1e9, bandwidth=1e6, is_serial=True)  # each kernel below takes 8 ms
KERNEL = 0.008
GATHER = 0.010
ARRAY, PART, BOTH = "f32[1000]{0}", "f32[500]{0}", "(f32[500]{0}, f32[1000]{0})"
GROUPS = 'replica_groups={{0,1}}, dimensions={0}, metadata={source_file="/home/me/model.py" source_line=7}'


def walked(lines: str, inside: str = "") -> tuple[Run, SourceLines]:
    module = parse(
        f"{inside}\nENTRY %main (x: {ARRAY}, y: {PART}) -> {ARRAY} {{\n"
        f"  %x = {ARRAY} parameter(0)\n  %y = {PART} parameter(1)\n{lines}\n}}"
    )
    return ScheduleWalk(module, CHIP, ProgramDevices({"replica": 2})).run(lambda use: GATHER), SourceLines(module)


def run(lines: str, inside: str = "") -> Run:
    return walked(lines, inside)[0]


OLD = (f"%s = {BOTH} all-gather-start(%y), {GROUPS}", f"%d = {ARRAY} all-gather-done(%s)")
NEW = (
    f"%s = (({PART}), {ARRAY}) async-start(%y), calls=%gathering",
    f"%d = {ARRAY} async-done(%s)",
)
GATHERING = f"""
%gathering (p: {PART}) -> {ARRAY} {{
  %p = {PART} parameter(0)
  ROOT %g = {ARRAY} all-gather(%p), {GROUPS}
}}
"""


@pytest.fixture(params=[OLD, NEW], ids=["jax-0.10", "jax-0.12"])
def pair(request) -> tuple[str, str]:
    return request.param


@pytest.mark.parametrize(("kernels", "exposed"), [(0, 0.010), (1, 0.002), (2, 0.0)])
def test_what_stands_between_start_and_end_hides(pair, kernels: int, exposed: float) -> None:
    start, done = pair
    between = "\n".join(f"  %k{i} = {ARRAY} negate(%x)" for i in range(kernels))
    found = run(f"  {start}\n{between}\n  {done}\n  ROOT %z = {ARRAY} negate(%d)", inside=GATHERING)
    [transfer] = found.transfers.values()
    assert found.seconds == pytest.approx(KERNEL * (kernels + 1) + exposed)
    assert transfer.exposed == pytest.approx(exposed)
    assert (transfer.use.kind, transfer.use.bytes, transfer.use.participants) == ("all-gather", 4000, 2)
    assert list(transfer.reasons) == {0: [NOTHING_BESIDE], 1: [TOO_SHORT], 2: []}[kernels]
    assert run(f"  ROOT {done.replace('%s', '%x')}").seconds == 0  # what was started elsewhere


def test_one_instruction_is_waited_for() -> None:
    found = run(f"  %k = {ARRAY} negate(%x)\n  ROOT %d = {ARRAY} all-gather(%y), {GROUPS}")
    assert found.seconds == pytest.approx(KERNEL + GATHER)
    assert found.transfers["d"].reasons == {NOT_ASYNCHRONOUS: pytest.approx(GATHER)}


def test_collectives_wait_for_those_before_them() -> None:
    first, second = OLD[0], OLD[0].replace("%s", "%s2")
    found = run(
        f"  {first}\n  {second}\n  %k = {ARRAY} negate(%x)\n  %d2 = {ARRAY} all-gather-done(%s2)\n  {OLD[1]}\n"
        f"  ROOT %z = {ARRAY} add(%d, %d2)"
    )
    assert found.transfers["s2"].reasons == {TOO_SHORT: pytest.approx(2 * GATHER - KERNEL)}
    assert found.transfers["s"].exposed == 0
    third = OLD[0].replace("%s", "%s3")
    found = run(
        f"  {first}\n  {third}\n  %k = {ARRAY} negate(%x)\n  %k2 = {ARRAY} negate(%x)\n  {OLD[1]}\n"
        f"  %d3 = {ARRAY} all-gather-done(%s3)\n  ROOT %z = {ARRAY} add(%d, %d3)"
    )
    assert found.transfers["s3"].reasons == {QUEUED: pytest.approx(2 * GATHER - 2 * KERNEL)}


@pytest.mark.parametrize(("source", "target"), [("", "S(1)"), ("S(1)", "")])
def test_copies_into_memory_near_by_and_out_of_it_take_time(source: str, target: str) -> None:
    start = f"(f32[1000]{{0:{target}}}, f32[1000]{{0:{source}}}, u32[]{{:S(2)}}) copy-start(%x)"
    module = parse(f"""
ENTRY %main (x: f32[1000]) -> f32[1000] {{
  %x = f32[1000]{{0:{source}}} parameter(0)
  %start = {start}
  %next = {start}
  %z = f32[1000]{{0:{target}}} copy-done(%next)
  ROOT %y = f32[1000]{{0:{target}}} copy-done(%start)
}}""")
    run = ScheduleWalk(module, CHIP, ProgramDevices({"replica": 1})).run(lambda use: 0.0)
    assert run.seconds == run.copying == 2 * 4000 / CHIP.bandwidth  # one after the other


def test_the_longer_arm_of_a_branch_counts() -> None:
    arms = "".join(
        f"%{name} (p: {ARRAY}) -> {ARRAY} {{\n  %{name}p = {ARRAY} parameter(0)\n{kernels}\n}}\n"
        for name, kernels in (
            ("short", f"  ROOT %s1 = {ARRAY} negate(%shortp)"),
            ("long", f"  %l1 = {ARRAY} negate(%longp)\n  ROOT %l2 = {ARRAY} negate(%l1)"),
        )
    )
    found = run(
        f"  %i = s32[] constant(0)\n  ROOT %c = {ARRAY} conditional(%i, %x, %x), branch_computations={{%long, %short}}",
        inside=arms,
    )
    assert found.seconds == pytest.approx(2 * KERNEL)
    assert sorted(found.kernels) == ["l1", "l2"]


def test_a_branch_hides_what_was_started_before_it() -> None:
    arm = f"%arm (p: {ARRAY}) -> {ARRAY} {{\n  %p = {ARRAY} parameter(0)\n  ROOT %k = {ARRAY} negate(%p)\n}}\n"
    branch = f"%c = {ARRAY} conditional(%i, %x), branch_computations={{%arm}}"
    found = run(f"  %i = s32[] constant(0)\n  {OLD[0]}\n  {branch}\n  ROOT {OLD[1]}", inside=arm)
    assert found.transfers["s"].exposed == pytest.approx(GATHER - KERNEL)


def test_each_arm_of_a_branch_has_collectives_of_its_own() -> None:
    first, second = (
        f"%{arm} (p: {PART}) -> {ARRAY} {{\n  %p = {PART} parameter(0)\n{kernel}"
        f"  ROOT %{arm}_gather = {ARRAY} all-gather(%p), {GROUPS}\n}}\n\n"
        for arm, kernel in (("first", ""), ("second", f"  %k = {PART} negate(%p)\n"))
    )
    branch = f"ROOT %c = {ARRAY} conditional(%i, %y, %y), branch_computations={{%first, %second}}"
    found = run(f"  %i = s32[] constant(0)\n  {branch}", inside=first + second)
    assert found.seconds == pytest.approx(KERNEL / 2 + GATHER)
    assert {name: t.exposed for name, t in found.transfers.items()} == {"second_gather": pytest.approx(GATHER)}


def test_a_collective_slows_the_kernels_of_a_gpu() -> None:
    module = parse(
        f"{GATHERING}\nENTRY %main (x: {ARRAY}, y: {PART}) -> {ARRAY} {{\n  %x = {ARRAY} parameter(0)\n"
        f"  %y = {PART} parameter(1)\n  {OLD[0]}\n  %k = {ARRAY} negate(%x)\n  ROOT {OLD[1]}\n}}"
    )
    gpu = Chip("gpu", flops=1e9, memory=1e9, bandwidth=1e6, multiprocessors=100)
    alone, beside = (
        ScheduleWalk(module, gpu, ProgramDevices({"replica": 2})).run(lambda use, s=s: s) for s in (0.0, 0.002)
    )
    assert alone.seconds < beside.seconds < alone.seconds + 0.002
    text = f"ENTRY %main (x: {ARRAY}) -> {ARRAY} {{\n  %x = {ARRAY} parameter(0)\n  %k = {ARRAY} negate(%x)\n"
    found = ScheduleWalk(parse(f"{text}  ROOT %z = {ARRAY} negate(%k)\n}}"), gpu, ProgramDevices({"replica": 2}))
    quiet = found.run(lambda use: 0.0)
    assert quiet.seconds == pytest.approx(sum(kernel.kernel.seconds for kernel in quiet.kernels.values()))


def timeline(lines: str, inside: str = "") -> Timeline:
    return timeline_of([walked(lines, inside)])


def test_what_is_not_hidden_is_told_with_the_line(pair) -> None:
    start, done = pair
    found = timeline(f"  {start}\n  %k = {ARRAY} negate(%x)\n  {done}\n  ROOT %z = {ARRAY} negate(%d)", GATHERING)
    [wait] = found.waits
    assert (wait.kind, wait.bytes, wait.count, wait.why) == ("all-gather", 4000, 1, TOO_SHORT)
    assert (wait.seconds, wait.exposed) == (pytest.approx(GATHER), pytest.approx(GATHER - KERNEL))
    assert wait.where == "model.py:7"
    assert found.hidden == pytest.approx(0.8)
    assert str(dataclasses.replace(found, exposed=found.communication * (1 + 1e-15)).hidden) == "0.0"
    assert [(k.kind, k.count, k.seconds, k.flops, k.bytes) for k in found.dearest] == [
        ("elementwise", 1, pytest.approx(KERNEL), 0, 8000),
        ("elementwise", 1, pytest.approx(KERNEL), 0, 8000),
    ]


def test_the_dearest_kernels_come_first_and_alike_ones_are_one() -> None:
    found, lines = walked(f"  ROOT %k = {ARRAY} negate(%x)")
    [run] = found.kernels.values()
    kinds = [(i, "product" if i == 2 else "reduce") for i in range(1, 13)]
    kernels = [dataclasses.replace(run.kernel, kind=kind, bytes=i, seconds=i) for i, kind in kinds]
    runs = [dataclasses.replace(run, kernel=kernel) for kernel in kernels]
    found.kernels = dict(enumerate([runs[1], *runs, dataclasses.replace(runs[0], count=20)]))
    predicted = timeline_of([(found, lines)])
    dearest = [(k.bytes, k.count, k.seconds) for k in predicted.dearest]
    assert dearest == [(1, 21, 21), *((i, 1, i) for i in range(12, 3, -1))]
    assert list(predicted.by_kind.items()) == [("reduce", 96), ("product", 4)]


def line_found(offset: int) -> str:
    """The line of an instruction that is so many lines below the one that calls this."""
    caller = sys._getframe(1)
    source = f'source_file="{caller.f_code.co_filename}" source_line={caller.f_lineno + offset}'
    module = parse(
        f"ENTRY %main (x: {ARRAY}) -> {ARRAY} {{\n  %x = {ARRAY} parameter(0)\n"
        f"  ROOT %z = {ARRAY} negate(%x), metadata={{{source}}}\n}}"
    )
    return SourceLines(module).of(module.computations["main"].root)


def test_a_line_that_asks_for_the_plan_is_no_line_of_the_step() -> None:
    assert line_found(0) == ""
    assert line_found(1000).startswith("test_timeline.py:1")


def test_what_is_computed_a_second_time_is_not_the_models() -> None:
    dot = "f32[10,10]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="
    found = timeline(
        f"  %m = f32[10,10]{{1,0}} constant(1)\n"
        f'  %p = {dot}"jit(f)/checkpoint/rematted_computation/dot_general"}}\n'
        f'  %q = {dot}"jit(f)/dot_general"}}\n  ROOT %z = {ARRAY} negate(%x)'
    )
    assert (found.flops, found.model_flops) == (4000, 2000)
    assert found.utilization == pytest.approx(found.hardware_utilization / 2)


def test_of_several_reasons_the_one_that_takes_longest_is_told() -> None:
    found = run(f"  {OLD[0]}\n  {OLD[1]}\n  ROOT %z = {ARRAY} negate(%d)")
    module = parse(f"ENTRY %main (x: {ARRAY}) -> {ARRAY} {{\n  ROOT %x = {ARRAY} parameter(0)\n}}")
    for reasons in ({QUEUED: 1.0, TOO_SHORT: 3.0}, {TOO_SHORT: 1.0, QUEUED: 3.0}):
        short = dataclasses.replace(found.transfers["s"], count=3, reasons=reasons)
        others = [dataclasses.replace(short, exposed=1.0, use=dataclasses.replace(short.use, bytes=8)) for _ in "ab"]
        waits = timeline_of([(Run(transfers=dict(enumerate([short, *others]))), SourceLines(module))]).waits
        assert [wait.why for wait in waits] == [max(reasons, key=reasons.get)] * 2
        # Those of one size are one, and the longest wait comes first.
        assert [(wait.bytes, wait.count, wait.exposed) for wait in waits] == [(8, 6, 2.0), (4000, 3, short.exposed)]
        assert [wait.seconds for wait in waits] == pytest.approx([6 * GATHER, 3 * GATHER])


def test_what_a_loop_calls_runs_in_each_turn() -> None:
    turns = 'backend_config={"known_trip_count":{"n":"5"}}'
    body = f"%n = {ARRAY} negate(%p)\n  ROOT %c = {ARRAY} call(%n), to_apply=%called"
    found = run(
        f"  ROOT %w = {ARRAY} while(%x), condition=%body, body=%body, {turns}",
        inside=f"%called (q: {ARRAY}) -> {ARRAY} {{\n  %q = {ARRAY} parameter(0)\n  ROOT %k = {ARRAY} negate(%q)\n}}\n"
        f"%body (p: {ARRAY}) -> {ARRAY} {{\n  %p = {ARRAY} parameter(0)\n  {body}\n}}",
    )
    assert {name: kernel.count for name, kernel in found.kernels.items()} == {"n": 5, "k": 5}
    assert found.seconds == pytest.approx(10 * KERNEL)


@pytest.mark.parametrize(
    "caller",
    [
        "call(%x), to_apply=%inner",
        "fusion(%x), kind=kLoop, calls=%inner",
        "while(%x), condition=%other, body=%inner",
        "while(%x), condition=%inner, body=%other",
        "conditional(%i, %x, %x), branch_computations={%other, %inner}",
        "conditional(%i, %x, %x), true_computation=%inner, false_computation=%other",
        "conditional(%i, %x, %x), true_computation=%other, false_computation=%inner",
    ],
)
def test_what_has_no_line_has_that_of_what_it_stands_in(caller: str) -> None:
    module = parse(
        f"%inner (p: {ARRAY}) -> {ARRAY} {{\n  %p = {ARRAY} parameter(0)\n  ROOT %n = {ARRAY} negate(%p)\n}}\n"
        f"%other (q: {ARRAY}) -> {ARRAY} {{\n  ROOT %q = {ARRAY} parameter(0)\n}}\n"
        f"ENTRY %main (x: {ARRAY}, i: s32[]) -> {ARRAY} {{\n  %x = {ARRAY} parameter(0)\n  %i = s32[] parameter(1)\n"
        f'  ROOT %c = {ARRAY} {caller}, metadata={{source_file="/home/me/model.py" source_line=7}}\n}}'
    )
    assert SourceLines(module).of(module.instructions["n"]) == "model.py:7"
