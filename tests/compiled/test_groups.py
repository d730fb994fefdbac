"""Programs on pieces that groups of replicas have: what goes inside groups and between them, and what is computed."""

from __future__ import annotations

import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.execution.compiled import pieces
from replicax.variables.partitioners import over_all
from tests.compiled.test_split_variables import sharded, trained
from tests.conftest import strategy_of

RNG = np.random.default_rng(5)


pytestmark = pytest.mark.usefixtures("ordinary_promotion")


def participants(executable: replicax.Executable) -> list[tuple[str, list[list[int]]]]:
    """Each kind of collective in the compiled program, with the groups that it goes between, once, in order."""
    found = []
    for line in executable.compiled_text().splitlines():
        issued = re.search(r" (all-gather|reduce-scatter|all-reduce)(-start)?\(", line)
        if issued:
            [text] = re.findall(r"replica_groups=\{(\{.*?\})\}", line)
            found.append((issued[1], [[int(i) for i in group.split(",")] for group in re.findall(r"\{(.*?)\}", text)]))
    return [entry for i, entry in enumerate(found) if entry not in found[:i]]


@pytest.mark.parametrize("small", [True, False], ids=["packed", "each"])
def test_what_goes_inside_groups_and_between_them(small: bool) -> None:
    def loss(variables: Any, x: Any) -> Any:
        for v in variables:
            x = jnp.tanh(x @ v)
        return replicax.compute_average_loss(x.mean(-1))

    count, width = 3, 32 if small else 256
    program = trained(sharded(4, 2), [(width, width)] * count, optax.adam(0.1), loss)
    inside, between = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    assert participants(program) == [("all-gather", inside), ("reduce-scatter", inside), ("all-reduce", between)]
    piece = width * width * 4 // 2
    for kind in ("reduce-scatter", "all-reduce"):  # of pieces only; small ones travel as one
        found = [c for c in program.collectives() if c.kind == kind]
        assert sum(c.bytes for c in found) == count * piece
        assert sum(c.arrays for c in found) == (1 if small else count)


def test_a_norm_over_pieces_is_gathered_inside_groups() -> None:
    """All-reduces of several groups might add in different orders, and the groups' copies would drift apart."""

    def loss(variables: Any, x: Any) -> Any:
        return replicax.compute_average_loss(jnp.square(x @ variables[0]).mean(-1))

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    program = trained(sharded(4, 2), [(64, 32)], tx, loss)
    assert [(c.kind, c.bytes) for c in program.collectives()] == [
        ("all-gather", 64 * 32 * 4),
        ("reduce-scatter", 64 * 32 * 2),
        ("all-reduce", 64 * 32 * 2),
        ("all-gather", 2 * 4),
    ]
    assert ("all-reduce", [[0, 1], [2, 3]]) not in participants(program)


def test_variables_of_several_groupings_in_one_program() -> None:
    """Each has collectives of its own, and values of both are combined."""
    strategy = strategy_of(4)
    values = [RNG.normal(size=(5, 6)).astype(np.float32) for _ in range(4)]
    partitioners = [
        replicax.variables.GroupPartitioner(2, over_all(2, 0)),
        over_all(4, 0),
        None,
        replicax.variables.GroupPartitioner(1),
    ]
    with strategy.scope():
        variables = [replicax.Variable(v, partitioner=p) for v, p in zip(values, partitioners, strict=True)]
        optimizer = replicax.Optimizer(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)))
        optimizer.build(variables)

    def step(x: Any) -> Any:
        a, b, c, d = variables
        sums = replicax.get_replica_context().all_reduce("sum", [x * v.value for v in variables])
        optimizer.apply_gradients(zip(sums, variables, strict=True), aggregate=False)
        return jnp.sum(a + b * c - d), jnp.max(a.value * b.value)

    x = strategy.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group))
    found = strategy.run(step, args=(x,))
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))

    @jax.jit
    def plain(values: Any) -> Any:
        updates, _ = tx.update([6 * v for v in values], tx.init(values), values)
        return optax.apply_updates(values, updates)

    expected = jax.device_get(plain(values))
    for v, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(v, value, rtol=1e-5)
    a, b, c, d = expected
    np.testing.assert_allclose(found, (np.sum(a + b * c - d), np.max(a * b)), rtol=1e-5)


def test_the_gradient_of_a_stack_of_layers_is_summed_layer_by_layer() -> None:
    data = RNG.normal(size=(8, 32)).astype(np.float32)
    initial = RNG.normal(size=(6, 32, 32)).astype(np.float32) * 0.1

    def train(strategy: replicax.Strategy) -> tuple[np.ndarray, Any]:
        with strategy.scope():
            stack = replicax.Variable(initial)
            optimizer = replicax.Optimizer(optax.adam(0.01))

        def step(x: Any) -> None:
            def loss() -> Any:
                body = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
                return replicax.compute_average_loss(jnp.square(jax.lax.scan(body, x, stack.value)[0]).mean(-1))

            _, [gradient] = replicax.value_and_grad(loss, [stack])()
            optimizer.apply_gradients([(gradient, stack)])

        for batch in strategy.distribute_dataset([data] * 2):
            strategy.run(step, args=(batch,))
        batch = next(iter(strategy.distribute_dataset([data])))
        return stack.numpy(), strategy.extended.trace(step, args=(batch,))

    mine, program = train(sharded(4, 2))
    theirs, _ = train(strategy_of(1))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    layer = 32 * 32 * 4
    found = {(c.kind, c.bytes) for c in program.collectives()}
    assert found == {("all-gather", layer), ("reduce-scatter", layer // 2), ("all-reduce", layer // 2)}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_device_keeps_one_part_of_each_of_a_group(size: int) -> None:
    def loss(variables: Any, x: Any) -> Any:
        return replicax.compute_average_loss(jnp.square(x @ variables[0] @ variables[1]).mean(-1))

    program = trained(sharded(8, size), [(256, 256)] * 2, optax.adam(0.1), loss)
    kept = 3 * 2 * 256 * 256 * 4  # parameters, and Adam's two slots
    memory = program.compiled().memory_analysis()
    assert kept / size <= memory.argument_size_in_bytes <= kept / size * 1.02
    assert memory.alias_size_in_bytes >= kept / size


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_step_holds_the_gradients_of_a_few_layers_until_groups_come_together(size: int) -> None:
    def loss(variables: Any, x: Any) -> Any:
        for v in variables:
            x = jnp.tanh(x @ v)
        return replicax.compute_average_loss(x.mean(-1))

    layers, layer = 12, 4 * 256 * 256
    program = trained(sharded(2 * size, size), [(256, 256)] * layers, optax.adam(0.1), loss)
    assert program.compiled().memory_analysis().temp_size_in_bytes < 6 * layer


def test_replicas_that_share_devices_of_several_processes_sum_in_their_groups(monkeypatch) -> None:
    x = RNG.normal(size=(16, 256)).astype(np.float32)
    found = []
    for client in (None, object()):  # there is one between processes, whose CPUs sum in another way
        monkeypatch.setattr(pieces, "_jax", types.SimpleNamespace(coordination_client=lambda client=client: client))
        groups = replicax.variables.GroupPartitioner(2, over_all(2, 0))
        strategy = replicax.MirroredStrategy([f"cpu:{i}" for i in range(4)], groups, num_replicas=8)
        with strategy.scope():
            w = replicax.Variable(np.ones((256, 128), np.float32))
            optimizer = replicax.Optimizer(optax.sgd(0.1))

        def step(x, w=w, optimizer=optimizer):
            loss = replicax.value_and_grad(lambda: replicax.compute_average_loss((x @ w.value).mean(-1)), [w])
            optimizer.apply_gradients(zip(loss()[1], [w], strict=True))

        strategy.run(step, args=tuple(strategy.distribute_dataset([x])))
        found.append(w.numpy())
    np.testing.assert_allclose(*found, rtol=1e-6)
