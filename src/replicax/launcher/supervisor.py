"""The whole launch: makes attempts as long as its policy allows."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping

from replicax.launcher import LaunchError
from replicax.launcher.attempt import Attempt, AttemptResult
from replicax.launcher.console import Console
from replicax.launcher.device_allocation import DeviceAllocation
from replicax.launcher.log_files import LogFile
from replicax.launcher.orphans import Guard
from replicax.launcher.rendezvous import LaunchRendezvous, is_taken, of_hosts, on_this_machine
from replicax.launcher.restarts import RestartPolicy
from replicax.launcher.settings import LaunchSettings
from replicax.launcher.signal_inbox import SignalInbox
from replicax.launcher.worker_environment import worker_environment
from replicax.system.addresses import host_and_port
from replicax.system.exit_codes import EXIT_PREEMPTED

_OTHER_PORTS = 3


class Supervisor:
    """Starts the workers of a launch on this machine, restarts them if need be, and returns its exit code."""

    def __init__(self, settings: LaunchSettings, devices: DeviceAllocation, environment: Mapping[str, str]) -> None:
        self._settings, self._devices, self._environment = settings, devices, environment
        shown = {"all": None, "chief": frozenset({0}), "none": frozenset[int]()}[settings.show]
        self._console = Console(settings.total, shown)
        self._id = os.urandom(8).hex()
        self._policy = RestartPolicy(settings)

    def new_rendezvous(self) -> LaunchRendezvous:
        """The rendezvous of the workers of the next attempt; raises a LaunchError if they can't listen there."""
        settings, workers = self._settings, len(self._policy.places)
        if settings.is_alone:
            return on_this_machine(workers, settings.port, settings.bind)
        assert settings.port is not None
        return of_hosts(settings.hosts, settings.node, workers, settings.port, settings.bind)

    def environments(self, attempt: int, rendezvous: LaunchRendezvous) -> dict[int, dict[str, str]]:
        """The environments of this machine's workers, by their numbers among those of all hosts."""
        places = self._policy.places
        first = self._settings.node * self._settings.workers
        return {
            first + i: worker_environment(
                self._environment,
                self._settings,
                rendezvous,
                worker=first + i,
                attempt=attempt,
                launch_id=self._id,
                devices=self._devices.variables(place, len(places), self._environment),
                columns=self._console.columns,
            )
            for i, place in enumerate(places)
        }

    def run(self) -> int:
        """Make attempts until one has finished or no other is allowed; returns the exit code.

        That is 0 if all workers have finished; that of the first worker that failed in the last attempt;
        :data:`~replicax.EXIT_PREEMPTED` if the workers have left to be started again; 128 + the signal that ended the
        launch. Raises a LaunchError if the workers can't listen at the rendezvous, an OSError if one can't be started.
        """
        rendezvous = self.new_rendezvous()
        guard = Guard(self._id)
        inbox = SignalInbox(self._settings.is_elastic)
        self._log = LogFile(self._settings.log_dir / "launch.log", self._console)
        try:
            return self._run(rendezvous, inbox)
        finally:
            self._log.close()
            guard.dismiss()

    def _run(self, rendezvous: LaunchRendezvous, inbox: SignalInbox) -> int:
        attempt = ports_lost = 0
        while True:
            result = self._attempt(attempt, rendezvous, inbox)
            attempt += 1
            if result.has_finished:
                if result.resize:
                    self._say(
                        "all workers have ended with exit code 0, so the program has finished, and is not started "
                        f"again; one that is to go on ends with {EXIT_PREEMPTED} (replicax.EXIT_PREEMPTED)"
                    )
                return 0
            if result.stop is not None:
                return self._exit_code_of_stop(result, result.stop)
            if self._port_was_lost(result, rendezvous) and ports_lost < _OTHER_PORTS:
                ports_lost += 1
                self._say(f"the chief's port, {rendezvous.bind}, was taken by another program: trying another one")
                pause = 0.0
            else:
                decision = self._policy.after(result)
                self._say(decision.why)
                if decision.pause is None:
                    return EXIT_PREEMPTED if result.cause is None else result.cause.exit_code
                pause = decision.pause
            stop = inbox.wait_for_stop(pause)
            if stop is not None:
                self._say(f"{stop.name}: not starting again")
                return 128 + stop
            rendezvous = self._next_rendezvous()

    def _attempt(self, number: int, rendezvous: LaunchRendezvous, inbox: SignalInbox) -> AttemptResult:
        count = len(rendezvous.addresses)
        folder = self._settings.log_dir / f"attempt-{number}"
        again = f"attempt {number}: " if number else ""
        self._say(
            f"{again}{self._settings.program.name} on {count} worker(s), {self._devices}; the chief is at "
            f"{rendezvous.coordinator}; output is kept in {folder}"
        )
        self._console.forget_tails()
        environments = self.environments(number, rendezvous)
        return Attempt(self._settings, environments, count, folder, self._id, self._console, self._say, inbox).run()

    def _exit_code_of_stop(self, result: AttemptResult, stop: signal.Signals) -> int:
        """The exit code when the launch itself was asked to end."""
        if any(ending.is_preemption for ending in result.endings):
            self._say("the workers have saved and left: the same command goes on from there")
            return EXIT_PREEMPTED
        return 128 + stop

    def _port_was_lost(self, result: AttemptResult, rendezvous: LaunchRendezvous) -> bool:
        """Return whether the chief may have failed because another program took its port; other ports don't matter."""
        if result.resize or result.is_preempted or self._settings.port is not None or not self._settings.is_alone:
            return False
        return is_taken(*host_and_port(rendezvous.bind, "the chief"))

    def _next_rendezvous(self) -> LaunchRendezvous:
        """The rendezvous of the next attempt; a port that the user chose may take a moment to be free again."""
        for _ in range(50):
            try:
                return self.new_rendezvous()
            except LaunchError:
                time.sleep(0.1)
        return self.new_rendezvous()

    def _say(self, message: str) -> None:
        self._console.say(message)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.write(f"{now} {socket.gethostname()}[{os.getpid()}] {message}\n".encode(errors="replace"))
