"""Attention kernels that are opaque to the compiler: what they compute, from the shapes that they take and give.

Pallas kernels and cuDNN's are ``custom-call`` instructions. One whose name has ``attention``, ``mha`` or ``flash`` in
it, and that takes queries and keys of four dims, is taken for attention that keeps its scores to itself. If ``causal``
is in its name, too, as in ``jax.named_scope("causal")``, it computes half of the scores.
"""

from __future__ import annotations

import dataclasses
import math
import re

from replicax.hlo.instructions import Computation, Instruction
from replicax.hlo.products import is_library_product

_NAMES = re.compile(r"attention|attn|mha|flash", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """One call of an attention kernel."""

    flops: int  # the flops of its products; the backward pass computes the scores again
    model_flops: int  # the same without what is computed again
    is_backward: bool  # whether it computes gradients


def attention_of(instruction: Instruction, computation: Computation) -> Attention | None:
    """The attention that an instruction computes; ``None`` if it is none, or not known as such."""
    if instruction.opcode != "custom-call" or is_library_product(instruction):
        return None
    if not _NAMES.search(instruction.op_name + instruction.attributes[:80]):
        return None
    operands = [a for name in instruction.operands for a in computation.instructions[name].arrays if len(a.dims) == 4]
    results = [a for a in instruction.arrays if len(a.dims) == 4]
    if len(operands) < 3 or not results:
        return None
    queries, keys = operands[:2]
    length = max(keys.dims[1:3])  # [batch, length, heads, width], or heads before length
    share = 0.5 if "causal" in instruction.op_name else 1.0
    product = int(2 * math.prod(queries.dims) * length * share)
    if not instruction.is_backward and len(results) == 1:
        return Attention(2 * product, 2 * product, False)
    # Gradients of queries take one product, those of keys and values two; all take the scores, and theirs.
    alone = {1: (3, 2), 2: (4, 2)}.get(len(results), (5, 4))
    return Attention(alone[0] * product, alone[1] * product, True)
