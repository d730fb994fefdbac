"""``ClusterResolver``: the interface that describes a process' cluster, and its task there."""

from __future__ import annotations

import abc
import collections

import jax

from replicax import _jax
from replicax.cluster.spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Describes the cluster of this process, and which of its tasks the process is.

    A *cluster* has *jobs*, such as ``"chief"`` and ``"worker"``, and a job has *tasks*: processes, numbered from 0,
    each with an address. :class:`MultiWorkerMirroredStrategy` and :func:`initialize_workers` take a resolver; see
    ``docs/cluster.md`` for how they use it.

    To write one: give it ``cluster_spec``, and set ``task_type`` and ``task_id``, or make properties of them.

    Args:
      task_type: the job of this process.
      task_id: its number in the job.
      rpc_layer: the prefix of the addresses that :meth:`master` returns, as in ``"grpc://node0:2222"``.

    >>> import replicax
    >>> class TwoNodes(replicax.cluster.ClusterResolver):
    ...     def cluster_spec(self):
    ...         return replicax.cluster.ClusterSpec({"worker": ["node0:2222", "node1:2222"]})
    >>> resolver = TwoNodes(task_type="worker", task_id=1)
    >>> resolver.master(), resolver.master("worker", 0, rpc_layer="grpc")
    ('node1:2222', 'grpc://node0:2222')
    """

    _environment = ""

    def __init__(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The present tasks of the cluster and their addresses; an empty one if there is nothing to connect to.

        Raises:
          RuntimeError: the cluster can't be determined.
        """

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as ``"chief"`` or ``"worker"``; ``None`` if unknown. May be set."""
        return self._own_task()[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job, from 0; ``None`` if unknown. May be set."""
        return self._own_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _own_task(self) -> tuple[str | None, int | None]:
        """The job and the number of this process where they have not been set; ``None`` for what is unknown."""
        return None, None

    @property
    def rpc_layer(self) -> str | None:
        """The prefix of the addresses that :meth:`master` returns; ``None`` for none. May be set."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str:
        """The kind of place where the cluster is, in a word; may be ``""``."""
        return self._environment

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task; ``""`` if the task is unknown, or there is nothing to connect to.

        Args:
          task_type: a job; ``None`` means this process's.
          task_id: a number in the job; ``None`` means this process's.
          rpc_layer: put before the address; ``None`` means the resolver's.

        Raises:
          ValueError: there is no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        cluster = self.cluster_spec()
        if task_type is None or task_id is None or not cluster:
            return ""
        return url(cluster.task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the number of accelerators of a task, by kind: ``{"GPU": 8}``; ``{}`` if it has CPUs only.

        JAX counts its devices, and creates them if it has not yet; connect the workers first, so that it sees all of
        theirs.

        Args:
          task_type: a job; ``None`` means this process's.
          task_id: a number in the job; ``None`` means this process's.

        Raises:
          ValueError: another task is requested, and JAX sees only this process' devices.
        """
        here = (self.task_type, self.task_id)
        asked = (task_type or here[0], here[1] if task_id is None else task_id)
        process = jax.process_index()
        if asked != here:
            from replicax.cluster.worker_group import index_of

            process = index_of(self.cluster_spec(), *asked, what=f"{type(self).__name__}.num_accelerators")
            if _jax.coordination_client() is None:
                raise ValueError(
                    f"num_accelerators: this is {here[0]!r} {here[1]}, which sees its own devices only, and "
                    f"{asked[0]!r} {asked[1]} was asked for. Call replicax.initialize_workers() first"
                )
        counts = collections.Counter(d.platform.upper() for d in jax.devices() if d.process_index == process)
        return {kind: count for kind, count in counts.items() if kind != "CPU"}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cluster_spec()!r}, task_type={self.task_type!r}, task_id={self.task_id!r})"


def url(address: str, rpc_layer: str | None) -> str:
    """An address with its prefix, if any; an empty one stays empty."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
