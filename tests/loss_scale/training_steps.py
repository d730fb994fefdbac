"""A model in small, and the parts that right and wrong steps are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax
from replicax.variables.store import DerivedStore, current_store, use_store
from tests.conftest import strategy_of

REPLICAS = 4
"""How many replicas there are: no number that losses are weighted by."""

here = replicax.get_replica_context
share_of = replicax.compute_average_loss


class Model:
    """A linear layer, a stack of layers, and a table; an optimizer; and one batch of each kind of data.

    Each replica has ``examples`` examples, and all together ``whole``.
    """

    def __init__(self, examples: int = 8) -> None:
        self.examples, self.whole = examples, REPLICAS * examples
        rng = np.random.default_rng(0)
        self.strategy = strategy_of(REPLICAS)
        with self.strategy.scope():
            self.w = replicax.Variable(rng.normal(size=(3,)).astype(np.float32), name="w")
            self.b = replicax.Variable(np.float32(0.0), name="b")
            self.stack = replicax.Variable(rng.normal(size=(5, 3, 3)).astype(np.float32), name="stack")
            self.table = replicax.Variable(rng.normal(size=(11, 3)).astype(np.float32), name="table")
            self.optimizer = replicax.Optimizer(optax.sgd(0.1))
            self.adam = replicax.Optimizer(optax.adam(0.1))
            self.rate = replicax.Variable(np.float32(0.1), name="rate", trainable=False)
        self.variables = [self.w, self.b, self.stack, self.table]
        batch = {
            "x": rng.normal(size=(self.whole, 3)).astype(np.float32),
            "y": rng.normal(size=(self.whole,)).astype(np.float32),
            "tokens": rng.integers(0, 11, size=(self.whole, 6)).astype(np.int32),
            "mask": rng.integers(0, 2, size=(self.whole, 6)).astype(np.float32),
        }
        [self.batch] = self.strategy.distribute_dataset([batch])

    def hidden(self, x: Any) -> Any:
        """All layers of the stack, one after the other."""
        return jax.lax.scan(lambda h, layer: (jax.nn.gelu(h @ layer), None), x, self.stack.value)[0]

    def predicted(self, batch: Any) -> Any:
        """``[batch]``."""
        return self.hidden(batch["x"]) @ self.w.value + self.b.value

    def errors(self, batch: Any) -> Any:
        """``[batch]``: each example's loss."""
        return (self.predicted(batch) - batch["y"]) ** 2

    def token_losses(self, batch: Any) -> Any:
        """``[batch, tokens]``: the cross-entropy of each token."""
        logits = self.table.value[batch["tokens"]] @ self.table.value.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])

    def penalty(self) -> Any:
        """The same on every replica."""
        return jnp.sum(self.w.value**2)

    def gradients(self, loss: Callable[[], Any]) -> Any:
        return replicax.value_and_grad(loss, self.variables)()[1]

    def apply(self, gradients: Any, **options: Any) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True), **options)

    def train(self, loss: Callable[[], Any]) -> None:
        self.apply(self.gradients(loss))

    def summed(self, loss: Callable[[], Any]) -> Any:
        return here().all_reduce("sum", self.gradients(loss))

    def averaged(self, loss: Callable[[], Any]) -> Any:
        return here().all_reduce("mean", self.gradients(loss))


@jax.custom_vjp
def clipped_back(x: Any) -> Any:
    """Itself, with another derivative."""
    return x


clipped_back.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1.0, 1.0),))


@jax.custom_jvp
def softened(x: Any) -> Any:
    """A function with a derivative of its own."""
    return jnp.log1p(jnp.exp(x))


softened.defjvp(lambda primals, tangents: (softened(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))


@jax.jit
def mean_squared(prediction: Any, y: Any) -> Any:
    """A helper of somebody's library."""
    return jnp.mean((prediction - y) ** 2)  # wrong as a loss


@functools.partial(jax.custom_vjp)
def mean_with_rule(losses: Any) -> Any:
    """A mean with a derivative of its own."""
    return jnp.mean(losses)


mean_with_rule.defvjp(
    lambda losses: (jnp.mean(losses), losses),  # wrong as a loss
    lambda losses, ct: (jnp.broadcast_to(ct / losses.size, losses.shape),),  # wrong as a loss
)


def unmarked_value_and_grad(fn: Callable[..., Any], variables: Any, has_aux: bool = False) -> Callable[..., Any]:
    """``replicax.value_and_grad`` as other libraries have it: by JAX alone."""

    def with_gradient(*args: Any) -> Any:
        outer, leaves = current_store(), list(variables)

        def of_values(values: list[Any]) -> Any:
            with use_store(DerivedStore(outer, dict(zip(leaves, values, strict=True)))):
                return fn(*args)

        return jax.value_and_grad(of_values, has_aux=has_aux)([v.value for v in leaves])

    return with_gradient
