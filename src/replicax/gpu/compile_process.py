"""Compiling for GPUs in a process of its own, as XLA may end the process in which it fails.

One process compiles all programs for some described GPUs, one after the other; after its end the next program gets a
new one. It ends when this process ends, as then its standard input closes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import jax

from replicax._jax import CompileRequest, compile_for
from replicax.errors import CompilationError, shortened

_COMMAND = [sys.executable, "-c", "from replicax.gpu.compile_process import serve; serve()"]
_KERNELS = "xla_gpu_experimental_use_collective_kernels"  # of which collectives XLA writes kernels; not in JAX 0.10
_LINES = 2  # of what the process has written, in a message


class CompileProcess:
    """A process that compiles programs for GPUs described by :func:`replicax.gpu.cuda_compiler.described_devices`.

    It starts with the first program.
    """

    def __init__(self, target_config: str, topology: str) -> None:
        self._describe = target_config, topology
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._lock = threading.Lock()

    def compile(self, request: CompileRequest) -> int:
        """Compile a program; returns its size in bytes.

        Raises:
          CompilationError: the compiler has ended the process.
          RuntimeError: the compiler refuses the program; the message is its own.
        """
        with self._lock:
            messages: list[Any] = [request]
            if self._process is None:
                self._process = self._started()
                messages = [self._describe, request]
            requests, answers = self._process.stdin, self._process.stdout
            assert requests is not None
            assert answers is not None
            try:
                for message in messages:
                    pickle.dump(message, requests)
                requests.flush()
                answer = pickle.load(answers)
            except (EOFError, OSError) as error:
                raise CompilationError(self._death(self._process)) from error
            except BaseException:  # such as an interrupt: the next answer would be for this request
                self._end()
                raise
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return int(answer)

    def _started(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        # What the compiler writes, of drivers that are not there, is of use only if it fails.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        atexit.register(self._end)
        return subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        )

    def _death(self, process: subprocess.Popen[bytes]) -> str:
        """Describe the process's end."""
        assert self._errors is not None
        code = process.wait()
        how = f"with exit status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        self._errors.seek(0)
        written = self._errors.read().decode(errors="replace")
        self._end()
        lines = [line for line in written.splitlines() if line.strip() and "cuda drivers" not in line]
        errors = [line for line in lines if re.search("error|fatal|check failed", line, re.IGNORECASE)] or lines
        said = " ".join(shortened(" ".join(line.split()), 240) for line in errors[:_LINES]) or "it has written nothing"
        return f"XLA's compiler has ended its process {how}: {said}. {_cure(code, written)}"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout, self._errors):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process.wait()
        self._process = self._errors = None
        atexit.unregister(self._end)


def _cure(code: int, written: str) -> str:
    if code == -signal.SIGKILL:
        return "Perhaps the machine had too little memory."
    if ("collective" in written or "triton" in written.lower()) and _is_known(_KERNELS):
        return (
            "It was in the kernel of a collective that XLA writes itself: set the environment variable "
            f"XLA_FLAGS=--{_KERNELS}= so that NCCL's are used"
        )
    return "This is a fault of XLA: try another version of JAX, and report it with the program"


def _is_known(option: str) -> bool:
    """Return whether this JAX's compiler has an option. One that it has not, in ``XLA_FLAGS``, ends every process."""
    try:
        jax.jit(lambda x: x).lower(0.0).compile({option: ""})
    except Exception:  # whatever a compiler raises
        return False
    return True


def serve() -> None:
    """Compile what comes from the standard input, until it closes: the other end of :class:`CompileProcess`."""
    from replicax.gpu.cuda_compiler import described_devices

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may be among the answers
    requests = sys.stdin.buffer
    devices = described_devices(*pickle.load(requests))
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Any = compile_for(request, devices)
        except Exception as error:  # whatever a compiler raises
            answer = str(error)
        pickle.dump(answer, answers)
        answers.flush()
