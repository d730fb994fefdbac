"""Totals over the replicas, whose gradient is that of the total."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from replicax import context
from replicax.devices.host_values import as_array
from replicax.errors import ContextError
from replicax.locality import T
from replicax.pytrees import registered
from replicax.user_functions import checked_function, checked_result
from replicax.variables.store import current_store

_Result = TypeVar("_Result")


def total_of_shares(fn: Callable[..., _Result]) -> Callable[..., _Result]:
    """Sum ``fn`` over the replicas; the gradient of the result is the gradient of the sum.

    Use it for a value that all replicas differentiate alike: the log density of a sampler (HMC, NUTS) or the objective
    of a solver (L-BFGS), over data that is split over the replicas. The gradient of ``all_reduce("sum", fn(x))``
    differs: with ``jax.grad`` each replica differentiates its own part of the sum, so the gradients differ between the
    replicas, and chains would drift apart.

    Args:
      fn: ``fn(*parameters)``, this replica's share: its own examples' part of the sum. It captures its data, and gets
        pytrees of float arrays. Add terms that are not sums over examples, such as a prior, to the result.

    Returns:
      A function of the same parameters, which must be the same on every replica. It returns the total, with the
      structure and shapes of ``fn``'s result, mirrored, as is its gradient, which has derivatives in reverse mode
      (``jax.jacrev(jax.grad(…))``); in forward mode (``jax.jvp``, ``jax.hessian``) JAX raises an error.

    Raises:
      TypeError: ``fn`` is not a function; a parameter is not a float array.
      LocalityError: a parameter, or the derivative of the total, differs between replicas.
      ContextError: called in cross-replica context.

    One fused all-reduce for a value, and one for a gradient.

    >>> import replicax, jax, jax.numpy as jnp, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step(mean, x):
    ...     log_likelihood = replicax.total_of_shares(lambda mean: -0.5 * jnp.sum((x - mean) ** 2))
    ...     return jax.value_and_grad(lambda mean: log_likelihood(mean) - 0.5 * mean**2)(mean)
    >>> for x in strategy.distribute_dataset([np.array([1.0, 2.0, 3.0, 6.0], np.float32)]):
    ...     density, gradient = strategy.run(step, args=(0.0, x))
    >>> float(density), float(gradient)
    (-25.0, 12.0)
    """
    checked_function(fn, "total_of_shares(fn)")

    @functools.wraps(fn)
    def total(*parameters: Any) -> Any:
        if context.get_replica_context() is None:
            raise ContextError(
                "the function of total_of_shares computes one replica's share: call it inside a step, not in "
                "cross-replica context"
            )
        leaves, tree = jax.tree_util.tree_flatten(registered(parameters))
        leaves = [as_array(leaf, "total_of_shares: a parameter") for leaf in leaves]
        for leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise TypeError(f"total_of_shares: a parameter must be a float array, got {leaf.dtype.name}")
        returned = fn(*jax.tree_util.tree_unflatten(tree, _common(_same(leaves, "a parameter"))))
        shares, structure = jax.tree_util.tree_flatten(registered(checked_result(returned, fn, "total_of_shares")))
        shares = [as_array(share, "total_of_shares: what fn returned") for share in shares]
        floats = [i for i, share in enumerate(shares) if jnp.issubdtype(share.dtype, jnp.inexact)]
        totals = iter(_total([shares[i] for i in floats]))
        counts = iter(all_reduced_sum([share for i, share in enumerate(shares) if i not in floats]))
        return jax.tree_util.tree_unflatten(
            structure, [next(totals if i in floats else counts) for i in range(len(shares))]
        )

    return total


# Each of the two is the derivative of the other, so higher derivatives are correct, too.


@jax.custom_vjp
def _total(values: Sequence[Any]) -> list[Any]:
    """The sums of floats over the replicas."""
    return all_reduced_sum(list(values))


@jax.custom_vjp
def _common(values: Sequence[Any]) -> list[Any]:
    """Values that are the same everywhere, for separate use by each replica."""
    return list(values)


def all_reduced_sum(values: Any) -> Any:
    """The sums of a pytree's arrays over the replicas; called inside a step."""
    return context.current_replica().all_reduce("sum", values)


def _same(values: Sequence[Any], what: str) -> list[Any]:
    """Return ``values``, which must be the same on every replica."""
    problem = (
        f"total_of_shares: {what} differs between replicas, so its gradient would be no gradient of the total. The "
        "parameters are what all replicas have in common; data is captured by the function, and what is computed from "
        "the total must be the same everywhere"
    )
    return current_store().expect(list(values), frozenset({T}), problem) if values else []


_total.defvjp(
    lambda values: (_total(values), None),
    lambda _, cotangents: (_common(_same(cotangents, "the derivative of the total")),),
)
_common.defvjp(lambda values: (_common(values), None), lambda _, cotangents: (_total(cotangents),))
