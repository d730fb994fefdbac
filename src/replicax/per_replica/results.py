"""Combines the outcomes of the replicas: checks that they agree where they must, results and written values.

Several workers compare replicas by digests of their arrays, which they exchange. So every worker has the digests of all
replicas, comes to the same result and raises the same error, although it has the arrays of its own replicas only. A
single worker compares the arrays.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import jax

from replicax import _jax
from replicax.devices.arrays import local_array, put_among
from replicax.errors import LocalityError
from replicax.execution.replica_values import mirror, place_components, stack
from replicax.locality import Locality, T
from replicax.padding.example_places import Place, joined
from replicax.padding.questions import dim_of_examples
from replicax.per_replica.replica_store import PerReplicaStore, local_value
from replicax.pytrees import are_equal, is_leaf, registered
from replicax.values import Components, ExampleMask, PerReplica, rebuilt
from replicax.variables.collection import VariableCollection, check_all_read
from replicax.variables.layout import Mirrored
from replicax.variables.variable import Variable
from replicax.workers.codec import declared, dumps, loads
from replicax.workers.digests import Digest, digest, unabridged
from replicax.workers.replicas import Replicas

declared(Locality)


@declared
@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One leaf of a replica's result."""

    digest: Digest | None  # of an array
    locality: Locality | None = None
    is_of_step: bool = False
    place: Place = None  # of its examples
    token: Any = None  # of another object, as other workers can compare it


@declared
@dataclasses.dataclass(frozen=True)
class _Check:
    """A value whose locality is checked."""

    digest: Digest | None  # None if no check refuses its locality
    locality: Locality
    refused: frozenset[Locality]
    message: str


@declared
@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one replica, as sent to every worker."""

    replica: int
    structure: str
    leaves: tuple[_Leaf, ...]
    mirrored: tuple[_Check, ...]
    differing: tuple[_Check, ...]
    written: dict[int, tuple[Digest | None, str | None]]
    """By the number of a variable: the value, if all replicas must have the same, and the message if they don't."""


def outcomes(returned: Sequence[Any], stores: Sequence[PerReplicaStore], replicas: Replicas) -> list[Outcome]:
    """The outcomes of all replicas, in their order; ``returned`` are the results of this worker's."""
    lockstep = replicas.lockstep
    mine = [_outcome(tree, store, lockstep.several) for tree, store in zip(returned, stores, strict=True)]
    return [
        outcome for theirs in lockstep.exchange("ends a step on the per-replica executor", mine) for outcome in theirs
    ]


def _outcome(returned: Any, store: PerReplicaStore, several: bool) -> Outcome:
    leaves, tree = jax.tree_util.tree_flatten(registered(returned), is_leaf=is_leaf)
    locality_of = store.localities.of
    digest_of = digest if several else unabridged  # without other workers the arrays themselves are compared

    def check(value: Any, refused: frozenset[Locality], text: str, always: bool) -> _Check:
        locality = locality_of(value)
        return _Check(digest_of(value) if always or locality in refused else None, locality, refused, text)

    def leaf_of(leaf: Any) -> _Leaf:
        if isinstance(leaf, jax.Array):
            place = None if store.places is None else store.places.of(leaf)
            return _Leaf(digest_of(leaf), locality_of(leaf), store.localities.is_of_step(leaf), place)
        return _Leaf(None, token=_token(leaf) if several else None)

    return Outcome(
        store.communicator.replica,
        str(tree),
        tuple(map(leaf_of, leaves)),
        tuple(check(*expected, always=True) for expected in store.mirrored),
        tuple(check(*expected, always=False) for expected in store.differing),
        {v.number: (None if v.is_stacked else digest_of(store.values[v]), text) for v, text in store.written.items()},
    )


def check_expectations(everyone: Sequence[Outcome]) -> None:
    """Check what one replica can't check alone."""
    for checks in zip(*(o.mirrored for o in everyone), strict=False):
        if not _equal([c.digest for c in checks]):
            raise LocalityError(checks[0].message)
    for checks in zip(*(o.differing for o in everyone), strict=False):
        if {c.locality for c in checks} <= checks[0].refused and _equal([c.digest for c in checks]):
            raise LocalityError(checks[0].message)


def merged(returned: Sequence[Any], everyone: Sequence[Outcome], replicas: Replicas, mask: ExampleMask | None) -> Any:
    """The result of ``run``: mirrored values plain, others as ``PerReplica``, with the ``mask`` of a padded batch."""
    for outcome in everyone:
        if outcome.structure != everyone[0].structure:
            raise ValueError(
                f"replicas must return the same structure: replica 0 has {everyone[0].structure}, replica "
                f"{outcome.replica} has {outcome.structure}"
            )
    flat = [jax.tree_util.tree_flatten(registered(tree), is_leaf=is_leaf) for tree in returned]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    everyones = zip(*(o.leaves for o in everyone), strict=True)
    results = []
    for mine, all_ in zip(columns, everyones, strict=True):
        padded, dim = (False, None) if mask is None else _where_examples_are(all_, mask.host.shape[1])
        value = _per_replica_value(mine, all_, replicas) if padded else _merged_leaf(mine, all_, replicas)
        results.append(PerReplica(value.form, mask, dim) if padded else value)
    return rebuilt(flat[0][1], results)


def _merged_leaf(mine: Sequence[Any], everyones: Sequence[_Leaf], replicas: Replicas) -> Any:
    first = mine[0]
    if len(everyones) == 1:
        return first
    if all(leaf.digest is not None for leaf in everyones):
        same = _equal([leaf.digest for leaf in everyones])
        if same and not any(leaf.is_of_step for leaf in everyones):
            return first
        if same and all(leaf.locality is not T for leaf in everyones):
            devices = [replicas.worker_devices[i] for i in replicas.local_replicas]
            whole = mirror([jax.device_put(v, d) for v, d in zip(mine, devices, strict=True)], replicas)
            # mirror loses a weak type. jax.device_put keeps it, but can't put values on other workers' devices.
            is_weak = getattr(first, "weak_type", False) and whole.is_fully_addressable
            return jax.device_put(first, whole.sharding) if is_weak else whole
        return _per_replica_value(mine, everyones, replicas)
    if not any(leaf.digest for leaf in everyones) and all(leaf is first or are_equal(leaf, first) for leaf in mine):
        tokens = [leaf.token for leaf in everyones]
        if _equal(tokens) or all(kind == "plain" and are_equal(loads(text), first) for kind, text in tokens):
            return first
    return PerReplica(Components(tuple(mine), replicas.local_replicas, replicas.num_replicas))


def _per_replica_value(mine: Sequence[Any], everyones: Sequence[_Leaf], replicas: Replicas) -> PerReplica:
    return place_components(mine, replicas, [leaf.digest[:2] for leaf in everyones if leaf.digest])


def _where_examples_are(everyones: Sequence[_Leaf], rows: int) -> tuple[bool, int | None]:
    """Whether a result may have padding, and along which dim."""
    if not all(leaf.digest is not None and leaf.locality is T for leaf in everyones):
        return False, None
    [_, shape, _] = everyones[0].digest or ("", (), b"")
    dim, unclear = dim_of_examples(joined([leaf.place for leaf in everyones]), shape, rows)
    return dim is not None or unclear, dim


def new_arrays(
    stores: Sequence[PerReplicaStore], everyone: Sequence[Outcome], of_strategy: VariableCollection
) -> list[tuple[Variable, jax.Array]]:
    """The variables that replicas have written, each with its new stored array."""
    numbers = dict.fromkeys(n for outcome in everyone for n in outcome.written)
    variables = {v.number: v for store in stores for v in store.written}
    written = [variables[n] if n in variables else of_strategy[n] for n in numbers]
    return [(v, _stored_array(v, stores, everyone)) for v in written]


def _stored_array(variable: Variable, stores: Sequence[PerReplicaStore], everyone: Sequence[Outcome]) -> jax.Array:
    replicas = variable.replicas
    devices = [replicas.worker_devices[s.communicator.replica] for s in stores]
    if variable.is_stacked:
        values = [
            s.values[variable] if variable in s.values else local_value(variable, s.communicator.replica)
            for s in stores
        ]
        values = [jax.device_put(v, d) for v, d in zip(values, devices, strict=True)]
        return put_among(stack(values, values[0].shape, replicas), variable.sharding)
    written = [outcome.written.get(variable.number) for outcome in everyone]
    old = None
    if not all(written):  # all workers know this, so all enter the collective that may be needed to read it
        check_all_read(variable)
        old = local_array(variable.from_storage())
    values = [
        s.values[variable] if variable in s.values else _jax.copy_on(d, old)
        for s, d in zip(stores, devices, strict=True)
    ]
    digest_of = digest if replicas.lockstep.several else unabridged
    unwritten = None if old is None else digest_of(old)
    if not _equal([w[0] if w else unwritten for w in written]):
        raise LocalityError(next(w[1] for w in written if w and w[1] is not None))
    if not isinstance(variable.layout, Mirrored) or variable.sharding.device_set != set(devices):
        return variable.to_storage(jax.device_put(values[0], devices[0]))
    # Each replica has it already, but other holders of the written array must not share it with the variable.
    copies = [_jax.copy_on(d, v) for d, v in dict(zip(devices, values, strict=True)).items()]
    return jax.make_array_from_single_device_arrays(variable.shape, variable.sharding, copies)


# --- comparing ------------------------------------------------------------------------------------------


def _equal(items: Sequence[Any]) -> bool:
    return all(item == items[0] for item in items)


def _token(value: Any) -> tuple[str, Any]:
    """A value by which another worker can compare its own object: the object, if it is plain, or else a digest."""
    if isinstance(value, Variable):
        return "variable", value.number
    try:
        return "plain", dumps(value)
    except TypeError:
        pass
    try:
        return "pickled", _jax.digested(pickle.dumps(value))
    except Exception:
        return "object", type(value).__qualname__
