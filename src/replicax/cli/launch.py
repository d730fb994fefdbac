"""``replicax launch``: starts the workers of a program, watches and restarts them."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from replicax.cli.command_line import InputError, positive_int, whole, why_not_writable, written
from replicax.launcher import LaunchError
from replicax.launcher.settings import LaunchSettings, Show

if TYPE_CHECKING:
    from replicax.launcher.supervisor import Supervisor

_PROG = "replicax launch"
_MOST_WORKERS = 65536
"""Each worker of a machine has a port."""
_EPILOG = """\
The launcher's options go before the script, the script's after it. Workers find each other by environment variables
(TF_CONFIG and JAX's own), so a script with replicax.MultiWorkerMirroredStrategy() needs no arguments. For example:

    replicax launch --workers 2 --devices-per-worker 2 train.py --rate 0.1

Ctrl-C interrupts the workers, and SIGTERM asks them to save and leave; after --grace seconds they are killed, and at a
second Ctrl-C at once. With --workers N:MAX, SIGUSR1 goes on with one worker less, and SIGUSR2 with one more.

Exit status: 0 if all workers have finished; that of the first worker that failed, or 128 + the number of the signal
that ended it; 75 if the workers have saved and left as asked; 2 if an argument was wrong, and nothing was started.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the command to ``argparse``."""
    parser = subparsers.add_parser(
        "launch",
        help="start the workers of a program, on this machine or on a cluster, and restart them after a fault",
        usage=f"{_PROG} --workers N[:MAX] [options] SCRIPT [ARGS …]\n"
        f"       {_PROG} --workers N[:MAX] [options] -m MODULE [ARGS …]",
        description="Start the worker processes of a script. Each line of output follows the number of its worker, "
        "and is kept in a file. If a worker fails, the launcher stops all, and restarts them if --max-restarts allows "
        "it. No process that a worker started outlives the launch.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workers",
        type=_workers,
        required=True,
        metavar="N[:MAX]",
        help="how many on each machine; N:MAX starts MAX, and goes on with fewer, but at least N",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=positive_int,
        metavar="M",
        help="GPUs for each worker, or, where JAX has none, emulated CPU devices (default: all GPUs in equal parts; "
        "one CPU device)",
    )
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--max-restarts",
        type=whole(0),
        metavar="R",
        help="start all workers again after a fault, R times (default: 3 times if a worker was killed, or with N:MAX; "
        "otherwise never, as a program that fails by itself would probably fail again)",
    )
    faults.add_argument(
        "--max-preemptions",
        type=whole(0),
        default=LaunchSettings.max_preemptions,
        metavar="R",
        help="the same after exit code 75 (default: %(default)d)",
    )
    faults.add_argument(
        "--max-resizes",
        type=whole(0),
        default=LaunchSettings.max_resizes,
        metavar="R",
        help="changes of the number of workers (default: %(default)d)",
    )
    faults.add_argument(
        "--backoff",
        type=float,
        default=LaunchSettings.backoff,
        metavar="S",
        help="seconds before the first restart after a fault; twice as many before each further one, up to 60 "
        "(default: %(default)g)",
    )
    faults.add_argument(
        "--grace",
        type=float,
        default=LaunchSettings.grace,
        metavar="S",
        help="seconds that workers have to end (default: %(default)g)",
    )
    faults.add_argument(
        "--hang-timeout",
        type=float,
        default=LaunchSettings.hang_timeout,
        metavar="S",
        help="after S seconds without a step, or 5 times the usual step time if that is longer, a worker hangs, "
        "unless it does something known to take long; a hang is a fault; 0 switches this off (default: %(default)g)",
    )
    faults.add_argument(
        "--finish-timeout",
        type=float,
        metavar="S",
        help="how long the others may go on when one worker has finished (default: for ever)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--log-dir",
        metavar="DIR",
        help="folder of the files attempt-0/worker-1.log and so on (default: replicax-logs/DATE-TIME-PROCESS)",
    )
    output.add_argument(
        "--show", choices=get_args(Show), default=LaunchSettings.show, help="whose output to show (default: all)"
    )
    output.add_argument("--dry-run", action="store_true", help="print commands and environments, and start nothing")
    hosts = parser.add_argument_group("several hosts", "run the same command on each")
    hosts.add_argument("--hosts", type=_hosts, default=(), metavar="HOST,…", help="all of them, the chief's first")
    hosts.add_argument(
        "--node-rank", type=whole(0), metavar="K", help="which of them this machine is, from 0 (default: by its name)"
    )
    hosts.add_argument(
        "--port", type=whole(1, 65535), metavar="P", help="the chief's (default on one host: any free one)"
    )
    hosts.add_argument(
        "--bind",
        metavar="ADDRESS",
        help="at which address the chief listens (default: 127.0.0.1; with --hosts, that of the first)",
    )
    jobs = parser.add_argument_group("jobs of a cluster", "the same launch as a job; nothing is started")
    kinds = jobs.add_mutually_exclusive_group()
    kinds.add_argument("--sbatch", action="store_true", help="write a script for Slurm's sbatch")
    kinds.add_argument("--jobset", action="store_true", help="write a manifest of a Kubernetes JobSet")
    jobs.add_argument("--out", type=Path, metavar="FILE", help="write it there (default: standard output)")
    jobs.add_argument("--nodes", type=positive_int, metavar="N", help="machines (default: 1)")
    jobs.add_argument("--gpus", type=positive_int, metavar="G", help="GPUs of each machine (default: none)")
    jobs.add_argument("--cpus", type=positive_int, metavar="C", help="processor cores of each machine")
    jobs.add_argument("--time", type=_duration, metavar="T", help="at most, such as 30:00 or 12:00:00 or 2-00:00:00")
    jobs.add_argument("--name", metavar="NAME", help="of the job (default: the script's)")
    jobs.add_argument("--image", metavar="IMAGE", help="the container to run in (Kubernetes)")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module instead of a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status that the epilog of its help describes."""
    try:
        return _run(args)
    except LaunchError as error:
        raise InputError(str(error)) from error


def _run(args: argparse.Namespace) -> int:
    from replicax.launcher import device_allocation, log_files
    from replicax.launcher.supervisor import Supervisor

    settings = _settings(args)
    if args.sbatch or args.jobset:
        return _write_job(args, settings)
    _refuse(args, "is for --sbatch and --jobset", "out", "nodes", "gpus", "cpus", "time", "name", "image")
    devices = device_allocation.allocate_devices(settings.workers, settings.devices_per_worker, os.environ)
    supervisor = Supervisor(settings, devices, os.environ)
    if args.dry_run:
        _show_plan(supervisor, settings.program.command)
        return 0
    if not os.path.isdir("/proc/self"):
        raise LaunchError(
            "the launcher needs Linux: it finds the processes of its workers in /proc, and there is none. Start the "
            "program without it, or in a container"
        )
    log_files.check_log_folder(settings.log_dir)
    try:
        return supervisor.run()
    except OSError as error:  # from the workers' program; the launcher has checked its own files before
        raise InputError(f"a worker can't be started: {error}") from error


def _settings(args: argparse.Namespace) -> LaunchSettings:
    from replicax.launcher import rendezvous, worker_program

    words = ["-m", *args.program] if args.is_module else args.program
    is_job = args.sbatch or args.jobset
    found = worker_program.parsed(words, is_here=not is_job)
    if is_job and args.hosts:
        raise LaunchError("--hosts is for launches that start now; the hosts of a job are those that it is given")
    least, most = args.workers
    node = args.node_rank
    if args.hosts:
        node = rendezvous.own_node_rank(args.hosts) if node is None and len(args.hosts) > 1 else node or 0
        if node >= len(args.hosts):
            raise LaunchError(f"--node-rank {node}: expected 0 to {len(args.hosts) - 1}, as there are so many --hosts")
    elif node is not None:
        raise LaunchError("--node-rank is for several hosts: say which with --hosts")
    default = f"replicax-logs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    made = {"program": found, "workers": most, "least": least, "node": node or 0}
    made |= {"hosts": tuple(args.hosts), "log_dir": Path(args.log_dir or default)}
    others = {field.name for field in dataclasses.fields(LaunchSettings)} - made.keys()
    return LaunchSettings(**made, **{name: getattr(args, name) for name in others})  # options have the settings' names


def _show_plan(supervisor: Supervisor, command: tuple[str, ...]) -> None:
    """Print the commands of the first attempt, ready to paste."""
    environments = supervisor.environments(0, supervisor.new_rendezvous())
    for environment in environments.values():
        added = {k: v for k, v in sorted(environment.items()) if os.environ.get(k) != v}
        words = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        removed = [f"-u {name}" for name in sorted(set(os.environ) - set(environment))]
        print(" ".join(["env", *removed, *words, shlex.join(command)]))


def _write_job(args: argparse.Namespace, settings: LaunchSettings) -> int:
    from replicax.launcher.job_scripts.job_request import JobRequest
    from replicax.launcher.job_scripts.jobset import jobset_manifest
    from replicax.launcher.job_scripts.sbatch import sbatch_script

    name = settings.program.name
    request = JobRequest(
        settings,
        name=args.name or (re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") if args.jobset else name),
        nodes=args.nodes or 1,
        gpus=args.gpus or 0,
        cpus=args.cpus,
        seconds=args.time,
        image=args.image,
        log_dir=args.log_dir,
    )
    if args.sbatch:
        _refuse(args, "is for --jobset: Slurm runs jobs without a container", "image")
    text = sbatch_script(request) if args.sbatch else jobset_manifest(request)
    if args.out is None:
        sys.stdout.buffer.write(os.fsencode(text))  # file names are bytes, whatever the terminal's encoding has
        return 0
    if (why := why_not_writable(args.out)) is not None:
        raise InputError(f"--out {args.out}: can't be written ({why})")
    if (why := written(args.out, lambda path: path.write_bytes(os.fsencode(text)))) is not None:
        raise InputError(f"--out {why}")
    return 0


def _refuse(args: argparse.Namespace, why: str, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise LaunchError(f"--{name} {why}")


# --- types of arguments ---------------------------------------------------------------------------------


def _workers(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most < _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"expected N or N:MAX with 1 <= N <= MAX < {_MOST_WORKERS}, got {text!r}")
    return least, most


def _hosts(text: str) -> tuple[str, ...]:
    found = tuple(host.strip() for host in text.split(","))
    if not all(re.fullmatch(r"[A-Za-z0-9._:-]+", host) for host in found):
        raise argparse.ArgumentTypeError(f"expected names or addresses with commas in between, got {text!r}")
    return found


def _duration(text: str) -> int:
    from replicax.launcher.job_scripts.job_request import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
