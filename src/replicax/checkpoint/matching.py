"""Checks whether a checkpoint fits the objects to restore, and describes the differences."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.checkpoint.array_leaves import DeviceArrayLeaf, HostArrayLeaf
from replicax.checkpoint.leaves import IteratorLeaf, Leaf, Leaves, OptimizerLeaf, names_by_place
from replicax.checkpoint.storage.index import (
    ArrayEntry,
    ArrayKind,
    Entry,
    IteratorEntry,
    OptimizerEntry,
    PlainEntry,
)

_MOST_LINES = 20
_NUMBERS = {bool: np.bool_, int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}


def check_fits(leaves: Leaves, entries: Mapping[str, Entry], path: str, optional: tuple[str, ...]) -> None:
    """Raise a ValueError that lists all differences, unless each leaf has its entry, of the same kind, and vice versa.

    Those whose names begin with one of ``optional`` may be on one side only.

    A step makes JAX arrays of numbers and of NumPy's arrays. So a number fits an array of shape () of its kind that was
    saved, and the other way round; so do a NumPy array and one of the dtype that JAX has for its own.
    """
    optimizers = {
        name: (leaf, entry)
        for name, leaf in leaves.of(OptimizerLeaf).items()
        if isinstance(entry := entries.get(name), OptimizerEntry)
    }
    slots = tuple(f"{name}/" for name, (_, entry) in optimizers.items() if not entry.built)  # those here are reset
    ours = [n for n in leaves.by_name if n not in entries and not n.startswith(slots or "\0")]
    theirs = [name for name in entries if name not in leaves.by_name]
    missing, extra = ([n for n in names if not n.startswith(optional)] for names in (ours, theirs))
    different = []
    for name, leaf in leaves.by_name.items():
        if name in entries and (what := _difference(leaf, entries[name])) is not None:
            different.append(f"{name}: {what}")
    moved = [text for name, pair in optimizers.items() for text in _moved_slots(name, *pair, leaves, entries)]
    different += moved
    if not (missing or extra or different):
        return
    lines = [
        *listed("in the checkpoint there is no", [_missing(n, leaves.by_name[n], extra) for n in missing]),
        *listed("the checkpoint also has", [f"{name}, {_in_words(entries[name])}" for name in extra]),
        *listed("they differ in", different),
    ]
    hint = _hint(leaves, missing, extra, different)
    if moved:
        hint += "\nGive an optimizer its variables in the order of the run that was saved, and new ones after these."
    raise ValueError(
        f"the checkpoint {path} does not fit the objects that it is to be restored into:\n" + "\n".join(lines) + hint
    )


def _moved_slots(
    name: str, leaf: OptimizerLeaf, entry: OptimizerEntry, leaves: Leaves, entries: Mapping[str, Entry]
) -> Iterator[str]:
    """The places where an optimizer, whose slots are named by place, had another variable when it was saved."""
    saved, here = names_by_place(entry.parameters), leaves.arrays()
    for place, now in names_by_place(leaf.entry(leaves.names_of_variables).parameters).items():
        was = saved.get(place, now)  # perhaps another name of the variable
        is_other = was in here and here[was].owner is not here[now].owner
        if was != now and (is_other or (now in entries and entries[now] != entries.get(was))):
            yield f"{name}, variable {place}: saved was {was}, here is {now}"


def _difference(leaf: Leaf, entry: Entry) -> str | None:
    same: Any = (PlainEntry, PlainEntry), (IteratorLeaf, IteratorEntry), (OptimizerLeaf, OptimizerEntry)
    kind: Any = getattr(leaf, "kind", None)
    if isinstance(entry, ArrayEntry):
        fits = entry.kind == kind or (isinstance(leaf, PlainEntry) and _is_number_as(leaf.value, entry.kind))
        fits = fits or (isinstance(leaf, HostArrayLeaf) and entry.kind == _as_in_jax(kind))
        fits = fits or (isinstance(leaf, DeviceArrayLeaf) and _as_in_jax(entry.kind) == kind)
    elif isinstance(entry, PlainEntry) and kind is not None:
        fits = _is_number_as(entry.value, kind) and _is_in_range(entry.value, kind.numpy_dtype)
    else:
        fits = any(isinstance(leaf, ours) and isinstance(entry, theirs) for ours, theirs in same)
    return None if fits else f"saved was {_in_words(entry)}, here is {_in_words(leaf)}"


def _as_in_jax(kind: ArrayKind) -> ArrayKind:
    """The kind of the array that a step makes of one of NumPy's; that of another is the same."""
    if kind.is_weak is not False:
        return kind
    return dataclasses.replace(kind, dtype=jax.dtypes.canonicalize_dtype(kind.numpy_dtype).name)


def _is_number_as(plain: Any, kind: ArrayKind) -> bool:
    """Return whether a plain value is a number as those in arrays of a kind, which have shape ()."""
    number = _NUMBERS.get(type(plain))
    return number is not None and kind == ArrayKind((), kind.dtype) and bool(jnp.issubdtype(kind.numpy_dtype, number))


def _is_in_range(number: Any, dtype: np.dtype[Any]) -> bool:
    if type(number) is not int:
        return True
    limits = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    return bool(limits.min <= number <= limits.max)


def _in_words(one: Leaf | Entry) -> str:
    if isinstance(one, PlainEntry):
        return f"the plain value {one.value!r}"
    if isinstance(one, IteratorLeaf | IteratorEntry):
        return "an iterator"
    if isinstance(one, OptimizerLeaf | OptimizerEntry):
        return "an optimizer"
    return str(one.kind)


def _missing(name: str, leaf: Leaf, extra: list[str]) -> str:
    near = difflib.get_close_matches(name, extra, 1, 0.75) if len(extra) < 1000 else []
    return f"{name}, {_in_words(leaf)}" + (f" (did you rename {near[0]}?)" if near else "")


def listed(what: str, items: Sequence[str], most: int = _MOST_LINES) -> list[str]:
    """Lines of a message: one for each item, at most so many, and how many there are beside these."""
    lines = [f"  {what} {item}" for item in items[:most]]
    return lines if len(items) <= most else [*lines, f"  … and {len(items) - most} more"]


def _hint(leaves: Leaves, missing: list[str], extra: list[str], different: list[str]) -> str:
    hints = []
    for name in leaves.of(OptimizerLeaf):
        if any(other.startswith(f"{name}/") for other in (*missing, *extra)):
            hints.append(
                f"{name} has other state than was saved: is it another transformation, or was it built for other "
                "variables?"
            )
    if any("replicas' copies" in text for text in different):
        hints.append(
            "The copies of an on-read variable without aggregation, or of bools with aggregation sum, belong to so "
            "many replicas; to restore it onto other numbers give it an aggregation, or an integer dtype."
        )
    if missing or extra:
        hints.append("To restore only what is in both: restore(path, partial=True).")
    return "".join(f"\n{hint}" for hint in hints)
