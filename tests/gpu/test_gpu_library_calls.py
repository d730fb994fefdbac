"""Calls of cuBLAS and cuDNN in a program as XLA compiles it for an H100.

``convolution_and_product_h100.txt`` is the text of ``compiled()``, by the compiler of JAX 0.10.2. Where a compiler for
GPUs is installed (``make gpu``), its own text must say the same.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

from replicax.hlo.instructions import Module, parse
from replicax.hlo.products import convolution_dims, dot_dims, is_gradient_of, is_library_product, product_kind
from replicax.planning.cost import cost_of, matrix_flops
from tests.gpu.described import devices, needs_compiler

TEXT = pathlib.Path(__file__).with_name("convolution_and_product_h100.txt").read_text()
IMAGES, KERNEL, HIDDEN = (64, 17, 17, 8), (32, 3, 3, 8), (64, 8, 8, 32)  # the images with their padding
CONVOLUTION, PRODUCT = 2 * 64 * 8 * 8 * 32 * 9 * 8, 2 * 64 * 2048 * 16


def compiled() -> str:
    """The gradients of a convolution with stride 2 and a product behind it, all in bfloat16."""
    here = jax.sharding.SingleDeviceSharding(devices("h100:1")[0, 0])

    def loss(kernel, weights, x, y):
        layout = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=layout)
        h = jax.nn.relu(h).reshape(len(x), -1)
        return jnp.square((h @ weights).astype(jnp.float32) - y).sum()

    shapes = ((3, 3, 8, 32), (2048, 16), (64, 16, 16, 8), (64, 16))
    dtypes = (*[jnp.bfloat16] * 3, jnp.float32)
    given = [jax.ShapeDtypeStruct(s, d, sharding=here) for s, d in zip(shapes, dtypes, strict=True)]
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*given)
    return lowered.compile({"xla_gpu_enable_triton_gemm": False}).as_text()


def check(module: Module) -> None:
    main = module.computations[module.entry]
    calls = [i for i in main.instructions.values() if is_library_product(i)]
    products = [i for i in calls if product_kind(i) == "dot"]
    convolutions = {is_gradient_of(i): i for i in calls if product_kind(i) == "convolution"}
    sides = [(dot_dims(i, "lhs_contracting"), dot_dims(i, "rhs_contracting")) for i in products]
    assert sorted(sides) == [([0], [0]), ([1], [0]), ([1], [1])]  # the weights' gradient, the product, the input's
    assert all(dot_dims(i, f"{side}_batch") == [] for i in products for side in ("lhs", "rhs"))
    assert set(convolutions) == {"", "input", "kernel"}
    assert {convolution_dims(i, main) for i in convolutions.values()} == {(IMAGES, KERNEL, HIDDEN)}
    assert sorted(matrix_flops(i, main) for i in calls) == [PRODUCT] * 3 + [CONVOLUTION] * 3
    assert cost_of(module).matrix_flops == 3 * PRODUCT + 3 * CONVOLUTION


def test_what_was_compiled_once() -> None:
    check(parse(TEXT))


@needs_compiler
def test_what_the_installed_compiler_writes() -> None:
    check(parse(compiled()))
