"""Arithmetic and bytes, against XLA's own count where XLA counts right, and by hand where it does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from replicax.hlo.collective_instructions import COLLECTIVES
from replicax.hlo.instructions import HOST_SPACE, parse
from replicax.planning.chip_specs import CHIPS
from replicax.planning.cost import Cost, bytes_moved, cost_of
from replicax.planning.timeline.kernels import kernel_of
from tests.hlo.hlo_texts import LOOP


def compiled(fn, *shapes):
    return jax.jit(fn).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()


def conv(x, w, strides=(1, 1), **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers, **options)


PROGRAMS = {
    "product": (lambda x, w: x @ w, (64, 96), (96, 32)),
    "batched product": (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), (8, 64, 96), (8, 96, 32)),
    "convolution": (conv, (4, 16, 16, 8), (3, 3, 8, 16)),
    "strided convolution": (lambda x, w: conv(x, w, (2, 2)), (4, 17, 16, 8), (3, 5, 8, 16)),
    "grouped convolution": (lambda x, w: conv(x, w, feature_group_count=4), (4, 16, 16, 8), (3, 3, 2, 16)),
    "dilated convolution": (lambda x, w: conv(x, w, rhs_dilation=(2, 3)), (4, 16, 16, 8), (3, 3, 8, 16)),
    "convolution's gradients": (
        lambda x, w: jax.grad(lambda x, w: (conv(x, w, (2, 2)) ** 2).sum(), (0, 1))(x, w),
        (4, 16, 16, 8),
        (3, 3, 8, 16),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_as_xla_without_loops(name: str) -> None:
    fn, *shapes = PROGRAMS[name]
    program = compiled(fn, *shapes)
    cost = cost_of(parse(program.as_text()))
    theirs = program.cost_analysis()
    assert 0 < cost.matrix_flops <= theirs["flops"]
    assert cost.matrix_flops + cost.other_flops == pytest.approx(theirs["flops"], rel=0.05)
    assert cost.bytes == pytest.approx(theirs["bytes accessed"], rel=0.35)


def test_the_gradient_of_a_grouped_convolution_costs_as_much_as_the_convolution() -> None:
    gradient = parse(
        "ENTRY %main (x: f32[4,16,16,8], g: f32[4,16,16,16]) -> f32[3,3,1,16] {\n"
        "  %x = f32[4,16,16,8] parameter(0)\n  %g = f32[4,16,16,16] parameter(1)\n"
        "  ROOT %w = f32[3,3,1,16] convolution(%x, %g), window={size=16x16 pad=1_1x1_1}, "
        "dim_labels=f01b_i01o->01bf, batch_group_count=8\n}"
    )
    program = compiled(lambda x, w: conv(x, w, feature_group_count=8), (4, 16, 16, 8), (3, 3, 1, 16))
    assert cost_of(gradient).matrix_flops == cost_of(parse(program.as_text())).matrix_flops > 0


def test_a_window_combines_all_numbers_in_it() -> None:
    program = compiled(lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (8, 8), (1, 1), "VALID"), (64, 64))
    assert cost_of(parse(program.as_text())).other_flops == program.cost_analysis()["flops"] == 57 * 57 * 63


def test_what_a_kernel_meets_where_padding_is_not_the_same_on_both_sides() -> None:
    def uneven(x, w):
        return jax.lax.conv_general_dilated(x, w, (2,), [(1, 3)], dimension_numbers=("NWC", "WIO", "NWC"))

    cost = cost_of(parse(compiled(uneven, (4, 6, 8), (3, 8, 16)).as_text()))
    met = 2 + 3 + 3 + 1  # of three elements each, from one before the six to three after them
    assert cost.matrix_flops == 2 * 4 * 8 * 16 * met


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_a_loop_counts_as_often_as_it_runs(layers: int) -> None:
    def looped(x, w):
        return jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, w)[0]

    def unrolled(x, w):
        for i in range(layers):
            x = jnp.sin(x @ w[i])
        return x

    shapes = (32, 64), (layers, 64, 64)
    ours, plain = (cost_of(parse(compiled(fn, *shapes).as_text())) for fn in (looped, unrolled))
    assert ours.matrix_flops == plain.matrix_flops == layers * 2 * 32 * 64 * 64
    assert ours.unknown_loops == ()
    # Each layer reads its own weights, not those of all.
    assert layers * 4 * 64 * 64 <= ours.bytes <= layers * 8 * 4 * 64 * 64


def test_a_loop_of_the_tpu_compiler() -> None:
    cost = cost_of(parse(LOOP))
    assert cost.matrix_flops == 6 * 2 * 4 * 8 * 8
    assert cost.unknown_loops == ()
    moved = (4 + 2 * 256) + (128 + 256 + 128) + 2 * 128 + 3 * 4  # slice, product, all-reduce, counter
    assert cost.bytes == 6 * moved + 2 * 4  # and the counter's beginning


@pytest.mark.parametrize(("growth", "trips"), [(1, 6), (2, 3), (4, 2), (5, 2), (6, 1), (9, 1)])
def test_a_loop_whose_counter_grows_faster(growth: int, trips: int) -> None:
    """So the compiler for TPUs writes products of what is split over chips: it sends one part beside each product."""
    cost = cost_of(parse(LOOP.replace("constant(1)", f"constant({growth})")))
    assert cost.unknown_loops == ()
    assert cost.matrix_flops == trips * 2 * 4 * 8 * 8


NEXT, TWICE = "%next = s32[]{:T(128)} add(", "%twice = s32[]{:T(128)} multiply(%i, %i)\n  "


@pytest.mark.parametrize(
    ("known", "unknown"),
    [
        ("direction=LT", "direction=LE"),
        ("constant(1)", "constant(0)"),
        ("constant(1)", "constant(-1)"),
        (f"{NEXT}%i, %one)", f"{NEXT}%i, %i)"),
        (f"{NEXT}%i, %one)", f"{TWICE}{NEXT}%twice, %one)"),
        (f"{NEXT}%i, %one)", f"{TWICE}{NEXT}%twice, %i)"),
        (NEXT, NEXT.replace("add", "multiply")),
        ("get-tuple-element(%p), index=0", "get-tuple-element(%p), index=1"),
        ("tuple(%next", "opt-barrier(%next"),
        ("tuple(%copied", "opt-barrier(%copied"),
        ("constant(6)", "get-tuple-element(%q), index=0"),
        ("get-tuple-element(%q), index=0", "negate(%q)"),
        ("copy(%zero)", "reduce(%x, %zero), to_apply=%sum"),
    ],
)
def test_a_loop_of_unknown_length_counts_once_and_is_named(known: str, unknown: str) -> None:
    assert known in LOOP
    cost = cost_of(parse(LOOP.replace(known, unknown, 1)))
    assert cost.unknown_loops == ("loop",)
    assert cost.matrix_flops == 2 * 4 * 8 * 8


def test_a_reduction_computes_as_much_as_it_takes_in() -> None:
    text = """
ENTRY %main (x: f32[64,32]) -> f32[64] {
  %x = f32[64,32]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %y = f32[64]{0} reduce(%x, %zero), dimensions={1}, to_apply=%add
}"""
    assert cost_of(parse(text)).other_flops == 64 * 32


def test_both_arms_of_a_branch() -> None:
    def branch(p, x):
        return jax.lax.cond(p[0] > 0, lambda: x @ x, lambda: x @ x.T)

    cost = cost_of(parse(compiled(branch, (1,), (16, 16)).as_text()))
    assert cost.matrix_flops == 2 * 2 * 16**3


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_a_collective_computes_only_if_it_adds_up(kind: str) -> None:
    cost = cost_of(
        parse(f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %y = f32[8]{{0}} {kind}(%x), channel_id=1
}}""")
    )
    assert cost.other_flops == (8 if kind in ("all-reduce", "reduce-scatter") else 0)
    assert cost.bytes == 64


@pytest.mark.parametrize(
    ("start", "done"),
    [
        ("(f32[8], f32[16]) all-gather-start(%x), dimensions={0}", "all-gather-done"),
        ("((f32[8]), f32[16]) async-start(%x), calls=%gathering", "async-done"),
    ],
)
def test_an_asynchronous_collective_is_one_operation(start: str, done: str) -> None:
    text = f"""
%gathering (a: f32[8]) -> f32[16] {{
  %a = f32[8] parameter(0)
  ROOT %b = f32[16] all-gather(%a), dimensions={{0}}
}}
ENTRY %main (x: f32[8]) -> f32[16] {{
  %x = f32[8] parameter(0)
  %s = {start}
  ROOT %d = f32[16] {done}(%s)
}}"""
    assert cost_of(parse(text)) == Cost(matrix_flops=0, other_flops=0, bytes=4 * (8 + 16), unknown_loops=(), launches=1)


def test_a_slice_that_is_copied_into_memory_near_by_is_read_and_nothing_else() -> None:
    text = """
%slicing (a: f32[1024]) -> f32[256] {
  %a = f32[1024]{0} parameter(0)
  ROOT %b = f32[256]{0:S(1)} slice(%a), slice={[0:256]}
}
ENTRY %main (x: f32[1024]) -> f32[256] {
  %x = f32[1024]{0} parameter(0)
  %s = ((f32[1024]{0}), f32[256]{0:S(1)}, s32[]{:S(2)}) async-start(%x), calls=%slicing
  ROOT %d = f32[256]{0:S(1)} async-done(%s)
}"""
    module = parse(text)
    assert cost_of(module).bytes == 1024
    start = module.computations["main"].instructions["s"]
    assert kernel_of(module, module.computations["main"], start, CHIPS["v5e"]).bytes == 1024


@pytest.mark.parametrize("fusions", [0, 1, 2])
@pytest.mark.parametrize(
    ("update", "moved", "added"),
    [
        ("dynamic-update-slice(%a, %b, %i)", 16 + 1 + 16, 0),
        ("scatter(%a, %i, %b), to_apply=%add", 16 + 1 + 16 + 16, 16),  # which reads what it adds to
    ],
)
def test_what_is_written_into_an_array_in_place_counts_and_nothing_else_of_it(update, moved, added, fusions) -> None:
    roots = [update, *(f"fusion(%a, %b, %i), kind=kLoop, calls=%put{n}" for n in range(fusions))]
    names = [*(f"%put{n}" for n in range(fusions)), "ENTRY %main"]
    text = "".join(
        f"""
{name} (a: f32[1024], b: f32[16], i: s32[]) -> f32[1024] {{
  %a = f32[1024]{{0}} parameter(0)
  %b = f32[16]{{0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = f32[1024]{{0}} {root}
}}"""
        for name, root in zip(names, roots, strict=True)
    )
    cost = cost_of(parse(text))
    assert (cost.bytes, cost.other_flops) == (4 * moved, added)


def test_what_an_inner_fusion_only_passes_on_is_read() -> None:
    """So the compiler for TPUs writes the operands of products."""
    text = """
%same (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %b = f32[8,8]{1,0} bitcast(%a)
}
%product (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  %d = f32[8,8]{1,0} fusion(%c), kind=kLoop, calls=%same
  ROOT %e = f32[8,8]{1,0} dot(%d, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %y = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%product
}"""
    assert cost_of(parse(text)).bytes == 2 * 256


@pytest.mark.parametrize(("update", "whole", "main", "host"), [("S(1)", "", 64, 0), ("", "S(5)", 64, 64)])
def test_an_update_is_written_into_the_memory_of_what_it_changes(update: str, whole: str, main: int, host: int) -> None:
    text = f"""
ENTRY %main (p: f32[16], i: s32[]) -> f32[1024] {{
  %p = f32[16]{{0:{update}}} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[1024]{{0:{whole}}} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %y = f32[1024]{{0:{whole}}} dynamic-update-slice(%x, %p, %i)
}}"""
    module = parse(text)
    main_computation = module.computations[module.entry]
    moved = [bytes_moved(module, main_computation, main_computation.root, space) for space in (0, HOST_SPACE)]
    assert moved == [main + 4, host]  # the index is read, too
    assert cost_of(module).launches == 1


def test_memory_that_is_no_main_memory_costs_nothing() -> None:
    text = """
%twice (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  ROOT %b = f32[1024]{0:S(1)} add(%a, %a)
}
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0:T(1024)} parameter(0)
  %start = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%x)
  %near = f32[1024]{0:T(1024)S(1)} copy-done(%start)
  %y = f32[1024]{0:T(1024)S(1)} fusion(%x), kind=kLoop, calls=%twice
  %sum = f32[1024]{0:T(1024)S(1)} add(%near, %y)
  ROOT %z = f32[1024]{0:T(1024)} copy(%sum)
}"""
    assert cost_of(parse(text)).bytes == 3 * 4096  # in twice, out once
