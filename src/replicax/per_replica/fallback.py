"""The fallback for steps that can't be one compiled program because their arguments differ between replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicax.errors import ExecutorWarning, warn
from replicax.execution.cache import ProgramCache
from replicax.execution.tracing.arguments import NotOneProgramError
from replicax.per_replica.executor import check_components, run_per_replica

_warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def fall_back(
    programs: ProgramCache,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    why: NotOneProgramError,
) -> Any:
    """Run a step that can't be one compiled program on the per-replica executor; warn once of each reason."""
    check_components(args, kwargs, programs.replicas)
    said = _warned.setdefault(programs, set())
    if str(why) not in said:
        said.add(str(why))
        warn(
            f"{why} So it does now, and so will others like it: right, but much slower than one compiled program.",
            ExecutorWarning,
        )
    return run_per_replica(programs, fn, args, kwargs)
