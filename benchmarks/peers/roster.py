"""Who is measured, and how many threads each may be given."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Sequence

from benchmarks.peers.libraries.training import Training
from benchmarks.peers.problems import Problem

REPLICAS = (2, 8)


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to train.

    Attributes:
      name: for the JSON and the command line.
      title: for tables.
      module: in ``benchmarks.peers.libraries``.
      function: in the module: ``function(problem, replicas)`` gives a :class:`Training`.
      packages: whose versions belong to the figures.
      threads: ``"xla"``, ``"tensorflow"`` or ``"openmp"``: what sets how many threads an operation may use.
      many: whether one dispatch has ten steps.
      fewest: on how many replicas it takes part, at least: with fewer it is what another one is.
    """

    name: str
    title: str
    module: str
    function: str
    packages: tuple[str, ...]
    threads: str
    many: bool = False
    fewest: int = 1

    def start(self, problem: Problem, replicas: int) -> Training:
        """Load the library, and begin."""
        start: Callable[[Problem, int], Training]
        start = getattr(importlib.import_module(f"benchmarks.peers.libraries.{self.module}"), self.function)
        return start(problem, replicas)


PEERS = (
    Peer("replicax", "Replicax, run", "on_replicax", "run", ("jax", "optax"), "xla"),
    Peer(
        "replicax_shared", "Replicax, a device a core", "on_replicax", "run_on_cores", ("jax", "optax"), "xla", fewest=8
    ),
    Peer("jax", "JAX by hand", "on_jax", "jit", ("jax", "optax"), "xla"),
    Peer("nnx", "Flax NNX, sharded", "on_nnx", "train", ("flax", "jax"), "xla"),
    Peer("keras", "Keras on JAX", "on_keras", "fit", ("keras", "jax"), "xla"),
    Peer("tensorflow", "TensorFlow MirroredStrategy", "on_tensorflow", "train", ("tensorflow_cpu",), "tensorflow"),
    Peer("torch", "PyTorch DDP, gloo", "on_torch", "train", ("torch",), "openmp"),
    Peer("replicax_steps", "Replicax, run_steps of 10", "on_replicax", "run_steps", ("jax", "optax"), "xla", many=True),
    Peer("jax_scan", "JAX by hand, scan of 10", "on_jax", "scan", ("jax", "optax"), "xla", many=True),
    Peer(
        "tensorflow_loop",
        "TensorFlow, loop of 10",
        "on_tensorflow",
        "loop",
        ("tensorflow_cpu",),
        "tensorflow",
        many=True,
    ),
)


def taking_part(peers: Sequence[Peer], replicas: int) -> list[Peer]:
    """Those of ``peers`` that are measured on so many replicas."""
    return [peer for peer in peers if peer.fewest <= replicas]


REFERENCE = Peer("reference", "one device, float64", "on_jax", "reference", (), "xla")
BY_NAME = {peer.name: peer for peer in (*PEERS, REFERENCE)}

# Threads of one operation. What `use_cpu_devices` does for emulated devices is the default of all on XLA: two threads
# for each device, below which devices wait for each other for ever.
DEFAULT = "default"
_SETTINGS: dict[str, dict[str, dict[str, str]]] = {
    "xla": {"1": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}},
    "tensorflow": {str(n): {"TF_NUM_INTRAOP_THREADS": str(n)} for n in (1, 2)},
    "openmp": {str(n): {"OMP_NUM_THREADS": str(n)} for n in (1, 2)},
}


def settings(peer: Peer) -> list[str]:
    """The settings to try, by name: ``"1"``, ``"2"`` and ``"default"``; on two cores 2 is what the libraries take."""
    names = [name for name in _SETTINGS[peer.threads] if int(name) < len(os.sched_getaffinity(0))]
    return [*names, DEFAULT]


def environment(peer: Peer, setting: str) -> dict[str, str]:
    """The variables that a process of ``peer`` is started with."""
    common = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ours = {**common, **({} if setting == DEFAULT else _SETTINGS[peer.threads][setting])}
    given = {"XLA_FLAGS", "NPROC", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"}
    return {**{name: value for name, value in os.environ.items() if name not in given}, **ours}
