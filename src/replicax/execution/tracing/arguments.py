"""The arguments of a call: which are traced, which are static, and the key of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding

from replicax import _jax
from replicax.devices.arrays import put
from replicax.devices.host_values import check_integers, holds_no_numbers, own_copy
from replicax.devices.logical_axes import over_replicas
from replicax.devices.mesh import mirrored_sharding, per_replica_sharding
from replicax.errors import shortened
from replicax.execution.tracing.function_key import ByKey
from replicax.execution.tracing.module_numbers import module_numbers
from replicax.execution.tracing.object_attributes import ObjectKey
from replicax.locality import Locality, M, T
from replicax.pytrees import is_leaf, key_paths, register
from replicax.values import ExampleMask, Local, PerReplica, Ragged, Stacked
from replicax.variables import Variable

_STATIC = object()
_LOWEST, _HIGHEST = -(2**31), 2**31 - 1  # of int32: such an int fits in JAX's default integer dtype
_flatten = jax.tree_util.default_registry.flatten  # jax.tree_util.tree_flatten calls it

# Arguments are read at every call, mostly right after a program that has emptied the processor's caches. A check that
# takes 0.1 µs in a loop then takes 20 or 100 times as long (isinstance(x, jax.Array): 9 µs), so avoid checks.
_array_types: set[type] = {jax.ShapeDtypeStruct}
"""The types of concrete arrays seen so far, which are no tracers; and the one that ``extended.trace`` takes."""


class TracedKey(NamedTuple):
    """The key of a traced argument, by name. :attr:`Arguments.key` has plain tuples, which are made in less time."""

    locality: Locality
    shape: tuple[int, ...]
    dtype: Any
    is_weak: bool
    dim: Any = ()
    """The dim of the examples, if the argument is padded; ``None`` if it is unknown."""
    shapes: tuple[tuple[int, ...], ...] | None = None
    """The shape on each replica, if they differ."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """One replica's shape, with room for the largest."""
        return self.shape[1:] if self.locality is T else self.shape


class NotOneProgramError(ValueError):
    """The components of a ``PerReplica`` argument differ so that the step can't be one compiled program."""


class CantJoinError(ValueError):
    """The programs that replicas of different sizes run can't be one; the text says why."""


_AS_PLAIN_PYTHON = "RunOptions(executor='per_replica') runs it as plain Python."


def not_one_program(name: str, why: str) -> NotOneProgramError:
    """The error that a step can't be compiled for replicas whose arguments differ in size."""
    return NotOneProgramError(
        f"{name} can't run as one compiled program on replicas whose arguments differ in size, because {why}. "
        f"{_AS_PLAIN_PYTHON}"
    )


class Arguments:
    """The arguments of one call of a step.

    ``PerReplica`` values are traced as per-replica; arrays, NumPy arrays and scalars, ints, floats and complex
    numbers are traced as mirrored; all other leaves (bools, strings, other Python objects, variables, the numbers
    of modules) are static: the step sees the object itself, and another object means another program.
    """

    __slots__ = ("_statics", "_tree", "arrays", "is_ragged", "key", "mask")

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self._tree = _flatten((args, kwargs), is_leaf)
        self.arrays: list[Any] = []  # the traced values, in the order of the flattened arguments
        self._statics: list[Any] = []
        # Which rows are examples, if arguments are padded; its arrays are the last of ``arrays``.
        self.mask: ExampleMask | None = None
        self.is_ragged = False  # whether some arguments differ in size between replicas
        padded: list[tuple[int, ExampleMask, int | None]] = []
        keys: list[Any] = []
        for position, leaf in enumerate(leaves):
            cls: Any = type(leaf)
            if cls is PerReplica:
                form = leaf.form
                if type(form) is not Stacked:
                    if type(form) is not Ragged:
                        self._not_stacked(form, position)
                    self.is_ragged = True
                    self.arrays.append(form.array)
                    keys.append((T, form.array.shape, form.array.dtype, False, (), form.shapes))
                    continue
                array = form.array
                self.arrays.append(array)
                if leaf.mask is None:
                    keys.append((T, array.shape, array.dtype, False))
                else:
                    padded.append((position, leaf.mask, leaf.dim))
                    keys.append((T, array.shape, array.dtype, False, leaf.dim))
            elif cls is Variable:
                self._statics.append((position, leaf))
                keys.append((_STATIC, cls, leaf.slot))  # one for each variable, and compared without its ==
            elif cls in _array_types or isinstance(leaf, jax.Array):
                if cls not in _array_types:
                    self._check_concrete(leaf, position)
                self.arrays.append(leaf)
                keys.append((M, leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)))
            elif isinstance(leaf, (np.ndarray, np.generic)):
                self.arrays.append(leaf)
                dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
                if holds_no_numbers(dtype):
                    raise TypeError(
                        f"{path_of(self._tree, position)} is a NumPy array of dtype {leaf.dtype}, not of numbers: "
                        "pass numbers, such as ids, or capture the array in the step, where it is a Python object"
                    )
                if dtype != leaf.dtype:
                    check_integers(leaf, functools.partial(path_of, self._tree, position), dtype)
                keys.append((M, leaf.shape, dtype, False))
            elif cls is int or cls is float or cls is complex:
                if position in module_numbers(self._tree):
                    self._statics.append((position, leaf))
                    keys.append((_STATIC, cls, repr(leaf)))
                    continue
                if cls is int and not _LOWEST <= leaf <= _HIGHEST:
                    check_integers(leaf, functools.partial(path_of, self._tree, position))
                self.arrays.append(leaf)
                keys.append((M, (), jax.dtypes.canonicalize_dtype(cls), True))
            elif register(leaf):
                self.__init__(args, kwargs)  # type: ignore[misc]  # again, now that its container is known
                return
            elif _jax.is_mutable(leaf):
                raise is_a_mutable_array(self._tree, position)
            else:
                self._statics.append((position, leaf))
                keys.append((_STATIC, cls, leaf if cls in _jax.BY_VALUE else _static_key(leaf)))
        if padded:
            self.mask = common_mask(padded, self._tree)
            if self.is_ragged:
                raise NotOneProgramError(
                    "some arguments are padded and others differ in size between replicas, which can't be one compiled "
                    f"program. {_AS_PLAIN_PYTHON}"
                )
            self.arrays += [self.mask.array, self.mask.count]
            keys += [(T, self.mask.array.shape, np.dtype(bool), False), (M, (), np.dtype(np.int32), False)]
        self.key = (self._tree, tuple(keys))  # arguments with an equal key use the same program

    def traced(self, num_replicas: int) -> list[tuple[jax.ShapeDtypeStruct, Locality]]:
        """One replica's shape and dtype, and the locality, of each traced argument.

        Raises a ValueError if a ``PerReplica`` value has components for another number of replicas.
        """
        for position, key in enumerate(self.key[1]):
            if key[0] is T and key[1][0] != num_replicas:
                raise of_another_strategy(self._tree, position, key[1][0], num_replicas)
        return [
            (jax.ShapeDtypeStruct(k.local_shape, k.dtype, weak_type=k.is_weak), k.locality) for k in self._traced_keys
        ]

    def of_replicas(self, num_replicas: int) -> list[list[tuple[jax.ShapeDtypeStruct, Locality]]]:
        """The result of :meth:`traced` for each replica, with the replica's own shapes."""
        padded = self.traced(num_replicas)
        return [
            [
                (aval if k.shapes is None else aval.update(shape=k.shapes[replica]), locality)
                for k, (aval, locality) in zip(self._traced_keys, padded, strict=True)
            ]
            for replica in range(num_replicas)
        ]

    def example_dims(self) -> list[Any] | None:
        """For each traced argument but the mask, the dim of the examples; ``None`` if unknown, ``()`` if it has none.

        The result is ``None`` if no argument is padded.
        """
        if self.mask is None:
            return None
        return [k.dim for k in self._traced_keys[:-2]]

    def paths(self) -> list[str]:
        """The path of each traced argument: ``args[0]['x']``."""
        paths = key_paths(self._tree)
        return [_shown(paths, i) for i, key in enumerate(self.key[1]) if key[0] is not _STATIC]

    def rebuild(self) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
        """A function from the traced values to ``(args, kwargs)``, which keeps no array alive."""
        tree: Any = self._tree
        statics = dict(self._statics)

        def build(values: Sequence[Any]) -> tuple[Any, Any]:
            rest = iter(values)
            leaves = [statics[i] if i in statics else next(rest) for i in range(tree.num_leaves)]
            args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
            return args, kwargs

        return build

    def placed(self, mesh: jax.sharding.Mesh) -> list[Any]:
        """The traced values on the devices of ``mesh``; those on other devices are copied, and those of NumPy."""
        if not self.arrays:
            return []
        everywhere, along = mirrored_sharding(mesh), per_replica_sharding(mesh)
        keys = [key for key in self.key[1] if key[0] is not _STATIC] if self._statics else self.key[1]
        placed: list[Any] = []
        fitting = wanted = None  # a sharding that fits: to ask JAX takes 5 µs for each array
        for array, key in zip(self.arrays, keys, strict=True):
            sharding = along if key[0] is T else everywhere
            present = getattr(array, "sharding", None)
            if present is sharding or (sharding is wanted and present == fitting):
                pass
            elif present is None:  # NumPy arrays and numbers have none: jit places them
                if isinstance(array, np.ndarray):
                    array = own_copy(array)  # the step may begin later
                elif isinstance(array, jax.ShapeDtypeStruct):
                    name = self.paths()[len(placed)]
                    raise TypeError(f"{name} is a jax.ShapeDtypeStruct, which only strategy.extended.trace takes")
            elif present == sharding or _fits(present, sharding, array.ndim):
                fitting, wanted = present, sharding
            else:
                array = put(array, sharding)
            placed.append(array)
        return placed

    @property
    def _traced_keys(self) -> list[TracedKey]:
        return [TracedKey(*key) for key in self.key[1] if key[0] is not _STATIC]

    def _check_concrete(self, leaf: jax.Array, position: int) -> None:
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"{path_of(self._tree, position)} is being traced: strategy.run compiles the step itself, so call it "
                "outside jax.jit"
            )
        _array_types.add(type(leaf))

    def _not_stacked(self, form: Any, position: int) -> NoReturn:
        if isinstance(form, Local):
            raise ValueError(f"{path_of(self._tree, position)} belongs to a step that is still being traced")
        shown = ", ".join(_describe(v) for v in form.values)
        raise NotOneProgramError(
            f"{path_of(self._tree, position)} can't run as one compiled program, which needs arrays of one dtype and "
            f"rank on every replica; its components are {shown}. {_AS_PLAIN_PYTHON}"
        )


def is_a_mutable_array(tree: Any, position: int) -> TypeError:
    """The error that an argument is a mutable array."""
    return TypeError(
        f"{path_of(tree, position)} is a mutable array (jax.new_ref), which a step can't take: pass its value, "
        "ref[...], or keep the state in a replicax.Variable"
    )


def of_another_strategy(tree: Any, position: int, found: int, expected: int) -> ValueError:
    """The error that a ``PerReplica`` argument has components for another number of replicas."""
    return ValueError(
        f"{path_of(tree, position)} is a PerReplica of another strategy, with {found} components; this one has "
        f"{expected} replica(s)"
    )


def common_mask(padded: Sequence[tuple[int, ExampleMask, int | None]], tree: Any) -> ExampleMask:
    """The mask of a step with padded arguments: that of the first whose examples lie along a known dim.

    ``padded`` has the position and mask of each, and the dim of its examples, ``None`` if that is not known. A
    ValueError says which of them come from different batches.
    """
    (_, first, _), *others = [a for a in padded if a[2] is not None] or padded[:1]
    for position, mask, _ in others:
        if not mask.same_as(first):
            sizes = [f"{m.host.sum(1).tolist()} of {m.host.shape[1]} rows" for m in (first, mask)]
            raise ValueError(
                f"{path_of(tree, position)} comes from another padded batch than one before it: there examples "
                f"are in {sizes[0]}, here in {sizes[1]}. Pass values of one batch, or pad none (partial_batch='exact')."
            )
    return first


def _fits(present: jax.sharding.Sharding, wanted: NamedSharding, ndim: int) -> bool:
    """Return whether an array has the wanted sharding, perhaps split further over each replica's logical devices."""
    if isinstance(present, NamedSharding) and present.mesh == wanted.mesh:
        return over_replicas(present.spec) == wanted.spec
    return bool(present.is_equivalent_to(wanted, ndim))


def path_of(tree: Any, position: int) -> str:
    """``args[0]['x']``: the path in ``(args, kwargs)`` of the leaf at ``position``."""
    return _shown(key_paths(tree), position)


def _shown(paths: Sequence[tuple[Any, ...]], position: int) -> str:
    if position >= len(paths):
        return "the mask of the padded batch"
    first, *rest = paths[position]
    return ("args" if first.idx == 0 else "kwargs") + jax.tree_util.keystr(tuple(rest))


def now_per_replica(old: Any, new: Any) -> list[tuple[str, tuple[Any, Any]]]:
    """The arguments that were M in one :attr:`Arguments.key` and are T in another, if no others differ.

    Returns the path of each, and its shape and dtype on a replica.
    """
    (old_tree, old_keys), (new_tree, new_keys) = old, new
    if old_tree != new_tree or len(old_keys) != len(new_keys):
        return []
    changed = []
    for i, (a, b) in enumerate(zip(old_keys, new_keys, strict=True)):
        if a != b:
            if a[0] is not M or b[0] is not T:
                return []
            was, now = TracedKey(*a), TracedKey(*b)
            if (was.shape, was.dtype) != (now.local_shape, now.dtype):
                return []
            changed.append((i, (was.shape, was.dtype)))
    paths = key_paths(new_tree) if changed else []
    return [(_shown(paths, i), form) for i, form in changed]


def describe_difference(old: Any, new: Any) -> list[str]:
    """The differences between two :attr:`Arguments.key`, in words."""
    (old_tree, old_keys), (new_tree, new_keys) = old, new
    if old_tree != new_tree:
        return [f"the structure of the arguments: was {old_tree}, now {new_tree}"]
    if len(old_keys) != len(new_keys):
        return [
            f"whether the batch is padded: was {len(old_keys) > len(new_keys)}, now {len(new_keys) > len(old_keys)}"
        ]
    paths = key_paths(new_tree)
    return [
        f"{_shown(paths, i)}: {in_words(_describe_key(a), _describe_key(b))}"
        for i, (a, b) in enumerate(zip(old_keys, new_keys, strict=True))
        if a != b
    ]


def in_words(was: str, now: str) -> str:
    """The change of a part of a key that ``was`` and is ``now`` described so."""
    return f"was {was}, now {'another' if now == was else now}"


def _describe_key(key: Any) -> str:
    if key[0] is _STATIC:
        if isinstance(key[2], _jax.ById) and key[2].is_dead:
            return f"a {key[1].__name__} that is gone"
        if issubclass(key[1], ByKey):
            return repr(key[2])
        return "a variable" if key[1] is Variable else f"the Python value {shortened(repr(key[2]), 200)}"
    key = TracedKey(*key)
    if key.shapes is not None:
        return f"{np.dtype(key.dtype).name} of the shapes {', '.join(str(list(shape)) for shape in key.shapes)}"
    dtype = key.dtype if jax.numpy.issubdtype(key.dtype, jax.dtypes.extended) else np.dtype(key.dtype).name
    locality = "per replica" if key.locality is T else "mirrored"
    return f"{dtype}{list(key.local_shape)} ({locality}{', weakly typed' if key.is_weak else ''})"


def _describe(value: Any) -> str:
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def _static_key(leaf: Any) -> Any:
    if is_leaf(leaf):
        return leaf.key if isinstance(leaf, ByKey) else _jax.ById(leaf)
    return frozenset(leaf) if type(leaf) is set else ObjectKey(leaf)
