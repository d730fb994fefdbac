"""``SlurmClusterResolver``: the tasks of a Slurm job step."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from replicax.argument_checks import checked_integer
from replicax.cluster.resolver import ClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.errors import few, shortened
from replicax.system.addresses import join_address

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST = 1 << 17
"""More nodes, and more tasks, than any Slurm cluster has."""


class SlurmClusterResolver(ClusterResolver):
    """The tasks of a Slurm job step, from the environment variables that ``srun`` sets.

    You do not need it to train on Slurm: without a resolver JAX detects the step. This resolver describes it as
    ``tf.distribute`` does, with jobs of your own, and chooses the ports.

    Tasks are numbered as in Slurm: node by node, or round the nodes with ``--distribution=cyclic`` or ``plane``. The
    ports of the tasks of one node are ``port_base``, ``port_base + 1``, …

    Args:
      jobs: the number of tasks of each job; jobs get tasks in the order of their names. ``None`` means that all
        tasks are of the job ``"worker"``.
      port_base: the first port on each node.
      gpus_per_node: the number of GPUs of a node; ``None`` takes it from ``SLURM_GPUS_ON_NODE``,
        ``CUDA_VISIBLE_DEVICES`` or ``nvidia-smi``, and is 0 without these.
      gpus_per_task: the number of GPUs of each task; ``None`` divides them equally.
      tasks_per_node: the number of tasks on each node, or a dict by the name of the node; ``None`` takes Slurm's.
      auto_set_gpu: whether to set ``CUDA_VISIBLE_DEVICES`` to this task's GPUs, if the task sees more than these.
      rpc_layer: the prefix of the addresses that :meth:`master` returns.

    Raises:
      RuntimeError: this is not a Slurm step, there are too few GPUs or tasks, or ``--distribution`` is ``arbitrary``.
      ValueError: a list of nodes or tasks is not in Slurm's format; a number is not an int, or negative.
      TypeError: ``jobs`` is not a dict.

    >>> import os, replicax
    >>> step = {"NODELIST": "node[01-02]", "NUM_TASKS": "4", "TASKS_PER_NODE": "2(x2)"}
    >>> os.environ.update({f"SLURM_STEP_{name}": value for name, value in step.items()}, SLURM_PROCID="3")
    >>> resolver = replicax.cluster.SlurmClusterResolver(jobs={"chief": 1, "worker": 3}, gpus_per_node=0)
    >>> resolver.cluster_spec()
    ClusterSpec({'chief': ['node01:8888'], 'worker': ['node01:8889', 'node02:8888', 'node02:8889']})
    >>> resolver.task_type, resolver.task_id
    ('worker', 2)
    >>> for name in [*(f"SLURM_STEP_{name}" for name in step), "SLURM_PROCID"]:
    ...     del os.environ[name]
    """

    _environment = "slurm"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        if not isinstance(jobs, Mapping | None):
            raise TypeError(
                f"SlurmClusterResolver: jobs must be a dict from jobs to their numbers of tasks, {{'worker': 3}}; got "
                f"{jobs!r}"
            )
        port_base = checked_integer(port_base, "SlurmClusterResolver: port_base")
        rank = _number("SLURM_PROCID")
        nodes = _tasks_of_nodes(tasks_per_node)
        count = sum(nodes.values())
        jobs = {"worker": count} if jobs is None else dict(sorted(_counts(jobs, "jobs").items()))
        if sum(jobs.values()) != count:
            raise RuntimeError(
                f"SlurmClusterResolver: jobs={jobs!r} are {sum(jobs.values())} tasks, and the step has {count}: "
                f"{_in_words(nodes)}. Start it with srun --ntasks={sum(jobs.values())}, or change jobs"
            )
        if rank >= count:
            raise RuntimeError(
                f"SlurmClusterResolver: SLURM_PROCID={rank}, and the step has {count} tasks: {_in_words(nodes)}"
            )
        places = _places(nodes)
        addresses = (join_address(node, port_base + place) for node, place in places)
        self._cluster_spec = ClusterSpec({job: list(itertools.islice(addresses, n)) for job, n in jobs.items()})
        most = max(nodes.values())
        gpus_per_node = _gpus_of_this_node() if gpus_per_node is None else _count(gpus_per_node, "gpus_per_node")
        self._gpus_per_task = gpus_per_node // most if gpus_per_task is None else _count(gpus_per_task, "gpus_per_task")
        if most * self._gpus_per_task > gpus_per_node:
            raise RuntimeError(
                f"SlurmClusterResolver: {most} tasks of a node with {self._gpus_per_task} GPUs each need "
                f"{most * self._gpus_per_task}, and it has {gpus_per_node}. Lower gpus_per_task, or run fewer tasks on "
                "each node"
            )
        task_type, task_id = [(job, index) for job, n in jobs.items() for index in range(n)][rank]
        super().__init__(task_type, task_id, rpc_layer)
        if auto_set_gpu and self._gpus_per_task:
            _choose_gpus(places[rank][1], self._gpus_per_task)

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """The number of GPUs of each task: ``{"GPU": 2}``; does not ask JAX."""
        return {"GPU": self._gpus_per_task}


def expand_hostlist(hostlist: str) -> list[str]:
    """The nodes of a list in Slurm's format, in its order.

    Raises:
      ValueError: it is not such a list.

    >>> expand_hostlist("node[01-03,07],login,rack[1-2]n[8,10]-ib")
    ['node01', 'node02', 'node03', 'node07', 'login', 'rack1n8-ib', 'rack1n10-ib', 'rack2n8-ib', 'rack2n10-ib']
    """
    nodes: list[str] = []
    for part in _split_hostlist(hostlist):
        pieces = re.split(r"\[([^][]*)\]", part)  # text, range, text, range, …, text
        if not part or any(c in "[]" for text in pieces[::2] for c in text):
            shown = shortened(hostlist)
            raise ValueError(f"not a list of nodes as Slurm writes it, 'node[01-03,07],login': {shown!r}")
        names = [pieces[0]]
        for ranges, text in zip(pieces[1::2], pieces[2::2], strict=True):
            numbers = _numbers(ranges, hostlist)
            _check_count(len(nodes) + len(names) * len(numbers), "nodes", hostlist)
            names = [name + number + text for name in names for number in numbers]
        nodes += names
    return nodes


def expand_tasks_per_node(tasks: str) -> list[int]:
    """The number of tasks of each node, from a list in Slurm's format.

    Raises:
      ValueError: it is not such a list.

    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"not the tasks of nodes as Slurm writes them, '2(x3),1': {shortened(tasks)!r}")
        _check_count(len(counts) + int(match[2] or 1), "nodes", tasks)
        counts += [int(match[1])] * int(match[2] or 1)
        _check_count(sum(counts), "tasks", tasks)
    return counts


def _check_count(count: int, what: str, written: str) -> None:
    """Raise if a list is longer than any real one."""
    if count > _MOST:
        raise ValueError(f"{shortened(written)!r} stands for {count} {what}, and no cluster has more than {_MOST}")


def _split_hostlist(hostlist: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts = [""]
    for text in re.split(r"(\[[^][]*\])", hostlist.strip()):
        first, *others = [text] if text.startswith("[") else text.split(",")
        parts[-1] += first
        parts += others
    return parts


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ValueError(
                f"{part!r} is no range of numbers, such as '01-03', in the list of nodes {shortened(hostlist)!r}"
            )
        last = int(match[2] or match[1])
        _check_count(len(numbers) + last + 1 - int(match[1]), "nodes", hostlist)
        numbers += [str(number).zfill(len(match[1])) for number in range(int(match[1]), last + 1)]
    return numbers


def _tasks_of_nodes(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    """The number of tasks of each node, in the order of the nodes.

    Raises a RuntimeError if Slurm's variables are missing, or contradict each other.
    """
    if isinstance(tasks_per_node, Mapping):
        return _counts(tasks_per_node, "tasks_per_node")
    nodes = expand_hostlist(_variable("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if tasks_per_node is not None:
        return dict.fromkeys(nodes, _count(tasks_per_node, "tasks_per_node"))
    text = _variable("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = expand_tasks_per_node(text)
    if len(counts) != len(nodes):
        raise RuntimeError(
            f"SlurmClusterResolver: Slurm lists {len(nodes)} nodes ({few(nodes)}), and the tasks of {len(counts)} "
            f"({shortened(text)}). Start the program with srun, or pass tasks_per_node"
        )
    return dict(zip(nodes, counts, strict=True))


def _places(nodes: Mapping[str, int]) -> list[tuple[str, int]]:
    """The node of each task, and the task's number there, by its rank.

    Raises a RuntimeError if they are in an order of which Slurm's variables do not tell enough.
    """
    order = os.environ.get("SLURM_DISTRIBUTION", "block")
    places = [(node, place) for node, count in nodes.items() for place in range(count)]
    if order.startswith(("cyclic", "plane")):
        plane_size = 1 if order.startswith("cyclic") else _number("SLURM_DIST_PLANESIZE")
        places.sort(key=lambda at: at[1] // plane_size)  # the first tasks of each node, then the next ones, …
    elif order.startswith("arbitrary"):
        raise RuntimeError(
            f"SlurmClusterResolver: with SLURM_DISTRIBUTION={order} it is unknown which node has which task. Start "
            "the program with srun --distribution=block, cyclic or plane"
        )
    return places


def _gpus_of_this_node() -> int:
    """The number of the node's GPUs, as far as that is known without a driver; 0 if it is not."""
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit():
        return int(on_node)
    if _VISIBLE in os.environ:
        return len(_visible())
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            f"SlurmClusterResolver: {program} --list-gpus does not say how many GPUs there are ({error}); pass "
            "gpus_per_node"
        ) from error
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _choose_gpus(place: int, count: int) -> None:
    """Let this task see only its part of the node's GPUs, unless Slurm has done so.

    Raises a RuntimeError if it sees too few for all of the node's tasks.
    """
    visible = _visible()
    if _VISIBLE in os.environ and len(visible) <= count:
        return
    first = place * count
    if visible and len(visible) < first + count:
        raise RuntimeError(
            f"SlurmClusterResolver: {_VISIBLE}={os.environ[_VISIBLE]} has {len(visible)} GPUs, and this task, number "
            f"{place} of its node, would be the one with those from {first} to {first + count - 1}. Unset it, pass "
            "gpus_per_node, or pass auto_set_gpu=False if Slurm gives each task its own"
        )
    share = visible[first : first + count] if visible else [str(i) for i in range(first, first + count)]
    os.environ[_VISIBLE] = ",".join(share)


def _visible() -> list[str]:
    return [name for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]


def _variable(*names: str) -> str:
    for name in names:
        if os.environ.get(name, "").strip():
            return os.environ[name].strip()
    raise RuntimeError(
        f"SlurmClusterResolver: {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set: this process is no "
        "task of a Slurm step. Start the program with srun"
    )


def _number(name: str) -> int:
    text = _variable(name)
    if not text.isdigit():
        raise RuntimeError(f"SlurmClusterResolver: {name}={text}, which is no number")
    return int(text)


def _count(value: Any, name: str) -> int:
    return checked_integer(value, f"SlurmClusterResolver: {name}", 0)


def _counts(values: Mapping[str, Any], name: str) -> dict[str, int]:
    return {key: _count(value, f"{name}[{key!r}]") for key, value in values.items()}


def _in_words(nodes: Mapping[str, int]) -> str:
    return few([f"{count} on {node}" for node, count in nodes.items()], 8)
