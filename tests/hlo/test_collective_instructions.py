from __future__ import annotations

import jax.numpy as jnp
import pytest

import replicax
from replicax.hlo.collective_instructions import (
    SLICE_AXIS,
    Collective,
    ProgramDevices,
    collectives_in,
    collectives_of,
    groups_of,
    plain_name,
)
from replicax.hlo.instructions import instructions, parse
from tests.conftest import strategy_of
from tests.hlo.hlo_texts import LOOP


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%r = f32[8]{0} all-reduce(%a), channel_id=1", [Collective("all-reduce", 32, 1)]),
        ("ROOT %r = pred[] all-reduce-start(%a)", [Collective("all-reduce", 1, 1)]),
        ("%r = f32[] all-reduce-done(%a)", []),
        ("%r = bf16[4,2]{1,0} all-gather(%a), dimensions={0}", [Collective("all-gather", 16, 1)]),
        ("%r = (f64[2], s32[], /*index=2*/u8[3]) all-reduce(%a, %b, %c)", [Collective("all-reduce", 23, 3)]),
        ("%r = f32[8]{0} ragged-all-to-all(%a, %b, %c, %d, %e, %f)", [Collective("ragged-all-to-all", 32, 1)]),
        ("%add = f32[] add(%all-reduce, %b)", []),
        (
            "%r = s32[2]{0} collective-permute(%a), source_target_pairs={{0,1}}",
            [Collective("collective-permute", 8, 1)],
        ),
    ],
)
def test_instructions(line: str, expected: list[Collective]) -> None:
    assert collectives_in(line) == expected


def test_links_of_one_chain_are_one_collective() -> None:
    chain = 'channel_id={}, frontend_attributes={{chain_id="{}"}}'
    text = "\n".join(
        [
            f"  %g.1 = f32[8] all-gather(%a), {chain.format(4, 1)}",
            f"  %g.2 = f32[8] all-gather(%b), {chain.format(4, 1)}",
            f"  %g.3 = f32[4] all-gather(%c), {chain.format(5, 2)}",
            "  %g.4 = f32[4] all-gather(%c), channel_id=5",
        ]
    )
    assert [c.bytes for c in collectives_in(text)] == [32, 16, 16]


# --- how often, and between whom -----------------------------------------------------------------------

MESH = ProgramDevices({"replica": 4, "logical0": 2})


def module_of(instruction: str):
    return parse(
        f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n  ROOT %y = {instruction}\n}}"
    )


@pytest.mark.parametrize(
    ("groups", "axes", "participants"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("replica",), 4),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("logical0",), 2),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("replica", "logical0"), 8),
        ("replica_groups={}", ("replica", "logical0"), 8),
        ("replica_groups=[1,8]<=[8]", ("replica", "logical0"), 8),
        ("replica_groups=[4,2]<=[8]", ("logical0",), 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("replica",), 4),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("replica",), 2),
        ("replica_groups={{0}}", (), 1),
        ("replica_groups=mesh['replica'=4,'logical0'=2] {'replica'}, use_global_device_ids=true", ("replica",), 4),
        ("replica_groups=mesh['replica'=4,'logical0'=2] {'logical0'}", ("logical0",), 2),
        ("replica_groups=mesh['replica'=4,'logical0'=2] {'replica','logical0'}", ("replica", "logical0"), 8),
        ("replica_groups=mesh['replica'=4,'logical0'=2] {'replica':(2)2}", ("replica",), 2),
    ],
)
def test_axes(groups: str, axes: tuple[str, ...], participants: int) -> None:
    [use] = collectives_of(module_of(f"f32[8]{{0}} all-reduce(%x), channel_id=1, {groups}, to_apply=%add"), MESH)
    assert (use.axes, use.participants, use.bytes, use.count) == (axes, participants, 32, 1)


@pytest.mark.parametrize(
    ("groups", "devices", "alike"),
    [
        ("mesh['a'=2,'b'=12] {'a'}", 24, lambda d: d % 12),
        ("mesh['a'=2,'b'=12] {'b':(2)3}", 24, lambda d: (d // 6, d % 2)),
        ("mesh['a'=2,'b'=12] {'b':(1)3}", 24, lambda d: (d // 12, d % 4)),
        ("mesh['a'=2,'b'=12] {'b':(4)3}", 24, lambda d: d // 3),
        ("mesh['a'=2,'b'=12] {'a','b':(6)2}", 24, lambda d: d % 12 // 2),
        ("mesh['a'=12,'b'=2] {'a':(3)2,'b'}", 24, lambda d: (d // 8, d // 2 % 2)),
        ("[4,6]<=[2,3,4]T(2,0,1)", 24, lambda d: d % 4),
        ("[12,2]<=[2,3,4]T(1,2,0)", 24, lambda d: d % 12),
    ],
)
def test_groups_are_of_devices_that_are_alike_in_all_else(groups: str, devices: int, alike) -> None:
    expected = {frozenset(d for d in range(devices) if alike(d) == alike(other)) for other in range(devices)}
    module = module_of(f"f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add")
    found = groups_of(module.computations["main"].root, devices)
    assert len(found) == len(expected)
    assert set(map(frozenset, found)) == expected


def test_groups_in_several_slices_come_first() -> None:
    pairs = "f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5}}, to_apply=%add"
    [use] = collectives_of(module_of(pairs), ProgramDevices({"replica": 6}, slices=2))
    assert (use.axes, use.groups) == ((SLICE_AXIS,), ((2, 3), (0, 1), (4, 5)))


def test_a_permute() -> None:
    pairs = "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"
    [use] = collectives_of(module_of(f"f32[8]{{0}} collective-permute(%x), {pairs}"), MESH)
    assert (use.axes, use.groups) == (("replica",), ((0, 2, 4, 6), (1, 3, 5, 7)))
    line = "source_target_pairs={{0,2},{2,4}}"
    [use] = collectives_of(module_of(f"f32[8]{{0}} collective-permute(%x), {line}"), MESH)
    assert use.members == (0, 2, 4)


def test_in_a_loop_it_counts_as_often_as_it_runs() -> None:
    [use] = collectives_of(parse(LOOP), ProgramDevices({"replica": 2, "logical0": 2}))
    assert (use.kind, use.bytes, use.axes, use.count) == ("all-reduce", 128, ("replica",), 6)
    assert use.where == "while/body/psum"


@pytest.mark.parametrize("program", ["train_step", "<lambda>"])
def test_names_of_operations_begin_inside_of_the_program(program: str) -> None:
    assert plain_name(f"jit({program})/shard_map/while/body/jit(f)/psum") == "while/body/jit(f)/psum"


def test_a_reduce_scatter_of_the_tpu_compiler() -> None:
    module = parse(
        """
%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  %r = f32[8]{0} all-reduce(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %n = s32[] constant(0)
  ROOT %s = f32[2]{0} dynamic-slice(%r, %n), dynamic_slice_sizes={2}
}

ENTRY %main (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[2]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}"""
    )
    [use] = collectives_of(module, MESH)
    assert (use.kind, use.bytes, use.whole, use.axes) == ("reduce-scatter", 8, 32, ("replica",))


SENT = 'is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1:4}x{0:1}",_xla_megascale_transfer_type='


@pytest.mark.parametrize(
    ("transfer", "kind", "whole"),
    [
        ("ALL_REDUCE", "all-reduce", 32),
        ("ALL_GATHER", "all-gather", 32),
        ("REDUCE_SCATTER", "reduce-scatter", 4 * 32),
        ("ONE_TO_ONE", "collective-permute", 32),
    ],
)
def test_what_slices_tell_each_other(transfer: str, kind: str, whole: int) -> None:
    module = parse(
        f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %inside = f32[8]{{0}} all-reduce(%x), replica_groups={{}}, to_apply=%add
  %token = token[] after-all()
  %sent = (f32[8]{{0}}, u32[], token[]) send(%inside, %token), channel_id=2, {SENT}"{transfer}"}}
  %received = (f32[8]{{0}}, u32[], token[]) recv(%token), channel_id=1, {SENT}"{transfer}"}}
  %done = (f32[8]{{0}}, token[]) recv-done(%received), channel_id=1
  ROOT %y = f32[8]{{0}} get-tuple-element(%done), index=0
}}"""
    )
    inside, between = collectives_of(module, ProgramDevices(MESH.axes, 4, 4))
    assert (inside.kind, inside.axes, inside.participants) == ("all-reduce", ("logical0",), 2)
    assert (between.kind, between.bytes, between.whole, between.axes) == (kind, 32, whole, (SLICE_AXIS,))
    assert (between.participants, between.members, between.count) == (4, (0, 2, 4, 6), 1)


@pytest.mark.parametrize(
    ("pairs", "chains"),
    [
        ("{0,1},{1,0},{2,3},{5,4},{4,6}", [(5, 4, 6), (2, 3), (0, 1)]),
        ("{1,0},{2,1},{3,2}", [(3, 2, 1, 0)]),
        ("{0,0},{2,1},{1,2},{3,3}", [(2, 1)]),  # 0 and 3 keep what they have
        ("{0,0},{1,1}", []),
    ],
)
def test_chains_of_permutes(pairs: str, chains: list[tuple[int, ...]]) -> None:
    permute = f"f32[8]{{0}} collective-permute(%x), source_target_pairs={{{pairs}}}"
    [instruction] = instructions(f"%y = {permute}")
    assert groups_of(instruction, 8) == chains
    assert [use.members for use in collectives_of(module_of(permute), MESH)] == chains[:1]


@pytest.mark.parametrize("replicas", [2, 4])
def test_real_programs(replicas: int) -> None:
    strategy = strategy_of(replicas)

    def step(x):
        context = replicax.get_replica_context()
        return context.all_reduce("sum", x), context.all_gather(x, 0)

    plan = replicax.plan(strategy, step, jnp.zeros((100, 30)))
    found = {c.kind: c for c in plan.collectives}
    assert set(found) == {"all-reduce", "all-gather"}
    assert {c.axes for c in plan.collectives} == {("replica",)}
    assert {c.participants for c in plan.collectives} == {replicas}
    assert found["all-gather"].bytes == replicas * 12_000
