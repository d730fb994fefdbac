"""The faults of a run: what is done in each attempt, in which phase, to which worker; a function of the seed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PERIOD = 7
"""Steps between two saves; no divisor of an epoch's steps, so that checkpoints lie anywhere in an epoch."""
EVALUATION = 2 * PERIOD
"""Steps between two evaluations."""
JOINED = 3
"""Steps in a call, where there is room for so many before the next save."""

KILL, STOP, PREEMPT, FILL = "kill", "stop", "preempt", "fill the disk"

SPOTS = {
    "start": ("before imports", "before connecting", "connected"),
    "compile": ("tracing", "compiling"),
    "step": ("in the program",),
    "run_steps": ("in the program",),
    "evaluation": ("in the program",),
    "save": ("copied", "written"),
    "commit": ("told",),
    "restore": ("before reading", "read"),
}
"""The phases of a run, and the places in each where a fault can strike."""
CHIEFS_SPOTS = {"save": ("copied", "written", "before renaming"), "commit": ("renamed", "told")}
"""The places of phases in which worker 0 does more than the others, as it writes the manifest."""

LATER = ("step", "run_steps", "evaluation", "save", "commit")
"""The phases that come after steps: an attempt that is struck there has saved something."""
SAVES = 3
"""Which save of an attempt is struck, or has begun before a step is: two are finished then."""
NOTICE = 20
"""How many saves a preemption may take until all workers have agreed on the last step: it takes time, not steps."""

TRUNCATED, FLIPPED, EMPTIED, HALF_COPIED = DAMAGES = ("truncated", "bit-flipped", "emptied", "half-copied")


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is done to the newest checkpoint before an attempt.

    Attributes:
      how: one of ``DAMAGES``.
      seed: chooses the file, and the place in it.
    """

    how: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is done in an attempt.

    Attributes:
      number: which attempt of the whole list it is.
      kind: ``KILL``, ``STOP``, ``PREEMPT`` or ``FILL``; ``""`` in the attempt that comes to the end.
      phase: when.
      spot: where in the phase.
      worker: who is struck.
      room: for ``FILL``: how many bytes are left free.
      damage: of the checkpoint before the attempt begins.
    """

    number: int
    kind: str = ""
    phase: str = ""
    spot: str = ""
    worker: int = 0
    room: int = 0
    damage: Damage | None = None

    def __str__(self) -> str:
        before = "" if self.damage is None else f"newest checkpoint {self.damage.how}, then "
        if not self.kind:
            return f"{before}nothing"
        return f"{before}{self.kind} worker {self.worker} in {self.phase} ({self.spot})"


@dataclasses.dataclass(frozen=True)
class Amounts:
    """How many faults of each kind there are."""

    kills: int = 40
    stops: int = 10
    preemptions: int = 20
    damages: int = 40
    fills: int = 5


def faults_of(seed: int, amounts: Amounts, workers: int) -> list[Fault]:
    """The faults, one for each attempt, in their order; the last attempt has none, and comes to the end."""
    rng = random.Random(seed)
    struck = [
        *_spread(KILL, amounts.kills, workers, rng),
        *_spread(STOP, amounts.stops, workers, rng),
        *_spread(PREEMPT, amounts.preemptions, workers, rng),
        *(Fault(0, FILL, "save", "copied", rng.randrange(workers), 4096 * rng.choice((0, 1, 8)))
          for _ in range(amounts.fills)),
    ]  # fmt: skip
    rng.shuffle(struck)
    # There is something to restore, and to damage, from the second attempt on.
    first = next((i for i, fault in enumerate(struck) if fault.phase in LATER), 0)
    struck.insert(0, struck.pop(first))
    # What is damaged leaves an older checkpoint, as the attempt before has made two.
    can_be_damaged = [i + 1 for i, fault in enumerate(struck) if fault.phase in LATER]
    if amounts.damages > len(can_be_damaged):
        raise ValueError(f"{amounts.damages} checkpoints are to be damaged, and only {len(can_be_damaged)} can be")
    hows = itertools.islice(itertools.cycle(rng.sample(DAMAGES, len(DAMAGES))), amounts.damages)
    damages = dict(zip(sorted(rng.sample(can_be_damaged, amounts.damages)), hows, strict=True))
    return [
        dataclasses.replace(
            fault, number=i, damage=Damage(damages[i], rng.randrange(1 << 30)) if i in damages else None
        )
        for i, fault in enumerate([*struck, Fault(0)])
    ]


def alone(faults: Sequence[Fault], number: int) -> list[Fault]:
    """Enough to repeat one of the faults: an attempt that saves, the fault, and the way to the end."""
    fault = faults[number]
    saving = Fault(0, KILL, "commit", "told", 1)
    after = Fault(2, damage=faults[number + 1].damage if number + 1 < len(faults) else None)
    return [saving, dataclasses.replace(fault, number=1), *([after] if fault.kind else [])]


def steps_needed(faults: Sequence[Fault]) -> int:
    """More steps than all attempts together can get on."""
    saves = [
        1 + (SAVES + 3) * (fault.phase in LATER) + NOTICE * (fault.kind == PREEMPT) - (fault.damage is not None)
        for fault in faults
    ]
    return PERIOD * sum(saves)


def write_faults(path: Path, faults: Sequence[Fault]) -> None:
    """Write them into a file, for the workers."""
    path.write_text(json.dumps([dataclasses.asdict(fault) for fault in faults]))


def read_faults(path: Path) -> list[Fault]:
    """Read them again."""

    def fault(entry: dict[str, Any]) -> Fault:
        damage = entry.pop("damage")
        return Fault(**entry, damage=None if damage is None else Damage(**damage))

    return [fault(entry) for entry in json.loads(path.read_text())]


def _spread(kind: str, count: int, workers: int, rng: random.Random) -> Iterator[Fault]:
    """So many faults over all phases, a quarter of them on worker 0."""
    phases = list(SPOTS)
    rng.shuffle(phases)
    struck = [0] * round(count / 4) + [1 + i % (workers - 1) for i in range(count - round(count / 4))]
    rng.shuffle(struck)
    numbers = dict.fromkeys(phases, rng.randrange(6))
    for phase, worker in zip(itertools.cycle(phases), struck, strict=False):
        spots = (CHIEFS_SPOTS if worker == 0 else SPOTS).get(phase, SPOTS[phase])
        yield Fault(0, kind, phase, spots[numbers[phase] % len(spots)], worker)
        numbers[phase] += 1
