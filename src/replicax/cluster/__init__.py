"""The cluster: which processes run one program, where they are, and how they connect.

A :class:`ClusterResolver` describes a cluster as ``tf.distribute`` does. :func:`replicax.initialize_workers` makes the
cluster's workers processes of ``jax.distributed``.
"""

from replicax.cluster.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
from replicax.cluster.resolver import ClusterResolver
from replicax.cluster.simple import SimpleClusterResolver
from replicax.cluster.slurm import SlurmClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.tf_config import TFConfigClusterResolver
from replicax.cluster.union import UnionClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionClusterResolver",
]
