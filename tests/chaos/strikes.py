"""In a worker: the fault of this attempt strikes when the worker comes to its place, by real signals to itself.

A worker knows best where it is. So nothing here waits for a time and hopes: the places are calls in the training
script, in the programs that it runs, and in the functions of Replicax that save and restore.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.chaos import damage
from tests.chaos.faults import FILL, KILL, PREEMPT, SAVES, STOP, Fault
from tests.chaos.records import Records, read_records

SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP, PREEMPT: signal.SIGTERM}
FILLER = "filler"
PATIENCE = 120.0
"""For how many seconds workers wait for worker 0 to damage a checkpoint."""


class Strikes:
    """The fault of one attempt.

    Args:
      fault: what is to be done.
      worker: this one.
      checkpoints: the folder of checkpoints.
      records: where it is noted.
      disk_is_real: whether that folder is a file system of its own, which can be filled.
    """

    def __init__(self, fault: Fault, worker: int, checkpoints: Path, records: Records, disk_is_real: bool) -> None:
        self.fault = fault
        self._worker = worker
        self._checkpoints = checkpoints
        self._records = records
        self._disk_is_real = disk_is_real
        self._lock = threading.Lock()
        self._struck = False
        self.saves = 0  # begun in this attempt
        self._lengths: dict[int, int] = {}  # of the call that a step was in

    def prepare(self, folder: Path) -> None:
        """What happens before an attempt begins: the disk gets room again, and the newest checkpoint is damaged."""
        attempt = self.fault.number
        if self._worker == 0:
            (self._checkpoints / FILLER).unlink(missing_ok=True)
            whole = damage.whole_steps(self._checkpoints)
            if self.fault.damage is not None:
                done = damage.damage(damage.path_of(self._checkpoints, whole[-1]), self.fault.damage)
                left = damage.whole_steps(self._checkpoints)
                assert left == whole[:-1], f"{done}: {whole} have become {left}"
                self._records.note("damaged", step=whole[-1], how=self.fault.damage.how, done=done)
                whole = left
            self._records.note("prepared", newest=whole[-1] if whole else None)
            return
        deadline = time.monotonic() + PATIENCE
        while not any(entry["attempt"] == attempt for entry in read_records(folder, "prepared")):
            if time.monotonic() > deadline:
                sys.exit("worker 0 has not prepared this attempt")
            time.sleep(0.01)

    def reach(self, phase: str, spot: str, **more: Any) -> None:
        """This worker is at a place; what is to happen there, happens."""
        fault = self.fault
        if (phase, spot, self._worker) != (fault.phase, fault.spot, fault.worker) or not self._is_time(phase):
            return
        with self._lock:
            if self._struck:
                return
            self._struck = True
            self._records.note("struck", number=fault.number, phase=phase, spot=spot, **more)
            if fault.kind == FILL:
                self._fill(fault.room)
            else:
                os.kill(os.getpid(), SIGNALS[fault.kind])

    def _is_time(self, phase: str) -> bool:
        if phase in ("save", "commit"):
            return self.saves == SAVES
        return phase in ("start", "compile", "restore") or self.saves >= SAVES

    def in_step(self, step: int) -> None:
        """This worker's devices are in the program of a step."""
        self.reach("run_steps" if self._lengths.get(step, 1) > 1 else "step", "in the program", step=step)

    def _fill(self, room: int) -> None:
        """Fill the disk, but for so many bytes."""
        if not self._disk_is_real:
            from replicax.checkpoint import saving

            def full(folder: str, arrays: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)

            saving.write_pieces = full
            return
        file = os.open(self._checkpoints / FILLER, os.O_WRONLY | os.O_CREAT)
        size = 1 << 20
        while size >= 4096:
            try:
                os.write(file, b"x" * size)
            except OSError:
                size //= 2
        os.ftruncate(file, max(0, os.fstat(file).st_size - room))
        os.close(file)

    # --- places in Replicax ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Come by the places in functions of Replicax that save, restore and launch steps."""
        from jax import monitoring

        from replicax.checkpoint import checkpoint, restoration, saving
        from replicax.loop import training_loop

        carry_out, write, rename = saving.carry_out, saving.write_pieces, os.rename
        read, launched = restoration.read_pieces, training_loop.TrainingLoop._launch_steps

        def carried_out(*args: Any) -> None:
            self.saves += 1
            self.reach("save", "copied")
            carry_out(*args)
            self.reach("commit", "told")

        def written(*args: Any) -> None:
            write(*args)
            self.reach("save", "written")

        def renamed(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            is_commit = ".unfinished-" in str(source) and ".unfinished-" not in str(target)
            if is_commit:
                self.reach("save", "before renaming")
            rename(source, target, *args, **kwargs)
            if is_commit:
                self.reach("commit", "renamed")

        def was_read(*args: Any) -> Any:
            self.reach("restore", "before reading")
            result = read(*args)
            self.reach("restore", "read")
            return result

        def launches(loop: Any, count: int) -> Any:
            first = loop._run.step + 1
            self._lengths = dict.fromkeys(range(first, first + count), count) | self._lengths
            return launched(loop, count)

        checkpoint.carry_out = carried_out
        saving.write_pieces = written
        os.rename = renamed
        restoration.read_pieces = was_read
        training_loop.TrainingLoop._launch_steps = launches
        monitoring.register_event_duration_secs_listener(self._on_event)

    def traced(self) -> None:
        """The step is being traced; what is compiled next is the step."""
        self.reach("compile", "tracing")
        self._is_traced = True

    _is_traced = False

    def _on_event(self, name: str, *_: Any, **__: Any) -> None:
        """JAX has done a part of its work: before a program is compiled, it is lowered."""
        if self._is_traced and name.endswith("jaxpr_to_mlir_module_duration"):
            threading.Timer(0.02, self.reach, ("compile", "compiling")).start()
