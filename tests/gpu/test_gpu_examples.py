"""The gallery, the examples, Keras' train function, loops of steps and ragged batches compile for H100s.

Each program is traced on eight emulated devices, as its own ``main`` starts it, up to its first step; that step's
program is then compiled for eight H100s, and its collectives are those of the golden table. Programs that compile for
long are represented by others: of the gallery ``GALLERY`` (each library, with convolutions, attention, batch
normalization, random numbers and a contrastive loss) and two of the three of Keras.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax
from replicax.execution.compiled.replicate import Executable, replicate
from replicax.execution.many_steps.loop import Step
from replicax.extended.described_arguments import PaddedShapeDtypeStruct
from replicax.hlo.collective_instructions import ProgramDevices, collectives_of
from replicax.planning import planner
from replicax.planning.compilation import compile_ahead
from tests.gallery.test_gallery import PROGRAMS
from tests.gpu.described import devices, needs_compiler
from tests.gpu.golden import check
from tests.programs.programs import third_party

pytestmark = [needs_compiler, pytest.mark.soak, pytest.mark.filterwarnings("ignore::replicax.errors.LocalityWarning")]


GALLERY = ("nnx.cnn", "nnx.gpt", "nnx.diffusion", "equinox.cnn", "linen.resnet", "pytrees.two_tower")


class TracedError(Exception):
    """Ends a program at its first step."""

    def __init__(self, program: Executable) -> None:
        self.program = program


class UntilTheFirstStep(replicax.MirroredStrategy):
    """On eight emulated devices."""

    def __init__(self) -> None:
        super().__init__([f"cpu:{i}" for i in range(8)])

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        raise TracedError(self.extended.trace(fn, args, kwargs))


def first_step(main: Any, *args: Any, **kwargs: Any) -> Executable:
    """The program of the first step that ``main`` runs."""
    with pytest.raises(TracedError) as e:
        main(*args, **kwargs)
    return e.value.program


def on_gpus(program: Executable) -> list[Any]:
    """The collectives of a program that was traced on emulated devices, compiled for as many H100s."""
    constants = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in program.program.constants]  # they are on CPUs
    return compiled(
        replicate(
            dataclasses.replace(program.program, constants=constants),
            replicax.MirroredStrategy(devices()).extended.replicas.mesh,
        )
    )


def compiled(program: Executable) -> list[Any]:
    """The collectives of a program for H100s."""
    module = compile_ahead(program.lowered, program.program.name, program.mesh.devices.flat[0]).module
    return collectives_of(module, ProgramDevices({str(k): int(n) for k, n in program.mesh.shape.items()}))


@pytest.mark.parametrize("name", GALLERY)
@third_party
def test_the_gallery(name: str) -> None:
    main = importlib.import_module(f"examples.gallery.{name}").main
    check(f"gallery {name}", on_gpus(first_step(main, UntilTheFirstStep(), **PROGRAMS[name])))


@pytest.mark.parametrize("name", ["cnn", "recommender"])
@third_party
def test_the_train_function_of_keras(name: str) -> None:
    pytest.importorskip("keras")
    main = importlib.import_module(f"examples.gallery.keras.{name}").main
    check(f"gallery keras.{name}", on_gpus(first_step(main, UntilTheFirstStep(), epochs=1, verbose=0)))


@third_party
def test_a_transformer_on_logical_devices() -> None:
    from examples import transformer

    strategy = replicax.MirroredStrategy(devices(), num_logical_devices=2)
    with strategy.scope():
        _, step = transformer.build(parts=2)
    text = jax.ShapeDtypeStruct((8, transformer.LENGTH), jnp.int32)
    check("example transformer", replicax.plan(strategy, step, (text, text)).collectives)


@third_party
def test_images_in_quarters() -> None:
    from examples import spatial

    strategy = replicax.MirroredStrategy(devices(), num_logical_devices=4)
    with strategy.scope():
        _, step = spatial.build(strategy, spatial.QUARTERS)
    images = jax.ShapeDtypeStruct((4, 32, 32, 1), jnp.float32)
    check("example spatial", replicax.plan(strategy, step, (images, images)).collectives)


@third_party
def test_a_recommender() -> None:
    from examples import recommender

    strategy = UntilTheFirstStep()
    model = recommender.TwoTowers(strategy)

    def step(users: jax.Array, items: jax.Array) -> jax.Array:
        return model.step(users, items, model.users[users], model.items[items])

    ids = np.arange(64, dtype=np.int32)
    [batch] = strategy.distribute_dataset([(ids, ids)])
    check("example recommender", on_gpus(first_step(strategy.run, step, args=batch)))


# --- loops of steps, and ragged batches -----------------------------------------------------------------


def training(strategy: replicax.Strategy) -> Any:
    """A step with two layers, a metric and Adam."""
    with strategy.scope():
        weights = [replicax.Variable(lambda: jnp.zeros((256, 256)), name=name) for name in ("first", "last")]
        optimizer = replicax.Optimizer(optax.adam(1e-3))
        seen = replicax.Mean("loss")

    def step(x: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            losses = jnp.square(jnp.tanh(x @ weights[0]) @ weights[1]).mean(-1)
            seen.update(losses)
            return replicax.compute_average_loss(losses)

        share, gradients = replicax.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return share

    return step


PLACEMENTS: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "split": {"variable_partitioner": replicax.variables.FixedShardsPartitioner(8)},
    "several replicas": {"num_replicas": 16},
    "reproducible": {"reproducible": True},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@third_party
def test_run_steps(placement: str) -> None:
    strategy = replicax.MirroredStrategy(devices(), **PLACEMENTS[placement])
    one = training(strategy)

    def step(ctx: replicax.MultiStepContext, x: jax.Array) -> None:
        ctx.set_last_step_output("loss", one(x), "sum")

    program, _ = planner._traced_program(strategy, Step(step), jax.ShapeDtypeStruct((32, 256), jnp.float32))
    check(f"run_steps of 10, {placement}", compiled(program.repeated(10)))


@pytest.mark.parametrize("placement", PLACEMENTS)
@third_party
def test_ragged_batches(placement: str) -> None:
    strategy = replicax.MirroredStrategy(devices(), **PLACEMENTS[placement])
    plan = replicax.plan(strategy, training(strategy), PaddedShapeDtypeStruct((32, 256), jnp.float32))
    check(f"ragged batch, {placement}", plan.collectives)
