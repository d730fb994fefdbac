"""Compiled programs that are called without JAX's checks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax import _jax


@pytest.fixture
def everywhere() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:2]), ("replica",)), PartitionSpec())


def program(sharding: NamedSharding, results=lambda state, x: ([s + x for s in state], [state[0] * 2])):
    return jax.jit(lambda state, others: results(state, *others), donate_argnums=0, out_shardings=sharding)


def arguments(sharding: NamedSharding) -> tuple[list[jax.Array], list[jax.Array]]:
    state = [jax.device_put(np.full((2, 3), i, np.float32), sharding) for i in range(4)]
    return state, [jax.device_put(np.ones((2, 3), np.float32), sharding)]


def test_what_a_program_returns_can_be_given_back_without_checks(everywhere) -> None:
    jitted = program(everywhere)
    state, others = arguments(everywhere)
    state, _ = jitted(state, others)
    compiled: list[str] = []

    def note(event: str, duration: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    monitoring.register_event_duration_secs_listener(note)
    try:
        quick = _jax.fast_call(jitted, (state, others))
    finally:
        monitoring.unregister_event_duration_listener(note)
    assert quick is not None
    assert not compiled  # it is the program that is there
    state, _ = jitted(state, others)
    assert quick.returns(state)
    assert quick.takes(others)
    before = state
    returned: list[list[jax.Array]] = []
    returned[:] = map(_jax.to_arrays, map(quick.execute, ([*state, *others],)), (quick.handlers,))
    [arrays] = returned
    assert [a.tolist() for a in arrays] == [[[i + 3.0] * 3] * 2 for i in range(4)] + [[[4.0] * 3] * 2]
    assert all(a.sharding == everywhere for a in arrays)
    assert all(a.is_deleted() for a in before)
    assert quick.returns(arrays)


def test_what_a_program_does_not_take(everywhere) -> None:
    jitted = program(everywhere)
    state, [x] = arguments(everywhere)
    state, _ = jitted(state, [x])
    quick = _jax.fast_call(jitted, (state, [x]))
    assert quick is not None
    deleted = jnp.copy(x)
    deleted.delete()
    others = {
        "a NumPy array": np.ones((2, 3), np.float32),
        "a number": 1.0,
        "another shape": jax.device_put(np.ones((3, 2), np.float32), everywhere),
        "another dtype": jax.device_put(np.ones((2, 3), np.int32), everywhere),
        "other devices": jax.device_put(np.ones((2, 3), np.float32), jax.devices()[3]),
        "another layout": jax.device_put(x, Format(Layout((1, 0)), everywhere)),
        "deleted": deleted,
    }
    assert {name for name, other in others.items() if quick.takes([other])} == set()
    assert quick.takes([jnp.copy(x)])


@pytest.mark.parametrize("what", ["unused", "calls back", "random key"])
def test_a_program_that_needs_more_care(everywhere, what) -> None:
    def results(state, x):
        if what == "calls back":
            jax.debug.callback(lambda x: None, x)
        return [s + 1 for s in state], [state[0] if what == "unused" else x]

    jitted = program(everywhere, results)
    state, others = arguments(everywhere)
    if what == "random key":
        others = [jax.device_put(jax.random.key(0), everywhere)]
    if what == "unused":
        others = [*others, others[0]]
        jitted = program(everywhere, lambda state, x, y: results(state, x))
    state, _ = jitted(state, others)
    assert _jax.fast_call(jitted, (state, others)) is None
