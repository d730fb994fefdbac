"""The communicator of a compiled step: collectives over the mesh's replica axis, traced once for all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from replicax import collectives
from replicax.collectives import COMBINED, Communicator, ReduceOp, ReplicaExamples
from replicax.communication import CommunicationOptions
from replicax.devices.host_values import as_array
from replicax.devices.mesh import REPLICA_AXIS
from replicax.execution.program.marks import asks_p
from replicax.pytrees import is_leaf, registered
from replicax.system import registry
from replicax.values import Local, PerReplica, rebuilt


class SpmdCommunicator:
    """See :class:`replicax.collectives.Communicator`. Everything here only records operations."""

    timeout: float | None = None  # the longest that a collective has, in seconds; ``None`` if none has one
    sums_own = False  # whether the step has sums of which some operands may have been reduced already

    def __init__(self, examples: ReplicaExamples | None, options: CommunicationOptions | None) -> None:
        self.examples = examples
        self._options = options

    def replica_id(self) -> Any:
        return lax.axis_index(REPLICA_AXIS)

    def all_reduce(self, op: ReduceOp, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        return collectives.all_reduce(op, arrays, self._noted(options))

    def sum_unless_reduced(self, arrays: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        self.sums_own = True
        return collectives.sum_unless_reduced(arrays, self._noted(options))

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        return collectives.all_gather(array, axis, self._noted(options))

    def _noted(self, options: CommunicationOptions | None) -> CommunicationOptions | None:
        options = self._options if options is None else options
        if options is not None and options.timeout_seconds is not None:
            self.timeout = max(self.timeout or 0.0, options.timeout_seconds)
        return options

    def from_first(self, array: Any) -> Any:
        return collectives.from_first(array, self._noted(None))

    def add_up(self, count: int) -> int:
        return count * lax.axis_size(REPLICA_AXIS)  # one program for all: they have the same shapes

    def has_examples_along(self, value: Any, dim: int, what: str, **errors: str) -> Any:
        assert self.examples is not None
        question = registry.padding_question()(dim, what, self.examples.mask.shape[0], **errors)
        return asks_p.bind(lax.stop_gradient(value), question=question)

    def components(self, value: Any) -> Sequence[Any]:
        stacked = collectives.all_gather(as_array(value, COMBINED)[None], 0, self._noted(None))
        return [stacked[i] for i in range(stacked.shape[0])]

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        computed = [isinstance(leaf, jax.core.Tracer) for leaf in leaves_of((args, kwargs))]
        return merge_here(self, lax.axis_size(REPLICA_AXIS), fn, args, kwargs, computed)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a pytree, with variables whole."""
    return jax.tree_util.tree_leaves(registered(tree), is_leaf=is_leaf)


def merge_here(
    communicator: Communicator,
    count: int,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    computed: Sequence[bool],
) -> Any:
    """Call ``fn`` in cross-replica context, as one of ``count`` replicas, with computed leaves as ``PerReplica``.

    ``computed`` says for each leaf of ``(args, kwargs)`` whether the step has computed it.
    """
    if count > 1 or communicator.examples is not None:
        leaves, tree = jax.tree_util.tree_flatten(registered((args, kwargs)), is_leaf=is_leaf)
        wrapped = [PerReplica(Local(x, communicator)) if c else x for x, c in zip(leaves, computed, strict=True)]
        args, kwargs = rebuilt(tree, wrapped)
    return own_components(registered(fn(*args, **kwargs)))


def own_components(tree: Any) -> Any:
    """A pytree of cross-replica context as the replica sees it that is being traced."""

    def one(leaf: Any) -> Any:
        return leaf.form.value if isinstance(leaf, PerReplica) and isinstance(leaf.form, Local) else leaf

    return jax.tree_util.tree_map(one, tree, is_leaf=is_leaf)
