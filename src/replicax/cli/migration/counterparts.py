"""What takes a name's place: looked up in Replicax itself and in :mod:`replicax.old_names`, by which errors go, too."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import replicax
from replicax.cli.migration.differences import DIFFERENCES, TOWER_DIFFERENCES
from replicax.cli.migration.original_names import (
    COMPAT,
    COMPAT_KINDS,
    KINDS,
    MEMBERS,
    MODERN,
    NOT_COMPAT,
    TOWER,
    TOWER_MEMBERS,
)
from replicax.old_names import NAMES

V1 = "replicax.compat.v1"
"""The tower API, for programs of 1.9 to 1.12."""

_RECEIVERS = {"Strategy": "strategy.", "StrategyExtended": "extended."}
"""How members are written in :mod:`replicax.old_names`."""

_OF_TOWERS = {
    "Strategy.distribute_dataset": "strategy.distribute_datasets_from_function(dataset_fn)",
    "Strategy.fetch": "jax.device_put(value, device)",
    "Strategy.finalize": "jax.effects_barrier(), or strategy.finalize() of a TPUStrategy",
    "Strategy.initialize": "nothing to do: devices are ready when JAX has made them; strategy.initialize() of a "
    "TPUStrategy looks at them",
    "Strategy.reduce": "strategy.extended.reduce_to(reduce_op, value, destinations)",
}
"""What members of the tower API are today where a later release has given their names to something else."""


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """What takes a name's place.

    Attributes:
      today: in words; for a renaming, the dotted name that takes the place of the whole, or of a member's name.
      is_renaming: whether that is all there is to change, so that it can be done without looking.
      differs: what behaves differently.
      modern: of a name of the tower API, what it is called in today's.
    """

    today: str
    is_renaming: bool = False
    differs: str | None = None
    modern: str | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether nothing takes its place, and it can't just be left out either."""
        return self.today.startswith("nothing") and not self.today.startswith("nothing to do")


def paths(table: dict[str, str]) -> dict[str, str]:
    """The last name of each dotted path, after ``tf.``, in ``MODERN`` or ``TOWER``."""
    return {f"{module}.{name}".lstrip("."): name for module, names in table.items() for name in names.split()}


_MODERN, _TOWER = paths(MODERN), paths(TOWER)


def of_path(path: str, is_tower: bool = False) -> Counterpart | None:
    """The counterpart of ``tf.<path>``; ``None`` if it is no name of distribution.

    Args:
      path: such as ``distribute.ReduceOp.SUM``; of an enum or class also with a member.
      is_tower: whether the program is written for the tower API.
    """
    for table in (_MODERN, _TOWER):
        if path in table:
            return _of_name(table[path], is_tower and (table is _TOWER or path == "VariableAggregation"))
    if path.startswith("tpu.experimental.embedding."):
        return Counterpart(NAMES["replicax"]["TPUEmbedding"])
    owner, _, member = path.rpartition(".")
    name = _MODERN.get(owner) or _TOWER.get(owner)
    of_owner = of_path(owner, is_tower) if name else None
    found = of_member(KINDS.get(name, ""), member) if name else None
    if of_owner is None or found is None:
        return None
    if of_owner.modern is not None:
        return dataclasses.replace(
            of_owner, today=f"{of_owner.today}.{member}", modern=f"{of_owner.modern}.{found.today}"
        )
    if not of_owner.is_renaming:
        return of_owner
    if found.is_renaming:
        return Counterpart(f"{of_owner.today}.{found.today}", True, found.differs or of_owner.differs)
    return found


def _of_name(name: str, is_tower: bool) -> Counterpart:
    differs = DIFFERENCES.get(name)
    modern = NAMES["replicax"].get(name) or f"replicax.{name}"
    if is_tower and name in COMPAT.split():
        return Counterpart(f"{V1}.{name}", True, TOWER_DIFFERENCES.get(name), modern)
    return Counterpart(modern, bool(re.fullmatch(r"replicax\.\w+", modern)) and not is_tower, differs)


def of_member(kind: str, name: str, is_tower: bool = False) -> Counterpart | None:
    """The counterpart of a member of a value of a kind; ``None`` if it was not a public one.

    Args:
      kind: one of ``MEMBERS`` or ``TOWER_MEMBERS``.
      name: of the member.
      is_tower: whether it is that of the tower API.
    """
    was_tower = name in TOWER_MEMBERS.get(kind, "").split()
    if not was_tower and name not in MEMBERS.get(kind, "").split() and name not in NAMES.get(kind, {}):
        return None
    modern = _today(kind, name)
    if is_tower and was_tower and kind in COMPAT_KINDS.split() and name not in NOT_COMPAT.split():
        key = f"{kind}.{name}"
        if key in _OF_TOWERS:
            modern = Counterpart(_OF_TOWERS[key])
        receiver = _RECEIVERS.get(kind, "context." if kind.endswith("Context") else "") if modern.is_renaming else ""
        return Counterpart("the same", modern=f"{receiver}{modern.today}", differs=TOWER_DIFFERENCES.get(key))
    return modern


def _today(kind: str, name: str) -> Counterpart:
    differs = DIFFERENCES.get(f"{kind}.{name}")
    if name in NAMES.get(kind, {}):
        today = NAMES[kind][name]
        if kind == "Aggregation":
            return Counterpart(today.rpartition(".")[2], True, differs)
        bare = re.fullmatch(rf"(?:{re.escape(_RECEIVERS.get(kind, ''))})([\w.]+)", today)
        return Counterpart(bare[1] if bare else today, bare is not None, differs)
    owner = getattr(replicax, kind, None)
    if owner is None:
        givers = [giver for giver, given in KINDS.items() if given == kind and giver in NAMES["replicax"]]
        return Counterpart(NAMES["replicax"][givers[0]] if givers else "nothing")
    plain = name.removeprefix("experimental_")
    found = next((each for each in (plain, name) if has(owner, each)), None)
    assert found is not None, f"{kind}.{name} is neither in replicax nor in old_names"
    return Counterpart(found, True, differs or DIFFERENCES.get(f"{kind}.{found}"))


def has(owner: Any, name: str) -> bool:
    """Whether instances of a class have an attribute, by the class itself or by what its documentation says."""
    documented = re.search(rf"^ +(\w+, )*{name}(, \w+)*:", owner.__doc__ or "", re.MULTILINE)
    return hasattr(owner, name) or documented is not None


def keywords(kind: str | None, name: str) -> dict[str, str]:
    """The old keyword arguments of what a name is today, with what they have become."""
    owner = replicax if kind is None else getattr(replicax, kind, None)
    plain = next((n for n in (name.removeprefix("experimental_"), name) if hasattr(owner, n)), None)
    today: Any = getattr(owner, plain) if plain else None
    found: dict[str, str] = {}
    if isinstance(today, type):
        found.update(NAMES.get(name, {}) if name == "InputOptions" else {})
        today = getattr(today, "__init__", None)
    found.update(getattr(today, "old_keywords", {}))
    return found
