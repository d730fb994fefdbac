"""Single operations on concrete arrays, each compiled once for all devices of a kind.

JAX compiles an operation again for each device that it runs on, and with every optimization. When a step runs operation
by operation on several devices, for debugging, that takes most of the time. So here each is compiled once, with few
optimizations, and loaded for the other devices.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as _extend
from jax.sharding import SingleDeviceSharding

from replicax._jax.internals import (
    compilation_cache as _compilation_cache,
    compiler as _compiler,
    config as _config,
    core as _core,
    dispatch as _dispatch,
    jaxlib as _jaxlib,
    literals as _literals,
    pxla as _pxla,
)
from replicax._jax.jaxprs.programs import calls_back, enable_x64_for, is_mutable
from replicax._jax.jaxprs.types import ClosedJaxpr, Primitive
from replicax._jax.runtime import copy_on, looks_for_nans
from replicax.devices.arrays import is_in_parts
from replicax.per_replica.eager.operation_keys import operation_key, program_key

_MOST = 8192  # operations that are kept
_LARGE = 1 << 14  # elements from which on it pays to optimize a loop over them
_NUMBERS = np.ndarray, np.generic, _literals.TypedNdArray, bool, int, float, complex

_programs: dict[Any, _Program | None] = {}
_calls: dict[Any, _Call | None] = {}
_lock = threading.RLock()


class Operations:
    """Computes operations on one device."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._sharding = _on(device)

    def compute(self, primitive: Primitive, args: Sequence[Any], params: dict[str, Any]) -> list[Any] | None:
        """The results of an operation; ``None`` if JAX is to compute it.

        JAX computes operations that it does not compile, or that do more than compute; those with tangents of integers
        (``float0``, which only JAX can pass on), or with operands that lie elsewhere, which :meth:`brought` copies;
        and all operations while it looks for NaNs.
        """
        if primitive is _core.stage_p and isinstance(args[0], _NUMBERS):
            aval = jax.typeof(args[0])
            return [_placed_array(np.array(args[0], aval.dtype), aval, self._device)]
        if not _is_compiled(primitive):
            return None
        is_power = primitive is lax.integer_pow_p and _varies(args[0], params["y"])
        apply: Callable[..., Any] = _power if is_power else functools.partial(primitive.bind, **params)
        if is_power:
            args, params = [args[0], np.int32(params["y"])], {}
        key = functools.partial(operation_key, primitive, params, any_power=is_power)
        return self._computed(apply, args, key, again=not is_power)

    def has(self, value: Any) -> bool:
        """Whether an operand is on the device, or can't be: a number, a mutable array, an array of other processes."""
        if not isinstance(value, jax.Array) or is_mutable(value) or value.sharding == self._sharding:
            return True
        return is_in_parts(value)

    def brought(self, value: Any) -> Any:
        """An operand on the device: a copy, where the step closed over an array that lies elsewhere."""
        return value if self.has(value) else copy_on(self._device, value)

    def kinds(self, primitive: Primitive, args: Sequence[Any], params: dict[str, Any]) -> tuple[Any, ...] | None:
        """The kinds of an operation's operands; ``None`` if JAX is to compute it, or if it differs each time."""
        if not _is_compiled(primitive) or looks_for_nans():
            return None
        if primitive is lax.integer_pow_p and _varies(args[0], params["y"]):
            return None
        are_placed = (
            isinstance(a, _NUMBERS) or (type(a) is _jaxlib.ArrayImpl and a.sharding == self._sharding) for a in args
        )
        return tuple(jax.typeof(a) for a in args) if all(are_placed) else None

    def apply(self, function: Callable[..., Any], args: Sequence[Any]) -> list[Any] | None:
        """The results of ``function``, compiled once for operands of one kind; ``None`` if it can't be compiled."""
        return self._computed(function, args, lambda avals: (function, *avals))

    def compute_program(self, program: ClosedJaxpr, args: Sequence[Any]) -> list[Any] | None:
        """The results of a program; ``None`` if it can't be computed at once."""
        return self._computed(_extend.jaxpr_as_fun(program), args, lambda avals: program_key(program))

    def _computed(
        self,
        apply: Callable[..., Any],
        args: Sequence[Any],
        key: Callable[[tuple[Any, ...]], Hashable | None],
        again: bool = True,
    ) -> list[Any] | None:
        """The results of ``apply``, compiled once for each ``key`` of its operands' kinds; ``None`` if it can't be."""
        placed = self._operands(args, again)
        if placed is None:
            return None
        avals, arrays, committed = placed
        operation = key(avals)
        call = None if operation is None else self._call(apply, operation, avals)
        return None if call is None else call(arrays, committed)

    def _operands(self, args: Sequence[Any], again: bool) -> tuple[tuple[Any, ...], list[Any], bool] | None:
        """The operands' kinds and arrays, and whether these are bound to the device; ``None`` if JAX must compute."""
        if looks_for_nans():
            return None
        avals, arrays, committed = [], [], False
        for arg in args:
            if type(arg) is _jaxlib.ArrayImpl:
                if arg.sharding is not self._sharding and arg.sharding != self._sharding:
                    return None
                avals.append(arg.aval)
                arrays.append(arg)
                committed = committed or arg._committed
            elif not isinstance(arg, _NUMBERS) or (aval := jax.typeof(arg)).dtype == jax.dtypes.float0:
                return None
            else:
                avals.append(aval)
                arrays.append(self._put(arg, aval, again))
        return tuple(avals), arrays, committed

    def _call(self, apply: Callable[..., Any], operation: Hashable, avals: tuple[Any, ...]) -> _Call | None:
        key = self._device, _config.trace_context(), operation
        if key in _calls:
            return _calls[key]
        with _lock, jax.disable_jit(False), jax.default_device(None), _core.set_current_trace(_core.eval_trace):
            kind = self._device.client, self._device.device_kind, _config.trace_context(), operation
            if kind not in _programs:
                _programs[kind] = _compiled_program(apply, avals, self._device)
            program = _programs[kind]
            _calls[key] = None if program is None else program.on(self._device)
            for kept in (_programs, _calls):
                while len(kept) > _MOST:
                    del kept[next(iter(kept))]
            return _calls[key]

    def _put(self, number: Any, aval: Any, again: bool) -> Any:
        """A constant on the device; kept if it may be wanted ``again``."""
        number = np.array(number, aval.dtype)  # a copy, which can't change later
        if number.ndim or not again:
            return _placed_array(number, aval, self._device)
        return _placed_number(number.tobytes(), aval, self._device)


@functools.cache
def _is_compiled(primitive: Primitive) -> bool:
    """Whether JAX computes an operation by compiling it."""
    return getattr(primitive.impl, "func", None) is _dispatch.apply_primitive or primitive.name in ("add_any", "copy")


@functools.cache
def _on(device: jax.Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device)


def _placed_array(number: np.ndarray[Any, Any], aval: Any, device: jax.Device) -> Any:
    with enable_x64_for([aval]):
        return _pxla.batched_device_put(aval, _on(device), [number], [device], committed=False)


@functools.lru_cache(maxsize=1024)
def _placed_number(data: bytes, aval: Any, device: jax.Device) -> Any:
    return _placed_array(np.frombuffer(data, aval.dtype).reshape(()).copy(), aval, device)


# --- powers ---------------------------------------------------------------------------------------------
#
# ``x ** n`` with a concrete ``n``, such as an optimizer's count of steps, is another operation for each ``n`` to JAX.


def _varies(x: Any, n: int) -> bool:
    """Whether ``x ** n`` is better one program for all ``n``."""
    real = jax.numpy.issubdtype(jax.typeof(x).dtype, np.floating)
    return bool(real) and abs(n) < 1 << 31 and (np.ndim(x) == 0 or abs(n) > 4)


def _power(x: Any, n: Any) -> Any:
    """What ``lax.integer_pow`` computes, by the same multiplications."""

    def iteration(state: Any) -> Any:
        left, square, result = state
        return left // 2, square * square, lax.select(left % 2 == 1, result * square, result)

    one = lax.full_like(x, 1)
    _, _, result = lax.while_loop(lambda state: state[0] > 0, iteration, (lax.abs(n), x, one))
    return lax.select(n < 0, one / result, result)


# --- programs -------------------------------------------------------------------------------------------


class _Call:
    """A program that is loaded for one device."""

    def __init__(self, executable: Any, avals: Sequence[Any], device: jax.Device) -> None:
        self._run = executable.execute_sharded
        shardings = [_on(device)] * len(avals)
        self._handlers = [_pxla.global_avals_to_results_handler(avals, shardings, c).handlers for c in (False, True)]

    def __call__(self, arrays: list[Any], committed: bool) -> list[Any]:
        return self._run(arrays).consume_with_handlers(self._handlers[committed])


class _Program:
    """A compiled program, which other devices of the kind can load."""

    def __init__(self, compiled: Callable[[jax.Device], Any], avals: Sequence[Any], device: jax.Device) -> None:
        self._compile = compiled
        self._executable = compiled(device)
        self._avals = avals
        self._device = device
        self._bytes: bytes | None = None

    def on(self, device: jax.Device) -> _Call:
        return _Call(self._executable if device == self._device else self._executable_on(device), self._avals, device)

    def _executable_on(self, device: jax.Device) -> Any:
        client = device.client
        # A program from a cache on disk can't be serialized, and need not be.
        if _compilation_cache._get_cache(client) is not None:
            return self._compile(device)
        try:
            if self._bytes is None:
                self._bytes = client.serialize_executable(self._executable)
        except jax.errors.JaxRuntimeError:  # some programs, such as a sort on CPU, can't be serialized
            return self._compile(device)
        options = _compiler.get_compile_options(1, 1, device_assignment=np.array([[device.id]]), backend=client)
        return client.deserialize_executable(self._bytes, _jaxlib.DeviceList((device,)), options)


def _compiled_program(apply: Callable[..., Any], avals: Sequence[Any], device: jax.Device) -> _Program | None:
    def traced(device: jax.Device) -> Any:
        def operation(*args: Any) -> Any:
            return apply(*args)

        place = _on(device)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=place) for a in avals]
        with enable_x64_for(avals):
            return jax.jit(operation, keep_unused=True, out_shardings=place).trace(*shapes)

    first = traced(device)
    results = first.jaxpr.out_avals
    if first.jaxpr.effects or calls_back(getattr(first.jaxpr, "jaxpr", first.jaxpr)):
        return None
    large = max((a.size for a in (*avals, *results)), default=0) >= _LARGE

    def compiled(on: jax.Device) -> Any:
        lowered = (first if on == device else traced(on)).lower()
        options = dict(_QUICKLY) if on.platform == "cpu" else {}
        if options and large:
            options["xla_backend_optimization_level"] = 1
        try:
            return lowered.compile(compiler_options=options).runtime_executable()
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error) or _EMITTERS not in _QUICKLY:
                raise
            del _QUICKLY[_EMITTERS]  # a newer XLA has no choice there
            return compiled(on)

    return _Program(compiled, results, device)


_EMITTERS = "xla_cpu_use_fusion_emitters"
_QUICKLY: dict[str, Any] = {
    _EMITTERS: False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""A third of the time that it takes otherwise; a loop over many elements is several times slower."""
