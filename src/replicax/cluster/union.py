"""``UnionClusterResolver``: several resolvers as one."""

from __future__ import annotations

from typing import Any

from replicax.cluster.resolver import ClusterResolver, url
from replicax.cluster.spec import ClusterSpec


class UnionClusterResolver(ClusterResolver):
    """Several resolvers as one: it has the tasks of all; everything else comes from the first one that knows it.

    Jobs of the same name are merged. Equal lists are one list. Lists without an address in common are concatenated, so
    tasks of the second get other indices. Where tasks are given by index, each index may have one address.

    Args:
      *cluster_resolvers: the resolvers; at least one.
      task_type: the job of this process; ``None`` means that of the first resolver that knows which task it is.
      task_id: its number in the job; ``None`` means the index that the task of that resolver has in the union.
      rpc_layer: the prefix of the addresses that :meth:`master` returns; ``None`` means that of the first resolver with
        one.

    Raises:
      TypeError: one of them is not a resolver.
      ValueError: there is none.

    >>> import replicax
    >>> workers = replicax.cluster.ClusterSpec({"worker": ["node1:2222", "node2:2222"]})
    >>> chief = replicax.cluster.ClusterSpec({"chief": ["node0:2222"]})
    >>> union = replicax.cluster.UnionClusterResolver(
    ...     replicax.cluster.SimpleClusterResolver(workers, task_type="worker", task_id=1),
    ...     replicax.cluster.SimpleClusterResolver(chief),
    ... )
    >>> union.cluster_spec(), union.task_type, union.task_id
    (ClusterSpec({'worker': ['node1:2222', 'node2:2222'], 'chief': ['node0:2222']}), 'worker', 1)
    """

    def __init__(
        self,
        *cluster_resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        if not cluster_resolvers:
            raise ValueError("UnionClusterResolver: give at least one resolver, got none")
        for resolver in cluster_resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"UnionClusterResolver: expected resolvers, replicax.cluster.ClusterResolver; got {resolver!r}"
                )
        self._resolvers = cluster_resolvers

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of all.

        Raises:
          ValueError: two resolvers have different addresses for one task; the message names both.
        """
        merged: dict[str, Any] = {}
        origin: dict[str, str] = {}
        seen: list[tuple[str, Any]] = []
        for number, resolver in enumerate(self._resolvers):
            name = f"resolver {number} ({type(resolver).__name__})"
            for job, tasks in resolver.cluster_spec().as_dict().items():
                if (job, tasks) in seen:
                    continue
                seen.append((job, tasks))
                merged[job] = _joined_tasks(job, merged[job], tasks, origin[job], name) if job in merged else tasks
                origin.setdefault(job, name)
        return ClusterSpec(merged)

    def _own_task(self) -> tuple[str | None, int | None]:
        """The task of the first that knows type and index: mixed from two resolvers they could name no task at all."""
        resolver = next((r for r in self._resolvers if None not in (r.task_type, r.task_id)), self._resolvers[0])
        job, index, own = resolver.task_type, resolver.task_id, resolver.cluster_spec()
        if self._task_type not in (None, job) or job not in own.jobs or index not in own.task_indices(job):
            return job, index
        return job, self.cluster_spec().job_tasks(job).index(own.task_address(job, index))

    @property
    def rpc_layer(self) -> str | None:
        return self._rpc_layer or next((r.rpc_layer for r in self._resolvers if r.rpc_layer), None)

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str:
        return next((r.environment for r in self._resolvers if r.environment), "")

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task; without type and index the first one that a resolver knows.

        Args:
          task_type: a job.
          task_id: a number in the job.
          rpc_layer: put before the address; ``None`` means the resolver's.

        Raises:
          ValueError: there is no such task, or the resolvers contradict each other.
        """
        if task_type is not None and task_id is not None:
            return url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)
        found = (r.master(rpc_layer=rpc_layer or self._rpc_layer) for r in self._resolvers)
        return next((address for address in found if address), "")

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """The accelerators that the first resolver with any reports."""
        found = (r.num_accelerators(task_type, task_id) for r in self._resolvers)
        return next((counts for counts in found if counts), {})


def _joined_tasks(job: str, ours: Any, theirs: Any, our_name: str, their_name: str) -> list[str] | dict[int, str]:
    """The merged tasks of a job of two resolvers; raises if they contradict each other."""
    if isinstance(ours, list) and isinstance(theirs, list):
        if ours == theirs:
            return ours
        if not set(ours) & set(theirs):
            return ours + theirs
    first = dict(enumerate(ours)) if isinstance(ours, list) else ours
    second = dict(enumerate(theirs)) if isinstance(theirs, list) else theirs
    for index in sorted(first.keys() & second.keys()):
        if first[index] != second[index]:
            raise ValueError(
                f"UnionClusterResolver: the task {job!r} {index} is at {first[index]!r} by {our_name}, which has "
                f"{ours!r}, and at {second[index]!r} by {their_name}, which has {theirs!r}. Give it the same address "
                "in both, or leave it out of one; lists that have no address in common are put one after the other"
            )
    return {**first, **second}
