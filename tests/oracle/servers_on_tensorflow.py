"""A cluster of TensorFlow's own servers, two workers and two parameter servers, in this process and on loopback."""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

import tensorflow as tf

COUNTS = {"worker": 2, "ps": 2}


@functools.cache
def cluster() -> Any:
    """A resolver of the cluster, which is started with the first call, and ends with the process."""
    os.environ["GRPC_FAIL_FAST"] = "use_caller"  # as in TensorFlow's own tutorial
    jobs = {job: [f"localhost:{port}" for port in _free_ports(count)] for job, count in COUNTS.items()}
    spec = tf.train.ClusterSpec(jobs)
    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = 8  # with few processors it has too few, and functions wait for each other
    for job, count in COUNTS.items():
        for index in range(count):
            tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc", config=config)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
