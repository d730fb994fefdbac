"""PyTorch: ``DistributedDataParallel`` on gloo, a process for each replica.

The first replica is the process that was asked. It starts the others, and tells them through pipes how many steps to
make.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import problems
from benchmarks.peers.libraries.training import Training
from benchmarks.peers.problems import Array, Problem, problem


def train(problem: Problem, replicas: int) -> Training:
    """DDP. Memory is that of all processes."""
    folder = tempfile.TemporaryDirectory()
    meeting = Path(folder.name) / "meeting"
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.libraries.on_torch"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
        )
        for _ in range(1, replicas)
    ]
    for rank, process in enumerate(others, start=1):
        _tell(process, json.dumps([problem.name, rank, replicas, str(meeting)]))
    replica = Replica(problem, 0, replicas, meeting)

    def steps(n: int) -> float:
        for process in others:
            _tell(process, str(n))
        return replica.steps(n)

    def close() -> None:
        for process in others:
            _tell(process, "")
        for process in others:
            process.wait(30)
        dist.destroy_process_group()
        folder.cleanup()

    return Training(replica.parameters, steps, close=close, children=tuple(process.pid for process in others))


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


class Replica:
    """One replica, in this process."""

    def __init__(self, problem: Problem, rank: int, replicas: int, meeting: Path) -> None:
        torch.set_flush_denormal(True)  # as XLA and TensorFlow do
        # What OMP_NUM_THREADS says holds for MKL alone in some builds.
        if threads := os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=replicas)
        model = MODELS[problem.name]()
        _set(model, problem)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=problems.LEARNING_RATE,
            betas=(problems.BETA_1, problems.BETA_2),
            eps=problems.EPSILON,
            fused=True,
        )
        inputs, labels = problem.rows(rank, replicas)
        self.inputs = _images(inputs) if problem.name == "cnn" else torch.from_numpy(inputs.copy())
        self.labels = torch.from_numpy(labels.astype("int64"))
        self.replicas = replicas

    def steps(self, n: int) -> float:
        """Train for ``n`` steps; the loss of the last, on all replicas."""
        for _ in range(n):
            self.optimizer.zero_grad(set_to_none=True)
            logits = self.model(self.inputs)
            loss = functional.cross_entropy(logits.flatten(0, -2), self.labels.flatten())
            loss.backward()
            self.optimizer.step()
        mean = loss.detach() / self.replicas
        dist.all_reduce(mean)
        return float(mean)


class MLP(nn.Module):
    """See :func:`benchmarks.peers.problems.mlp`."""

    def __init__(self) -> None:
        super().__init__()
        sizes = problems.MLP_SIZES
        self.dense = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])

    def forward(self, x: Any) -> Any:
        """Logits."""
        for i, layer in enumerate(self.dense):
            x = layer(functional.relu(x) if i else x)
        return x


class CNN(nn.Module):
    """See :func:`benchmarks.peers.problems.cnn`."""

    def __init__(self) -> None:
        super().__init__()
        channels = problems.CNN_CHANNELS
        convolutions = itertools.pairwise(channels)
        self.conv = nn.ModuleList([nn.Conv2d(a, b, 3, padding="same") for a, b in convolutions])
        flat = (problems.IMAGE // 4) ** 2 * channels[-1]
        sizes = (flat, problems.CNN_HIDDEN), (problems.CNN_HIDDEN, problems.CLASSES)
        self.dense = nn.ModuleList([nn.Linear(a, b) for a, b in sizes])
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        """Logits."""
        for layer in self.conv:
            x = functional.max_pool2d(functional.relu(layer(x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)
        return self.dense[1](functional.relu(self.dense[0](x)))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden = problems.WIDTH, problems.HIDDEN
        self.norm0, self.norm1 = (nn.LayerNorm(width, eps=problems.NORM_EPSILON) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        """The next layer's input."""
        y = self.norm0(x)
        split = (*x.shape[:2], problems.HEADS, problems.HEAD)
        q, k, v = (layer(y).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm1(x)), approximate="tanh"))


class Transformer(nn.Module):
    """See :func:`benchmarks.peers.problems.transformer`."""

    def __init__(self) -> None:
        super().__init__()
        width = problems.WIDTH
        self.tokens = nn.Embedding(problems.VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(problems.LENGTH, width))
        self.blocks = nn.ModuleList([Block() for _ in range(problems.LAYERS)])
        self.norm = nn.LayerNorm(width, eps=problems.NORM_EPSILON)
        self.head = nn.Linear(width, problems.VOCABULARY, bias=False)

    def forward(self, tokens: Any) -> Any:
        """Logits."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS: dict[str, Any] = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}


def _images(inputs: Array) -> Any:
    return torch.from_numpy(inputs.copy()).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def _set(model: nn.Module, problem: Problem) -> None:
    """Give the model's parameters the values that all peers begin with: kernels are the other way round here."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in problem.initial.items():
            path = _path(name)
            if path.endswith("weight") and not path.startswith("tokens") and value.ndim > 1:
                if value.ndim == 4:
                    value = value.transpose(3, 2, 0, 1)
                else:
                    n_in = problems.WIDTH if value.ndim == 3 else len(value)
                    value = value.reshape(n_in, -1).T
            assert parameters[path].shape == value.shape, name
            parameters.pop(path).copy_(torch.from_numpy(value.copy()))
    assert not parameters, parameters


def _path(name: str) -> str:
    """What PyTorch calls a parameter: ``0.query`` is ``blocks.0.query.weight``, ``conv1.bias`` is ``conv.1.bias``."""
    name = name.replace("kernel", "weight").replace("scale", "weight")
    first, *rest = name.split(".")
    if first.isdigit():
        return ".".join(("blocks", first, *rest, *(["weight"] if len(rest) == 1 else [])))
    if first[:-1] in ("dense", "conv"):
        return ".".join((first[:-1], first[-1], *rest))
    return {"tokens": "tokens.weight", "head": "head.weight"}.get(name, name)


def main() -> None:
    """A replica but the first: reads what to do from standard input."""
    name, rank, replicas, meeting = json.loads(sys.stdin.readline())
    replica = Replica(problem(name), rank, replicas, Path(meeting))
    while line := sys.stdin.readline().strip():
        replica.steps(int(line))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
