"""``plan``: what a step needs on its devices, which need not be there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from replicax.execution.described import described
from replicax.execution.replicate import Executable
from replicax.execution.run import arguments_of, prepare
from replicax.planning.chips import CHIPS, Chip
from replicax.planning.compiling import Compilation, compile_ahead
from replicax.planning.cost import cost_of
from replicax.planning.estimate import estimate_of, scaling_of
from replicax.planning.groups import collectives_of
from replicax.planning.memory import inputs_and_outputs, largest, memory_of, temporaries_of
from replicax.planning.network import Network
from replicax.planning.report import CollectiveRow, Plan
from replicax.topology.generations import generation_of

if TYPE_CHECKING:
    from replicax.strategy import Strategy

_BUFFERS = 12


def plan(strategy: Strategy, step: Callable[..., Any], element_spec: Any = None, *, chip: Chip | None = None) -> Plan:
    """Compile a step ahead of time, and report what it needs: nothing runs, and no device need be there.

    It is the program that ``strategy.run(step, args=(element,))`` would run, compiled by the compiler of the strategy's
    devices. On the devices of a TPU slice that is only described (``TPUClusterResolver(topology="v5p:8x8x8")``; this
    needs the extra ``replicax[tpu]``) it is the compiler for TPUs. Make variables in the strategy's scope as ever: on
    absent devices they have shapes and no values, and take no memory.

    Args:
      strategy: where the step is to run.
      step: written for one replica.
      element_spec: the pytree that the step takes. A ``jax.ShapeDtypeStruct`` in it stands for a ``PerReplica`` array,
        and has one replica's shape: of a global batch of 1,024 on 512 replicas, ``(2, …)``. Anything else is passed on
        as ``strategy.run`` would: arrays and numbers are the same for all replicas (M), and a real element of a
        distributed dataset will do too. ``None``: the step takes nothing. For a step with several arguments pass a
        function of one: ``lambda element: step(*element)``.
      chip: figures to estimate with; by default those of the chip table (:mod:`replicax.planning.chips`). Without
        any (a CPU, a GPU) the estimates are left out, and whether the step fits is not known.

    Returns:
      A :class:`Plan`: print it, ``to_json()``, ``write_html(path)``. A step that does not fit is no error:
      ``plan.fits`` is ``False``.

    Raises:
      CompilationError: the step can't be compiled for these devices.
      LocalityError, DeadlockError, ContextError: as ``strategy.run``.

    >>> import jax, optax, replicax
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     w = replicax.Variable(lambda: jax.numpy.zeros((256, 10)), name="w")
    ...     optimizer = replicax.Optimizer(optax.sgd(0.1))
    >>> def step(x):
    ...     loss, grads = replicax.value_and_grad(lambda: replicax.compute_average_loss((x @ w).sum(-1)), [w])()
    ...     optimizer.apply_gradients(zip(grads, [w]))
    >>> found = replicax.plan(strategy, step, jax.ShapeDtypeStruct((32, 256), "float32"))
    >>> found.fits, found.memory.arguments, [(c.kind, c.axes) for c in found.collectives]
    (None, 43008, [('all-reduce', ('replica',))])
    """
    if chip is not None and not isinstance(chip, Chip):
        raise TypeError(f"plan: chip must be a replicax.Chip or None, got {chip!r}")
    begin = time.perf_counter()
    element = () if element_spec is None else (described(element_spec, strategy.extended.mesh),)
    arguments = arguments_of(strategy, step, element, None)
    executable = prepare(strategy, step, arguments)
    traced = time.perf_counter() - begin
    compilation = compile_ahead(executable)
    names = [path.replace("args[0]", "element", 1) for path in arguments.paths()]
    return _report(strategy, executable, names, compilation, traced, chip)


def _report(
    strategy: Strategy,
    executable: Executable,
    argument_names: Sequence[str],
    compilation: Compilation,
    traced: float,
    given: Chip | None,
) -> Plan:
    devices = strategy.extended.logical_devices
    chip, device = _chips(devices, given)
    fixed = list(inputs_and_outputs(executable, argument_names))
    about = partial(
        Plan,
        step=executable.program.name,
        strategy=type(strategy).__name__,
        platform=devices.flat[0].platform,
        device_kind=devices.flat[0].device_kind,
        devices=devices.size,
        replicas=len(devices),
        mesh={str(name): int(size) for name, size in executable.mesh.shape.items()},
        is_absent=strategy.extended.is_absent,
        chip=chip,
        trace_seconds=traced,
        compile_seconds=compilation.seconds,
        words=compilation.words,
    )
    network = None if chip is None else Network(devices, chip)
    if network is not None:
        about = partial(about, topology=network.name)
    module = compilation.module
    capacity = compilation.available or (None if device is None else int(device.usable or device.memory))
    buffers = largest([*fixed, *temporaries_of(compilation.allocations, module)], _BUFFERS)
    memory = memory_of(compilation.allocations, compilation.code, capacity, buffers)
    cost = cost_of(module)
    uses = collectives_of(module, {str(name): int(size) for name, size in executable.mesh.shape.items()})
    # The compiler for TPUs refuses what does not fit; others leave it to the device.
    fits = not compilation.words if devices.flat[0].platform == "tpu" else memory.fits
    if device is None or network is None:
        rows = tuple(CollectiveRow.of(use, None) for use in uses)
        return about(fits=fits, memory=memory, cost=cost, collectives=rows)
    return about(
        fits=fits,
        memory=memory,
        cost=cost,
        collectives=tuple(CollectiveRow.of(use, network.seconds(use)) for use in uses),
        estimate=estimate_of(cost, uses, device, network),
        scaling=scaling_of(cost, uses, device, network),
    )


def _chips(devices: np.ndarray, given: Chip | None) -> tuple[Chip | None, Chip | None]:
    """What the chips are, and what each device has of one."""
    generation = generation_of(devices.flat[0].device_kind)
    chip = given or (None if generation is None else CHIPS.get(generation.name))
    if chip is None:
        return None, None
    places = {getattr(d, "coords", None) and tuple(d.coords) for d in devices.flat}
    several = devices.size // len(places) if None not in places else 1
    return chip, chip.share(max(1, several)) if given is None or None not in places else chip
