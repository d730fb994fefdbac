"""What behaves differently under the old and new names: the short form of ``tests/oracle/differences.md``."""

from __future__ import annotations

_SHARED = "what all replicas share can't be summed across them, as once or n times can't be told: an error"
_ONE_RUN = (
    "the Python of a step runs once for all replicas, compiled, and no tf.function is needed: branching on a value is "
    "an error (jnp.where, jax.lax.cond), and what is the same on all comes back as one array, without a wrapper"
)
_ACROSS = "inside a step it is an error: it looks at all replicas"
_ALL_LOCAL = "without devices, a replica on each local device of JAX's (CPUs where there are no others)"
_INSIDE = "an error inside a step; batches may come from anything iterable, Grain or tf.data"

DIFFERENCES: dict[str, str] = {
    "MirroredStrategy": _ALL_LOCAL,
    "MultiWorkerMirroredStrategy": "cluster_resolver is a keyword; by the same TF_CONFIG JAX connects the workers",
    "TPUStrategy": "the resolver may be left out",
    "ParameterServerStrategy": "servers and workers are processes that the coordinator starts, on this machine or on a "
    "Ray cluster; steps run on workers only; optimizers are applied on the servers; mode='sync' trains in step; each "
    "variable goes to the server that has the fewest bytes so far; an on-read variable needs an aggregation",
    "ClusterCoordinator": "what a function changes counts once, though its worker dies and it runs again; an error "
    "says which worker and line; close() ends the processes",
    "CentralStorageStrategy": "variables lie on the host if no parameter_device is given",
    "TPUClusterResolver": "finds the TPUs of this program by itself; emulate= and topology= are for machines without",
    "SimpleClusterResolver": "two tasks with one address are an error",
    "TFConfigClusterResolver": "what is wrong in TF_CONFIG is an error when it is read",
    "SlurmClusterResolver": "tasks are in Slurm's order, and need not be named: JAX finds a Slurm step by itself",
    "KubernetesClusterResolver": "pods by their own addresses, in the order of their completion indices; the labels "
    "have to be given",
    "UnionResolver": "equal lists of a job are one; the task is that of the first resolver that knows its own",
    "DistributedValues": "only for what differs: what is the same on all replicas is an ordinary array",
    "CommunicationOptions": "an argument of each collective, or of MultiWorkerMirroredStrategy",
    "InputOptions": "other options: auto_shard_policy, partial_batch, prefetch",
    "VariableAggregation": "with NONE, what differs between replicas can't be assigned to a mirrored variable, where "
    "TensorFlow lets the copies drift apart; with SUM each replica contributes what it assigns",
    "VariableSynchronization": "an ON_READ variable can't be trainable; without an aggregation it is assigned from "
    "across, and not read",
    "compute_average_loss": "counts the examples of all replicas, also of uneven batches, and of a partial one; a "
    "global batch of 0 is an error; losses [batch, time] are added up over time with a warning, unless reduce_dims is "
    "'mean' or 'sum'",
    "get_strategy": "a variable made outside every scope belongs to no strategy, and can't be read in its steps",
    "CrossShardOptimizer": "gradients that have been reduced need aggregate=False, and are an error otherwise",
    "Strategy.run": f"{_ONE_RUN}; a PerReplica argument must have as many components as there are replicas; "
    "variables that a step makes are made once",
    "Strategy.experimental_run_v2": _ONE_RUN,
    "Strategy.experimental_run": _ONE_RUN,
    "Strategy.call_for_each_tower": _ONE_RUN,
    "Strategy.reduce": f"{_SHARED} (its mean is itself); nests go leaf by leaf, along an axis too; bools are counted",
    "Strategy.gather": "nests go leaf by leaf; a negative axis counts from the end; a plain array is an error; "
    "a failed one leaves nothing behind",
    "Strategy.scope": "leaving scopes in the wrong order is always an error",
    "Strategy.local_results": _ACROSS,
    "Strategy.experimental_local_results": _ACROSS,
    "Strategy.unwrap": f"a tuple; {_ACROSS}",
    "Strategy.distribute_values_from_function": _ACROSS,
    "Strategy.experimental_distribute_values_from_function": f"{_ACROSS}; structures that differ are a ValueError",
    "Strategy.experimental_distribute_dataset": _INSIDE,
    "Strategy.distribute_dataset": _INSIDE,
    "Strategy.distribute_datasets_from_function": f"{_INSIDE}; one whole batch for each replica, as there",
    "Strategy.experimental_distribute_datasets_from_function": f"{_INSIDE}; one whole batch for each replica, as there",
    "StrategyExtended.reduce_to": _SHARED,
    "StrategyExtended.batch_reduce_to": "of nothing there are no results, []",
    "StrategyExtended.update": "only across replicas (merge_call), for variables, and with arguments that are the "
    "same for all copies",
    "StrategyExtended.colocate_vars_with": "another strategy's variable is a ContextError, a RuntimeError",
    "StrategyExtended.value_container": "a component knows its value; the copies of a variable are arrays, and don't",
    "ReplicaContext.all_reduce": "n replicas that share an array sum it n times, where TensorFlow counts it once; "
    "numbers are arrays; a gradient of what has been reduced is an error; it can't stand under a Python branch on a "
    "value",
    "ReplicaContext.all_gather": "a negative axis counts from the end",
    "ReplicaContext.merge_call": "all replicas must come to it, so it can't stand under a Python branch on a value; "
    "no other step can be run in it",
    "ReplicaContext.replica_id_in_sync_group": "an array in a step, on which Python can't branch",
    "ClusterResolver.master": "rpc_layer stands before every address, also that of a named task",
    "DistributedIterator.get_next": "inside a step a ContextError, a RuntimeError",
    "ClusterCoordinator.schedule": "a result may be an argument of another function; an error is a WorkerError, with "
    "the original as its cause; a function that makes variables is a ContextError",
    "ClusterCoordinator.create_per_worker_dataset": "each worker is told how many there are, and which it is; datasets "
    "are distributed on workers, not in the coordinator's program",
    "PerReplica.values": "a PerReplica has no truth, and is not an array",
}
"""By the name of a module, or ``Kind.member``."""

TOWER_DIFFERENCES: dict[str, str] = {
    "MirroredStrategy": _ALL_LOCAL,
    "VariableAggregation": DIFFERENCES["VariableAggregation"],
    "Strategy.call_for_each_tower": _ONE_RUN,
    "Strategy.reduce": f"{_SHARED} (its mean is itself)",
    "Strategy.scope": DIFFERENCES["Strategy.scope"],
    "ReplicaContext.merge_call": "all towers must come to it, so it can't stand under a Python branch on a value",
    "DistributedIterator.get_next": DIFFERENCES["DistributedIterator.get_next"],
}
"""The same of what :mod:`replicax.compat.v1` has."""
