"""Programs with loops, against the same ones unrolled, and the walk against a simulation of two streams."""

from __future__ import annotations

import dataclasses
import random

import pytest

from replicax.hlo.collective_instructions import CollectiveUse, ProgramDevices
from replicax.hlo.instructions import Module, parse
from replicax.planning.chip_specs import Chip
from replicax.planning.cost import cost_of
from replicax.planning.estimate import estimate_of
from replicax.planning.timeline.kernels import Kernel, kernel_of
from replicax.planning.timeline.walk import ScheduleWalk

WHOLE, PART = "f32[1000]{0}", "f32[500]{0}"
GROUPS = "replica_groups={{0,1}}, dimensions={0}"
CHIP = Chip("chip", flops=1e9, memory=1e9, bandwidth=1e6, arithmetic=1e6, launch=1e-4)
PLACES = ProgramDevices({"replica": 2})
SECONDS = 0.010
"""Of a collective: a kernel takes 3 to 10 ms."""

FUSED = f"""
%fused (f: {WHOLE}) -> {WHOLE} {{
  %f = {WHOLE} parameter(0)
  %f1 = {WHOLE} negate(%f)
  ROOT %f2 = {WHOLE} add(%f1, %f)
}}
%gathering (g: {PART}) -> {WHOLE} {{
  %g = {PART} parameter(0)
  %g1 = {PART} negate(%g)
  ROOT %g2 = {WHOLE} all-gather(%g1), {GROUPS}
}}
%c (h: ({WHOLE}, {PART})) -> pred[] {{
  %h = ({WHOLE}, {PART}) parameter(0)
  ROOT %more = pred[] constant(true)
}}
"""


@dataclasses.dataclass
class Loop:
    trips: int | None  # not known: it counts once
    body: list[object]


Operation = str | Loop
"""One of ``TEXTS``, or a loop."""

TEXTS = {
    "kernel": f"{WHOLE} negate(%x)",
    "fusion": f"{WHOLE} fusion(%x), kind=kLoop, calls=%fused",
    "gather": f"{WHOLE} all-gather(%y), {GROUPS}",
    "fused gather": f"{WHOLE} fusion(%y), kind=kCustom, calls=%gathering",
    "start": f"({PART}, {WHOLE}) all-gather-start(%y), {GROUPS}",
    "done": f"{WHOLE} all-gather-done",
    "left": f"({PART}, {WHOLE}) all-gather-start(%y), {GROUPS}",  # nothing waits for it
}


def drawn(rng: random.Random, depth: int = 2) -> list[Operation]:
    """Operations in which each start has its done, and each iteration ends when its collectives have ended."""
    found: list[Operation] = [
        rng.choice(["kernel", "fusion", "gather", "fused gather"]) for _ in range(rng.randint(1, 3))
    ]
    if depth:
        found.insert(rng.randint(0, len(found)), Loop(rng.randint(1, 4), drawn(rng, depth - 1)))
    start = rng.randint(0, len(found))
    found.insert(start, "start")
    found.insert(rng.randint(start + 1, len(found)), "done")
    return found


def unrolled(operations: list[Operation]) -> list[str]:
    each = ((o.trips or 1) * unrolled(o.body) if isinstance(o, Loop) else [o] for o in operations)
    return [operation for found in each for operation in found]


def module_of(operations: list[Operation]) -> Module:
    computations: list[str] = []
    names = iter(range(10**6))

    def lines_of(operations: list[Operation]) -> list[str]:
        lines: list[str] = []
        started: list[str] = []
        for operation in operations:
            name = f"v{next(names)}"
            if isinstance(operation, Loop):
                kind = f"({WHOLE}, {PART})"
                body = "\n".join(f"  {line}" for line in lines_of(operation.body))
                computations.append(
                    f"%{name}_body (p: {kind}) -> {kind} {{\n  %{name}p = {kind} parameter(0)\n"
                    f"  %x = {WHOLE} get-tuple-element(%{name}p), index=0\n"
                    f"  %y = {PART} get-tuple-element(%{name}p), index=1\n{body}\n"
                    f"  ROOT %{name}r = {kind} tuple(%x, %y)\n}}\n"
                )
                trips = f'backend_config={{"known_trip_count":{{"n":"{operation.trips}"}}}}' if operation.trips else ""
                lines.append(f"%{name}t = {kind} tuple(%x, %y)")
                lines.append(f"%{name} = {kind} while(%{name}t), condition=%c, body=%{name}_body, {trips}")
                continue
            lines.append(f"%{name} = {TEXTS[operation]}" + (f"(%{started.pop()})" if operation == "done" else ""))
            if operation == "start":
                started.append(name)
        return lines

    entry = "\n".join(f"  {line}" for line in lines_of(operations))
    return parse(
        f"{FUSED}\n{''.join(computations)}\nENTRY %main (x: {WHOLE}, y: {PART}) -> {WHOLE} {{\n"
        f"  %x = {WHOLE} parameter(0)\n  %y = {PART} parameter(1)\n{entry}\n  ROOT %last = {WHOLE} bitcast(%x)\n}}"
    )


class Network:
    def seconds(self, use: CollectiveUse) -> float:
        return SECONDS


def kernels_of() -> dict[str, Kernel]:
    """The kernel of each kind of operation that has one."""
    found = {}
    for kind in ("kernel", "fusion", "fused gather"):
        module = module_of([kind])
        main = module.computations["main"]
        found[kind] = kernel_of(module, main, main.instructions["v0"], CHIP)
    return found


def simulated(operations: list[str]) -> tuple[float, float, float]:
    """The seconds of a step, those of its kernels, and those in which these wait for collectives."""
    kernels = kernels_of()
    now = busy = computing = waiting = 0.0
    ends: list[float] = []
    for operation in operations:
        if operation not in ("kernel", "fusion", "done"):
            busy = max(now, busy) + SECONDS
            ends += [] if operation == "left" else [busy]
        if operation in kernels:
            now += kernels[operation].seconds
            computing += kernels[operation].seconds
        if operation in ("gather", "fused gather", "done"):
            waiting += max(0.0, ends[-1] - now)
            now = max(now, ends.pop())
    return max(now, busy), computing, waiting


CASES = [drawn(random.Random(seed)) for seed in range(20)]
CASES.append([Loop(5, ["kernel", "kernel", "left"]), "gather"])
CASES.append([Loop(None, ["kernel", "gather"]), "kernel"])


@pytest.mark.parametrize("operations", CASES, ids=range(len(CASES)))
def test_a_loop_is_as_if_it_were_unrolled(operations: list[Operation]) -> None:
    flat = unrolled(operations)
    looped, plain = module_of(operations), module_of(flat)
    assert dataclasses.replace(cost_of(looped), unknown_loops=()) == cost_of(plain)
    bounds, expected = (
        dataclasses.asdict(estimate_of([(module, PLACES)], [], CHIP, Network())) for module in (looped, plain)
    )
    assert bounds == pytest.approx(expected)
    seconds, computing, waiting = simulated(flat)
    for module in (looped, plain):
        run = ScheduleWalk(module, CHIP, PLACES).run(lambda use: SECONDS)
        assert run.seconds == pytest.approx(seconds)
        assert sum(k.count * k.kernel.seconds for k in run.kernels.values()) == pytest.approx(computing)
        assert sum(t.exposed for t in run.transfers.values()) == pytest.approx(waiting)
        assert sum(sum(t.reasons.values()) for t in run.transfers.values()) == pytest.approx(waiting)
        assert sum(t.count for t in run.transfers.values()) == sum(o not in ("kernel", "fusion", "done") for o in flat)
