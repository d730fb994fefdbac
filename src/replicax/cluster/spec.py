"""``ClusterSpec``: the tasks of a cluster, by job, with their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax.argument_checks import as_integer
from replicax.system.addresses import split_address


class ClusterSpec:
    """The tasks of a cluster: for each job the addresses of its tasks, by their index.

    Two are equal if they have the same tasks at the same addresses; a plain dict compares as the cluster that it
    describes. A cluster without jobs is false.

    Args:
      cluster: another ``ClusterSpec``; or by the name of a job its addresses, as a list, or by index where not all of
        them are known. Indices may be strings of digits, as in JSON.

    Raises:
      TypeError: a job or an address is not a string, or a job's tasks are neither a list nor a dict.
      ValueError: an address or an index is invalid; two tasks have the same address.

    >>> import replicax
    >>> cluster = replicax.cluster.ClusterSpec({"chief": ["node0:2222"], "worker": ["node1:2222", "node2:2222"]})
    >>> cluster.jobs, cluster.num_tasks("worker"), cluster.task_address("worker", 1)
    (['chief', 'worker'], 2, 'node2:2222')
    >>> replicax.cluster.ClusterSpec({"worker": {3: "node3:2222"}})
    ClusterSpec({'worker': {3: 'node3:2222'}})
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Any]) -> None:
        self._jobs: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"ClusterSpec: expected a dict from jobs to lists of addresses, {{'worker': ['node0:2222']}}; got "
                f"{cluster!r}"
            )
        self._jobs = {job: _tasks(job, tasks) for job, tasks in cluster.items()}
        owners: dict[str, str] = {}
        for job, tasks in self._jobs.items():
            for index, address in tasks.items():
                other = owners.setdefault(address, f"{job!r} {index}")
                if other != f"{job!r} {index}":
                    raise ValueError(
                        f"ClusterSpec: the tasks {other} and {job!r} {index} have the same address, {address!r}; each "
                        "listens at one of its own. On one machine, give them different ports"
                    )

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of known tasks of a job.

        Raises:
          ValueError: there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of the tasks of a job that are known, in order.

        Raises:
          ValueError: there is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of a task.

        Raises:
          ValueError: there is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"there is no task {task_index!r} in the job {job_name!r}: it has {_in_words(sorted(tasks))}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job's tasks, by index; ``None`` for those that are not known.

        Raises:
          ValueError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """The cluster as plain data: a list of addresses for each job, or a dict by index where not all are known."""
        return {
            job: [tasks[i] for i in range(len(tasks))] if sorted(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(f"there is no job {name!r} in the cluster: it has {_in_words(self.jobs)}")
        return self._jobs[name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: Any) -> bool:
        try:
            return self._jobs == ClusterSpec(other)._jobs
        except (TypeError, ValueError):
            return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _tasks(job: Any, tasks: Any) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(f"ClusterSpec: the name of a job is a string, such as 'worker'; got {job!r}")
    if isinstance(tasks, (list, tuple)):
        numbered = dict(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        numbered = {_index(job, index): address for index, address in tasks.items()}
    else:
        raise TypeError(
            f"ClusterSpec: the tasks of the job {job!r} must be a list of addresses, or a dict from indices to "
            f"addresses; got {tasks!r}"
        )
    for index, address in numbered.items():
        split_address(address, f"ClusterSpec: the task {job!r} {index}")
    return numbered


def _index(job: str, index: Any) -> int:
    if isinstance(index, str) and index.isascii() and index.isdigit():
        return int(index)
    number = as_integer(index)
    if number is None or number < 0:
        raise ValueError(f"ClusterSpec: the tasks of the job {job!r} are numbered from 0; got the index {index!r}")
    return number


def _in_words(names: list[Any]) -> str:
    return ", ".join(map(repr, names)) or "none"
