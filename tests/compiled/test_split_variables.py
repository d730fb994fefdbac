"""Programs on pieces of their variables compute what they compute on the whole of them."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.variables.partitioners import over_all
from tests.conftest import logical_strategy, strategy_of
from tests.programs.programs import PROGRAMS, Program, bundles, components
from tests.programs.test_programs import Counted, check
from tests.soaking import soak_except

RNG = np.random.default_rng(3)


pytestmark = pytest.mark.usefixtures("ordinary_promotion")


def sharded(devices: int, group: int | None = None, per_device: int = 1) -> replicax.ShardedStrategy:
    """A strategy that splits everything, however small, so that most pieces are uneven."""
    size = group or devices
    partitioner = replicax.variables.GroupPartitioner(size, over_all(size, min_bytes=0))
    names = [f"cpu:{i}" for i in range(devices)]
    return replicax.ShardedStrategy(names, partitioner, num_replicas=devices * per_device)


def kinds(executable: replicax.Executable) -> collections.Counter[str]:
    return collections.Counter(c.kind for c in executable.collectives())


# --- everything ordinary --------------------------------------------------------------------------------


BUNDLES = bundles([p for p in PROGRAMS if p.shared is not tuple], 8)
OF_THEMES = {which.name.partition(":")[0]: which for which in BUNDLES}
QUICK = [OF_THEMES[theme] for theme in OF_THEMES if theme not in ("nnx", "optax")]
"""One of each theme, but for libraries whose own tests are on split variables, too."""


@pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")  # some draw from a key that all replicas have
@pytest.mark.covering(1)
@pytest.mark.parametrize(("devices", "group", "per_device"), [(2, 2, 1), (4, 4, 1), (4, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize(
    "which",
    soak_except(BUNDLES, *QUICK),
    ids=lambda p: p.name,
)
def test_programs_on_split_variables(which: Program, devices: int, group: int, per_device: int) -> None:
    strategy = sharded(devices, group, per_device)
    x = strategy.distribute_values_from_function(lambda ctx: which.data(ctx.replica_id_in_sync_group))
    with strategy.scope():
        shared = jax.tree.map(replicax.Variable, which.shared())

    def run(x: Any, *shared: Any) -> Any:
        is_variable = lambda v: isinstance(v, replicax.Variable)  # noqa: E731
        return which.step(x, *jax.tree.map(lambda v: v.value, shared, is_leaf=is_variable))

    step = Counted(run)
    localities = strategy.extended.trace(step, (x, *shared)).localities
    check(which, localities, strategy.run(step, (x, *shared)), which.reference(devices * per_device))
    assert step.calls == 1


# --- what stays in pieces, and what is moved ------------------------------------------------------------


def trained(strategy: replicax.Strategy, sizes: list[tuple[int, ...]], tx: Any, loss: Any) -> replicax.Executable:
    with strategy.scope():
        variables = [replicax.Variable(jnp.full(shape, 0.01)) for shape in sizes]
        optimizer = replicax.Optimizer(tx)

    def step(x: Any) -> None:
        _, gradients = replicax.value_and_grad(lambda: loss(variables, x), variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    x = strategy.distribute_values_from_function(
        lambda ctx: jnp.full((4, sizes[0][0]), float(ctx.replica_id_in_sync_group))
    )
    return strategy.extended.trace(step, args=(x,))


def test_what_is_element_by_element_stays_in_pieces() -> None:
    strategy = sharded(4)
    with strategy.scope():
        variables = [replicax.Variable(jnp.ones(8 + i)) for i in range(10)]

    def step(x: Any) -> None:
        for v in variables:
            v.assign_add(x * jnp.tanh(v) + 1.0)

    program = strategy.extended.trace(step, args=(2.0,))
    assert program.collectives() == []
    strategy.run(step, args=(2.0,))
    np.testing.assert_allclose(variables[3].numpy(), np.full(11, 2 + 2 * np.tanh(1)), rtol=1e-6)


COUNT = 10


def test_elements_of_any_kind_stay_in_pieces() -> None:
    """Bits are counted, numbers made complex and taken apart, without a gather."""
    strategy = sharded(2)
    with strategy.scope():
        w = replicax.Variable(RNG.normal(size=(6, 3)).astype(np.float32))
        bits = replicax.Variable(RNG.integers(0, 99, (6, 3)).astype(np.int32))
    before = w.numpy(), bits.numpy()

    def step() -> None:
        w.assign(jax.lax.real(jax.lax.conj(jax.lax.complex(w.value, w.value) * 2)))
        bits.assign(jax.lax.population_count(bits.value) + jax.lax.clz(bits.value))

    assert kinds(strategy.extended.trace(step)) == {}
    strategy.run(step)
    np.testing.assert_array_equal(w.numpy(), before[0] * 2)
    counted = np.array([bin(b).count("1") + 32 - int(b).bit_length() for b in before[1].ravel()])
    np.testing.assert_array_equal(bits.numpy(), counted.reshape(6, 3))


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_parameters_are_gathered_and_their_gradients_scattered_and_nothing_else(replicas: int) -> None:
    strategy = replicax.ShardedStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        variables = [replicax.Variable(jnp.full((16, 32), 0.1)) for _ in range(COUNT)]
        optimizer = replicax.Optimizer(optax.adam(0.1))

    def step(x: Any) -> None:
        def loss() -> Any:
            return replicax.compute_average_loss(sum(jnp.tanh(x @ v).mean(-1) for v in variables))

        _, gradients = replicax.value_and_grad(loss, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    x = strategy.distribute_values_from_function(lambda ctx: jnp.full((4, 16), float(1 + ctx.replica_id_in_sync_group)))
    found = strategy.extended.trace(step, args=(x,)).collectives()
    # The gradient of tanh(x @ v) does not need v again; small gradients travel as one.
    assert collections.Counter(c.kind for c in found) == {"all-gather": COUNT, "reduce-scatter": 1}
    assert sum(c.bytes for c in found if c.kind == "all-gather") == COUNT * 16 * 32 * 4
    assert sum(c.bytes for c in found if c.kind == "reduce-scatter") == COUNT * 16 * 32 * 4 // replicas


def test_gathered_again_for_the_backward_pass() -> None:
    def loss(variables: Any, x: Any) -> Any:
        for v in variables:
            x = jnp.tanh(x @ v)
        return replicax.compute_average_loss(x.mean(-1))

    program = trained(replicax.ShardedStrategy(["cpu:0", "cpu:1"]), [(256, 256)] * 8, optax.sgd(0.1), loss)
    # Each but the first one twice, except for the last ones, which the backward pass finds still there.
    assert 8 + 7 - 3 <= kinds(program)["all-gather"] <= 8 + 7
    assert kinds(program)["reduce-scatter"] == 8
    assert kinds(program)["all-reduce"] == 0


@pytest.mark.parametrize("replicas", [2, 3])
def test_small_sums_of_any_rank_are_scattered_together(replicas: int) -> None:
    strategy = sharded(replicas)
    initial = [RNG.normal(size=shape).astype(np.float32) for shape in [(2, 3, 6), (3, 6, 2), (6, 2, 3), (5,)]]
    with strategy.scope():
        variables = [replicax.Variable(value) for value in initial]
    assert [v.layout.dim for v in variables] == [2, 1, 0, 0]

    def step(x: Any) -> None:
        sums = replicax.get_replica_context().all_reduce("sum", [x * v.value for v in variables])
        for v, total in zip(variables, sums, strict=True):
            v.assign(total)

    x = strategy.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1))
    assert kinds(strategy.extended.trace(step, args=(x,)))["reduce-scatter"] == 1
    strategy.run(step, args=(x,))
    for v, value in zip(variables, initial, strict=True):
        np.testing.assert_allclose(v.numpy(), value * sum(range(1, replicas + 1)), rtol=1e-6)


def test_a_norm_over_pieces_is_one_small_all_reduce() -> None:
    def loss(variables: Any, x: Any) -> Any:
        return replicax.compute_average_loss(jnp.square(x @ variables[0]).mean(-1))

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    found = trained(sharded(4), [(64, 32)], tx, loss).collectives()
    assert {c.kind: c.bytes for c in found} == {"all-gather": 64 * 32 * 4, "reduce-scatter": 64 * 32, "all-reduce": 4}


@pytest.mark.parametrize("used_again", [False, True])
def test_the_gradient_of_a_stack_is_scattered_layer_by_layer(used_again: bool) -> None:
    data = RNG.normal(size=(8, 64)).astype(np.float32)
    initial = RNG.normal(size=(12, 64, 63)).astype(np.float32) * 0.1

    def train(strategy: replicax.Strategy) -> tuple[np.ndarray, Any, Any]:
        with strategy.scope():
            stack = replicax.Variable(initial)
            optimizer = replicax.Optimizer(optax.adam(0.01))

        def step(x: Any) -> Any:
            def loss() -> Any:
                body = lambda h, w: (jnp.pad(jnp.tanh(h @ w), [(0, 0), (0, 1)]), None)  # noqa: E731
                return replicax.compute_average_loss(jnp.square(jax.lax.scan(body, x, stack.value)[0]).mean(-1))

            _, [gradient] = replicax.value_and_grad(loss, [stack])()
            optimizer.apply_gradients([(gradient, stack)])
            return jnp.abs(gradient).max() if used_again else None  # of each replica's own gradient

        largest = [strategy.run(step, args=(batch,)) for batch in strategy.distribute_dataset([data] * 2)]
        batch = next(iter(strategy.distribute_dataset([data])))
        return stack.numpy(), largest, strategy.extended.trace(step, args=(batch,))

    mine, largest, program = train(sharded(4))
    theirs, expected, _ = train(strategy_of(4))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    for a, b in zip(largest, expected, strict=True):
        if used_again:
            np.testing.assert_allclose(a.values, b.values, rtol=1e-5)
    layer = 64 * 63 * 4
    found = {(c.kind, c.bytes) for c in program.collectives()}
    # What each replica wants to know of its own gradient is there only if the loop leaves it whole.
    assert found == {("all-gather", layer), ("reduce-scatter", (12 * layer if used_again else layer) // 4)}
    temporaries = program.compiled().memory_analysis().temp_size_in_bytes / layer
    assert (temporaries > 12) == used_again


def test_a_stack_beside_arrays_that_are_whole_is_gathered_layer_by_layer() -> None:
    strategy = sharded(2)
    with strategy.scope():
        stack = replicax.Variable(RNG.normal(size=(3, 64, 63)).astype(np.float32))

    def step(x: Any) -> Any:
        body = lambda h, layer: (jnp.pad(jnp.tanh(h @ layer[0] * layer[1]), [(0, 0), (0, 1)]), None)  # noqa: E731
        return jax.lax.scan(body, x, (stack.value, jnp.arange(3.0)))[0]

    [batch] = strategy.distribute_dataset([np.ones((8, 64), np.float32)])
    found = strategy.extended.trace(step, args=(batch,)).collectives()
    assert {(c.kind, c.bytes) for c in found} == {("all-gather", 64 * 63 * 4)}


@pytest.mark.parametrize("also_whole", [False, True])
def test_what_a_checkpoint_casts_is_gathered_after_the_cast(also_whole: bool) -> None:
    data = RNG.normal(size=(8, 64)).astype(np.float32)
    initial = RNG.normal(size=(4, 64, 64)).astype(np.float32) * 0.1

    def train(strategy: replicax.Strategy) -> tuple[np.ndarray, Any]:
        with strategy.scope():
            stack = replicax.Variable(initial)
            optimizer = replicax.Optimizer(optax.sgd(0.1))

        @jax.checkpoint
        def layer(h: Any, w: Any) -> tuple[Any, None]:
            product = jnp.tanh(h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
            return (product * jnp.sin(w[0]) if also_whole else product), None

        def step(x: Any) -> None:
            def loss() -> Any:
                return replicax.compute_average_loss(jnp.square(jax.lax.scan(layer, x, stack.value)[0]).mean(-1))

            optimizer.apply_gradients(zip(replicax.value_and_grad(loss, [stack])()[1], [stack], strict=True))

        [batch] = strategy.distribute_dataset([data])
        program = strategy.extended.trace(step, args=(batch,))
        strategy.run(step, args=(batch,))
        return stack.numpy(), program

    mine, program = train(sharded(4))
    np.testing.assert_allclose(mine, train(strategy_of(4))[0], rtol=1e-5, atol=1e-6)
    text = program.lowered().as_text()
    gathered = collections.Counter(re.findall(r"stablehlo.all_gather.*-> tensor<64x64x(\w+)>", text))
    assert gathered == ({"f32": 2, "bf16": 1} if also_whole else {"bf16": 2})  # forward and backward


def test_a_stack_that_is_split_between_its_layers() -> None:
    data, initial = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=(6, 3, 3)).astype(np.float32)

    def train(strategy: replicax.Strategy) -> replicax.Variable:
        with strategy.scope():
            stack = replicax.Variable(initial)

        def loss(x: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack.value)
            return replicax.compute_average_loss(h.sum(-1))

        def step(x: Any) -> None:
            _, [gradient] = replicax.value_and_grad(loss, [stack])(x)
            stack.assign_sub(replicax.get_replica_context().all_reduce("sum", gradient))

        strategy.run(step, args=tuple(strategy.distribute_dataset([data])))
        return stack

    mine = train(sharded(2))
    assert mine.layout.dim == 0
    np.testing.assert_allclose(mine.numpy(), train(strategy_of(2)).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("between", ["a cast", "a number"])
def test_what_is_between_a_gradient_and_its_sum_happens_layer_by_layer(between: str) -> None:
    """Casts, as of parameters in bfloat16, and numbers: they are applied to each layer's gradient, and it is summed."""
    data = RNG.normal(size=(8, 64)).astype(np.float32)
    initial = RNG.normal(size=(12, 64, 64)).astype(np.float32) * 0.1

    def train(strategy: replicax.Strategy) -> tuple[np.ndarray, Any]:
        with strategy.scope():
            stack = replicax.Variable(initial)
            optimizer = replicax.Optimizer(optax.sgd(100.0))

        def step(x: Any) -> None:
            dtype = jnp.bfloat16 if between == "a cast" else jnp.float32

            def loss() -> Any:
                layers = stack.value.astype(dtype)
                h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x.astype(dtype), layers)
                return replicax.compute_average_loss(jnp.square(h.astype(jnp.float32)).mean(-1))

            _, [gradient] = replicax.value_and_grad(loss, [stack])()
            optimizer.apply_gradients([(3.0 * gradient if between == "a number" else gradient, stack)])

        [batch] = strategy.distribute_dataset([data])
        strategy.run(step, args=(batch,))
        return stack.numpy(), strategy.extended.trace(step, args=(batch,))

    mine, program = train(sharded(4))
    theirs, _ = train(strategy_of(4))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert np.abs(mine - initial).max() > 1e-3
    layer = 64 * 64 * 4
    assert {c.bytes for c in program.collectives() if c.kind == "reduce-scatter"} == {layer // 4}  # float32
    assert program.compiled().memory_analysis().temp_size_in_bytes < 12 * layer


def test_values_that_differ_between_replicas_are_never_in_pieces() -> None:
    strategy = sharded(2)
    with strategy.scope():
        v = replicax.Variable(jnp.arange(5.0), aggregation="sum")
    x = strategy.distribute_values_from_function(lambda ctx: jnp.full(5, float(1 + ctx.replica_id_in_sync_group)))
    product = strategy.run(lambda x: v * x, args=(x,))
    assert [p.tolist() for p in strategy.local_results(product)] == [[0, 1, 2, 3, 4], [0, 2, 4, 6, 8]]
    strategy.run(lambda x: v.assign(v * x), args=(x,))
    assert v.numpy().tolist() == [0, 3, 6, 9, 12]
    program = strategy.extended.trace(lambda x: v.assign(v * x), args=(x,))
    assert kinds(program) == {"all-gather": 1, "reduce-scatter": 1}


def test_a_sum_is_scattered_through_functions_that_are_called() -> None:
    strategy = sharded(2)
    with strategy.scope():
        v = replicax.Variable(jnp.arange(4.0))
    half = jax.jit(lambda total: 0.5 * total)

    def step(x: Any) -> None:
        v.assign_sub(half(replicax.get_replica_context().all_reduce("sum", x)))

    x = strategy.distribute_values_from_function(lambda ctx: jnp.full(4, float(1 + ctx.replica_id_in_sync_group)))
    strategy.run(step, args=(x,))
    assert v.numpy().tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert kinds(strategy.extended.trace(step, args=(x,))) == {"reduce-scatter": 1}


# --- memory ---------------------------------------------------------------------------------------------

LAYERS, WIDTH = 12, 256


@pytest.mark.parametrize("replicas", [*(pytest.param(n, marks=pytest.mark.soak) for n in (2, 8)), 4])
def test_a_device_holds_a_part_of_the_model_and_a_few_layers(replicas: int) -> None:
    def loss(variables: Any, x: Any) -> Any:
        for v in variables:
            x = jnp.tanh(x @ v)
        return replicax.compute_average_loss(x.mean(-1))

    def memory(strategy: replicax.Strategy) -> Any:
        return trained(strategy, [(WIDTH, WIDTH)] * LAYERS, optax.adam(0.1), loss).compiled().memory_analysis()

    layer = WIDTH * WIDTH * 4
    kept = 3 * LAYERS * layer  # parameters, and Adam's two slots
    split = memory(replicax.ShardedStrategy([f"cpu:{i}" for i in range(replicas)]))
    assert kept / replicas <= split.argument_size_in_bytes <= kept / replicas * 1.01
    assert kept / replicas <= split.output_size_in_bytes <= kept / replicas * 1.01
    assert split.temp_size_in_bytes < 6 * layer
    mirrored = memory(strategy_of(replicas))
    assert mirrored.argument_size_in_bytes >= kept
    assert mirrored.temp_size_in_bytes > LAYERS * layer


# --- reductions, whatever the pieces hold ---------------------------------------------------------------

REDUCTIONS = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "any": lambda x, axis=None: jnp.any(x != 0, axis=axis),
    "all": lambda x, axis=None: jnp.all(x != 0, axis=axis),
    "prod": jnp.prod,
    "argmax": jnp.argmax,
}
VALUES = {
    "float32": np.array([[1, -2, 3], [4, 5, -6], [0, 8, 9], [-1, -2, -3], [7, 7, 7]], np.float32),
    "with NaN": np.array([[1, np.nan], [3, 4], [5, -np.inf], [0, 0], [1, np.inf]], np.float32),
    "int8": np.array([[-5, 2], [3, -128], [7, 7], [12, 10], [8, 14]], np.int8),
    "int4": jnp.array([[-5, 2], [3, -8], [7, 7], [1, 0], [2, 4]], jnp.int4),
    "float8": -jnp.arange(1.0, 11.0).reshape(5, 2).astype(jnp.float8_e4m3fn),
    "complex64": np.array([[1 + 2j, 3], [-1j, 4], [2, 2], [0, 1], [5, -3j]], np.complex64),
    "bool": np.array([[True, False], [True, True], [False, False], [True, True], [True, False]]),
}


# Of little use, and not everywhere defined.
LEFT_OUT = {(name, values) for name in ("prod", "argmax", "sum") for values in ("int4", "float8", "complex64")}


@pytest.mark.covering(1)
@pytest.mark.parametrize("pieces", [2, 3, 4])
@pytest.mark.parametrize(("name", "values"), [(n, v) for n in REDUCTIONS for v in VALUES if (n, v) not in LEFT_OUT])
def test_a_reduction_of_pieces_is_that_of_the_whole(name: str, values: str, pieces: int) -> None:
    reduce, value = REDUCTIONS[name], jnp.asarray(VALUES[values])
    strategy = strategy_of(4)
    with strategy.scope():
        v = replicax.variables.ShardedVariable(value, partitioner=replicax.variables.FixedShardsPartitioner(pieces))
    found = strategy.run(lambda: [reduce(v.value, axis=axis) for axis in (None, 0, 1)])
    expected = jax.jit(lambda value: [reduce(value, axis=axis) for axis in (None, 0, 1)])(value)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(*(np.asarray(x).astype(np.complex64) for x in (mine, theirs)), rtol=1e-5)


def test_bits_of_pieces_are_combined_as_bits() -> None:
    strategy = strategy_of(4)
    with strategy.scope():
        v = replicax.variables.ShardedVariable(np.array([12, 10, 14, 11, 15], np.int32))
    found = strategy.run(lambda: (jnp.bitwise_and.reduce(v.value), jnp.bitwise_or.reduce(v.value)))
    assert tuple(map(int, found)) == (8, 15)


def test_a_reduction_of_ones_own() -> None:
    strategy = sharded(2)
    with strategy.scope():
        v = replicax.Variable(jnp.ones((4, 3)))

    def step() -> Any:
        return jax.lax.reduce(v.value, jnp.float32(0), lambda a, b: a + b + a * b, (0,))

    assert strategy.run(step).tolist() == [15, 15, 15]


def test_the_filling_is_no_part_of_the_value() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        v = replicax.variables.ShardedVariable(jnp.array([1.0, 2.0, 4.0]))
    with jax.debug_nans(True):
        strategy.run(lambda: v.assign(v.value / v.value))
    assert v.numpy().tolist() == [1, 1, 1]
    assert np.asarray(v.slot.array).tolist() == [1, 1, 1, 0]


def test_what_is_made_of_the_filling_is_in_no_reduction() -> None:
    strategy = strategy_of(2)
    value = jnp.array([1.0, 2.0, 4.0])
    with strategy.scope():
        v = replicax.variables.ShardedVariable(value)

    def step(x: Any) -> Any:
        return [jnp.cos(x).sum(), (x + 1).mean(), (2 - x).max(), (x - 5).min(), jnp.linalg.norm(x - 3)]

    assert list(map(float, strategy.run(lambda: step(v.value)))) == pytest.approx(list(map(float, step(value))))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("replicas", "pieces"), [(2, 2), (3, 3), (4, 4), (6, 3)])
@pytest.mark.parametrize("method", ["add", "set", "max", "mul"])
def test_rows_change_in_the_pieces_where_they_are(method: str, replicas: int, pieces: int) -> None:
    strategy = strategy_of(replicas)
    partitioner = replicax.variables.GroupPartitioner(pieces, replicax.variables.FixedShardsPartitioner(pieces))
    initial = RNG.normal(size=(7, 3)).astype(np.float32)
    rows = jnp.array([6, 0, -1, 3, 3, 99, 4], jnp.int32)  # some twice, one from the end, one that is not there
    new = jnp.ones((7, 3)) * jnp.arange(7.0)[:, None] if method != "set" else jnp.ones((7, 3))
    with strategy.scope():
        v = replicax.Variable(initial, partitioner=partitioner)

    def change(value: Any, rows: Any) -> Any:
        return getattr(jnp.asarray(value).at[rows], method)(new)

    program = strategy.extended.trace(lambda rows: v.assign(change(v.value, rows)), args=(rows,))
    assert program.collectives() == []
    strategy.run(lambda rows: v.assign(change(v.value, rows)), args=(rows,))
    plain = jax.jit(change)
    np.testing.assert_allclose(v.value, plain(initial, rows), rtol=1e-6)
    own = strategy.distribute_values_from_function(lambda ctx: rows + ctx.replica_id_in_sync_group)
    found = strategy.run(lambda rows: change(v.value, rows), args=(own,))
    for i, mine in enumerate(components(found)):
        np.testing.assert_allclose(mine, plain(v.numpy(), rows + i), rtol=1e-6)


def test_rows_change_where_logical_devices_have_parts_or_rows_outside_count() -> None:
    strategy = logical_strategy(2, 2, replicax.variables.FixedShardsPartitioner(2))
    initial, rows = RNG.normal(size=(8, 6)).astype(np.float32), jnp.array([6, 0, -1, 3, 3, 99, 4])
    for parts in ([2, 1], [1, 2]):
        for mode in (None, "clip"):
            with strategy.scope():
                v = replicax.Variable(initial, partition_dimensions=parts)
            assert v.layout.logical_parts == parts[0]
            strategy.run(lambda v: v.assign(v.value.at[rows].add(1.0, mode=mode)), args=(v,))  # noqa: B023
            np.testing.assert_allclose(v.numpy(), jnp.asarray(initial).at[rows].add(1.0, mode=mode), rtol=1e-6)


@pytest.mark.parametrize("executor", ["compiled", "per_replica"])
def test_options_hold_for_sums_that_end_in_pieces(executor: str) -> None:
    strategy = sharded(2)
    with strategy.scope():
        v = replicax.Variable(jnp.zeros((8, 4)))
    options = replicax.CommunicationOptions(implementation="ring")

    def step(x: Any) -> None:
        context = replicax.get_replica_context()
        assert context is not None
        v.assign_add(context.all_reduce("sum", x, options))

    x = strategy.distribute_values_from_function(lambda ctx: jnp.full((8, 4), 1.0 + ctx.replica_id_in_sync_group))
    assert set(kinds(strategy.extended.trace(step, args=(x,)))) == {"collective-permute"}
    strategy.run(step, args=(x,), options=replicax.RunOptions(executor))
    assert v.numpy().tolist() == [[3] * 4] * 8
