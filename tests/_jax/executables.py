"""Compiled programs, kept: the tests make many functions that come to the same program."""

import collections
from typing import Any

from jax._src import compiler

_KEPT = 1000
_compile = compiler.backend_compile_and_load


def keep_executables() -> None:
    """From now on, a program that is the same as one of the latest, on the same devices, is not compiled again.

    JAX compiles for each function anew, and an eighth of the time of the tests went into what had been compiled before.
    Programs that call the host are left out: they know which function they call.
    """
    kept: collections.OrderedDict[Any, Any] = collections.OrderedDict()

    def compile(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any) -> Any:
        if callbacks:
            return _compile(backend, module, devices, options, callbacks)
        text = module.operation.get_asm(enable_debug_info=False)
        key = id(backend), text, tuple(device.id for device in devices), options.SerializeAsString()
        if key not in kept:
            kept[key] = _compile(backend, module, devices, options, callbacks)
        kept.move_to_end(key)
        while len(kept) > _KEPT:
            kept.popitem(last=False)
        return kept[key]

    compiler.backend_compile_and_load = compile
