"""What parameter servers cost, on one machine: bytes a second, calls, a slow worker.

    python benchmarks/parameter_server.py            # about two minutes, on two cores
    python benchmarks/parameter_server.py --quick

- **Bandwidth.** A function that reads and changes a variable of 4, 16 and 64 MB: what a pull and a push take, beside
  ``ray.put`` of an array of this size, in turn in the same process. The bar is 0.7 of its bandwidth.
- **Calls.** How often a server is called for a step: at most once to pull and once to push, whatever the number of
  variables.
- **A slow worker.** Four workers whose functions sleep for 20 ms; then one of them for 100 ms. The other three are to
  keep 0.95 of their rate.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from typing import Any

import numpy as np

import replicax

RESULTS = pathlib.Path(__file__).parent / "results" / "parameter_server.json"


def bandwidth(megabytes: int, rounds: int) -> dict[str, float]:
    """Bytes a second of pulls, of pushes and of ``ray.put``, measured in turn on a worker."""
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=1)
    count = megabytes * 2**20 // 4
    with strategy.scope():
        served = replicax.Variable(np.zeros(count, np.float32), name="v")

    def measure(rounds: int) -> dict[str, list[float]]:
        import ray

        v: Any = served
        times: dict[str, list[float]] = {"put": [], "pull": [], "push": []}
        own, ones = np.ones(count, np.float32), np.ones(count, np.float32)
        for _ in range(rounds):
            began = time.perf_counter()
            reference = ray.put(own)
            times["put"].append(time.perf_counter() - began)
            del reference
            began = time.perf_counter()
            v.elsewhere.send_change(assigned={v.number_on_servers: ones})  # what follows a step
            times["push"].append(time.perf_counter() - began)
            began = time.perf_counter()
            v.read_value().block_until_ready()
            times["pull"].append(time.perf_counter() - began)
        return times

    with replicax.ClusterCoordinator(strategy) as coordinator:
        coordinator.schedule(measure, args=(3,)).fetch()
        times = coordinator.schedule(measure, args=(rounds,)).fetch()
    rates = {name: megabytes / 1024 / statistics.median(some) for name, some in times.items()}
    for name in ("pull", "push"):
        pairs = zip(times["put"], times[name], strict=True)
        rates[f"{name} / put"] = statistics.median(put / own for put, own in pairs)
    return rates


def calls(variables: int) -> dict[str, float]:
    """Calls of each server for a step, counted on the server's side."""
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2)
    with strategy.scope():
        vs = [replicax.Variable(np.zeros(8, np.float32)) for _ in range(variables)]

    def step() -> None:
        for v in vs:
            v.assign_add(v * 0 + 1)

    def run() -> tuple[int, int]:
        from replicax.parameter_server.serving import servers

        counted: dict[str, int] = {"pull": 0, "push": 0}
        usual = servers.Servers._all

        def counting(self: Any, method: str, sent: Any) -> Any:
            counted[method] = counted.get(method, 0) + len(sent)
            return usual(self, method, sent)

        servers.Servers._all = counting  # type: ignore[method-assign]
        try:
            strategy.run(step)
        finally:
            servers.Servers._all = usual  # type: ignore[method-assign]
        return counted["pull"], counted["push"]

    with replicax.ClusterCoordinator(strategy) as coordinator:
        pulls, pushes = coordinator.schedule(run).fetch()
    return {"variables": variables, "pulls a server": pulls / 2, "pushes a server": pushes / 2}


def slow_worker(functions: int) -> dict[str, float]:
    """The rate of three workers of four, with and without the fourth being slow."""
    strategy = replicax.ParameterServerStrategy(num_workers=4, num_servers=1)
    with strategy.scope():
        v = replicax.Variable(np.zeros(256, np.float32), name="v")

    def step() -> None:
        v.assign_add(v * 0 + 1)

    def work(slow: int | None) -> float:
        worker: int = replicax.get_strategy().worker_index  # type: ignore[attr-defined]
        time.sleep(0.1 if worker == slow else 0.02)
        strategy.run(step)
        return worker

    with replicax.ClusterCoordinator(strategy) as coordinator:
        rates: dict[int | None, list[float]] = {None: [], 3: []}
        for warm in range(3):
            for slow in (None, 3):
                for _ in range(functions):
                    coordinator.schedule(work, args=(slow,))
                report = coordinator.join()
                if warm:
                    others = sum(count for worker, count in report.by_worker.items() if worker != 3)
                    rates[slow].append(others / report.seconds)
    return {
        "rate of the others, all alike": statistics.median(rates[None]),
        "rate of the others, one slow": statistics.median(rates[3]),
        "kept": statistics.median(b / a for a, b in zip(rates[None], rates[3], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and noisier")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="where to write the numbers")
    args = parser.parse_args()
    found: dict[str, Any] = {"bandwidth, GB/s": {}}
    for megabytes in (4, 16, 64):
        found["bandwidth, GB/s"][megabytes] = rates = bandwidth(megabytes, 5 if args.quick else 15)
        print(f"{megabytes} MB: " + ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items()))
    found["calls"] = calls(20)
    print(found["calls"])
    found["slow worker"] = slow_worker(100 if args.quick else 300)
    print({name: round(value, 2) for name, value in found["slow worker"].items()})
    args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
