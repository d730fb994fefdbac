"""What takes a name's place: looked up in Replicax itself, and in :mod:`replicax_migrate.old_names`."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from typing import Any

import replicax
from replicax.compat import v1
from replicax_migrate.differences import DIFFERENCES, TOWER_DIFFERENCES
from replicax_migrate.old_names import ARGUMENTS, NAMES
from replicax_migrate.original_names import AROUND_TOWERS, KINDS, MEMBERS, MODERN, TOWER, TOWER_MEMBERS
from replicax_migrate.run_names import (
    DIFFERENCES_OF_RUNS,
    DIFFERENCES_OF_STEPS,
    MEMBERS_OF_RUNS,
    RUNS,
    STEPS,
    TODAY_OF_RUNS,
    TODAY_OF_STEPS,
)

V1 = "replicax.compat.v1"
"""The tower API, for programs of 1.9 to 1.12."""

_RECEIVERS = {"Strategy": "strategy.", "StrategyExtended": "extended.", "Optimizer": "optimizer."}
"""How members are written in :mod:`replicax_migrate.old_names`."""

TOWER_CLASSES: dict[str, tuple[type, ...]] = {
    "Strategy": (v1.DistributionStrategy, v1.TPUStrategy),
    "ReplicaContext": (v1.TowerContext,),
    "MultiStepContext": (v1.MultiStepContext,),
    "DistributedDataset": (v1.PerDeviceDataset,),
    "DistributedIterator": (v1.PerDeviceIterator,),
    "Aggregation": (v1.VariableAggregation,),
    "Optimizer": (v1.Optimizer,),
}
"""By kind, what has its members in the tower API; which they are is asked of these classes."""

TODAY_OF_TOWERS = {
    "AUTO_REUSE": "nothing to do: keep the variable, and use it again",
    "GradientDescentOptimizer": "replicax.Optimizer, of optax.sgd(learning_rate)",
    "MapOutput": "a list",
    "MomentumOptimizer": "replicax.Optimizer, of optax.sgd(learning_rate, momentum)",
    "Operation": "nothing to do: calls run immediately",
    "Optimizer": "replicax.Optimizer",
    "Optimizer._distributed_apply": "optimizer.apply_gradients(gradients, variables), in a step",
    "Optimizer.compute_gradients": "replicax.value_and_grad(fn, variables)",
    "Optimizer.minimize": "replicax.value_and_grad(fn, variables), and optimizer.apply_gradients",
    "PerDevice": "replicax.PerReplica",
    "PerDeviceDataset": "replicax.DistributedDataset",
    "PerDeviceIterator": "replicax.DistributedIterator",
    "Strategy.distribute_dataset": "strategy.distribute_datasets_from_function(dataset_fn)",
    "Strategy.fetch": "jax.device_put(value, device)",
    "Strategy.finalize": "jax.effects_barrier(), or strategy.finalize() of a TPUStrategy",
    "Strategy.initialize": "nothing to do: JAX initializes the devices; strategy.initialize() of a "
    "TPUStrategy looks at them",
    "Strategy.reduce": "strategy.extended.reduce_to(reduce_op, value, destinations)",
    "VariableScope": "nothing to do: variables are objects, which are passed around",
    "create_global_step": "replicax.Variable(0, aggregation='only_first_replica')",
    "get_global_step": "a replicax.Variable of your own",
    "get_or_create_global_step": "replicax.Variable(0, aggregation='only_first_replica')",
    "get_variable": "replicax.Variable(initial_value, name=name)",
    "get_variable_scope": "nothing to do: variables are objects, which are passed around",
    "trainable_variables": "a list of your own",
    "variable_scope": "nothing to do: variables are objects, which are passed around",
}
"""What names of the tower API are today that the table of old names has not, or has with a later meaning."""

_TAKES_SOMETHING_ELSE = {"Optimizer": "of an Optax transformation"}
"""Names of the tower API that are there, but are not called as they were."""


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """What takes a name's place."""

    today: str  # in words; for a renaming, the dotted name that takes the place of the whole, or of a member's name
    is_renaming: bool = False  # whether that is all there is to change, so that it can be done without looking
    differs: str | None = None  # what behaves differently
    modern: str | None = None  # of a name of the tower API, what it is called in today's

    @property
    def is_nothing(self) -> bool:
        """Whether nothing takes its place, and it can't just be left out either."""
        return self.today.startswith("nothing") and not self.today.startswith("nothing to do")


TF_CONFIG = Counterpart("the same: replicax launch sets it, and replicax.initialize_workers() reads it")
"""What takes the place of the environment variable."""


STAYS_FOR_FIT = "the same for model.fit, with KERAS_BACKEND=jax; in a loop of your own "
"""How the answer for each of Keras' callbacks begins."""


def paths(table: dict[str, str]) -> dict[str, str]:
    """The last name of each dotted path, after ``tf.``, in a table of names by module."""
    return {f"{module}.{name}".lstrip("."): name for module, names in table.items() for name in names.split()}


_MODERN, _TOWER, _AROUND_TOWERS, _RUNS = paths(MODERN), paths(TOWER), paths(AROUND_TOWERS), paths(RUNS)
OF_STEPS = paths(STEPS)


def _dotted(name: str) -> str:
    return f"{replicax._PLACES.get(name, 'replicax')}.{name}"


def public(name: str) -> Any:
    """What a public name stands for; ``None`` if it is none."""
    return pkgutil.resolve_name(_dotted(name)) if name in replicax._PLACES else None


def of_path(path: str, is_tower: bool = False) -> Counterpart | None:
    """The counterpart of ``tf.<path>``, such as ``distribute.ReduceOp.SUM``; ``None`` if it is none of distribution.

    The program is written for the tower API if it ``is_tower``.
    """
    if path in _MODERN:
        return _of_name(_MODERN[path], is_tower and path == "VariableAggregation")
    if path in _RUNS:
        today, differs = TODAY_OF_RUNS[_RUNS[path]], DIFFERENCES_OF_RUNS.get(_RUNS[path])
        if path.startswith("keras.callbacks."):
            today = f"{STAYS_FOR_FIT}{today}"
            return Counterpart(f"{today} ({differs})" if differs else today)
        return Counterpart(today, differs=differs)
    if path in OF_STEPS and not (is_tower and path in _AROUND_TOWERS):
        return Counterpart(TODAY_OF_STEPS[OF_STEPS[path]], differs=DIFFERENCES_OF_STEPS.get(OF_STEPS[path]))
    if path in _TOWER:
        return _of_name(_TOWER[path], is_tower)
    if is_tower and path in _AROUND_TOWERS:
        return _of_name(_AROUND_TOWERS[path], is_tower)
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


def of_tower_name(name: str) -> Counterpart:
    """The counterpart of a name of the tower API, which ``replicax.compat.v1`` has."""
    modern = TODAY_OF_TOWERS.get(name) or NAMES["replicax"].get(name) or _dotted(name)
    other = _TAKES_SOMETHING_ELSE.get(name)
    today = f"{V1}.{name}, {other}" if other else f"{V1}.{name}"
    return Counterpart(today, other is None, TOWER_DIFFERENCES.get(name), modern)


def _of_name(name: str, is_tower: bool) -> Counterpart:
    if is_tower and name in v1.__all__:
        return of_tower_name(name)
    modern = NAMES["replicax"].get(name) or TODAY_OF_TOWERS.get(name) or _dotted(name)
    return Counterpart(
        modern, bool(re.fullmatch(r"replicax(\.\w+){1,2}", modern)) and not is_tower, DIFFERENCES.get(name)
    )


def of_member(kind: str, name: str, is_tower: bool = False) -> Counterpart | None:
    """The counterpart of a member of a value of a kind, of those in ``MEMBERS`` and ``TOWER_MEMBERS``.

    It is that of the tower API if it ``is_tower``; ``None`` if it was not a public one.
    """
    if name in MEMBERS_OF_RUNS.get(kind, ()):
        today, differs = MEMBERS_OF_RUNS[kind][name]
        return Counterpart(today, differs=differs)
    was_tower = name in TOWER_MEMBERS.get(kind, "").split()
    if not was_tower and name not in MEMBERS.get(kind, "").split() and name not in NAMES.get(kind, {}):
        return None
    if not (is_tower and was_tower and any(has(each, name) for each in TOWER_CLASSES.get(kind, ()))):
        return _today(kind, name)
    key = f"{kind}.{name}"
    modern = Counterpart(TODAY_OF_TOWERS[key]) if key in TODAY_OF_TOWERS else _today(kind, name)
    receiver = _RECEIVERS.get(kind, "context." if kind.endswith("Context") else "") if modern.is_renaming else ""
    return Counterpart("the same", modern=f"{receiver}{modern.today}", differs=TOWER_DIFFERENCES.get(key))


def _today(kind: str, name: str) -> Counterpart:
    differs = DIFFERENCES.get(f"{kind}.{name}")
    if name in NAMES.get(kind, {}):
        today = NAMES[kind][name]
        if kind == "Aggregation":
            return Counterpart(today.rpartition(".")[2], True, differs)
        bare = re.fullmatch(rf"(?:{re.escape(_RECEIVERS.get(kind, ''))})([\w.]+)", today)
        return Counterpart(bare[1] if bare else today, bare is not None, differs)
    givers = [giver for giver, given in KINDS.items() if given == kind]
    owner = next((public(each) for each in (kind, *givers) if each in replicax._PLACES), None)
    if f"{kind}.{name}" in TODAY_OF_TOWERS and not has(owner, name):
        return Counterpart(TODAY_OF_TOWERS[f"{kind}.{name}"])
    plain = name.removeprefix("experimental_")
    found = next((each for each in (plain, name) if owner is not None and has(owner, each)), None)
    if found is None:
        told = [NAMES["replicax"][giver] for giver in givers if giver in NAMES["replicax"]]
        assert told or owner is None, f"{kind}.{name} is neither in replicax nor in old_names"
        return Counterpart(told[0] if told else "nothing")
    return Counterpart(found, True, differs or DIFFERENCES.get(f"{kind}.{found}"))


def has(owner: Any, name: str) -> bool:
    """Whether instances of a class have an attribute, by the class itself or by what its documentation says."""
    documented = re.search(rf"^ +(\w+, )*{name}(, \w+)*:", owner.__doc__ or "", re.MULTILINE)
    return hasattr(owner, name) or documented is not None


def keywords(kind: str | None, name: str) -> dict[str, str]:
    """The old keyword arguments of what a name is today, with what they have become."""
    owner = replicax if kind is None else public(kind)
    names = (name.removeprefix("experimental_"), name)
    plain = next((n for n in names if (n in replicax._PLACES if kind is None else hasattr(owner, n))), None)
    return ARGUMENTS.get(f"{plain}.__init__" if kind is None else f"{kind}.{plain}", {})
