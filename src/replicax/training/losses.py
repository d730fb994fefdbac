"""Losses that are correct for any number of replicas."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from replicax import context
from replicax.collectives import mask_of_rows, share_p
from replicax.devices.host_values import as_array, check_numbers
from replicax.errors import ContextError, ShareWarning, warn


def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any | None = None,
    global_batch_size: int | jax.Array | None = None,
    *,
    reduce_dims: Literal["mean", "sum"] | None = None,
) -> jax.Array:
    """This replica's share of the mean loss over the *global* batch: its sum, divided by the global count.

    Call it at the end of a loss function. The replicas' shares add up to the mean, and the sum of their gradients,
    which ``Optimizer.apply_gradients`` computes, is the gradient of the mean. (A mean over the replica's own
    batch would be counted once for each replica.)

    Args:
      per_example_loss: ``[batch, …]``, this replica's losses. ``[batch]``, or see ``reduce_dims``.
      sample_weight: factors for the losses. Their shape is that of the losses, or its first dims. They change the
        sum, but not the count.
      global_batch_size: the number of examples of all replicas. By default the examples of this call are counted; a
        compiled step needs no collective for that, as the sizes of the batches are known. Pass the number of the whole
        batch if you add up the gradients of several calls, as with microbatches: otherwise each is a mean, and k of
        them add up to k times the mean.
      reduce_dims: how to reduce further dims, such as the time in losses ``[batch, time]``: ``"mean"``, so that the
        result is the share of ``losses.mean()``, or ``"sum"``, which is ``time`` times as large. By default they are
        summed, with a :class:`replicax.errors.ShareWarning`.

    Padding (``InputOptions(partial_batch="pad")``) contributes 0 for any loss, and does not count. A
    replica without examples has a share of 0.

    Returns:
      A scalar: each replica's own, even if all shares happen to be equal. No collective.

    Raises:
      ValueError: ``per_example_loss`` is a scalar, so examples can't be counted; or the batch is padded, and dim 0 of
        the losses is not its rows; ``sample_weight`` does not fit; ``global_batch_size`` is not positive;
        ``reduce_dims`` is invalid.
      TypeError: ``global_batch_size`` is not an int; losses or weights are not numbers.
      ContextError: called in cross-replica context.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> for losses in strategy.distribute_dataset([np.array([1.0, 2.0, 3.0, 6.0], np.float32)]):
    ...     share = strategy.run(replicax.compute_average_loss, args=(losses,))
    ...     [float(s) for s in strategy.local_results(share)], float(strategy.reduce("sum", share))
    ([0.75, 2.25], 3.0)
    >>> losses = np.array([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], np.float32)  # [batch, time]
    >>> float(replicax.compute_average_loss(losses, reduce_dims="mean"))
    3.0
    """
    replica = _replica("compute_average_loss")
    if reduce_dims not in (None, "mean", "sum"):
        raise ValueError(f"compute_average_loss: reduce_dims must be 'mean', 'sum' or None, got {reduce_dims!r}")
    losses = _float(per_example_loss, "compute_average_loss: per_example_loss")
    if losses.ndim == 0:
        raise ValueError(
            "compute_average_loss: per_example_loss must have a dim 0 with an entry for each example, got a scalar. "
            "Don't take the mean first: this function takes it."
        )
    each = math.prod(losses.shape[1:])
    if each > 1 and reduce_dims is None:
        warn(
            f"compute_average_loss: per_example_loss has shape {losses.shape}. Its dims after the first are added up, "
            f"so the result is {each} times the share of losses.mean(). Pass reduce_dims='mean' to average them, or "
            "reduce_dims='sum' to add them up without this warning.",
            ShareWarning,
        )
    examples = replica._communicator.examples
    if examples is not None:
        mask = mask_of_rows(losses, replica._communicator, "compute_average_loss: per_example_loss")
    if sample_weight is not None:
        what = "compute_average_loss: sample_weight"
        if any(map(np.iscomplexobj, jax.tree.leaves(sample_weight))) and not jnp.iscomplexobj(losses):
            raise ValueError(f"{what} must be real, got {sample_weight!r}")
        weight = as_array(sample_weight, what, losses.dtype)
        if weight.shape != losses.shape[: weight.ndim]:
            raise ValueError(
                f"compute_average_loss: sample_weight of shape {weight.shape} does not fit per_example_loss of shape "
                f"{losses.shape}"
            )
        losses = losses * along_rows(weight, losses)
    if examples is not None:
        # Selected, not multiplied: the loss of padding may be infinite.
        losses = jnp.where(along_rows(mask, losses), losses, jnp.zeros_like(losses))
        if global_batch_size is None:
            global_batch_size = examples.count
        elif (
            examples.parts > 1
            and isinstance(global_batch_size, int)
            and isinstance(examples.count, int)
            and losses.shape[0] * replica._replicas.in_sync == global_batch_size < examples.count
        ):
            raise ValueError(
                f"compute_average_loss: global_batch_size={global_batch_size} is the size of one micro-batch, and the "
                f"gradients of all are added up: pass that of the whole batch, {examples.count}, or leave it out. If "
                f"it is another number, such as that of the labelled examples, pass jnp.asarray({global_batch_size})"
            )
    if global_batch_size is None:
        global_batch_size = replica._communicator.add_up(losses.shape[0])
    elif not _is_size(global_batch_size):
        raise TypeError(
            f"compute_average_loss: global_batch_size must be an int, or a scalar array, got {global_batch_size!r}"
        )
    elif not isinstance(global_batch_size, jax.Array) and global_batch_size <= 0:
        raise ValueError(f"compute_average_loss: global_batch_size must be positive, got {global_batch_size}")
    # Half-precision floats can't count: 100,000 is infinite in float16.
    wide = jnp.float32 if losses.dtype.itemsize < 4 else losses.dtype
    count = jnp.maximum(jnp.asarray(global_batch_size, jnp.float32), 1).astype(wide)
    if reduce_dims == "mean":
        count = count * max(each, 1)
    return share_p.bind((jnp.sum(losses, dtype=wide) / count).astype(losses.dtype))[0]


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """This replica's share of a loss that does not depend on the data, such as weight decay: 1/n of it.

    Every replica computes the same regularization loss; the shares of the n replicas add up to it once, also those of
    all micro-batches where gradients are accumulated.

    Args:
      regularization_loss: an array or number; usually a mirrored scalar.

    Returns:
      An array of the same shape, per replica: each has its own share. No collective.

    Raises:
      ContextError: called in cross-replica context.

    >>> import replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> [float(s) for s in strategy.local_results(strategy.run(replicax.scale_regularization_loss, args=(3.0,)))]
    [1.5, 1.5]
    """
    replica = _replica("scale_regularization_loss")
    loss = _float(regularization_loss, "scale_regularization_loss: regularization_loss")
    examples = replica._communicator.examples
    share = loss / (replica._replicas.in_sync * (1 if examples is None else examples.parts))
    return share_p.bind(share, of_each=True)[0]


def as_share(loss: Any) -> jax.Array:
    """``loss`` as this replica's share: declares that its sum over the replicas is intended.

    For a loss that you have scaled yourself, if a :class:`replicax.errors.ShareWarning` is wrong, or if you want a sum
    of means. It changes no value. Where gradients are accumulated, the shares of all micro-batches are added up: divide
    a sum by the size of the global batch, rather than a mean by the number of replicas.

    Args:
      loss: an array or number.

    Returns:
      An array of the same shape: each replica's own. No collective.

    Raises:
      ContextError: called in cross-replica context.
      TypeError: it is not a number.

    >>> import replicax, jax.numpy as jnp, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def share(losses, global_batch_size):
    ...     return replicax.as_share(jnp.sum(losses) / global_batch_size)
    >>> for losses in strategy.distribute_dataset([np.array([1.0, 2.0, 3.0, 6.0], np.float32)]):
    ...     float(strategy.reduce("sum", strategy.run(share, args=(losses, 4))))
    3.0
    """
    _replica("as_share")
    return share_p.bind(_float(loss, "as_share: loss"), stated=True)[0]


def along_rows(factors: Any, values: Any) -> jax.Array:
    """``factors``, or a mask, with a dim of size 1 for each further dim of ``values``."""
    return jnp.reshape(factors, factors.shape + (1,) * (values.ndim - factors.ndim))


def _is_size(value: Any) -> bool:
    """Whether ``value`` can be a number of examples: an int, or a computed scalar, which may be a float."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "iuf"
    return isinstance(value, int) and not isinstance(value, bool)


def _float(value: Any, where: str) -> jax.Array:
    check_numbers(value, where)
    # NumPy's integers become floats directly: int64 would become int32 first.
    array = value if isinstance(value, np.ndarray | np.generic) else jnp.asarray(value)
    return jnp.asarray(array, None if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.result_type(float))


def _replica(what: str) -> context.ReplicaContext:
    replica = context.get_replica_context()
    if replica is None:
        raise ContextError(
            f"replicax.{what} computes one replica's share: call it inside a step, not in cross-replica context"
        )
    return replica
