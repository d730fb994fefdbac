"""What processes do in the restore matrix: each saves its placements, and restores those of all others."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import grain
import jax
import numpy as np

import replicax
from tests.checkpoint.runs import Run

BATCH = 24
"""The size of the global batch of what is saved; it divides evenly among 1, 2, 3 and 8 replicas."""
OTHER_BATCH = 20
"""Another one, which does not."""
STEPS = 2
"""After how many steps is saved."""
EXAMPLES = 144
"""How many examples each of the datasets has in an epoch."""
FILES = 4
SEED = 0
"""Of the runs that are saved."""
OWN_FILES = "filtered files of each worker's own"
NAMES = "filtered files and others, mixed and shuffled", OWN_FILES, "shuffled numbers"
"""Of the datasets."""

Stream = dict[str, list[list[int]]]
"""Of each dataset, for each element the examples that this worker's replicas got."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a run is.

    Attributes:
      workers: how many processes.
      replicas: how many in all of them.
      kind: ``"mirrored"``; ``"sharded"``: variables split over the replicas of all processes; or ``"groups"``: over
        pairs of them.
    """

    workers: int
    replicas: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.replicas}-in-{self.workers}"

    @property
    def devices(self) -> tuple[int, ...]:
        """How many devices of each worker are used; the first workers have the larger shares."""
        quotient, rest = divmod(self.replicas, self.workers)
        return tuple(quotient + (i < rest) for i in range(self.workers))

    def strategy(self) -> replicax.Strategy:
        """On this worker's devices, and those of the others."""
        mine = [f"cpu:{i}" for i in range(self.devices[jax.process_index()])]
        if self.kind == "sharded":
            return replicax.ShardedStrategy(mine)
        if self.kind == "groups":
            return replicax.ShardedStrategy(mine, replicax.variables.GroupPartitioner(2))
        return replicax.MirroredStrategy(mine) if self.workers == 1 else replicax.MultiWorkerMirroredStrategy(mine)


def write_files(folder: pathlib.Path) -> None:
    """Files of lines with numbers, of which two thirds are examples."""
    for file in range(FILES):
        numbers = range(file, EXAMPLES * 3 // 2, FILES)
        (folder / f"{file}.txt").write_text("".join(f"{number}\n" for number in numbers))


def datasets(folder: str, batch: int) -> list[Any]:
    """Datasets with files, a filter, shuffles, and a mix, in the order of ``NAMES``.

    Each has ``EXAMPLES`` examples, all of them different.
    """

    def lines(last: int) -> Any:
        numbers = replicax.data.text_lines(f"{folder}/*.txt").map(np.float32)
        return numbers.filter(lambda number: number % 3 != 0 and number < last)

    half = EXAMPLES * 3 // 4  # the numbers below it are half of the examples
    others = np.arange(1000, 1000 + EXAMPLES // 2, dtype=np.float32)
    shuffled = grain.MapDataset.source(others).seed(3).shuffle().to_iter_dataset()
    mixed = grain.IterDataset.mix([lines(half), shuffled], weights=[1, 1])
    window = grain.experimental.WindowShuffleIterDataset(mixed, window_size=72, seed=1)
    numbered = grain.MapDataset.source(np.arange(EXAMPLES, dtype=np.float32)).seed(5).shuffle()
    return [window.batch(batch), lines(2 * EXAMPLES).batch(batch), numbered.batch(batch)]


class Trained(Run):
    """A run whose step draws a random number, and in whose checkpoint there is more input."""

    @classmethod
    def at(cls, placement: Placement, folder: str, seed: int) -> Trained:
        """Before its first step."""
        strategy = placement.strategy()
        [examples, *others] = _iterators(strategy, folder, BATCH)
        mesh = jax.sharding.Mesh(strategy.extended.mesh.devices.reshape(-1), "devices")
        spec = ["devices"] if placement.kind == "sharded" else []
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        array = jax.make_array_from_callback((48,), sharding, numbers(seed).__getitem__)
        return cls.of(strategy, seed=seed, data=examples, others=others, array=array)

    def step(self, x: Any) -> Any:
        key, own = jax.random.split(self.model["key"].value)
        self.model["key"].assign(key)
        super().step(x * (1.0 + 0.1 * jax.random.uniform(own)))

    def goes_on(self, steps: int | None = None) -> Stream:
        """So many steps, or those to the end of the epoch; what was read."""
        stream: Stream = {name: [] for name in NAMES}
        for name, iterator in zip(NAMES, [self.data, *self.checkpoint.others], strict=True):
            for element in itertools.islice(iterator, steps):
                stream[name].append(_own(self.strategy, element))
                if iterator is self.data:
                    self.strategy.run(self.step, args=(element,))
                    self.checkpoint.step += 1
        return stream

    def has_array(self, seed: int) -> bool:
        """Whether the parts of the array that are here are those of a run with this ``seed``."""
        shards = self.checkpoint.array.addressable_shards
        return all(np.array_equal(shard.data, numbers(seed)[shard.index]) for shard in shards)


def numbers(seed: int) -> np.ndarray[Any, Any]:
    """What the array of a run with this ``seed`` has."""
    return np.random.default_rng(seed).normal(size=48).astype(np.float32)


def _iterators(strategy: replicax.Strategy, folder: str, batch: int) -> list[Any]:
    return [iter(strategy.distribute_dataset(dataset)) for dataset in datasets(folder, batch)]


def _own(strategy: replicax.Strategy, element: Any) -> list[int]:
    """The examples of this worker's replicas, in their order."""
    return [int(x) for part in strategy.local_results(element) for x in np.asarray(part)]


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a placement has saved.

    Attributes:
      stream: what was read before.
      values: of all that has a value.
      rest: what was read afterwards, until the end of the epoch.
      last: the values then.
    """

    stream: Stream
    values: dict[str, Any]
    rest: Stream
    last: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a placement has made of what another has saved.

    Attributes:
      values: of all that has a value, when it was restored.
      has_array: whether the array is the one that was saved, as far as it is here.
      stream: what was read afterwards, until the end of the epoch.
      last: the values then.
      other_stream: what is read with batches of another size.
    """

    values: dict[str, Any]
    has_array: bool
    stream: Stream
    last: dict[str, Any]
    other_stream: Stream


_kept: dict[Placement, Trained] = {}


def save(placements: Sequence[Placement], folder: str, keep: bool) -> dict[Placement, Saved]:
    """At each placement run some steps, save, and go on to the end of the epoch.

    Args:
      placements: of as many processes as there are here.
      folder: with the files; gets the checkpoints.
      keep: whether :func:`restore` is to restore into these runs, which need not be compiled again.
    """
    found = {}
    for placement in placements:
        run = Trained.at(placement, folder, SEED)
        stream = run.goes_on(STEPS)
        run.checkpoint.save(f"{folder}/{placement}")
        found[placement] = Saved(stream, run.values(), run.goes_on(), run.values())
        run.checkpoint.array *= 0.0
        if keep:
            _kept[placement] = run
    return found


def restore(
    placements: Sequence[Placement], folder: str, sources: Sequence[Placement]
) -> dict[tuple[Placement, Placement], Restored]:
    """At each placement, restore what each source has saved, and go on to the end of the epoch."""
    found = {}
    for placement in placements:
        run = _kept.pop(placement, None) or Trained.at(placement, folder, SEED + 1)
        for source in sources:
            path = f"{folder}/{source}"
            run.checkpoint.restore(path)
            values, has_array = run.values(), run.has_array(SEED)
            rest = run.goes_on()
            others = _read_in_other_batches(run.strategy, folder, path)
            found[source, placement] = Restored(values, has_array, rest, run.values(), others)
    return found


def _read_in_other_batches(strategy: replicax.Strategy, folder: str, path: str) -> Stream:
    """What is left of the epoch, in batches of another size."""
    [examples, *others] = _iterators(strategy, folder, OTHER_BATCH)
    replicax.Checkpoint(data=examples, others=others).restore(path, partial=True)
    return {
        name: [_own(strategy, element) for element in iterator]
        for name, iterator in zip(NAMES, [examples, *others], strict=True)
    }
