"""Values that differ between replicas, as cross-replica code sees them.

A value that is the same on every replica (*mirrored*) needs no wrapper: it is an ordinary array. A value that
differs is a :class:`PerReplica`, which holds one *component* for each replica in one of four forms.
"""

from __future__ import annotations

import dataclasses
import html
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _jax
from replicax.devices.host_values import is_key
from replicax.errors import LocalityError, shortened
from replicax.pytrees import is_leaf, registered


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """All components in one global array ``[num_replicas, *shape]``, a slice on each replica's devices."""

    array: jax.Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Components that differ in size only, in one global array ``[num_replicas, *largest]``.

    Each component is at the start of its slice; the rest of the slice has no meaning.
    """

    array: jax.Array
    shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Components:
    """A tuple with one Python object for each replica: arrays of different dtypes or ranks, or other objects."""

    values: tuple[Any, ...]  # the components of this worker's replicas
    replicas: tuple[int, ...] | None = None  # the numbers of those replicas; ``None``: from 0
    count: int | None = None  # the number of replicas on all workers; ``None``: no others


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Local:
    """This replica's component, inside a step; ``communicator`` reaches the components of the others."""

    value: Any
    communicator: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExampleMask:
    """Marks the rows of a padded batch that are examples."""

    array: jax.Array  # bool ``[num_replicas, rows]``, a slice on each replica's device; ``False`` is padding
    count: jax.Array  # the number of examples of all replicas: an int32 scalar on all their devices
    host: np.ndarray  # the same as ``array``, on the host

    @property
    def is_full(self) -> bool:
        """Whether there is no padding."""
        return bool(self.host.all())

    def same_as(self, other: ExampleMask) -> bool:
        """Whether it marks the same rows."""
        return self is other or np.array_equal(self.host, other.host)


Scale = Literal["mean", "ragged mean", "share"]
"""The kind of a number: the mean over one replica's own examples, or its share of the mean over the global batch."""


class PerReplica:
    """One component for each replica: ``run`` returns it for a value that may differ between replicas.

    Use it through the strategy: pass it to ``strategy.run`` (each replica gets its own component), combine it with
    ``strategy.reduce`` or ``strategy.gather``, or take it apart with ``strategy.local_results``. It is not an array,
    and JAX functions raise an error for it. It prints its values if they are scalars or short vectors,
    and formats as a number (``f"{loss:.3f}"``) if all replicas have the same.

    Attributes:
      form: how the components are held; see the classes of this module. Not for use outside Replicax.
      mask: which rows are examples, if the value was computed from a padded batch and may have padding.
      dim: the dim of a component along which the examples lie; ``None`` if unknown.
      scale: ``"mean"`` if it is the mean over each replica's own examples (``"ragged mean"`` if replicas
        have different numbers of them), ``"share"`` if it is each replica's share of the mean over the global batch;
        ``None`` if none of these is certain.

    With several workers each worker has the components of its own replicas.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> ids = strategy.run(lambda: replicax.get_replica_context().replica_id_in_sync_group * 10)
    >>> ids
    PerReplica(int32[], 2 replicas: 0, 10)
    >>> [int(x) for x in strategy.local_results(ids)]
    [0, 10]
    """

    __slots__ = ("__weakref__", "_real", "_values", "dim", "form", "mask", "scale")

    def __init__(
        self,
        form: Stacked | Ragged | Components | Local,
        mask: ExampleMask | None = None,
        dim: int | None = 0,
        scale: Scale | None = None,
    ) -> None:
        self.form = form
        self.mask = mask
        self.dim = dim
        self.scale = scale
        self._values: tuple[Any, ...] | None = None
        self._real: tuple[Any, ...] | None = None

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this worker's replicas, in their order, each on its replica's (first) device."""
        if self._values is None:
            match self.form:
                case Stacked(array):
                    with _jax.outside_tracing():  # they are kept
                        self._values = tuple(x[0] for x in components_in(array).values())
                case Ragged(array, shapes):
                    with _jax.outside_tracing():
                        self._values = tuple(_start_of(x, shapes[i]) for i, x in components_in(array).items())
                case Components(values):
                    self._values = values
                case Local():
                    raise TypeError(
                        "the components of this PerReplica value are not known while a step is traced: "
                        "use strategy.local_results(value), which gathers them on every replica"
                    )
            for component in self._values:
                _containers[id(component)] = self
        return self._values

    @property
    def replicas(self) -> tuple[int, ...]:
        """The numbers of the replicas that :attr:`values` belong to."""
        match self.form:
            case Stacked(array) | Ragged(array):
                return tuple(i for s in slices_of(array) for i in _replicas_in(s, array))
            case Components(_, replicas) if replicas is not None:
                return replicas
        return tuple(range(len(self.values)))

    @property
    def count(self) -> int:
        """The number of replicas with a component, on all workers."""
        match self.form:
            case Stacked(array) | Ragged(array):
                return int(array.shape[0])
            case Components(_, _, count) if count is not None:
                return count
        return len(self.values)

    @property
    def real_values(self) -> tuple[Any, ...]:
        """The components without padding, if it is known which rows are padding."""
        if self.mask is None or self.dim is None or self.mask.is_full:
            return self.values
        if self._real is None:
            rows = [np.flatnonzero(self.mask.host[i]) for i in self.replicas]
            pairs = list(zip(self.values, rows, strict=True))
            with _jax.outside_tracing():
                self._real = tuple(jax.numpy.take(jax.numpy.asarray(v), r, axis=self.dim) for v, r in pairs)
            for component in self._real:
                _containers[id(component)] = self
        return self._real

    def __repr__(self) -> str:
        few = self._few_values()
        return self._described(": " + _few([text for _, text in few]) if few else "")

    def _repr_html_(self) -> str:
        """A table for notebooks, with a row for each replica."""
        few = self._few_values()
        rows = "".join(f"<tr><td>{replica}</td><td>{html.escape(text)}</td></tr>" for replica, text in few)
        table = f"<table><tr><th>replica</th><th>value</th></tr>{rows}</table>" if 0 < len(few) <= _MOST_ROWS else ""
        return f"<code>{html.escape(self._described() if table else repr(self))}</code>{table}"

    def _described(self, values: str = "") -> str:
        """A description without reading the values, followed by ``values``."""
        match self.form:
            case Stacked(array):
                shape = ",".join(map(str, array.shape[1:]))
                padded = ""
                if self.mask is not None:
                    padded = f", {int(self.mask.host.sum())} of {self.mask.host.size} rows are examples"
                return f"PerReplica({array.dtype.name}[{shape}], {array.shape[0]} replicas{padded}{values})"
            case Ragged(array, shapes):
                return f"PerReplica({_few([f'{array.dtype.name}[{_listed(shape)}]' for shape in shapes])}{values})"
            case Components(components):
                shown = [_shown(v) for v in components]
                if len(components) == self.count:
                    return f"PerReplica({_few(shown)}{values})"
                numbered = [f"{replica}: {text}" for replica, text in zip(self.replicas, shown, strict=True)]
                return f"PerReplica({_few(numbered)}; {self.count} replicas{values})"
            case Local(value):
                return f"PerReplica({_shown(value)} on this replica)"

    @_jax.public_call
    def _few_values(self) -> list[tuple[int, str]]:
        """This worker's replicas and their values if these are scalars or short vectors; otherwise an empty list."""
        match self.form:
            case Stacked(array):
                shapes, dtypes = (array.shape[1:],), [array.dtype]
            case Ragged(array, shapes):
                dtypes = [array.dtype]
            case Components(values) if values and all(map(_is_array, values)):
                shapes, dtypes = tuple(v.shape for v in values), [v.dtype for v in values]
            case _:
                return []
        is_short = max(map(len, shapes)) <= 1 and max(map(math.prod, shapes)) * min(self.count, 8) <= _MOST_NUMBERS
        if not is_short or any(map(is_key, dtypes)):
            return []
        try:
            with _jax.outside_tracing():
                on_host = [np.asarray(v) for v in self.real_values]
            return [(i, " ".join(str(v).split())) for i, v in zip(self.replicas, on_host, strict=True)]
        except RuntimeError:  # it was deleted, or is lost
            return []

    @_jax.public_call
    def __format__(self, spec: str) -> str:
        """Format it as a number if all replicas are on this worker and have the same value."""
        if not spec:
            return str(self)
        match self.form:
            case Local():
                raise TypeError(f"{self._described()} can't be formatted as {spec!r} inside a step")
        numbers = [v.item() if _is_array(v) and v.size == 1 else v for v in self.values]
        if len(numbers) == self.count and len(set(map(str, numbers))) == 1 and not _is_array(numbers[0]):
            return format(numbers[0], spec)
        raise TypeError(
            f"{self!r} has a value for each replica, so {spec!r} can't format it as one number. Combine them first: "
            "strategy.reduce('mean', value), or 'sum' for what is to be summed, also along an axis; or format each of "
            "strategy.local_results(value)"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            message = f"{self._described()} has no attribute {name!r}: it {_NO_ARRAY}"
            raise AttributeError(message, name=name, obj=self)

    @_jax.hiding_frames
    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{self._described()} {_NO_ARRAY}")

    @_jax.hiding_frames
    def __eq__(self, other: object) -> bool:
        """Whether it is the same object; it can't be compared with another value, element by element."""
        if self is not other and isinstance(other, PerReplica | int | float | complex):
            self._refuse()
        return self is other or NotImplemented

    __hash__ = object.__hash__

    @_jax.hiding_frames
    def _refuse_as_array(self) -> NoReturn:
        raise LocalityError(f"{self._described()} {_NO_ARRAY}")  # JAX would replace a TypeError by its own

    # JAX calls this before it raises its own error about the type; this error explains more.
    __jax_array__ = property(_refuse_as_array)
    __array__ = __bool__ = __float__ = __int__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __abs__ = __round__ = _refuse
    __getitem__ = __len__ = __iter__ = __contains__ = _refuse


_NO_ARRAY = (
    "holds one value for each replica and is not an array. Pass it to a step through "
    "strategy.run(step, args=(value,)), combine it with strategy.reduce(op, value, axis), or take it apart with "
    "strategy.local_results(value)."
)


def _shown(component: Any) -> str:
    """A short description of a component: dtype and shape of an array, the ``repr`` of another object."""
    if _is_array(component):
        return f"{component.dtype.name}[{_listed(component.shape)}]"
    return shortened(repr(component), _MOST)


def _is_array(component: Any) -> bool:
    return isinstance(component, jax.Array | np.ndarray) and not isinstance(component, jax.core.Tracer)


def _listed(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def _few(shown: list[str]) -> str:
    """The components' descriptions; of more than 8, the first and the last ones."""
    if len(shown) > 8:
        shown = [*shown[:4], "…", *shown[-2:]]
    return ", ".join(shown)


_MOST = 60
"""How many characters of a component other than an array are shown."""

_MOST_NUMBERS, _MOST_ROWS = 16, 16
"""How many numbers are shown on a line, and how many replicas in a table."""


def _start_of(piece: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The component of that shape at the start of a replica's slice ``[1, *largest]``."""
    return jax.lax.slice(piece, (0,) * piece.ndim, (1, *shape)).reshape(shape)


def slices_of(array: jax.Array) -> list[Any]:
    """The shards of a stacked array that are its slices on this worker's replicas (their first devices), in order."""
    slices = {s.index[0].start or 0: s for s in reversed(array.addressable_shards)}
    if any(s.data.shape[1:] != array.shape[1:] for s in slices.values()):  # in parts, over the logical devices
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding)
        return slices_of(jax.device_put(array, sharding.update(spec=PartitionSpec(sharding.spec[0]))))
    return [slices[start] for start in sorted(slices)]


def _replicas_in(piece: Any, array: jax.Array) -> range:
    """The replicas that have a component in a shard of a stacked array.

    The data of a shard may have more rows if they have no elements: JAX gives some constants the whole shape.
    """
    return range(array.shape[0])[piece.index[0]]


def components_in(array: jax.Array) -> dict[int, jax.Array]:
    """The components ``[1, *shape]`` in a stacked array of this worker's replicas, by number, on their devices."""
    found: dict[int, jax.Array] = {}
    for piece in slices_of(array):
        n = len(piece.data)
        parts = [piece.data] if n == 1 else jax.lax.split(piece.data, (1,) * n)
        found |= zip(_replicas_in(piece, array), parts, strict=False)
    return found


# A component is held by its container, so while the container lives the id is the component's.
_containers: weakref.WeakValueDictionary[int, PerReplica] = weakref.WeakValueDictionary()


def container_of(value: Any) -> Any:
    """The ``PerReplica`` that ``value`` is a component of, if it still exists; otherwise ``value`` itself."""
    container = _containers.get(id(value))
    if container is not None and any(v is value for v in (*container.values, *(container._real or ()))):
        return container
    return value


def regroup(
    trees: Sequence[Any],
    *,
    always_wrap: bool = False,
    replicas: tuple[int, ...] | None = None,
    count: int | None = None,
) -> Any:
    """Merge one pytree per replica into one pytree of :class:`PerReplica` leaves; a ValueError if structures differ.

    A leaf that is the same object on every replica stays unchanged (unless ``always_wrap``). Every other leaf becomes a
    ``PerReplica`` with a component for each replica. If the trees are not those of all replicas, ``replicas`` has their
    numbers, and ``count`` is the number of replicas on all workers.
    """
    if not trees:
        raise ValueError("regroup: trees is empty: pass one pytree for each replica")
    flat: list[tuple[list[Any], Any]] = [
        jax.tree_util.tree_flatten(registered(tree), is_leaf=is_leaf) for tree in trees
    ]
    treedef = flat[0][1]
    numbers = replicas or tuple(range(len(trees)))
    for replica, (_, other) in zip(numbers, flat, strict=True):
        if other != treedef:
            raise ValueError(
                f"replicas must agree on the structure of a value: replica {numbers[0]} has {treedef}, "
                f"replica {replica} has {other}"
            )
    merged = [
        leaves[0]
        if not always_wrap and all(leaf is leaves[0] for leaf in leaves)
        else PerReplica(Components(tuple(leaves), replicas, count))
        for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return rebuilt(treedef, merged)


def rebuilt(tree: Any, leaves: Sequence[Any]) -> Any:
    """The pytree of these leaves, of which some may be ``PerReplica`` or variables.

    The error of a class that wants arrays says what to do. Part of each call of a step that is known.
    """
    try:
        return tree.unflatten(leaves)
    except Exception as error:
        if any(type(leaf) is PerReplica or is_leaf(leaf) for leaf in leaves):
            error.add_note(f"A pytree class was rebuilt around PerReplica values or variables. {USE_LEAVES}")
        raise


USE_LEAVES = (
    "Use its arrays, jax.tree.leaves(value), in its place, and make the value of them inside the step, by "
    "jax.tree.unflatten; or let the class, when it is rebuilt, take whatever it is given (no __init__, no checks), as "
    "JAX asks, too."
)


def unwrap(tree: Any, replica: int) -> Any:
    """The pytree of one replica: its component of each ``PerReplica``; other leaves unchanged.

    Raises:
      ValueError: it is no replica of this worker.

    >>> from replicax.values import regroup, unwrap
    >>> unwrap(regroup([{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]), replica=1)
    {'a': 2, 'b': 'x'}
    """
    return jax.tree_util.tree_map(
        lambda leaf: component(leaf, replica) if isinstance(leaf, PerReplica) else leaf,
        registered(tree),
        is_leaf=is_leaf,
    )


def component(value: PerReplica, replica: int) -> Any:
    """The component of one of this worker's replicas."""
    if replica not in value.replicas:
        raise ValueError(f"replica must be one of this worker's, {value.replicas}, got {replica!r}")
    return value.values[value.replicas.index(replica)]


def padded(stacked: Any, mask: ExampleMask) -> Any:
    """An element of a padding dataset: the pytree with ``PerReplica`` leaves, which share ``mask``.

    ``stacked`` has arrays ``[num_replicas, rows, …]`` on the replicas' devices, also with one replica.
    """
    return jax.tree_util.tree_map(lambda array: PerReplica(Stacked(array), mask), registered(stacked))
