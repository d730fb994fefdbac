"""Convolutions in loops and branches of programs for CPUs: in one order of dims, with the results of any other."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import replicax

FAST = {1: "b0f_0io->b0f", 2: "b01f_01io->b01f"}


def orders_of(program: Any) -> set[str]:
    """The orders of dims of the convolutions that XLA has compiled."""
    return set(re.findall(r"dim_labels=([\w>-]+)", program.compiled_text()))


def gradients(x: Any, kernel: Any, **params: Any) -> Any:
    def loss(kernel: Any, x: Any) -> Any:
        return jnp.square(lax.conv_general_dilated(x, kernel, **params)).sum()

    return jax.grad(loss, (0, 1))(kernel, x)


LAST = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
SAME = {"window_strides": (1, 1), "padding": "SAME"}
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "channels last": ((4, 8, 8, 3), (3, 3, 3, 5), SAME | LAST),
    "channels first": ((4, 3, 8, 8), (5, 3, 3, 3), {"window_strides": (1, 1), "padding": "VALID"}),
    "strides": ((4, 8, 8, 3), (3, 3, 3, 5), {"window_strides": (2, 2), "padding": "SAME"} | LAST),
    "dilated": ((2, 9, 9, 3), (3, 3, 3, 4), SAME | LAST | {"rhs_dilation": (2, 2)}),
    "by channel": ((4, 8, 8, 6), (3, 3, 1, 6), SAME | LAST | {"feature_group_count": 6}),
    "one dim": (
        (4, 16, 3),
        (5, 3, 7),
        {"window_strides": (1,), "padding": "SAME", "dimension_numbers": ("NWC", "WIO", "NWC")},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_in_one_dispatch_convolve_as_one_step_does(case: str) -> None:
    x_shape, kernel_shape, params = CASES[case]
    key1, key2 = jax.random.split(jax.random.key(0))
    batches = np.array(jax.random.normal(key1, (3, 2, *x_shape)))

    def trained(steps: int) -> Any:
        """The filter after all batches, so many in a dispatch."""
        strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            kernel = replicax.Variable(jax.random.normal(key2, kernel_shape) / 8)

        def step(ctx: Any, x: Any) -> None:
            of_kernel, of_x = gradients(x, kernel.value, **params)
            kernel.assign_sub(1e-4 * replicax.get_replica_context().all_reduce("sum", of_kernel + of_x.sum()))

        data = iter(strategy.distribute_dataset([batch.reshape(-1, *x_shape[1:]) for batch in batches]))
        for _ in range(len(batches) // steps):
            strategy.run_steps(step, data, steps)
        return np.asarray(kernel)

    np.testing.assert_allclose(trained(3), trained(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", ["loop", "branch", "replicas", "top"])
def test_in_bodies_they_have_the_order_that_is_fast(case: str, where: str) -> None:
    x_shape, kernel_shape, params = CASES[case]
    key1, key2 = jax.random.split(jax.random.key(1))
    x, kernel = np.array(jax.random.normal(key1, x_shape)), jax.random.normal(key2, kernel_shape)
    expected = gradients(x, kernel, **params)

    def step(x: Any) -> Any:
        if where == "loop":
            return lax.scan(lambda c, x: (c, gradients(x, kernel, **params)), 0, x[None])[1]
        if where == "branch":
            return lax.cond(x.sum() > 0, *[lambda x: gradients(x, kernel, **params)] * 2, x)
        return gradients(x, kernel, **params)

    strategy = replicax.MirroredStrategy(["cpu:0"], num_replicas=2 if where == "replicas" else 1)
    program = strategy.extended.trace(step, args=(x,))
    assert orders_of(program) <= {FAST[len(x_shape) - 2]}
    for found, right in zip(
        strategy.experimental_local_results(strategy.run(step, args=(x,)))[0], expected, strict=True
    ):
        np.testing.assert_allclose(np.reshape(found, right.shape), right, rtol=1e-4, atol=1e-5)
