"""NNX objects inside a step: one replica's copies, whose changes leave the step in a form that all replicas agree on.

Metrics leave padding out. With several replicas

- random streams draw different numbers on each replica, except streams called ``params``;
- ``nnx.Optimizer.update`` sums the replicas' gradients, as :class:`~replicax.Optimizer` does, unless the step has
  all-reduced them;
- metrics use the values of all replicas;
- batch statistics are averaged after the step.

Everything else that a step assigns must be the same on every replica.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from replicax.context import current_replica
from replicax.devices.mesh import REPLICA_AXIS
from replicax.locality import M
from replicax.models.nnx_errors import ITS_OWN, structural
from replicax.training.extra_arguments import SHARES, of_parameters
from replicax.variables import Variable
from replicax.variables.store import current_store


class NNXStep:
    """One replica's copies of some objects, while its step runs."""

    def __init__(self, graphdef: Any, values: Sequence[Any], names: Sequence[str], has_rows: bool) -> None:
        self.objects: tuple[Any, ...] = nnx.graphlib.unflatten(graphdef, list(values))
        self._graphdef = graphdef
        self._names = names
        self._has_rows = has_rows
        self._replica = current_replica()
        leaves = nnx.graphlib.flatten(self.objects, graph=True)[1]
        self._given = [value_of(leaf) for _, leaf in leaves]
        self._undo = [_adapt(node) for node in nodes_in(self.objects)]

    def close(self, variables: Mapping[int, Variable]) -> None:
        """Assign the changes to ``variables``, those of leaves that have one, by the leaf's number.

        Raises a TypeError for a change that can't leave the step.
        """
        for undo in self._undo:
            undo()
        constants = {number: value for number, value in enumerate(self._given) if number not in variables}
        leaves = leaves_left(self.objects, self._graphdef, self._names, constants)
        changed: list[tuple[Variable, Any]] = []
        averaged: list[tuple[Variable, Any]] = []
        for number, variable in variables.items():
            leaf = leaves[number]
            value = value_of(leaf)
            if value is self._given[number]:
                continue
            statistic = isinstance(leaf, nnx.BatchStat) and jnp.issubdtype(variable.dtype, jnp.inexact)
            (averaged if statistic else changed).append((variable, value))
        if averaged and _several():
            averaged = self._means(averaged)
        for variable, value in [*changed, *averaged]:
            value = jnp.asarray(variable.checked(value), variable.dtype)
            current_store().write(variable, value, ITS_OWN.format(variable.describe()))

    def _means(self, statistics: Sequence[tuple[Variable, Any]]) -> list[tuple[Variable, Any]]:
        """The means of batch statistics over the replicas that have examples."""
        values = [value for _, value in statistics]
        counted = self._replica._communicator.add_up(int(self._has_rows))
        if counted in (0, self._replica._replicas.num_replicas):
            means = self._replica.all_reduce("mean", values)
        else:
            counting = values if self._has_rows else [jnp.zeros_like(value) for value in values]
            means = [total / counted for total in self._replica.all_reduce("sum", counting)]
        return [(variable, mean) for (variable, _), mean in zip(statistics, means, strict=True)]


def _several() -> bool:
    replicas = current_replica()._replicas  # not the context's number, which records that the user's step asks
    return bool(replicas.num_replicas > 1)


def value_of(leaf: Any) -> Any:
    """The array in a leaf of an object: an ``nnx.Variable``, or the array itself."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def name_of_leaf(path: tuple[Any, ...], objects: Sequence[Any]) -> str:
    """The name of a leaf: the class of its object, and its path there."""
    return "/".join([type(objects[path[0]]).__name__.lower(), *map(str, path[1:])])


def leaves_left(
    objects: tuple[Any, ...], graphdef: Any, names: Sequence[str], constants: Mapping[int, Any]
) -> list[Any]:
    """The leaves of ``objects`` after a step; raises a TypeError for a change that can't leave the step.

    ``graphdef`` is what was static before; ``names`` are those of the leaves. ``constants`` are the values before, by
    the leaf's number, of those leaves that are not arrays in an ``nnx.Variable``.
    """
    now, flat = nnx.graphlib.flatten(objects, graph=True)
    if now != graphdef:
        raise TypeError(structural(graphdef, now, names, [name_of_leaf(path, objects) for path, _ in flat]))
    for number, before in constants.items():
        if value_of(flat[number][1]) is not before:
            raise TypeError(
                f"{names[number]} was changed by the step, but it is not an array in an nnx.Variable, which "
                "is what can leave a step: make it one (self.x = nnx.Variable(…))"
            )
    return [leaf for _, leaf in flat]


def nodes_in(objects: tuple[Any, ...]) -> Iterator[Any]:
    """The NNX objects in ``objects``, each once."""
    seen: set[int] = set()
    for _, node in nnx.iter_graph(objects):
        if isinstance(node, nnx.Pytree) and id(node) not in seen:
            seen.add(id(node))
            yield node


def _adapt(node: Any) -> Callable[[], None]:
    """Adapt ``node`` to padding, several replicas and their executor; returns a function that undoes it."""
    if isinstance(node, nnx.Metric) and own_state(node):
        return _become(node, _common_metric(type(node)))
    if isinstance(node, nnx.BatchNorm) and (_several() or not _has_axis()):
        return _become(node, _ragged_norm(type(node)))
    if not _several():
        return lambda: None
    if isinstance(node, nnx.Optimizer):
        tx = node.tx
        vars(node)["tx"] = _summing(tx)
        return functools.partial(vars(node).__setitem__, "tx", tx)
    if isinstance(node, nnx.RngStream) and node.tag != "params":
        return _become(node, _own_stream(type(node)))
    return lambda: None


def _become(node: Any, other: type) -> Callable[[], None]:
    undo = functools.partial(object.__setattr__, node, "__class__", type(node))
    object.__setattr__(node, "__class__", other)
    return undo


# --- random streams ---------------------------------------------------------------------------------------------


@functools.cache
def _own_stream(kind: Any) -> Any:
    """A class of streams of ``kind`` that draw different numbers on each replica; their stored state is the same."""

    def call(self: Any) -> Any:
        return current_replica().random_key(kind.__call__(self))

    return type(kind.__name__, (kind,), {"__call__": call, "__doc__": kind.__doc__, "__module__": kind.__module__})


# --- batch norm ---------------------------------------------------------------------------------------------------


class _RaggedNorm(nnx.BatchNorm):
    """Comes before ``nnx.BatchNorm`` among the base classes, for replicas that differ in size, or have no rows.

    Their own statistics are NaN without rows. Those over the replicas are the mean of the replicas' means, which is not
    that of the batch, so with these the norm takes the whole batch instead; so it does on the per-replica executor,
    where ``jax.lax`` knows no axis of replicas.
    """

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        replica, rows = current_replica(), len(x)
        if self.use_running_average if use_running_average is None else use_running_average:
            return super().__call__(x, use_running_average, mask=mask)
        if self.axis_name != REPLICA_AXIS:
            if rows:
                return super().__call__(x, use_running_average, mask=mask)
            self.mean[...] += 0  # assigned as on the other replicas, and not counted
            self.var[...] += 0
            return super().__call__(x, True, mask=mask)
        add_up = replica._communicator.add_up
        if _has_axis() and not add_up(int(add_up(rows) != rows * replica._replicas.num_replicas)):
            return super().__call__(x, use_running_average, mask=mask)
        masks = None if mask is None else replica.all_gather(jnp.broadcast_to(mask, x.shape), axis=0)
        sizes = replica.all_gather(jnp.full(1, rows), axis=0)
        first = jnp.sum(jnp.where(jnp.arange(len(sizes)) < replica.replica_id_in_sync_group, sizes, 0))
        self.axis_name = None
        whole = super().__call__(replica.all_gather(x, axis=0), use_running_average, mask=masks)
        self.axis_name = REPLICA_AXIS
        return jax.lax.dynamic_slice_in_dim(whole, first, rows)


def _has_axis() -> bool:
    """Return whether ``jax.lax`` has collectives over the replicas here, as in compiled steps."""
    try:
        jax.lax.axis_size(REPLICA_AXIS)
    except NameError:
        return False
    return True


@functools.cache
def _ragged_norm(kind: Any) -> Any:
    bases = (_RaggedNorm,) if kind is nnx.BatchNorm else (kind, _RaggedNorm)
    return type(kind.__name__, bases, {"__doc__": kind.__doc__, "__module__": kind.__module__})


# --- optimizers ---------------------------------------------------------------------------------------------------


def _summing(tx: Any) -> Any:
    """``tx`` with an ``update`` that takes each replica's own gradients."""

    def update(gradients: Any, state: Any, parameters: Any = None, **extra: Any) -> Any:
        shares = {name: value for name, value in extra.items() if name in SHARES}
        own, tree = jax.tree_util.tree_flatten((gradients, shares))
        gradients, shares = jax.tree_util.tree_unflatten(tree, current_replica()._sum_unless_reduced(own))
        tree = jax.tree_util.tree_structure(parameters)
        functions = {name: of_parameters(fn, name, (), tree, True) for name, fn in extra.items() if callable(fn)}
        return tx.update(gradients, state, parameters, **{**extra, **shares, **functions})

    return optax.GradientTransformationExtraArgs(tx.init, update)


# --- metrics ------------------------------------------------------------------------------------------------------


def own_state(metric: Any) -> list[Any]:
    """The variables of ``metric``, without those of metrics inside it and of random streams."""
    inner = [node for _, node in nnx.iter_graph(metric) if isinstance(node, nnx.Metric) and node is not metric]
    others = {id(cell) for node in inner for _, cell in nnx.iter_graph(node)}
    cells = [cell for _, cell in nnx.iter_graph(metric) if isinstance(cell, nnx.Variable) and id(cell) not in others]
    return [cell for cell in cells if not isinstance(cell, nnx.RngState)]


def update_of_kind(metric: Any) -> Any:
    """The function ``update`` of the user's class of ``metric``, which may be adapted."""
    return inspect.unwrap(type(metric).update)


def names_taken(metric: Any) -> set[str]:
    """The names of the values that ``metric.update`` takes, of those that are for several metrics."""
    parameters = list(inspect.signature(update_of_kind(metric)).parameters.values())[1:]
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return names | ({metric.argname} if hasattr(metric, "argname") else set())


class _Unpadded(nnx.metrics.Average):
    """Comes before ``nnx.metrics.Average`` among the base classes of a metric, and leaves padding out."""

    def update(self, mask: Any = None, **values: Any) -> None:
        padding: Any = current_replica().example_mask
        if padding is not None:
            counted: Any = values.get(self.argname)
            rows = padding.shape[0]
            if not _is_batch(counted) or counted.shape[0] != rows:
                raise ValueError(
                    f"{type(self).__name__}.update: the batch is padded to {rows} rows, so there must be an entry for "
                    "each of them: padding could not be left out"
                )
            padding = padding.reshape(padding.shape + (1,) * (counted.ndim - 1))
            mask = jnp.broadcast_to(padding, counted.shape) if mask is None else jnp.where(padding, mask, False)
            vars(self)["_is_unpadded"] = True
        super().update(mask=mask, **values)


@functools.cache
def _common_metric(kind: Any) -> Any:
    """A class of metrics of ``kind`` whose update uses the values of all replicas, and gives each the same state."""
    is_sum = issubclass(kind, nnx.metrics.Average)

    @functools.wraps(kind.update)
    def update(self: Any, *args: Any, **values: Any) -> None:
        if kind.update.__module__ == nnx.metrics.Average.__module__:  # NNX's own; a MultiMetric gives them all values
            values = {name: value for name, value in values.items() if name in names_taken(self)}
        labels = [*(f"argument {i}" for i in range(len(args))), *values]
        arguments = [_whole_of_share(label, x) for label, x in zip(labels, [*args, *values.values()], strict=True)]
        is_alone = not _several() and current_replica().example_mask is None
        has_batch = not is_alone and any(map(_is_batch, arguments))
        if has_batch and not is_sum:
            arguments = _of_all(kind, arguments)
        args, values = tuple(arguments[: len(args)]), dict(zip(values, arguments[len(args) :], strict=True))
        if has_batch and is_sum:
            with _own_sums(self):
                super(common, self).update(*args, **values)
        else:
            with _own_classes(self):
                kind.update(self, *args, **values)

    bases = (_Unpadded,) if kind is nnx.metrics.Average else (kind, _Unpadded) if is_sum else (kind,)
    names = {"update": update, "_add_sums": add_sums, "_users_kind": kind}
    common: Any = type(kind.__name__, bases, {**names, "__doc__": kind.__doc__, "__module__": kind.__module__})
    return common


@contextlib.contextmanager
def _own_classes(metric: Any) -> Iterator[None]:
    """Give ``metric`` and the metrics inside it the classes that they have outside of steps, for a ``with`` block."""
    adapted = [node for node in nodes_in((metric,)) if hasattr(node, "_users_kind")]
    undo = [_become(node, node._users_kind) for node in adapted]
    try:
        yield
    finally:
        for become in undo:
            become()


def _is_batch(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.ndim > 0


def _whole_of_share(name: str, value: Any) -> Any:
    """The sum over the replicas of a scalar, which is this replica's share (as of a loss), unless it was reduced."""
    if not isinstance(value, jax.Array) or value.ndim or not _several():
        return value
    [value] = current_store().expect([value], frozenset({M}), _NO_SHARE.format(name))
    return current_replica()._sum_unless_reduced(value)


_NO_SHARE = (
    "the update of a metric: {} is a number that is the same on every replica. A number is taken for this replica's "
    "share, as replicax.compute_average_loss makes it, and the shares are added up, so it would count once for every "
    "replica. Make a share of it: replicax.scale_regularization_loss(value)"
)


@contextlib.contextmanager
def _own_sums(metric: Any) -> Iterator[None]:
    """Let a ``with`` block add this replica's values to a metric that consists of sums; then add all replicas' sums."""
    state = own_state(metric)
    before = [cell.get_raw_value() for cell in state]
    for cell, value in zip(state, before, strict=True):
        cell.set_raw_value(jnp.zeros_like(value))
    yield
    if not vars(metric).pop("_is_unpadded", False) and current_replica().example_mask is not None:
        raise ValueError(
            f"{type(metric).__name__}.update: the batch is padded, and nnx.metrics.Average leaves padding out in its "
            "update: call super().update(…), with a value for each example, or use drop_remainder"
        )
    own = [cell.get_raw_value() for cell in state]
    for cell, value in zip(state, before, strict=True):
        cell.set_raw_value(value)
    metric._add_sums(own)


def add_sums(metric: Any, own: Sequence[Any]) -> None:
    """Add the sums of all replicas, of which ``own`` are this one's, to a metric that consists of sums."""
    for cell, more in zip(own_state(metric), current_replica().all_reduce("sum", own), strict=True):
        cell.set_raw_value(cell.get_raw_value() + more)


def _of_all(kind: Any, given: Sequence[Any]) -> list[Any]:
    """The values of all replicas, for any other metric."""
    examples = current_replica()._communicator.examples
    if examples is not None:
        where, without = "the batch is padded", "drop_remainder"
        if examples.parts > 1:
            where, without = "a micro-batch of accumulated gradients may be padded", "update it in another step"
        raise ValueError(
            f"{kind.__name__}.update: {where}, and only metrics that are sums (nnx.metrics.Average and its subclasses) "
            f"can leave padding out: use one of these, or {without}"
        )
    return [current_replica().all_gather(value, axis=0) if _is_batch(value) else value for value in given]
