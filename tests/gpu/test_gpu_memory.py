"""Memory of planned steps that is not in one heap: buffers of collectives, temporaries apart, the host's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import replicax
from replicax.backends.gpu import GATHERS_AHEAD
from replicax.planning import planner
from tests.gpu.described import devices, needs_compiler
from tests.planning.test_planner import build

pytestmark = needs_compiler


def test_heaps_of_collectives_and_of_temporaries_are_in_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for heap in ("xla_gpu_enable_nccl_user_buffers", "xla_gpu_temp_buffer_use_separate_color"):
        monkeypatch.setitem(GATHERS_AHEAD, heap, True)  # as if XLA_FLAGS named them, which are read once in a process
    strategy = replicax.ShardedStrategy(devices())
    step, spec = build(strategy, width=128)
    plan = replicax.plan(strategy, step, spec)
    executable, _ = planner._traced_program(strategy, step, spec)
    needed = executable.compiled().memory_analysis().temp_size_in_bytes
    assert plan.memory.temporaries == pytest.approx(needed, abs=1024)
    assert sum(plan.memory.peak.values()) == plan.memory.total


def test_activations_in_the_hosts_memory() -> None:
    """They are copied over PCIe, twice, and are in none of the device's memory."""
    layers, one = 6, 4 * 4096 * 512
    strategy = replicax.OneDeviceStrategy(devices()[0, 0])
    with strategy.scope():
        w = replicax.Variable(lambda: jnp.zeros((layers, 512, 512)), name="w")
    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def planned(policy):
        def layer(x, w):
            return jnp.tanh(checkpoint_name(x, "x") @ w) @ w, None

        def loss(w, x):
            return jnp.square(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0]).mean()

        spec = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
        return replicax.plan(strategy, lambda x: w.assign(jax.grad(loss)(w.value, x)), spec)

    kept, offloaded = planned(policies.save_only_these_names("x")), planned(offload)
    assert (kept.memory.host, offloaded.memory.host) == (0, layers * one)
    assert kept.memory.peak["activations"] >= layers * one
    assert offloaded.memory.peak.get("activations", 0) < 2 * one
    assert offloaded.memory.total < kept.memory.total - (layers - 2) * one
    assert offloaded.timeline.copying > kept.timeline.seconds > 4 * kept.timeline.copying
    assert offloaded.timeline.seconds > 2 * layers * one / 63e9
