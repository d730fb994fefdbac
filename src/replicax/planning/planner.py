"""``plan``: what a step needs on its devices, which need not be there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from replicax import _jax
from replicax.devices.mesh import axis_sizes, programs_for, slices_of
from replicax.errors import CompilationError
from replicax.execution.compiled.replicate import Executable
from replicax.extended.described_arguments import traced_step
from replicax.hlo.collective_instructions import ProgramDevices, collectives_of
from replicax.pipeline.dispatch import PlacedExecutable
from replicax.planning.chip_specs import Chip, chip_and_share
from replicax.planning.compilation import Compilation, compile_ahead, hint_of
from replicax.planning.cost import cost_of
from replicax.planning.estimate import estimate_of, scaling_of
from replicax.planning.global_batch import examples_together, tokens_of
from replicax.planning.memory import compiled_buffers, inputs_and_outputs, largest, memory_of, read_variables
from replicax.planning.network import Network
from replicax.planning.pipeline_costs import DeviceLoad, compile_regions, loads_of
from replicax.planning.report import CollectiveRow, Plan, Stage
from replicax.planning.timeline.peak import peak_by_kind, temporaries_by_kind
from replicax.planning.timeline.prediction import timeline_of
from replicax.planning.timeline.user_lines import SourceLines
from replicax.planning.timeline.walk import ScheduleWalk
from replicax.strategy import Strategy

_BUFFERS = 12


@_jax.public_call
def plan(strategy: Strategy, step: Callable[..., Any], element_spec: Any = None, *, chip: Chip | None = None) -> Plan:
    """Compile a step ahead of time, and report what it needs: nothing runs, and no device need be there.

    It is the program that ``strategy.run(step, args=(element,))`` would run, compiled by the compiler of the strategy's
    devices. For GPUs that are only described (``GPUClusterResolver(topology="h100:16x8")``; this needs the extra
    ``replicax[gpu-plan]``) it is XLA's compiler for GPUs, and for TPU slices
    (``TPUClusterResolver(topology="v5p:8x8x8")``; the extra ``replicax[tpu]``) that for TPUs. Make variables in the
    strategy's scope as ever: on absent devices they have shapes and no values, and take no memory.

    Args:
      strategy: where the step is to run.
      step: written for one replica.
      element_spec: the pytree that the step takes. A ``jax.ShapeDtypeStruct`` in it stands for a ``PerReplica`` array,
        and has one replica's shape: of a global batch of 1,024 on 512 replicas, ``(2, …)``. Anything else is passed on
        as ``strategy.run`` would: arrays and numbers are the same for all replicas, and a real element of a
        distributed dataset will do too. ``None``: the step takes nothing. For a step with several arguments pass a
        function of one: ``lambda element: step(*element)``.
      chip: figures to estimate with; by default those of the chip table (:mod:`replicax.planning.chip_specs`). Without
        any (a CPU) the estimates are left out, and whether the step fits is not known.

    Returns:
      A :class:`Plan`: print it, ``to_json()``, ``write_html(path)``. A step that does not fit is no error:
      ``plan.fits`` is ``False``.

    Raises:
      CompilationError: the step can't be compiled for these devices.
      ValueError: the devices are of several slices, or GPUs of several hosts, and the chip has no bandwidth of the
        network between them.
      TypeError: ``strategy`` is none, ``step`` is not callable, ``element_spec`` is a dataset, or ``chip`` no
        :class:`Chip`.
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
    if not isinstance(strategy, Strategy):
        raise TypeError(f"plan(strategy, step, element_spec): expected a strategy, got {strategy!r}")
    if chip is not None and not isinstance(chip, Chip):
        raise TypeError(f"plan: chip must be a replicax.planning.Chip or None, got {chip!r}")
    if hasattr(type(element_spec), "element_spec"):
        raise TypeError(f"plan(strategy, step, element_spec): pass the element_spec of {element_spec!r}")
    _check_network(strategy, chip)
    begin = time.perf_counter()
    try:
        executable, names = _traced_program(strategy, step, element_spec)
    except Exception as error:
        if strategy.extended.is_absent and isinstance(error, RuntimeError) and (hint := hint_of(str(error))):
            raise CompilationError(f"the step can't be traced for devices that are not there: {hint}{error}") from error
        if type(element_spec) in (tuple, list) and set(map(type, element_spec)) == {int}:
            error.add_note(
                f"(The step was given the numbers {element_spec}. If that is the shape of an array, pass "
                f"jax.ShapeDtypeStruct({element_spec}, dtype).)"
            )
        raise
    traced = time.perf_counter() - begin
    if isinstance(executable, PlacedExecutable):
        compilations = compile_regions(executable)
        loads = loads_of(executable, names, compilations, _slices(strategy))
    else:
        device = executable.mesh.devices.flat[0]
        compilations = [compile_ahead(executable.lowered, executable.program.name, device)]
        loads = [_load(executable, names, compilations[0], _slices(strategy))]
    report = _report(strategy, executable, compilations, loads, traced, chip)
    return dataclasses.replace(
        report, examples=examples_together(element_spec, report.replicas), tokens=tokens_of(element_spec)
    )


def variables_alone(
    strategy: Strategy, step: Callable[..., Any], element_spec: Any = None, *, chip: Chip | None = None
) -> tuple[int, int | None]:
    """Return the bytes that a step's variables need on a device, and those it has: known before it is compiled.

    The arguments, and the errors, are those of :func:`plan`, which then need not trace the step again. The second is
    ``None`` if it is not known, or if logical devices have different variables.
    """
    executable, _ = _traced_program(strategy, step, element_spec)
    if isinstance(executable, PlacedExecutable):
        return 0, None
    device = chip_and_share(_devices_of(strategy), chip)[1]
    needed = sum(buffer.bytes * buffer.count for buffer in read_variables(executable))
    return needed, None if device is None else int(device.usable or device.memory)


def _traced_program(strategy: Strategy, step: Callable[..., Any], element_spec: Any) -> tuple[Executable, list[str]]:
    """The program of a step, and the names of its traced arguments."""
    element = () if element_spec is None else (element_spec,)
    executable, arguments = traced_step(strategy.extended.programs, step, element, None, "replicax.plan")
    return executable, [path.replace("args[0]", "element", 1) for path in arguments.paths()]


def _devices_of(strategy: Strategy) -> np.ndarray:
    """The devices ``[n, logical devices]``, each once, also if it has several replicas."""
    devices: np.ndarray = strategy.extended.logical_devices[:: strategy.extended.replicas.per_device]
    return devices


def _slices(strategy: Strategy) -> int:
    """Return the number of slices of the devices, one after the other; 1 for another order, or for GPUs.

    Between GPUs that NVLink does not join there is no other kind of collective: where each participant is, is enough.
    """
    if _devices_of(strategy).flat[0].platform == "gpu":
        return 1
    return strategy.extended.slices or 1


def _check_network(strategy: Strategy, given: Chip | None) -> None:
    """Raise if it is not known how much slices, or GPUs that NVLink does not join, can send each other."""
    devices = _devices_of(strategy)
    chip, slices = chip_and_share(devices, given)[0], max(_slices(strategy), slices_of(devices))
    if slices > 1 and chip is not None and not chip.network:
        parts = "NVLink domains" if devices.flat[0].platform == "gpu" else "slices"
        known = "chip" if given else f"replicax.planning.chip_specs.CHIPS[{chip.name!r}]"
        raise ValueError(
            f"plan: the devices are of {slices} {parts}, and for {chip.name} no bandwidth of the network between "
            f"{parts} is known: pass a chip that has it, such as dataclasses.replace({known}, network=6.25e9), in "
            "bytes per second of a chip"
        )


def _load(executable: Executable, names: Sequence[str], compilation: Compilation, slices: int) -> DeviceLoad:
    """Return each device's part of a step that is one program."""
    module = compilation.module
    buffers = [*inputs_and_outputs(executable, names), *compiled_buffers(compilation.allocations, module)]
    memory = memory_of(compilation.allocations, compilation.code, buffers)
    variables = sum(buffer.bytes * buffer.count for buffer in read_variables(executable))
    peak = peak_by_kind(memory, variables, temporaries_by_kind(module, compilation.live, memory.temporaries))
    memory = dataclasses.replace(memory, peak=peak, host=compilation.host)
    placement = ProgramDevices(axis_sizes(executable.mesh), slices, programs_for(executable.mesh.devices))
    return DeviceLoad(memory, cost_of(module), collectives_of(module, placement), [(module, placement)])


def _report(
    strategy: Strategy,
    executable: Executable,
    compilations: Sequence[Compilation],
    loads: Sequence[DeviceLoad],
    traced: float,
    users_chip: Chip | None,
) -> Plan:
    devices = _devices_of(strategy)
    chip, device = chip_and_share(devices, users_chip)
    words = next((c.words for c in compilations if c.words), "")
    capacity = next((c.available for c in compilations if c.available), None)
    capacity = capacity or (None if device is None else int(device.usable or device.memory))
    network = None if chip is None else Network(devices, chip, _slices(strategy))
    walks = [_walks(load, device) for load in loads]
    stages = [
        _stage(number, load, capacity, device, network, walk)
        for number, (load, walk) in enumerate(zip(loads, walks, strict=True))
    ]
    fullest = max(stages, key=lambda stage: stage.memory.total)
    busiest = max(stages, key=lambda stage: stage.busy)
    several = isinstance(executable, PlacedExecutable)
    # The compiler for TPUs refuses what does not fit, but sees one program at a time. Others leave it to the device.
    is_checked = devices.flat[0].platform == "tpu" and not several
    report = Plan(
        step=executable.program.name,
        strategy=type(strategy).__name__,
        platform=devices.flat[0].platform,
        device_kind=devices.flat[0].device_kind,
        devices=devices.size,
        replicas=strategy.num_replicas_in_sync,
        mesh=axis_sizes(executable.mesh),
        is_absent=strategy.extended.is_absent,
        chip=chip,
        trace_seconds=traced,
        compile_seconds=sum(c.seconds for c in set(compilations)),
        words=words,
        topology="" if network is None else network.name,
        slices=_slices(strategy),
        fits=False if words else is_checked or fullest.memory.fits,
        memory=fullest.memory,
        cost=busiest.cost,
        collectives=busiest.collectives,
        estimate=busiest.estimate,
        timeline=busiest.timeline,
        stages=tuple(stages) if several else (),
    )
    if device is None or network is None or strategy.num_replicas_in_sync > len(devices):
        return report  # it is about replicas that have devices of their own
    return dataclasses.replace(report, scaling=scaling_of(walks[busiest.logical_device], network))


def _walks(load: DeviceLoad, device: Chip | None) -> list[ScheduleWalk]:
    """Walk through the programs of a device; equal ones are walked as one."""
    if device is None:
        return []
    made = {module: ScheduleWalk(module, device, placement) for module, placement in dict(load.schedule).items()}
    return [made[module] for module, _ in load.schedule]


def _stage(
    number: int,
    load: DeviceLoad,
    capacity: int | None,
    device: Chip | None,
    network: Network | None,
    walks: Sequence[ScheduleWalk],
) -> Stage:
    """Make the report of a device, with its estimate on chips."""
    memory = dataclasses.replace(load.memory, capacity=capacity, buffers=tuple(largest(load.memory.buffers, _BUFFERS)))
    estimate = timeline = None
    if device is not None and network is not None:
        sends = [use for use in load.collectives if use.kind == "send"]
        estimate = estimate_of(load.schedule, sends, device, network)
        runs = {walk: (walk.run(network.seconds), SourceLines(walk.module)) for walk in set(walks)}
        timeline = timeline_of([runs[walk] for walk in walks])
    rows = tuple(
        CollectiveRow.of(use, *((None, "") if network is None else (network.seconds(use), network.way(use))))
        for use in load.collectives
    )
    return Stage(number, load.programs, memory, load.cost, rows, estimate, timeline)
