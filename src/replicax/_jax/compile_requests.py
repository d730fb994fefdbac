"""Requests to a compiler, as bytes, for another process to compile.

A compiler that fails may end its process. It takes a module and options; JAX makes both, and has no public way to get
them. So a lowered program is compiled with a client of ours, which keeps them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import mlir as _mlir
from jaxlib.mlir import ir as _ir

from replicax._jax.internals import jaxlib as _jaxlib


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """A program to compile, as bytecode, with options as a serialized proto, for devices by their numbers in order."""

    module: bytes
    options: bytes
    devices: tuple[int, ...]


class _CaughtError(Exception):
    """Carries the request of a :class:`_Client` up to the call that made the client."""


class _Client:
    """Acts as a client, but does not compile."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def compile_and_load(self, module: Any, executable_devices: Any, compile_options: Any, **_: Any) -> Any:
        devices = tuple(device.id for device in executable_devices)
        raise _CaughtError(
            CompileRequest(_mlir.module_to_bytecode(module), compile_options.SerializeAsString(), devices)
        )


def compile_request(lowered: jax.stages.Lowered, options: dict[str, Any]) -> CompileRequest:
    """The request that ``lowered.compile(options)`` would make of its compiler."""
    lowering: Any = copy.copy(lowered._lowering)
    lowering.compile_args = {**lowering.compile_args, "backend": _Client(lowering.compile_args["backend"])}
    try:
        lowering.compile(options)
    except _CaughtError as caught:
        return caught.args[0]
    raise AssertionError("JAX has compiled a program without its client")


def compile_for(request: CompileRequest, devices: Sequence[jax.Device]) -> int:
    """Compile the request for ``devices``, and return the program's size in bytes.

    The devices belong to a client that only compiles; those that the program is for are among them.
    """
    by_id = {device.id: device for device in devices}
    chosen = _jaxlib.DeviceList(tuple(by_id[i] for i in request.devices))
    options = _jaxlib.CompileOptions.ParseFromString(request.options)
    client: Any = devices[0].client
    with _mlir.make_ir_context():
        module = _ir.Module.parse(request.module)
        executable = client.compile(module, executable_devices=chosen, compile_options=options)
    return int(executable.get_compiled_memory_stats().generated_code_size_in_bytes)
