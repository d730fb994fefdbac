"""How long kernels and collectives of GPUs take, against what must hold for any."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from replicax.hlo.collective_instructions import CollectiveUse
from replicax.hlo.instructions import parse
from replicax.hlo.products import arithmetic_of
from replicax.planning.chip_specs import Chip
from replicax.planning.gpu_collectives import LINK_SHARE, NETWORK_SHARE, seconds_between_gpus
from replicax.planning.network import Network
from replicax.planning.timeline.attention import attention_of
from replicax.planning.timeline.kernels import EFFICIENCY, kernel_of
from replicax.planning.timeline.products import Product, peak_of, seconds_of_product

PEAKS = {"bf16": 1e15, "tf32": 5e14, "f32": 6e13, "f8": 2e15, "f64": 1e15 / 16}
SPEED = {"flops": 1e15, "memory": 80e9, "bandwidth": 3e12, "peaks": PEAKS, "multiprocessors": 132}
GPU = Chip("gpu", **SPEED, link=25e9, links=18, network=50e9)
LINKS, NETWORK = 18 * 25e9 * LINK_SHARE, 50e9 * NETWORK_SHARE


def test_products_fill_tiles_and_waves() -> None:
    def share(*shape: int) -> float:
        product = Product(1, *shape, "bf16")
        return product.flops / GPU.flops / seconds_of_product(product, GPU)

    assert 0.9 < share(16896, 8192, 8192) <= 1.0  # 132 × 64 tiles of 256 × 128
    assert share(16896, 8192, 8192) > share(16896 + 1, 8192, 8192)
    assert share(256, 128, 8192) < 1 / 3  # few multiprocessors have work, also if the depth is cut
    assert share(8192, 8192, 64) < share(8192, 8192, 1024)
    # Cutting the depth pays where tiles are few, if enough of it is left for each.
    assert share(256, 256, 1 << 16) > 0.5  # the 16 smallest tiles alone have a tenth of the multiprocessors
    assert 1.7 < share(64, 64, 1024) / share(64, 64, 1023) < 2
    # A TPU's matrix unit is filled up: rows to 8, columns and depth to 128, or to 8 where there are fewer.
    assert seconds_of_product(Product(2, 9, 129, 4, "bf16"), TPU) == 2 * 2 * 16 * 256 * 8 / 1e15


@pytest.mark.parametrize(
    ("shape", "waves", "tile", "share", "depth"),
    [
        ((1, 16896, 8192, 8192), 32, 256 * 128, 1.0, 8192),
        ((1, 1536, 1408, 1000), 1, 128 * 128, 0.93, 1000),
        ((3, 512, 704, 500), 1, 128 * 64, 0.8, 500),
        ((1, 704, 768, 500), 1, 64 * 64, 0.62, 500),
        ((1, 256, 128, 8192), 1, 64 * 64, 0.62, 8192 / 8),
    ],
)
def test_products_take_waves_of_tiles(shape, waves, tile, share, depth) -> None:
    expected = waves * 2 * tile * (depth + 96) / (1e15 / 132 * share)
    assert seconds_of_product(Product(*shape, "bf16"), GPU) == pytest.approx(expected)


@pytest.mark.parametrize(("dtype", "times"), [("bf16", 1), ("f16", 1), ("f32", 2), ("f8e4m3fn", 0.5), ("f64", 16)])
def test_products_take_longer_in_wider_dtypes(dtype: str, times: float) -> None:
    narrow = seconds_of_product(Product(1, 4096, 4096, 4096, "bf16"), GPU)
    assert seconds_of_product(Product(1, 4096, 4096, 4096, dtype), GPU) == pytest.approx(times * narrow)


HIGHEST, EXACT = "operand_precision={highest,highest}", "algorithm=dot_f32_f32_f32, metadata={}"
HIGH = "operand_precision={high,high}"
CUBLAS = 'custom_call_target="__cublas$gemm", backend_config={"precision_config":{"operand_precision":["HIGHEST"],'
THRICE = 'custom_call_target="__cublas$gemm", backend_config={"algorithm":"ALG_DOT_BF16_BF16_F32_X3"}'
TPU, OLD = Chip("tpu", 1e15, 80e9, 3e12), Chip("old", 1e15, 80e9, 3e12, peaks={"f32": 3e13})


@pytest.mark.parametrize(
    ("chip", "dtype", "asked", "peak"),
    [
        (GPU, "f32", "", 5e14),
        (GPU, "f32", HIGH, 5e14),
        *((GPU, "f32", asked, 6e13) for asked in (HIGHEST, EXACT, CUBLAS)),
        (GPU, "f32", THRICE, 1e15 / 3),
        (GPU, "c64", "", 5e14 / 4),
        (GPU, "bf16", HIGHEST, 1e15),
        (OLD, "f32", "", 3e13),
        (TPU, "f32", "", 1e15),
        (TPU, "f32", HIGH, 1e15 / 3),
        (TPU, "f32", HIGHEST, 1e15 / 6),
        (TPU, "bf16", HIGHEST, 1e15),
        (Chip("cpu", 1e12, 80e9, 3e10, is_serial=True), "f32", HIGHEST, 1e12),
    ],
)
def test_float32_is_multiplied_with_the_precision_that_the_step_asks_for(chip, dtype, asked, peak) -> None:
    opcode = "custom-call" if "cublas" in asked else "dot"
    type_ = f"{dtype}[8,8]{{1,0}}"
    text = (
        f"ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = {type_} parameter(0)\n  ROOT %y = {type_} {opcode}(%x, %x)"
    )
    main = parse(f"{text}, {asked}\n}}").computations["main"]
    assert peak_of(arithmetic_of(main.root, main), chip) == pytest.approx(peak)


def kernel(opcode: str, kind: str = "f32[1000,1000]{1,0}", chip: Chip = GPU):
    text = f"ENTRY %main (x: {kind}) -> {kind} {{\n  %x = {kind} parameter(0)\n  ROOT %y = {kind} {opcode}\n}}"
    module = parse(text)
    main = module.computations["main"]
    return kernel_of(module, main, main.root, chip)


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("negate(%x)", "elementwise"),
        ("transpose(%x), dimensions={1,0}", "transposition"),
        ("sort(%x), dimensions={1}, to_apply=%less", "sort"),
        ("gather(%x)", "gather"),
        ("reduce(%x), dimensions={1}, to_apply=%add", "reduction"),
        ('custom-call(%x), custom_call_target="f"', "opaque"),
    ],
)
def test_kernels_are_told_apart(opcode: str, kind: str) -> None:
    found = kernel(opcode)
    assert (found.kind, found.bound_by, found.bytes) == (kind, "memory", 8_000_000)
    assert found.seconds == pytest.approx(8e6 / 3e12 / EFFICIENCY[kind])
    launched = kernel(opcode, chip=dataclasses.replace(GPU, launch=1e-6))
    assert launched.seconds == pytest.approx(found.seconds + 1e-6)


def test_a_product_inside_of_a_fusion() -> None:
    """As the compiler for GPUs writes it: its own kernel, with casts inside."""
    module = parse(
        """
%gemm (a: bf16[4096,4096], b: f32[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %b = f32[4096,4096]{1,0} parameter(1)
  %c = bf16[4096,4096]{1,0} convert(%b)
  ROOT %d = bf16[4096,4096]{1,0} dot(%a, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (x: bf16[4096,4096], w: f32[4096,4096]) -> bf16[4096,4096] {
  %x = bf16[4096,4096]{1,0} parameter(0)
  %w = f32[4096,4096]{1,0} parameter(1)
  ROOT %y = bf16[4096,4096]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
}"""
    )
    main = module.computations["main"]
    found = kernel_of(module, main, main.root, GPU)
    assert (found.kind, found.bound_by, found.flops) == ("product", "compute", 2 * 4096**3)
    assert found.seconds == seconds_of_product(Product(1, 4096, 4096, 4096, "bf16"), GPU)
    assert found.bytes == 4096 * 4096 * (2 + 4 + 2)


@pytest.mark.parametrize(
    ("name", "results", "products"),
    [
        ("jit(f)/jvp(mha_forward)/pallas_call", 1, (2, 2)),
        ("jit(f)/transpose(jvp(mha_backward))/pallas_call", 3, (5, 4)),
        ("jit(f)/causal/jvp(mha_forward)/pallas_call", 1, (1, 1)),
        ("jit(f)/transpose(jvp(flash_attention_dq))/pallas_call", 1, (3, 2)),
        ("jit(f)/transpose(jvp(flash_attention_dkdv))/pallas_call", 2, (4, 2)),
        ("jit(f)/mha_backward_by_hand/pallas_call", 3, (5, 4)),  # gradients are known by their number, too
        ("jit(f)/rematted_computation/mha_forward/pallas_call", 1, (2, 2)),
        ("jit(f)/something_else/pallas_call", 1, None),
        ("jit(f)/jvp(mha_forward)/pallas_call", 0, None),
    ],
)
def test_attention_that_is_opaque(name: str, results: int, products: tuple[int, int] | None) -> None:
    array = "bf16[2,512,8,64]{3,2,1,0}"
    given = f"({', '.join([*[array] * results, 'f32[2,8,512]{2,1,0}'])})"
    module = parse(
        f"ENTRY %main (q: {array}, k: {array}, v: {array}) -> {array} {{\n  %q = {array} parameter(0)\n"
        f"  %k = {array} parameter(1)\n  %v = {array} parameter(2)\n"
        f'  ROOT %o = {given} custom-call(%q, %k, %v), custom_call_target="__gpu$xla.gpu.triton", '
        f'metadata={{op_name="{name}"}}\n}}'
    )
    main = module.computations["main"]
    found = attention_of(main.root, main)
    kind = "opaque" if products is None else "attention, backward" if products[0] > 2 else "attention"
    run, one = kernel_of(module, main, main.root, GPU), 2 * 2 * 8 * 512 * 512 * 64
    # What is computed a second time is no FLOP of the model's.
    assert (run.kind, run.model_flops) == (kind, one * products[1] if products and "remat" not in name else 0)
    assert (found and (found.flops, found.model_flops)) == (products and tuple(p * one for p in products))


@pytest.mark.parametrize("dims", ["2,{},8,64", "2,8,{},64"])
def test_attention_to_keys_of_another_length(dims: str) -> None:
    queries, keys = (f"bf16[{dims.format(length)}]{{3,2,1,0}}" for length in (128, 512))
    main = parse(
        f"ENTRY %main (q: {queries}, k: {keys}, v: {keys}) -> {queries} {{\n  %q = {queries} parameter(0)\n"
        f"  %k = {keys} parameter(1)\n  %v = {keys} parameter(2)\n"
        f'  ROOT %o = {queries} custom-call(%q, %k, %v), custom_call_target="x", metadata={{op_name="mha"}}\n}}'
    ).computations["main"]
    found = attention_of(main.root, main)
    assert found is not None
    assert found.flops == 2 * (2 * 2 * 8 * 128 * 512 * 64)


def test_an_operation_that_runs_beside_others_reads_and_writes_what_it_would_alone() -> None:
    whole, part = "f32[1000,100]{1,0}", "f32[10,100]{1,0}"
    module = parse(f"""
%slicing (p: {whole}, i: s32[]) -> {part} {{
  %p = {whole} parameter(0)
  %i = s32[] parameter(1)
  ROOT %inner = {part} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{10,100}}
}}

ENTRY %main (x: {whole}, n: s32[]) -> {part} {{
  %x = {whole} parameter(0)
  %n = s32[] parameter(1)
  %start = (({whole}, s32[]), {part}) async-start(%x, %n), calls=%slicing
  %alone = {part} dynamic-slice(%x, %n, %n), dynamic_slice_sizes={{10,100}}
  ROOT %done = {part} async-done(%start)
}}""")
    main = module.computations["main"]
    beside, alone = (kernel_of(module, main, main.instructions[name], GPU) for name in ("start", "alone"))
    assert beside == alone
    assert alone.bytes == 2 * 4 * 10 * 100


# --- collectives


RING = (6.6, 0.6, 2.7), (14.0, 1.9, 4.0), (8.4, 3.4, 14.0)  # the latencies of NCCL's table
TREE = (6.8, 0.6, 5.0), (14.0, 1.25, 8.5)


@pytest.mark.parametrize(("hosts", "each", "way"), [(1, 8, RING), (64, 1, TREE), (16, 8, TREE)])
def test_a_small_sum_takes_the_steps_of_a_ring_or_a_tree(hosts: int, each: int, way: tuple) -> None:
    """Up a chain of the GPUs of a host and a binary tree of hosts, and back; a permute takes one step of each kind."""
    steps = {
        "all-reduce": (way, 2 * (each - 1), 2 * int(np.log2(hosts))),
        "all-gather": (RING, hosts * (each - 1), hosts if hosts > 1 else 0),
        "collective-permute": (RING, 1, int(hosts > 1)),
        "all-to-all": (RING[-1:], each - 1, hosts - 1),
    }
    for kind, (ways, inside, between) in steps.items():
        expected = 1e-6 * min(base + inside * a + between * b for base, a, b in ways)
        assert seconds_between_gpus(kind, 1, hosts, hosts * each, GPU) == pytest.approx(expected, rel=1e-3)
    assert seconds_between_gpus("all-reduce", 1, 1, 1, GPU) == 0
    assert seconds_between_gpus("all-reduce", 6e12, hosts, hosts * each, dataclasses.replace(GPU, link=0)) == 2


@pytest.mark.parametrize(
    ("kind", "hosts", "gpus", "expected"),
    [
        ("all-gather", 1, 8, 7 / 8 / LINKS),
        ("reduce-scatter", 1, 8, 7 / 8 / LINKS),
        ("all-reduce", 1, 8, 2 * 7 / 8 / LINKS),
        ("all-gather", 8, 64, 63 / 64 / (8 * NETWORK)),  # each of the eight of a host sends a part of it
        ("all-gather", 8, 8, 7 / 8 / NETWORK),
        ("all-gather", 2, 4, 3 / 4 / (2 * NETWORK)),
        ("all-to-all", 1, 8, 7 / 8 / LINKS),
        ("all-to-all", 8, 64, 56 / 64 / NETWORK),
        ("all-to-all", 2, 16, 8 / 16 / NETWORK),  # to the eight of the other host
        ("ragged-all-to-all", 8, 64, 56 / 64 / NETWORK),
        ("collective-permute", 1, 8, 1 / LINKS),
        ("collective-permute", 8, 64, 1 / NETWORK),
    ],
)
def test_large_collectives_take_what_their_bytes_take(kind: str, hosts: int, gpus: int, expected: float) -> None:
    assert seconds_between_gpus(kind, 1e11, hosts, gpus, GPU) == pytest.approx(1e11 * expected, rel=0.01)


def test_hosts_come_from_the_devices() -> None:
    cards = [SimpleNamespace(device_kind="H100", platform="gpu", slice_index=i // 8) for i in range(32)]
    network = Network(np.array(cards, dtype=object)[:, None], GPU, slices=1)
    assert network.name == "4x8"
    assert Network(np.array(cards[:12], dtype=object)[:, None], GPU, slices=1).name == ""  # 8 of one, 4 of another
    whole = CollectiveUse("all-gather", 10**9, ("replica",), (tuple(range(32)),), 1)
    inside = CollectiveUse("all-gather", 10**9, ("replica",), (tuple(range(8)),), 1)
    across = CollectiveUse("all-gather", 10**9, ("replica",), (tuple(range(0, 32, 8)),), 1)
    assert network.seconds(whole) == seconds_between_gpus("all-gather", 10**9, 4, 32, GPU)
    assert network.seconds(inside) == seconds_between_gpus("all-gather", 10**9, 1, 8, GPU)
    assert network.seconds(across) == seconds_between_gpus("all-gather", 10**9, 4, 4, GPU)
    assert network.seconds(whole, (16,), 1) == seconds_between_gpus("all-gather", 10**9, 2, 16, GPU)
    assert network.seconds(across, (8,), 1) == 0


def test_all_groups_wait_for_the_one_on_most_hosts() -> None:
    cards = [SimpleNamespace(device_kind="H100", platform="gpu", slice_index=i // 6) for i in range(12)]
    network = Network(np.array(cards, dtype=object)[:, None], GPU, slices=1)
    groups = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    fours = CollectiveUse("all-gather", 10**9, ("replica",), groups, 1)
    assert network.seconds(fours) == seconds_between_gpus("all-gather", 10**9, 2, 4, GPU)
    assert network.way(fours) == "NVLink, network"
    assert network.seconds(fours, (6,)) == seconds_between_gpus("all-gather", 10**9, 1, 4, GPU)
