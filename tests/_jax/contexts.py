"""Contexts of the compiler's front end, kept: the tests lower many thousands of small programs."""

import threading

from jax._src.interpreters import mlir

_kept = threading.local()
_new_context = mlir.make_ir_context


def keep_contexts() -> None:
    """From now on, each thread of this process lowers all its programs in one context.

    JAX makes one for each program and throws it away, which takes a quarter of the time of a test of small programs.
    An operation that a library computes while its program is lowered (lineax does) gets one of its own.
    """

    def context() -> object:
        if mlir.ir.Context.current is not None:
            return _new_context()
        if not hasattr(_kept, "context"):
            _kept.context = _new_context()
        return _kept.context

    mlir.make_ir_context = context
