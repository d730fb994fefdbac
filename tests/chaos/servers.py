"""Chaos for parameter servers: workers and servers on Ray are killed, at chosen moments, while functions count.

``python -m tests.chaos.servers --seed 1`` has functions scheduled all the time, each of which adds one to every
variable. It kills processes meanwhile; Ray's titles of processes say what each is doing. In the end every function has
to have counted once, though its process, or that of a server, has died in the middle; and no process may be left.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray  # noqa: F401 - it brings psutil, and makes it importable
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import psutil

INSIDE, BETWEEN, TWO, RECOVERY = "in a function", "between functions", "two at once", "in recovery"
SERVER, BOTH, AGAIN = "server", "two servers at once", "two servers, the second in recovery"
_WORKERS = {INSIDE: 0.4, BETWEEN: 0.2, TWO: 0.2, RECOVERY: 0.2}
_SERVERS = {SERVER: 0.5, BOTH: 0.2, AGAIN: 0.3}
_ALONE = {*_WORKERS, *_SERVERS} - {TWO, RECOVERY, BOTH, AGAIN}
_PATIENCE = 30.0
"""Seconds to wait for a process that does what a strike wants; then the strike takes what there is."""
_WAIT = 600.0
_ELEMENTS = 1 << 17
"""So many that the parts are in memory that workers and servers share."""
_LEAVING = 10.0
"""Seconds that processes have to end after the coordinator has been closed."""


@dataclasses.dataclass(frozen=True)
class Strike:
    """One or two processes that are to be killed."""

    kind: str
    pause: float

    @property
    def count(self) -> int:
        """How many processes."""
        return 1 if self.kind in _ALONE else 2


def strikes_of(seed: int, workers: int, servers: int) -> list[Strike]:
    """Strikes that kill so many processes of workers and of servers, in the order of a seed."""
    rng = random.Random(seed)
    found: list[Strike] = []
    for left, shares, single in ((workers, _WORKERS, INSIDE), (servers, _SERVERS, SERVER)):
        while left > 0:
            kind = rng.choices(list(shares), list(shares.values()))[0]
            found.append(Strike(kind if left > 1 else single, rng.uniform(0.2, 1.0)))
            left -= found[-1].count
    rng.shuffle(found)
    return found


def processes(kind: str) -> dict[int, str]:
    """The processes of actors of a class that this program has started, each with the method that it runs."""
    parents, titles = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            titles[int(path.name)] = (path / "cmdline").read_bytes().rstrip(b"\0 ").decode(errors="replace")
        except (OSError, IndexError):
            continue  # it has just ended
    found = {}
    for pid, title in titles.items():
        if title.startswith(f"ray::{kind}") and _descends(pid, parents):
            found[pid] = title.removeprefix(f"ray::{kind}").lstrip(".")
    return found


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid := parents.get(pid, 0):
        if pid == os.getpid():
            return True
    return False


def strike(one: Strike, rng: random.Random, go_on: Callable[[], None]) -> list[str]:
    """Kill; returns what the processes were doing. ``go_on`` is called while the right moment is waited for."""
    of = "ShardServer" if one.kind in _SERVERS else "StepWorker"
    if one.kind in (SERVER, BOTH):
        return _kill(_wanted(of, one.count, lambda doing: True, go_on), one.count, rng)
    if one.kind in (RECOVERY, AGAIN):
        killed = _kill(_wanted(of, 1, lambda doing: True, go_on), 1, rng)
        until = time.monotonic() + rng.uniform(0.0, 3.0)
        while time.monotonic() < until:
            go_on()
        # Now another process is starting; or it has just been sent the function again, or what it is to know.
        return killed + _kill(_wanted(of, 1, lambda doing: True, go_on), 1, rng)
    doing = "" if one.kind == BETWEEN else "work"
    return _kill(_wanted("StepWorker", one.count, lambda found: found == doing, go_on), one.count, rng)


def _wanted(kind: str, count: int, is_wanted: Callable[[str], bool], go_on: Callable[[], None]) -> dict[int, str]:
    deadline = time.monotonic() + _PATIENCE
    while True:
        found = processes(kind)
        wanted = {pid: doing for pid, doing in found.items() if is_wanted(doing)}
        if len(wanted) >= count or time.monotonic() > deadline:
            return wanted if len(wanted) >= count else found
        go_on()


def _kill(found: dict[int, str], count: int, rng: random.Random) -> list[str]:
    killed = []
    for pid in rng.sample(sorted(found), min(count, len(found))):
        try:
            os.kill(pid, signal.SIGKILL)
            killed.append(found[pid] or "idle")
        except ProcessLookupError:
            pass
    return killed


def descendants() -> set[psutil.Process]:
    """The processes that this one has started, and theirs."""
    import psutil

    return set(psutil.Process().children(recursive=True))


def left_of(noted: set[psutil.Process]) -> int:
    """How many of these processes are still there when they have had time to end."""
    import psutil

    return len(psutil.wait_procs(noted, timeout=_LEAVING)[1])


def counting(strategy: Any, elements: int) -> tuple[Any, Any, Callable[[], None]]:
    """What has to come out: a number and an array on servers, and a function that adds one to each element of both."""
    import numpy as np

    import replicax

    with strategy.scope():
        iterations = replicax.Variable(0, name="iterations")
        counts = replicax.Variable(np.zeros(elements, np.int32), name="counts", aggregation="sum")

    def step() -> None:
        iterations.assign_add(1)
        counts.assign_add(np.ones(elements, np.int32))

    return iterations, counts, lambda: strategy.run(step)


def run(seed: int, workers: int, servers: int, mode: Any, console: Console) -> bool:
    """Strike a run; returns whether all was well."""
    import replicax

    began = time.monotonic()
    strategy = replicax.ParameterServerStrategy(
        num_workers=3, num_servers=2, mode=mode, variable_partitioner=replicax.variables.FixedShardsPartitioner(2)
    )
    iterations, counts, add = counting(strategy, _ELEMENTS)

    def count(number: int) -> int:
        time.sleep(0.01)
        add()
        time.sleep(0.01)
        return number

    rng = random.Random(seed)
    killed: dict[str, list[str]] = collections.defaultdict(list)
    results: list[replicax.parameter_server.RemoteValue] = []
    noted: set[psutil.Process] = set()
    before = descendants()
    with replicax.ClusterCoordinator(strategy) as coordinator:

        def go_on() -> None:
            if sum(not value.is_finished for value in results[-30:]) < 20:
                results.append(coordinator.schedule(count, args=(len(results),)))
            else:
                time.sleep(0.005)

        def ended() -> int:
            return sum(value.is_finished for value in results)

        def schedule_until_one_ends() -> None:
            # Or the same function would be struck again and again, as if it were the reason.
            before, deadline = ended(), time.monotonic() + _WAIT
            while ended() == before and time.monotonic() < deadline:
                go_on()

        def schedule_until(ends: float) -> None:
            while time.monotonic() < ends or len(results) % strategy.groups:
                go_on()

        schedule_until(time.monotonic() + 1.0)
        results[0].fetch(_WAIT)
        for number, one in enumerate(planned := strikes_of(seed, workers, servers)):
            schedule_until(time.monotonic() + one.pause)
            schedule_until_one_ends()
            struck = strike(one, rng, go_on)
            killed[one.kind] += struck
            noted |= descendants() - before
            single = SERVER if one.kind in _SERVERS else INSIDE
            planned += [Strike(single, 1.0)] * (one.count - len(struck))  # for those that had ended, or had to start
            if number % 10 == 9:
                console.print(f"{time.monotonic() - began:6.1f} s  {number + 1} of {len(planned)} strikes")
        schedule_until(time.monotonic() + 1.0)
        report = coordinator.join(timeout_seconds=_WAIT)
        wrong = [i for i, found in enumerate(coordinator.fetch(results)) if found != i]
        scheduled = len(results)
        steps = scheduled // strategy.groups
        found = int(iterations), sorted(set(counts.numpy().tolist()))
    left = left_of(noted)
    table = Table("killed", "processes", "what they were doing")
    for kind in (*_WORKERS, *_SERVERS):
        doing = collections.Counter(killed[kind])
        table.add_row(kind, str(len(killed[kind])), ", ".join(f"{what} {n}" for what, n in doing.most_common()))
    console.print(table)
    is_well = found == (steps, [scheduled]) and not wrong and not left
    console.print(
        f"{'well' if is_well else 'WRONG'}: mode {mode}, {scheduled} functions in {steps} steps; iterations == "
        f"{found[0]}, each element == {found[1]}; {report.workers_lost} workers lost, {report.functions} runs of "
        f"functions; of {len(noted)} processes {left} left; {time.monotonic() - began:.0f} s",
        markup=False,
    )
    return is_well


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.servers", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="another number, other moments")
    parser.add_argument("--workers", type=int, default=50, help="how many processes of workers to kill")
    parser.add_argument("--servers", type=int, default=10, help="how many processes of servers to kill")
    parser.add_argument("--mode", choices=("async", "sync"), default="async")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    return 0 if run(arguments.seed, arguments.workers, arguments.servers, arguments.mode, console) else 1


if __name__ == "__main__":
    sys.exit(main())
