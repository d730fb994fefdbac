"""The cluster: which processes run one program, where they are, and how they come together.

A :class:`~replicax.cluster.cluster_resolver.ClusterResolver` tells of a cluster in the words of the original; the
workers of it become processes of ``jax.distributed`` by
:func:`~replicax.cluster.initialization.initialize_workers`.
"""
