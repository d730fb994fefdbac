"""How behavior differs under the old and new names: the short form of ``tests/oracle/differences.md``."""

from __future__ import annotations

_SHARED = "summing what all replicas share is an error: whether it counts once or n times is unknown"
_ONE_RUN = (
    "the Python of a step runs once for all replicas, compiled without a tf.function: branching on a value is an error "
    "(use jnp.where or jax.lax.cond), and a result that is the same on all replicas is one array, without a wrapper"
)
_ACROSS = "an error inside a step, since it needs all replicas"
_ALL_LOCAL = "without devices, a replica on each of JAX's local devices (CPUs if there are no others)"
_INSIDE = "an error inside a step; takes any iterable of batches, Grain or tf.data"

DIFFERENCES: dict[str, str] = {
    "MirroredStrategy": _ALL_LOCAL,
    "MultiWorkerMirroredStrategy": "cluster_resolver is a keyword; JAX connects the workers by the same TF_CONFIG",
    "TPUStrategy": "the resolver may be left out",
    "ParameterServerStrategy": "the coordinator starts the servers and workers, on this machine or a Ray cluster; "
    "steps run on workers only; the servers apply optimizers; mode='sync' trains synchronously; each variable goes to "
    "the server that has the fewest bytes so far; an on-read variable is an error: leave synchronization out; fit of a "
    "Keras model is an error: make variables of its values, for stateless_call",
    "ClusterCoordinator": "a function's changes count once, even if its worker dies and it runs again; an error names "
    "the worker and the line; close() ends the processes",
    "CentralStorageStrategy": "variables lie on the host if no parameter_device is given",
    "TPUClusterResolver": "finds the TPUs of this program by itself; emulate= and topology= are for machines "
    "without TPUs",
    "SimpleClusterResolver": "two tasks with one address are an error",
    "TFConfigClusterResolver": "a mistake in TF_CONFIG is an error when it is read",
    "SlurmClusterResolver": "tasks are in Slurm's order, and may be left out: JAX finds a Slurm step by itself",
    "KubernetesClusterResolver": "pods by their own addresses, in the order of their completion indices; labels are "
    "required",
    "UnionResolver": "equal lists of a job are one; the task is that of the first resolver that knows its own",
    "DistributedValues": "only for values that differ: one that is the same on all replicas is an ordinary array",
    "CommunicationOptions": "an argument of each collective, or of MultiWorkerMirroredStrategy",
    "InputOptions": "other options: auto_shard_policy, partial_batch, prefetch",
    "VariableAggregation": "with NONE, assigning a value that differs between replicas to a mirrored variable is an "
    "error, where TensorFlow lets the copies drift apart; with SUM each replica contributes what it assigns",
    "VariableSynchronization": "an ON_READ variable can't be trainable; without an aggregation it can be assigned "
    "outside a step, but not read there",
    "compute_average_loss": "counts the examples of all replicas, also in uneven and partial batches; a global batch "
    "of 0 is an error; losses [batch, time] are summed over time with a warning, unless reduce_dims is 'mean' or 'sum'",
    "get_strategy": "a variable made outside every scope belongs to no strategy, and no step of a strategy can read it",
    "CrossShardOptimizer": "gradients that are already reduced need aggregate=False; without it they are an error",
    "Strategy.run": f"{_ONE_RUN}; a PerReplica argument must have as many components as there are replicas; "
    "a variable created in a step is created once",
    "Strategy.experimental_run_v2": _ONE_RUN,
    "Strategy.experimental_run": _ONE_RUN,
    "Strategy.call_for_each_tower": _ONE_RUN,
    "Strategy.reduce": f"{_SHARED} (its mean is itself); pytrees go leaf by leaf, along an axis too; bools are counted",
    "Strategy.gather": "pytrees go leaf by leaf; a negative axis counts from the end; a plain array is an error; "
    "a failed call leaves nothing behind",
    "Strategy.scope": "leaving scopes in the wrong order is an error",
    "Strategy.local_results": _ACROSS,
    "Strategy.experimental_local_results": _ACROSS,
    "Strategy.unwrap": f"a tuple; {_ACROSS}",
    "Strategy.distribute_values_from_function": _ACROSS,
    "Strategy.experimental_distribute_values_from_function": f"{_ACROSS}; structures that differ are a ValueError",
    "Strategy.experimental_distribute_dataset": _INSIDE,
    "Strategy.distribute_dataset": _INSIDE,
    "Strategy.distribute_datasets_from_function": f"{_INSIDE}; one whole batch for each replica, as in TensorFlow",
    "Strategy.experimental_distribute_datasets_from_function": f"{_INSIDE}; one whole batch for each replica, as in "
    "TensorFlow",
    "StrategyExtended.reduce_to": _SHARED,
    "StrategyExtended.batch_reduce_to": "no pairs give no results, []",
    "StrategyExtended.update": "only outside a step or in a merge_call, only for variables, and with arguments that "
    "are the same for all copies",
    "StrategyExtended.colocate_vars_with": "a variable of another strategy is a ContextError, which is a RuntimeError",
    "StrategyExtended.value_container": "works for components of a value; the copies of a variable are arrays, and "
    "have no container",
    "ReplicaContext.all_reduce": "an array that n replicas share is summed n times, where TensorFlow counts it once; "
    "numbers are arrays; a gradient of a value that is already reduced is an error; it can't be under a Python branch "
    "on a value",
    "ReplicaContext.all_gather": "a negative axis counts from the end",
    "ReplicaContext.merge_call": "all replicas must reach it, so it can't be under a Python branch on a value; no "
    "other step can run in it",
    "ReplicaContext.replica_id_in_sync_group": "in a step an array, on which Python can't branch",
    "ClusterResolver.master": "rpc_layer precedes every address, also that of a named task",
    "DistributedIterator.get_next": "inside a step a ContextError, which is a RuntimeError",
    "ClusterCoordinator.schedule": "a result may be an argument of another function; an error is a WorkerError, caused "
    "by the original one; a function that creates variables is a ContextError",
    "ClusterCoordinator.create_per_worker_dataset": "each worker is told how many there are, and which it is; datasets "
    "are distributed on workers, not in the coordinator's program",
    "PerReplica.values": "a PerReplica has no truth value, and is not an array",
}
"""By the name of a module, or ``Kind.member``."""

TOWER_DIFFERENCES: dict[str, str] = {
    "MirroredStrategy": _ALL_LOCAL,
    "VariableAggregation": DIFFERENCES["VariableAggregation"],
    "Strategy.call_for_each_tower": _ONE_RUN,
    "Strategy.reduce": f"{_SHARED} (its mean is itself)",
    "Strategy.scope": DIFFERENCES["Strategy.scope"],
    "ReplicaContext.merge_call": "all towers must reach it, so it can't be under a Python branch on a value",
    "DistributedIterator.get_next": DIFFERENCES["DistributedIterator.get_next"],
}
"""The same of what :mod:`replicax.compat.v1` has."""
