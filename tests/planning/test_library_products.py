"""Products that XLA for GPUs leaves to cuBLAS and cuDNN count as those that it compiles itself.

The instructions are as XLA wrote them for an H100, with ``xla_gpu_enable_triton_gemm=false`` for those of cuBLAS. On
a GPU that is there XLA tries both, and takes the quicker.
"""

from __future__ import annotations

import pytest

import replicax
from replicax.hlo.instructions import parse
from replicax.planning.cost import cost_of
from replicax.planning.timeline.attention import attention_of
from replicax.planning.timeline.kernels import kernel_of
from replicax.planning.timeline.products import product_of

CARD = replicax.planning.Chip("card", flops=1e15, memory=80e9, bandwidth=3e12, multiprocessors=132)
GEMM = (
    'custom_call_target="{target}", metadata={{op_name="jit(step)/attention/dot_general"}}, backend_config={{'
    '"gemm_backend_config":{{"alpha_real":1,"beta":0,"dot_dimension_numbers":{{"lhs_contracting_dimensions":["{left}"],'
    '"rhs_contracting_dimensions":["{right}"],"lhs_batch_dimensions":[{batch}],"rhs_batch_dimensions":[{batch}]}},'
    '"precision_config":{{"operand_precision":["DEFAULT","DEFAULT"]}},"epilogue":"BIAS_RELU"}}}}'
)
WINDOW = "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_o01i->b01f"


def module(result: str, call: str, *operands: str):
    """A program of a single instruction, of operands of these types."""
    given = [f"  %x{i} = {type} parameter({i})" for i, type in enumerate(operands)]
    names = ", ".join(f"%x{i}" for i in range(len(operands)))
    lines = [*given, f"  ROOT %z = {result} {call.replace('(...)', f'({names})', 1)}"]
    return parse("ENTRY %main () -> f32[] {\n" + "\n".join(lines) + "\n}\n")


def counted(program):
    main = program.computations["main"]
    return cost_of(program), product_of(main.root, main), kernel_of(program, main, main.root, CARD)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_a_product_of_cublas(target: str) -> None:
    operands = "bf16[4096,512]{1,0}", "bf16[512,1024]{1,0}", "bf16[1024]{0}"
    result = "(bf16[4096,1024]{1,0}, s8[4194304]{0})"
    text = "custom-call(...), " + GEMM.format(target=target, left=1, right=0, batch="")
    cost, product, kernel = counted(module(result, text, *operands))
    own = "dot(...), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    as_dot = counted(module("bf16[4096,1024]{1,0}", own, *operands[:2]))
    assert product == as_dot[1]
    assert (product.batch, product.rows, product.columns, product.depth) == (1, 4096, 1024, 512)
    assert cost.matrix_flops == as_dot[0].matrix_flops == 2 * 4096 * 512 * 1024
    assert cost.bytes == as_dot[0].bytes + 2 * 1024  # the bias, and not the memory to work in
    assert (kernel.kind, kernel.flops) == ("product", cost.matrix_flops)


def test_a_product_with_a_batch_that_is_part_of_attention() -> None:
    operands = ("bf16[8,512,1024,1]{3,2,1,0}",) * 3  # as many dims as queries, keys and values
    text = "custom-call(...), " + GEMM.format(target="__cublas$gemm", left=2, right=2, batch='"0"')
    program = module("(bf16[8,512,512]{2,1,0}, s8[4194304]{0})", text, *operands)
    cost, product, _ = counted(program)
    assert product is not None
    assert (product.batch, product.rows, product.columns, product.depth) == (8, 512, 512, 1024)
    assert cost.matrix_flops == 2 * 8 * 512 * 512 * 1024
    main = program.computations["main"]
    assert attention_of(main.root, main) is None


X, W, Y = "bf16[4,16,16,8]{3,2,1,0}", "bf16[32,3,3,8]{3,2,1,0}", "bf16[4,8,8,32]{3,2,1,0}"


@pytest.mark.parametrize(
    ("target", "result", "operands", "rows", "columns"),
    [
        ("convForward", Y, (X, W), 4 * 8 * 8, 32),
        ("convBiasActivationForward", Y, (X, W, "bf16[32]{0}"), 4 * 8 * 8, 32),
        ("convBackwardInput", X, (Y, W), 4 * 16 * 16, 8),
        ("convBackwardFilter", W, (X, Y), 3 * 3 * 8, 32),
    ],
)
def test_a_convolution_of_cudnn(target, result, operands, rows, columns) -> None:
    text = f'custom-call(...), {WINDOW}, custom_call_target="__cudnn${target}", backend_config={{"cudnn":{{}}}}'
    cost, product, kernel = counted(module(f"({result}, u8[1024]{{0}})", text, *operands))
    forward, _, _ = counted(module(Y, f"convolution(...), {WINDOW}", X, W))
    assert cost.matrix_flops == forward.matrix_flops > 0.9 * 2 * 4 * 8 * 8 * 32 * 9 * 8  # but for the padding
    assert (product.rows, product.columns) == (rows, columns)
    assert kernel.flops == cost.matrix_flops
    assert kernel.kind == "product"


@pytest.mark.parametrize("target", ["__cudnn$norm", "__cublas$triangularSolve"])
def test_other_calls_are_no_products(target: str) -> None:
    cost, product, kernel = counted(module(Y, f'custom-call(...), custom_call_target="{target}"', X, W))
    assert (cost.matrix_flops, product, kernel.kind) == (0, None, "opaque")
