from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from replicax.hlo.instructions import arrays_in, parse
from replicax.planning.cost import cost_of
from tests.hlo.hlo_texts import LOOP


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[2,3]{1,0:T(8,128)}", 24),
        ("bf16[4]", 8),
        ("pred[3]", 3),
        ("f8e4m3fn[5]", 5),
        ("s4[3]", 2),
        ("c64[2]", 16),
        ("f32[]", 4),
        ("token[]", 0),
        ("(f32[2]{0:T(8,128)(2,1)S(1)}, (s32[], u8[7]))", 19),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert sum(a.bytes for a in arrays_in(text)) == size


def test_computations_and_lines() -> None:
    module = parse(LOOP)
    assert (module.entry, list(module.computations)) == ("main", ["body", "condition", "slicing", "main"])
    loop = module.computations["main"].instructions["loop"]
    assert (loop.called("condition"), loop.called("body"), len(loop.arrays)) == (["condition"], ["body"], 3)
    assert module.computations["main"].instructions["start"].operands == ("copied", "x", "ws")
    reduced = module.computations["body"].instructions["r"]
    assert module.source(reduced) == [("/usr/lib/optax/losses.py", 40), ("/home/me/model.py", 7)]
    assert module.source(loop) == []
    assert [a.space for a in arrays_in("(f32[2]{0:S(1)}, f32[2]{0})")] == [1, 0]


def test_elements_of_tuples_as_operands() -> None:
    """As compilers write them since JAX 0.12: each is an instruction that takes one array out."""
    module = parse(
        """
ENTRY %main (p: (s32[], (f32[4,8], f32[8,3]))) -> f32[4,3] {
  %p = (s32[], /*index=1*/(f32[4,8]{1,0}, f32[8,3]{1,0})) parameter(0)
  ROOT %z = f32[4,3]{1,0} dot(%p#1#0, %p#1#1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
    )
    found = module.computations["main"].instructions
    assert list(found) == ["p", "p#1", "p#1#0", "p#1#1", "z"]
    assert module.computations["main"].root is found["z"]
    assert [str(a) for name in found["z"].operands for a in found[name].arrays] == ["f32[4,8]", "f32[8,3]"]
    assert (found["p#1#1"].opcode, found["p#1#1"].operands, found["p#1"].operands) == (
        "get-tuple-element",
        ("p#1",),
        ("p",),
    )
    cost = cost_of(module)
    assert (cost.matrix_flops, cost.bytes, cost.launches) == (2 * 4 * 8 * 3, 4 * (4 * 8 + 8 * 3 + 4 * 3), 1)


def lines_of_product(f: Any) -> set[str]:
    """The files that the matrix product of a compiled function comes from."""
    module = parse(jax.jit(f).lower(jax.ShapeDtypeStruct((32, 32), jnp.float32)).compile().as_text())
    [dot] = [
        i
        for c in module.computations.values()
        for i in c.instructions.values()
        if i.opcode in ("dot", "fusion") and "dot" in i.op_name
    ][:1]
    return {file for file, _ in module.source(dot)}


def test_a_real_program_has_the_lines_of_this_file() -> None:
    assert __file__ in lines_of_product(lambda x: jnp.sin(x) @ x)


def test_names_of_files_are_as_they_were_before_compilers_escaped_them() -> None:
    file = '/home/mé/a "шаг" 步\\x.py'
    names: dict[str, Any] = {}
    exec(compile("def f(x):\n    return x @ x\n", file, "exec"), names)
    assert file in lines_of_product(names["f"])
    text = r"""
ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2] parameter(0)
  ROOT %r = f32[2] negate(%p), metadata={source_file="/home/m\303\251/a \"\321\210\" \\x.py" source_line=7}
}"""
    module = parse(text)
    assert module.source(module.instructions["r"]) == [('/home/mé/a "ш" \\x.py', 7)]
