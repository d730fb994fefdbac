"""One side of the oracle, in a process of its own: runs programs, and prints what each did as a line of JSON.

``python -m tests.oracle.side SIDE`` reads the names of programs from standard input. The parent process never loads
TensorFlow or JAX, and this one loads only the one that it is for.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Program
from tests.oracle.programs import PROGRAMS

SIDES = ("tensorflow", "replicax", "exact")


def main() -> None:
    """Run the programs that standard input names."""
    side = sys.argv[1]
    results = _take_standard_output()
    wanted = sys.stdin.read().splitlines()
    by_name = {program.name: program for program in PROGRAMS}
    library = _load(side)
    if any(by_name[name].servers for name in wanted):  # their start is no program's time
        _start_servers(library(by_name[wanted[0]].replicas))
    print(json.dumps({"ready": side}), file=results, flush=True)
    for name in wanted:
        print(json.dumps({"program": name, "outcome": outcome(by_name[name], library, side)}), file=results, flush=True)
    library.close()
    # Some programs leave threads of a library in a state in which they don't end.
    os._exit(0)


def _take_standard_output() -> Any:
    """Standard output for results alone: what libraries print goes to standard error."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def _load(side: str) -> type[Library]:
    if side == "tensorflow":
        from tests.oracle.on_tensorflow import TensorFlow

        return TensorFlow
    from tests.oracle.on_replicax import Replicax

    return Replicax


def _start_servers(d: Library) -> None:
    """Start the processes of the coordinator that most programs share: a worker that has run something has started."""
    d.coordinator().schedule(d.on_workers.function(lambda: None)).fetch()


def outcome(program: Program, library: type[Library], side: str) -> dict[str, Any]:
    """What a program did: ``{"value": …}`` or ``{"error": kind, "message": …}``."""
    d = library(program.replicas)
    with contextlib.ExitStack() as stack:
        if side == "exact":
            import replicax

            stack.enter_context(replicax.debug())
        try:
            return {"value": d.to_plain(program.body(d))}
        except Exception as error:
            return {"error": d.kind_of(error), "message": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
