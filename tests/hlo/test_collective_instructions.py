from __future__ import annotations

import jax.numpy as jnp
import pytest

import replicax
from replicax.hlo.collective_instructions import Collective, collectives_in


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%r = f32[8]{0} all-reduce(%a), channel_id=1", [Collective("all-reduce", 32, 1)]),
        ("ROOT %r = pred[] all-reduce-start(%a)", [Collective("all-reduce", 1, 1)]),
        ("%r = f32[] all-reduce-done(%a)", []),
        ("%r = bf16[4,2]{1,0} all-gather(%a), dimensions={0}", [Collective("all-gather", 16, 1)]),
        ("%r = (f64[2], s32[], /*index=2*/u8[3]) all-reduce(%a, %b, %c)", [Collective("all-reduce", 23, 3)]),
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


def test_every_kind_of_a_real_program(pair) -> None:
    def step(x):
        ctx = replicax.get_replica_context()
        return ctx.all_reduce("sum", [x * i for i in range(1, 9)] + [x.astype(jnp.int32)]), ctx.all_gather(x, 0)

    found = pair.extended.trace(step, args=(jnp.ones((300, 100)),)).collectives()
    assert {c.kind for c in found} == {"all-reduce", "all-gather"}
    assert sum(c.bytes for c in found if c.kind == "all-reduce") == 9 * 300 * 100 * 4
