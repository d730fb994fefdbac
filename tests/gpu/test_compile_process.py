"""The process that compiles for described GPUs, with others in its place: they need no compiler."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

from replicax.errors import CompilationError
from replicax.gpu import compile_process
from replicax.gpu.compile_process import CompileProcess

SERVER = """
import os, pickle, sys, time
described = pickle.load(sys.stdin.buffer)
while True:
    request = pickle.load(sys.stdin.buffer)
    if request == "end":
        os.write(2, b"a line\\nan error: \\xff in it")
        os._exit(3)
    if request == "triton":
        os.write(2, b"Triton: failed")
        os._exit(1)
    if request == "kill":
        os.kill(os.getpid(), 9)
    if request == "interrupt":
        os.kill(os.getppid(), 2)
        time.sleep(60)
    answer = f"refused for {described}" if request == "refuse" else (request, os.getpid())
    pickle.dump(answer if isinstance(answer, str) else int(f"{answer[0]}{answer[1]}"), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileProcess]:
    monkeypatch.setattr(compile_process, "_COMMAND", [sys.executable, "-c", SERVER])
    process = CompileProcess("config", "1x1x2")
    yield process
    process._end()


def test_one_process_compiles_all_programs(process: CompileProcess) -> None:
    first, second = str(process.compile(1)), str(process.compile(2))
    assert (first[0], second[0]) == ("1", "2")
    assert first[1:] == second[1:] != str(os.getpid())
    with pytest.raises(RuntimeError, match=r"^refused for \('config', '1x1x2'\)$"):
        process.compile("refuse")
    assert str(process.compile(3)) == f"3{first[1:]}"


def test_a_process_that_has_ended_is_replaced(process: CompileProcess) -> None:
    seen = set()
    for number in (1, 2):
        seen.add(str(process.compile(number))[1:])
        with pytest.raises(CompilationError, match=r"ended its process with exit status 3: an error: \ufffd in it\. "):
            process.compile("end")
    assert len(seen) == 2


def test_what_may_help_is_told(process: CompileProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CompilationError, match=r"by SIGKILL: it has written nothing\. .* machine had too little memory"
    ):
        process.compile("kill")
    for option, cure in ((compile_process._KERNELS, "a fault of XLA"), ("xla_dump_to", "XLA_FLAGS=--xla_dump_to= so")):
        monkeypatch.setattr(compile_process, "_KERNELS", option)  # which some versions of JAX have
        with pytest.raises(CompilationError, match=rf"status 1: Triton: failed\. .*{cure}"):
            process.compile("triton")


def test_a_process_that_ends_before_it_has_read_for_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_process, "_COMMAND", [sys.executable, "-c", "import sys; sys.exit('no such module')"])
    process = CompileProcess("config" * 100_000, "1x1x2")  # more than a pipe holds
    for _ in range(2):
        with pytest.raises(CompilationError, match=r"ended its process with exit status 1: no such module\. "):
            process.compile(1)


def test_after_an_interrupt_no_answer_is_for_another_program(process: CompileProcess) -> None:
    before, began = str(process.compile(1))[1:], time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        process.compile("interrupt")
    assert time.monotonic() - began < 30  # it does not wait for the program
    after = str(process.compile(7))
    assert after[0] == "7"
    assert after[1:] != before
