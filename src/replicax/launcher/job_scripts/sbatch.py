"""Writes a launch as a script for Slurm's ``sbatch``.

Each node runs one task, the launcher, which starts the node's workers. Before the time limit Slurm sends SIGTERM to the
launchers; the workers save and leave with the exit code for a preemption, and the job is requeued.
"""

from __future__ import annotations

import shlex

from replicax.launcher import LaunchError
from replicax.launcher.job_scripts.job_request import JobRequest
from replicax.system.exit_codes import EXIT_PREEMPTED
from replicax.system.quantities import hours_in_words


def sbatch_script(request: JobRequest) -> str:
    """The script for a job; raises a LaunchError if the name can't be one of Slurm's jobs."""
    if not request.name.isprintable() or set(request.name) & set(" \t%/\\'\"#"):
        raise LaunchError(f"--name {request.name!r}: a job of Slurm needs a name without blanks, quotes, /, # and %")
    grace = int(request.settings.grace) + 1
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={request.name}",
        f"#SBATCH --nodes={request.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={request.gpus}"] if request.gpus else []),
        *([f"#SBATCH --time={hours_in_words(request.seconds)}"] if request.seconds is not None else []),
        f"#SBATCH --cpus-per-task={request.cpus}" if request.cpus else "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=TERM@{grace + 60}",
        "",
        "# Written by `replicax launch --sbatch`. One task a node: the launcher, which starts the node's workers.",
        "# Partition, account and the like: `sbatch --partition=NAME ...` with this script, or further #SBATCH lines.",
        "# What makes `replicax` a command (modules, a virtual environment) belongs here.",
        "set -uo pipefail",
        "",
    ]
    options = ["replicax", "launch", *request.options("LOGS")]
    command = shlex.join(options).replace(" LOGS", ' "$logs"')
    if request.nodes > 1:
        lines += [
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)',
            "port=$((61440 + SLURM_JOB_ID % 4096))  # the same on all nodes, another for each job"
            if request.settings.port is None
            else f"port={request.settings.port}",
        ]
        command += ' --hosts "$hosts" --port "$port"'
        if request.settings.bind is not None:
            command += f" --bind {shlex.quote(request.settings.bind)}"
    lines += [
        f"logs={shlex.quote(request.log_dir) if request.log_dir else 'replicax-logs/$SLURM_JOB_ID'}",
        "code=0",
        f'srun --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 {command} \\',
        f"    {shlex.join(request.settings.program.words)} || code=$?",
        "",
        f"# {EXIT_PREEMPTED}: the workers were asked to leave, and have saved. Other faults: "
        f"{request.settings.restarts} times (Slurm counts all restarts together).",
        f'if [ "$code" -eq {EXIT_PREEMPTED} ] || '
        f'{{ [ "$code" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {request.settings.restarts} ]; }}; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
