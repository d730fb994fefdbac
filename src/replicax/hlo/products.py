"""Matrix products and convolutions in a compiled program, also those that XLA for GPUs leaves to cuBLAS and cuDNN.

A library's product is a ``custom-call`` whose ``backend_config`` has the dims of the ``dot`` that it was; a library's
convolution has the window and the labels of the forward convolution, and its gradients take and give its arrays in
other places. Besides their results they have memory to work in, which is no traffic.
"""

from __future__ import annotations

import re

from replicax.hlo.instructions import Computation, Instruction

Dims = tuple[int, ...]

_PRECISION = re.compile(r'operand_precision(?:=\{|":\[")(high|highest)\b', re.IGNORECASE)
_ALGORITHM = re.compile(r'algorithm(?:=|":"alg_)dot_(?:any_)?([a-z]+\d+)\w*?(?:_(x\d))?[",]', re.IGNORECASE)
_TARGET = re.compile(r'custom_call_target="(__cublas\$(?=gemm|lt\$matmul)|__cudnn\$conv)(\w*)')


def product_kind(instruction: Instruction) -> str:
    """``"dot"`` or ``"convolution"``, by XLA or a library; ``""`` if the instruction is neither."""
    if instruction.opcode in ("dot", "convolution"):
        return instruction.opcode
    if instruction.opcode != "custom-call" or (found := _TARGET.search(instruction.attributes)) is None:
        return ""
    return "dot" if found[1].startswith("__cublas") else "convolution"


def is_library_product(instruction: Instruction) -> bool:
    """Return whether cuBLAS or cuDNN computes a product or a convolution."""
    return instruction.opcode == "custom-call" and bool(product_kind(instruction))


def arithmetic_of(product: Instruction, computation: Computation) -> str:
    """The dtype in which a product multiplies, and the precision or number of products, where the step asks for it."""
    if found := _ALGORITHM.search(product.attributes):
        dtype, products = found[1].lower(), (found[2] or "").lower()
        return f"{dtype} {'highest' if dtype == 'f32' else products}".strip()
    dtype = computation.instructions[product.operands[0]].arrays[0].dtype
    return f"{dtype} {found[1].lower()}" if (found := _PRECISION.search(product.attributes)) else dtype


def dot_dims(dot: Instruction, role: str) -> list[int]:
    """The dims of a matrix product that have a role, such as ``"lhs_contracting"`` or ``"rhs_batch"``."""
    found = re.search(rf'{role}_(?:dims=\{{|dimensions":\[)([^}}\]]*)', dot.attributes)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []


def convolution_dims(instruction: Instruction, computation: Computation) -> tuple[Dims, Dims, Dims]:
    """The dims of the input, the kernel and the result of a convolution, or of the one whose gradient it is."""
    first, second = (computation.instructions[name].arrays[0].dims for name in instruction.operands[:2])
    result = instruction.arrays[0].dims
    match is_gradient_of(instruction):
        case "input":
            return result, second, first
        case "kernel":
            return first, result, second
    return first, second, result


def convolution_labels(convolution: Instruction) -> tuple[str, str, str]:
    """Return the dims of the input, the kernel and the result, such as ``("b01f", "01io", "b01f")``."""
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert found is not None, convolution.attributes
    return found[1], found[2], found[3]


def is_gradient_of(convolution: Instruction) -> str:
    """Return the array of a convolution whose gradient cuDNN computes: ``"input"`` or ``"kernel"``; ``""``: none."""
    found = _TARGET.search(convolution.attributes)
    return {"BackwardInput": "input", "BackwardFilter": "kernel"}.get(found[2] if found else "", "")
