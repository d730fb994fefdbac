"""The communicator of a worker that trains synchronously with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jax import lax

from replicax import context
from replicax.collectives import ReduceOp
from replicax.devices.mesh import REPLICA_AXIS
from replicax.errors import ContextError
from replicax.execution.tracing.communicator import SpmdCommunicator


class GroupCommunicator(SpmdCommunicator):
    """Collectives among the replicas of one worker, for a step in which other workers take part.

    The workers combine values only on the servers, after the step. So a collective inside a step is impossible, and
    would be wrong among the replicas of one worker alone: it raises. The two collectives that the servers complete, the
    sum of gradients and assigned values, set ``is_part``. ``group`` returns the number of this worker, traced.
    """

    def __init__(
        self,
        examples: Any,
        options: context.Options,
        groups: int,
        group: Callable[[], Any],
        is_part: Callable[[], bool],
    ) -> None:
        super().__init__(examples, options)
        self._groups = groups
        self._group = group
        self._is_part = is_part

    def _check_part(self, what: str) -> None:
        if not self._is_part():
            _refuse(what)

    def replica_id(self) -> Any:
        return lax.axis_index(REPLICA_AXIS) + self._group() * lax.axis_size(REPLICA_AXIS)

    def add_up(self, count: int) -> int:
        return super().add_up(count) * self._groups

    def all_reduce(self, op: ReduceOp, arrays: Sequence[Any], options: context.Options = None) -> list[Any]:
        self._check_part("all_reduce")
        return super().all_reduce(op, arrays, options)

    def sum_of_own(self, arrays: Sequence[Any], options: context.Options = None) -> list[Any]:
        return self.all_reduce(ReduceOp.SUM, arrays, options)

    def all_gather(self, array: Any, axis: int, options: context.Options = None) -> Any:
        self._check_part("all_gather")
        return super().all_gather(array, axis, options)

    def from_first(self, array: Any) -> Any:
        self._check_part("a value of the first replica")
        return super().from_first(array)

    def components(self, value: Any) -> Sequence[Any]:
        _refuse("the replicas' components")

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        _refuse("merge_call")


def _refuse(what: str) -> NoReturn:
    raise ContextError(
        f"{what} was asked for in a step of ParameterServerStrategy(mode='sync'), whose replicas are on several "
        "workers, which meet only on the servers, after the step. Optimizer.apply_gradients and variables with an "
        "aggregation combine there. Return other values from the scheduled function and combine them after fetch(); or "
        "use MultiWorkerMirroredStrategy, whose replicas meet inside steps."
    )
