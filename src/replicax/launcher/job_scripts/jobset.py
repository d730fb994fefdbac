"""Writes a launch as a manifest of a Kubernetes JobSet.

One Job has a pod for each machine, whose launcher starts the machine's workers. The pods find each other by the names
that a JobSet gives them. A fault restarts all pods, a limited number of times; a pod whose workers were asked to leave,
and one that the cluster takes away, do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from replicax.launcher import LaunchError
from replicax.launcher.job_scripts.job_request import JobRequest
from replicax.system.exit_codes import EXIT_PREEMPTED

_JOB = "worker"
_PORT = 8476
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 63  # of a host, which has the job's name and the pod's number
_MOST_PODS = 100_000  # that an indexed Job may run at a time
_PLAIN = re.compile(r"(\./)?[A-Za-z_/][-A-Za-z0-9_./]*")


def jobset_manifest(request: JobRequest) -> str:
    """The manifest for a job, as YAML.

    Raises a LaunchError if there is no image, there are too many machines, or the name can't be one of Kubernetes'
    objects.
    """
    pod = f"{request.name}-{_JOB}-0-{request.nodes - 1}"
    if not _NAME.fullmatch(request.name) or len(pod) > _LONGEST_NAME:
        raise LaunchError(
            f"--name {request.name!r}: a JobSet needs a name of small letters, digits and -, that begins with a "
            f"letter, and so short that {pod} has at most {_LONGEST_NAME} characters"
        )
    if request.nodes > _MOST_PODS:
        raise LaunchError(
            f"--nodes {request.nodes}: Kubernetes runs at most {_MOST_PODS:,} pods of such a Job at a time"
        )
    if request.image is None:
        raise LaunchError("--jobset needs --image, the container to run in, with Python and the program")
    return "# Written by `replicax launch --jobset`.\n" + "\n".join(_yaml(_manifest(request, request.image))) + "\n"


def _manifest(request: JobRequest, image: str) -> dict[str, Any]:
    settings = request.settings
    command = ["replicax", "launch", *request.options(request.log_dir or "/tmp/replicax-logs")]
    if request.nodes > 1:
        hosts = [f"{request.name}-{_JOB}-0-{i}.{request.name}" for i in range(request.nodes)]
        # A pod has an address of its own; its name may not resolve yet when it starts.
        command += ["--hosts", ",".join(hosts), "--port", str(settings.port or _PORT)]
        command += ["--bind", settings.bind or "0.0.0.0"]
    command += settings.program.words
    container: dict[str, Any] = {
        "name": _JOB,
        "image": image,
        # Kubernetes expands $(NAME).
        "command": [word.replace("$", "$$") for word in command],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(settings.grace) + 15,
        "containers": [container],
    }
    if request.nodes > 1:
        container["ports"] = [{"name": "coordinator", "containerPort": settings.port or _PORT}]
    limits = {"nvidia.com/gpu": request.gpus, "cpu": request.cpus}
    if any(limits.values()):
        container["resources"] = {"limits": {name: number for name, number in limits.items() if number}}
    if request.gpus:
        # NCCL and data loaders share more memory than the 64 MiB of a container's /dev/shm.
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": request.nodes,
        "completions": request.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _JOB, "operator": "In", "values": [EXIT_PREEMPTED]},
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    if request.seconds is not None:
        job["activeDeadlineSeconds"] = request.seconds
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": request.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": settings.restarts,
                "rules": [
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """A tree of dictionaries and lists as lines of YAML. Strings that YAML could read as other types are quoted."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        start = f"{indent}{key}:" if isinstance(value, dict) else f"{indent}-"
        if isinstance(item, dict | list):
            nested = list(_yaml(item, indent + "  "))
            if isinstance(value, dict):
                yield start
                yield from nested
            else:
                yield f"{start} {nested[0].lstrip()}"
                yield from nested[1:]
        else:
            yield f"{start} {_scalar(item)}"


def _scalar(value: Any) -> str:
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    if is_plain:
        return str(value)
    return re.sub("[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))


_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""Words that YAML does not read as strings."""
