"""Launch: give a program the arrays of its variables, and keep the new ones, whatever comes in between.

Once a program has been given the memory of its variables, only what it returns has their values. An interrupt (Ctrl-C,
or any signal whose handler raises) between the two would lose both. So what a program returns is put into its place by
one operation of Python, inside of which no handler runs. That is so for the calls that JAX makes without any Python in
between, which are all but the first of their kind; for the others, and until objects of other libraries show the new
arrays (see :class:`replicax.variables.slots.View`), signals are kept waiting.

A program that may fail while it runs, since it calls the user's Python on the host or looks for NaNs, is not given any
memory. It is waited for, and its variables change when it has succeeded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax import _jax
from replicax.devices.arrays import copied
from replicax.execution.compiled.replicate import Executable
from replicax.execution.deadline import call_watched
from replicax.execution.program.collective_operations import replicas_meet
from replicax.execution.signals import hold_signals
from replicax.variables.lost_arrays import DELETED, LostArray, note_lost
from replicax.variables.slots import Slot, arrays_of, coalesced, escaped, launching
from replicax.workers import heartbeat
from replicax.workers.launch_log import LaunchedProgram
from replicax.workers.lockstep import Lockstep
from replicax.workers.replicas import Replicas


def launch(
    replicas: Replicas, executable: Executable, placed: Sequence[Any], launched: list[Any] | None = None
) -> Sequence[jax.Array]:
    """Run a program on the present values of its variables, and leave the new ones; return what it computes.

    ``placed`` are its arguments, on the replicas' devices. ``launched`` is an empty list, which is not empty any more
    from when the variables have their new values. Raises a VariableLostError if a variable that it reads has no value
    any more, and a WorkerError if another worker has failed, has ended or has died. If the program calls the host, an
    error from there comes out, too, and variables are as they were.
    """
    returned: list[Any] = [] if launched is None else launched
    lockstep = replicas.lockstep
    several = lockstep.several
    with launching:
        if escaped:
            _take_back(executable)
        policy = executable.policy
        kept = arrays_of(executable.kept)
        group = coalesced(executable.written)
        overwritten = len(executable.donated) < len(executable.written)
        donated = group.arrays[: len(executable.donated)] if overwritten else group.arrays
        constants, call = executable.program.constants, executable.call
        is_cached = policy.cached_calls is not None and policy.cached_calls == call._cache_size()
        begun = _announce(lockstep, executable) if several or heartbeat.current is not None else None
        release: Callable[[], None] | None = None
        try:
            try:
                if is_cached and group.views:
                    release = hold_signals()
                # The call and the assignment are one operation. Between two, a signal's handler could raise.
                if is_cached:
                    returned[:] = map(call, (donated,), (kept,), (placed,), (constants,))
                else:
                    release = _call(replicas, executable, (donated, kept, placed, constants), returned, begun)
            except BaseException as error:
                if not returned:
                    _tell_what_is_left(executable, error)
                if several:
                    lockstep.explain(error, f"the step {executable.label.name!r}")
                if begun is not None and not lockstep.is_known(error):  # otherwise the program is over on all
                    begun.failed(error)
                raise
            finally:
                if returned:
                    group.arrays = returned[0][0]
                if begun is not None:
                    begun.returned(*(returned[0] if returned else ()))
            if escaped:
                escaped.difference_update(executable.written)
            if not is_cached and executable.home_transfer is not None:
                group.arrays = jax.device_put(group.arrays, executable.home_transfer.homes)
        finally:
            if release is not None:
                try:
                    group.show()
                finally:
                    release()
        if policy.waits and policy.donates:  # others have been waited for
            try:
                _wait_until_done(returned[0])
            except Exception as error:  # of a jax.debug.print to a stream that is closed, say
                _jax.drop_failed_tokens()
                if begun is not None:
                    begun.failed(error)
                raise
    return returned[0][1]


def _announce(lockstep: Lockstep, executable: Executable) -> LaunchedProgram:
    """Note a program that is about to be launched, if the other workers will launch it, too; otherwise raise."""
    lockstep.check_launch()
    label = executable.label
    if not label.number:
        times = "" if executable.steps is None else f", {executable.steps} times"
        label.name = executable.program.name + times
        label.communicates = _jax.contains(executable.program.jaxpr, replicas_meet)
    begun = lockstep.launches.begin(label)
    if heartbeat.current is not None:
        heartbeat.current.launching(begun)
    return begun


def _call(
    replicas: Replicas,
    executable: Executable,
    args: tuple[Any, ...],
    returned: list[Any],
    begun: LaunchedProgram | None,
) -> Callable[[], None]:
    """Run the program by its policy, and append its results to ``returned``.

    Signals wait from then on; the function that is returned lets them come again.
    """
    call, policy = executable.ready(), executable.policy
    donated, kept, placed, constants = args
    home_transfer = executable.home_transfer
    if home_transfer is not None:
        donated, kept = jax.device_put((donated, kept), (home_transfer.donated, home_transfer.kept))
    if not policy.donates:

        def run() -> Any:
            policy.errors.begin()
            return call(donated, kept, placed, constants)

        timeout = executable.program.timeout
        watched = run if timeout is None else functools.partial(call_watched, run, replicas, timeout)
        results = _succeeded(executable, replicas.lockstep, watched, begun)
        release = hold_signals()
        returned.append(results)
        return release
    before = _kinds_of_calls(call)
    release = hold_signals()
    try:
        returned.append(call(donated, kept, placed, constants))
    except BaseException:
        release()
        raise
    # From the second call of a kind on, JAX runs no Python, unless there are transfers or the call waits.
    if home_transfer is None and not policy.waits and before:
        policy.cached_calls = before
    return release


def _succeeded(
    executable: Executable, lockstep: Lockstep, call: Callable[[], Any], begun: LaunchedProgram | None
) -> Any:
    """Run a program that may fail; return its results when it has succeeded on all workers, or raise."""
    policy, results, failure = executable.policy, None, None
    try:
        with lockstep.leaving_nans():
            results = call()
            _wait_until_done(results)
    except Exception as error:
        failure = error
        if begun is not None:
            begun.failed(error)
    except BaseException:  # an interrupt
        policy.errors.end(results)
        raise
    problem = policy.errors.end() or failure
    if policy.ends_together:
        lockstep.end_together(f"the step {executable.program.name!r}", problem, results)
    elif problem is not None:
        raise problem
    return results


def _wait_until_done(results: Any) -> None:
    """Wait for a program that returns these results."""
    if not any(jax.block_until_ready(results)):
        jax.effects_barrier()  # nothing else tells when it is done


def _kinds_of_calls(call: Callable[..., Any]) -> int | None:
    """The number of kinds of calls that JAX knows of ``call``; ``None`` if it is no function of JAX's, or unknown."""
    size = getattr(call, "_cache_size", None)
    return None if size is None else size()


def _take_back(executable: Executable) -> None:
    """Give each variable that the program takes as a donation a new copy, if code outside holds the present array.

    Raise a VariableLostError if that code has deleted it.
    """
    uses = escaped.intersection((*executable.donated, *executable.kept))
    for slot in uses:
        if isinstance(slot.array, jax.Array) and slot.array.is_deleted():
            slot.array = LostArray(DELETED)
    _check_not_lost(executable, uses)
    if executable.policy.donates:
        for slot in uses.intersection(executable.donated):
            slot.array = copied(slot.array)


def _check_not_lost(executable: Executable, slots: Any) -> None:
    for slot in slots:
        if isinstance(slot.array, LostArray):
            raise slot.array.error(f"{executable.program.name} needs {_name(executable, slot)}, which")


def _tell_what_is_left(executable: Executable, error: BaseException) -> None:
    """After a failed call: name the variables whose values it took, or raise the error that one had none before."""
    _check_not_lost(executable, (*executable.donated, *executable.kept))
    lost = note_lost(executable.donated, executable.program.name, error)
    if lost:
        names = ", ".join(_name(executable, slot) for slot in lost[:5]) + (", …" if len(lost) > 5 else "")
        error.add_note(f"{names} lost the value in this step, and can't be read before a new one is assigned.")
    if executable.policy.waits and isinstance(error, Exception):
        _jax.drop_failed_tokens()
    if executable.written and not executable.policy.donates:
        error.add_note(f"The variables that {executable.program.name} writes have the values from before it.")


def _name(executable: Executable, slot: Slot) -> str:
    use = executable.program.uses.get(slot)
    return "a variable" if use is None else use.describe()
