"""``SimpleClusterResolver``: a cluster that the program itself describes."""

from __future__ import annotations

from collections.abc import Mapping

from replicax.cluster.resolver import ClusterResolver, url
from replicax.cluster.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program itself describes.

    Args:
      cluster_spec: the :class:`ClusterSpec`.
      master: returned by :meth:`master` when no task is named.
      task_type: the job of this process.
      task_id: its number in the job.
      environment: the kind of place where the cluster is, in a word.
      num_accelerators: how many accelerators each task drives, by kind: ``{"GPU": 8}``.
      rpc_layer: the prefix of the addresses that :meth:`master` returns.

    Raises:
      TypeError: ``cluster_spec`` is not a ``ClusterSpec``, or ``master`` not a string.

    >>> import replicax
    >>> cluster = replicax.cluster.ClusterSpec({"worker": ["node0:2222", "node1:2222"]})
    >>> resolver = replicax.cluster.SimpleClusterResolver(
    ...     cluster, task_type="worker", task_id=0, num_accelerators={"GPU": 8}
    ... )
    >>> resolver.master("worker", 1), resolver.num_accelerators()
    ('node1:2222', {'GPU': 8})
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"SimpleClusterResolver: cluster_spec must be a replicax.cluster.ClusterSpec, got {cluster_spec!r}; "
                "make one: replicax.cluster.ClusterSpec({'worker': ['node0:2222', 'node1:2222']})"
            )
        if not isinstance(master, str):
            raise TypeError(f"SimpleClusterResolver: master must be an address as a string, got {master!r}")
        if num_accelerators is not None and not isinstance(num_accelerators, Mapping):
            raise TypeError(
                "SimpleClusterResolver: num_accelerators must be a dict of the numbers of each type, such as "
                f"{{'GPU': 8}}, got {num_accelerators!r}"
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task if both arguments that name it are given; otherwise the constructor's ``master``.

        Args:
          task_type: a job.
          task_id: a number in the job.
          rpc_layer: put before the address; ``None`` means the resolver's.

        Raises:
          ValueError: there is no such task.
        """
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return url(self._master, rpc_layer or self.rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """The constructor's ``num_accelerators``, for every task."""
        return dict(self._num_accelerators)
