"""What parameter servers cost, on one machine: bytes a second, calls, a step, a slow worker.

    python benchmarks/parameter_server.py            # about two minutes, on two cores
    python benchmarks/parameter_server.py --quick    # under a minute
    python benchmarks/parameter_server.py --only bandwidth step

- **Bandwidth.** What a worker needs to push a new value of a variable of 4, 16 and 64 MB until the server has it, and
  to pull it until the program can read it, beside ``ray.put`` of an array of this size: in turn in the same process,
  after 20 rounds that do not count. *Add* is a push that is added to the variable, and *update* a gradient, until the
  optimizer (SGD) has made the new value: so the server reads and writes the value besides. After each of the three
  comes a pull of the new value. The bar is half the bandwidth of ``ray.put`` from 16 MB on, for a push of a value and
  for each of these pulls: both copy an array once, and the call there and back counts as time.
- **Calls.** How often each server is called in a step: once to pull and once to push at most, whatever
  the number of variables.
- **A step** that computes for 50 ms, reads a variable of 4 MB and changes it: from one step to the next one, beside the
  same program without servers, in turn. It has no bar: what travels comes on top.
- **A slow worker.** Four workers whose functions sleep for 20 ms; then one of them for 100 ms. The other three are to
  keep 0.95 of their rate. A rate is what workers have done by the moment when nothing is waiting any more, so that it
  does not count how long the slow one needs to end its last function.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax

RESULTS = pathlib.Path(__file__).parent / "results" / "parameter_server.json"
LEAST_BANDWIDTH, MOST_CALLS, LEAST_RATE = 0.5, 1.0, 0.95
SECONDS = 0.05
WARM_UP = 20
BARS = ("push", "pull", "pull after an add", "pull after an update")


def bandwidth(sizes: Sequence[int], rounds: int) -> dict[int, dict[str, Any]]:
    """Seconds of pulls, of pushes and of ``ray.put``, measured in turn on a worker that has done so for a while."""
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=1)
    with strategy.scope():
        served = {
            megabytes: replicax.Variable(np.zeros(megabytes * 2**20 // 4, np.float32), name=f"{megabytes} MB")
            for megabytes in sizes
        }
        optimizers = {megabytes: replicax.Optimizer(optax.sgd(0.1)) for megabytes in sizes}

    def build(megabytes: int) -> None:
        v = served[megabytes]
        strategy.run(lambda: optimizers[megabytes].apply_gradients([(jnp.ones(v.shape), v)]))

    def measure(megabytes: int, rounds: int) -> dict[str, list[float]]:
        import itertools

        import ray

        from replicax.parameter_server.server.messages import Ended

        v: Any = served[megabytes]
        optimizer: Any = optimizers[megabytes]
        own, ones = np.ones(v.shape, np.float32), np.ones(v.shape, np.float32)
        server_variables, numbers = (
            v.server_variables,
            itertools.count(megabytes * 10**9),
        )  # what has come before changes nothing

        def push(kind: str) -> None:
            """What follows a step: a change is on its way."""
            server_variables.begin(next(numbers), Ended())
            kinds = {"update": optimizer._number, "add": "added", "push": "assigned"}
            server_variables.change({(kinds[kind], v.number_on_servers): ones})
            server_variables.settle()

        def update() -> None:
            """Until the server has computed it: it reads a row then."""
            push("update")
            server_variables.rows(v.number_on_servers, np.zeros(1, np.int64))

        def pull() -> None:
            v.read_value().block_until_ready()

        cases = {
            "put": lambda: ray.put(own),
            "push": lambda: push("push"),
            "pull": pull,
            "add": lambda: push("add"),
            "pull after an add": pull,
            "update": update,
            "pull after an update": pull,
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, case in cases.items():
                began = time.perf_counter()
                result = case()
                times[name].append(time.perf_counter() - began)
                del result
        return {name: some[WARM_UP:] for name, some in times.items()}

    found: dict[int, dict[str, Any]] = {}
    with replicax.ClusterCoordinator(strategy) as coordinator:
        for megabytes in sizes:
            coordinator.schedule(build, args=(megabytes,)).fetch()
            times = coordinator.schedule(measure, args=(megabytes, WARM_UP + rounds)).fetch()
            rates = found[megabytes] = {f"{name}, ms": 1e3 * statistics.median(some) for name, some in times.items()}
            for name, some in list(times.items())[1:]:
                pairs = zip(times["put"], some, strict=True)
                rates[f"{name} / put"] = statistics.median(put / mine for put, mine in pairs)
            print(f"{megabytes} MB: " + ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items()), flush=True)
    return found


def calls(variables: int, steps: int) -> dict[str, float]:
    """Calls of each server for a step, counted where they leave the worker."""
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2)
    with strategy.scope():
        vs = [replicax.Variable(np.zeros(8, np.float32)) for _ in range(variables)]

    def step() -> None:
        for v in vs:
            v.assign_add(v * 0 + 1)

    def run() -> None:
        strategy.run(step)

    def count() -> None:
        """From now on note all calls that leave the worker."""
        servers: Any = vs[0].server_variables.servers  # type: ignore[attr-defined]
        usual, servers.noted = servers._all, []

        def noted(method: str, calls: Any) -> Any:
            servers.noted += [(method, server) for server in calls]
            return usual(method, calls)

        def noted_push(pushes: Any) -> Any:
            servers.noted += [("push", server) for server in pushes]
            return usual_push(pushes)

        usual_push = servers.push
        servers._all, servers.push = noted, noted_push

    def counted() -> list[tuple[str, int]]:
        return vs[0].server_variables.servers.noted  # type: ignore[attr-defined,no-any-return]

    with replicax.ClusterCoordinator(strategy) as coordinator:
        for fn in (run, count):
            coordinator.schedule(fn).fetch()
        for _ in range(steps):
            coordinator.schedule(run)
        coordinator.join()
        noted = coordinator.schedule(counted).fetch()
    most = {kind: max(noted.count((kind, server)) for server in range(2)) for kind in ("pull", "push")}
    return {
        "variables": variables,
        **{f"calls to {kind}, for a server and step": n / steps for kind, n in most.items()},
    }


def step_time(functions: int, rounds: int) -> dict[str, float]:
    """The time from one step to the next, beside that of its computation alone."""
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=1)
    count = 4 * 2**20 // 4
    with strategy.scope():
        v = replicax.Variable(np.zeros(count, np.float32), name="v")
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def gradient(value: Any, turns: Any) -> Any:
        """Small products, one after the other, on one core; then a gradient of the variable's size."""
        x = jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), jnp.full((96, 96), 0.01))
        return value * 0.01 + x[0, 0]

    def step(turns: Any) -> None:
        optimizer.apply_gradients([(gradient(v.read_value(), turns), v)])

    def train(turns: int) -> None:
        strategy.run(step, args=(np.int32(turns),))

    def alone(turns: int, times: int) -> float:
        value = jnp.zeros(count)
        program = jax.jit(gradient)
        program(value, np.int32(turns)).block_until_ready()
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            program(value, np.int32(turns)).block_until_ready()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    with replicax.ClusterCoordinator(strategy) as coordinator:
        turns = 200
        for _ in range(3):
            turns = max(1, round(turns * SECONDS / coordinator.schedule(alone, args=(turns, 5)).fetch()))
        for _ in range(3):
            coordinator.schedule(train, args=(turns,)).fetch()
        coordinator.join()
        own, all_in_all = [], []
        for _ in range(rounds):
            own.append(coordinator.schedule(alone, args=(turns, functions)).fetch())
            coordinator.join()
            for _ in range(functions):
                coordinator.schedule(train, args=(turns,))
            all_in_all.append(coordinator.join().seconds / functions)
    return {
        "computation, ms": 1e3 * statistics.median(own),
        "from step to step, ms": 1e3 * statistics.median(all_in_all),
        "ratio": statistics.median(b / a for a, b in zip(own, all_in_all, strict=True)),
    }


def slow_worker(functions: int, rounds: int) -> dict[str, float]:
    """The rate of three workers of four, with and without the fourth being slow."""
    strategy = replicax.ParameterServerStrategy(num_workers=4, num_servers=1)
    with strategy.scope():
        v = replicax.Variable(np.zeros(256, np.float32), name="v")

    def step() -> None:
        v.assign_add(v * 0 + 1)

    def work(slow: int | None) -> tuple[int, float]:
        worker: int = replicax.get_strategy().worker_index  # type: ignore[attr-defined]
        time.sleep(0.1 if worker == slow else 0.02)
        strategy.run(step)
        return worker, time.time()

    def rate(coordinator: Any, slow: int | None) -> float:
        """Functions a second of the three, between their first and their last one."""
        results = [coordinator.schedule(work, args=(slow,)) for _ in range(functions)]
        ended = sorted(when for worker, when in coordinator.fetch(results) if worker != 3)
        coordinator.join()
        return (len(ended) - 1) / (ended[-1] - ended[0])

    with replicax.ClusterCoordinator(strategy) as coordinator:
        rate(coordinator, None)
        pairs = [(rate(coordinator, None), rate(coordinator, 3)) for _ in range(rounds)]
    return {
        "rate of the others, all alike": statistics.median(alike for alike, _ in pairs),
        "rate of the others, one slow": statistics.median(slow for _, slow in pairs),
        "kept": statistics.median(slow / alike for alike, slow in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and noisier")
    parser.add_argument("--only", nargs="+", choices=["bandwidth", "calls", "step", "slow"], default=None)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where to write the numbers")
    args = parser.parse_args()
    wanted = args.only or ["bandwidth", "calls", "step", "slow"]
    found: dict[str, Any] = {}
    rows: list[tuple[str, float, str, bool]] = []
    if "bandwidth" in wanted:
        found["bandwidth"] = bandwidth((4, 16, 64), 10 if args.quick else 30)
        for megabytes, rates in found["bandwidth"].items():
            for kind in BARS if megabytes >= 16 else ():
                ratio = rates[f"{kind} / put"]
                name = f"{kind} of {megabytes} MB / ray.put"
                rows.append((name, ratio, f"≥ {LEAST_BANDWIDTH:.2f}", ratio >= LEAST_BANDWIDTH))
    if "calls" in wanted:
        found["calls"] = calls(20, 10)
        for kind in ("pull", "push"):
            each = found["calls"][f"calls to {kind}, for a server and step"]
            rows.append((f"calls to {kind} 20 variables, for a server and step", each, "≤ 1", each <= MOST_CALLS))
    if "step" in wanted:
        found["step"] = step_time(20, 3 if args.quick else 7)
        print({name: round(value, 2) for name, value in found["step"].items()})
    if "slow" in wanted:
        found["slow worker"] = slow_worker(200, 2 if args.quick else 5)
        print({name: round(value, 2) for name, value in found["slow worker"].items()})
        kept = found["slow worker"]["kept"]
        rows.append(("rate of three workers beside a slow one / alike", kept, "≥ 0.95", kept >= LEAST_RATE))
    print()
    for name, value, bar, passes in rows:
        print(f"| {name} | {value:.2f} | {bar} | {'pass' if passes else 'MISSED'} |")
    if args.only is None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(passes for *_, passes in rows))


if __name__ == "__main__":
    sys.exit(main())
