"""What TensorFlow had, from release 1.9 to today: the public names of distribution, and what each of them gives.

Facts only. What takes a name's place is in :mod:`replicax_migrate.old_names` or, if it has stayed, in Replicax itself.
"""

from __future__ import annotations

_STRATEGIES = "MirroredStrategy OneDeviceStrategy ParameterServerStrategy TPUStrategy"
_CLUSTERS = (
    "ClusterResolver GCEClusterResolver KubernetesClusterResolver KubernetesExecutableLocation SimpleClusterResolver "
    "SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver UnionResolver"
)
_COORDINATOR = "ClusterCoordinator PerWorkerValue PerWorkerValues RemoteValue experimental_get_current_worker_index"
_CROSS = "CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce ReductionToOneDevice"

MODERN: dict[str, str] = {
    "distribute": f"{_STRATEGIES} MultiWorkerMirroredStrategy Strategy StrategyExtended {_CROSS} DistributedDataset "
    "DistributedIterator DistributedValues InputContext InputOptions InputReplicationMode ReduceOp ReplicaContext "
    "RunOptions Server experimental_set_strategy get_loss_reduction get_replica_context get_strategy has_strategy "
    "in_cross_replica_context",
    "distribute.cluster_resolver": _CLUSTERS,
    "distribute.coordinator": _COORDINATOR,
    "distribute.experimental": "CentralStorageStrategy CollectiveCommunication CollectiveHints "
    "CommunicationImplementation CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy "
    "PreemptionCheckpointHandler PreemptionWatcher TPUStrategy TerminationConfig ValueContext",
    "distribute.experimental.coordinator": _COORDINATOR,
    "distribute.experimental.partitioners": "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner",
    "distribute.experimental.rpc": "Client Server",
    "train": "Server",
    "tpu": "CrossShardOptimizer PaddingSpec XLAOptions batch_parallel bfloat16_scope core cross_replica_sum "
    "initialize_system outside_compilation replicate rewrite shard shutdown_system",
    "tpu.experimental": "AdagradParameters AdamParameters DeviceAssignment DeviceOrderMode FtrlParameters "
    "HardwareFeature StochasticGradientDescentParameters TPUSystemMetadata Topology embedding_column "
    "initialize_tpu_system shared_embedding_columns shutdown_tpu_system",
    "tpu.experimental.embedding": "TPUEmbedding TPUEmbeddingForServing TPUEmbeddingV0 TPUEmbeddingV2",
    "": "VariableAggregation VariableSynchronization",
    "config": "experimental_connect_to_cluster experimental_connect_to_host",
    "data.experimental": "AutoShardPolicy DistributeOptions",
    "nn": "compute_average_loss scale_regularization_loss",
    "keras.utils": "multi_gpu_model",
}
"""By module, after ``tf.``, of 1.13 and later; those of ``tf.compat.v1`` and ``tf.compat.v2`` are among them."""

TOWER: dict[str, str] = {
    "contrib.distribute": "AllReduceCrossDeviceOps AllReduceCrossTowerOps CollectiveAllReduceStrategy CrossDeviceOps "
    f"CrossTowerOps DistributeConfig DistributionStrategy {_STRATEGIES} Monitor MultiWorkerAllReduce "
    "ReductionToOneDeviceCrossDeviceOps ReductionToOneDeviceCrossTowerOps StandardInputStep StandardSingleLossStep "
    "Step TowerContext UpdateContext get_cross_replica_context get_cross_tower_context get_distribution_strategy "
    "get_loss_reduction get_tower_context has_distribution_strategy in_cross_tower_context initialize_tpu_system "
    "require_replica_context require_tower_context run_standard_tensorflow_server",
    "contrib.cluster_resolver": _CLUSTERS,
    "contrib.tpu": MODERN["tpu"],
    "contrib.distribute.python.values": "MapOutput Mirrored MultiStepContext PerDevice PerDeviceDataset",
    "": "get_tower_context get_cross_tower_context get_distribution_strategy has_distribution_strategy",
}
"""By module, of 1.9 to 1.15; ``contrib.distribute`` of 1.13 and later has the methods of today's strategies."""

AROUND_TOWERS: dict[str, str] = {
    "": "AUTO_REUSE VariableAggregation VariableScope VariableSynchronization get_variable get_variable_scope "
    "trainable_variables variable_scope",
    "train": "GradientDescentOptimizer MomentumOptimizer Optimizer create_global_step get_global_step "
    "get_or_create_global_step",
}
"""What programs in tower words make variables and update them with: not of distribution, but of the same revision."""

_INPUT = (
    "distribute_datasets_from_function experimental_distribute_dataset experimental_distribute_datasets_from_function "
    "experimental_distribute_values_from_function experimental_make_numpy_dataset make_dataset_iterator "
    "make_input_fn_iterator"
)
_LOGICAL = (
    "experimental_assign_to_logical_device experimental_replicate_to_logical_devices "
    "experimental_split_to_logical_devices"
)
_EXTENDED = "parameter_devices update value_container worker_devices"

MEMBERS: dict[str, str] = {
    "Strategy": f"cluster_resolver configure experimental_finalize experimental_initialize experimental_local_results "
    f"experimental_run experimental_run_v2 extended gather group num_replicas_in_sync reduce run scope steps_per_run "
    f"unwrap update_config_proto {_INPUT} {_LOGICAL}",
    "StrategyExtended": f"{_EXTENDED} batch_reduce_to broadcast_to call_for_each_replica colocate_vars_with "
    "experimental_between_graph experimental_enable_get_next_as_optional experimental_make_numpy_dataset "
    "experimental_require_static_shapes "
    "experimental_run_steps_on_iterator experimental_should_init non_slot_devices read_var reduce_to "
    "should_checkpoint should_save_summary steps_per_run tpu_hardware_feature update_non_slot "
    "variable_created_in_scope",
    "ReplicaContext": "all_gather all_reduce devices merge_call num_replicas_in_sync replica_id_in_sync_group strategy",
    "MultiStepContext": "last_step_outputs non_tensor_outputs run_op set_last_step_output set_non_tensor_output",
    "InputContext": "get_per_replica_batch_size input_pipeline_id num_input_pipelines num_replicas_in_sync",
    "ValueContext": "num_replicas_in_sync replica_id replica_id_in_sync_group",
    "InputOptions": "experimental_fetch_to_device experimental_per_replica_buffer_size "
    "experimental_place_dataset_on_device experimental_prefetch_to_device experimental_replication_mode",
    "RunOptions": "experimental_bucketizing_dynamic_shape experimental_enable_dynamic_batch_size "
    "experimental_xla_options",
    "DistributedDataset": "element_spec reduce",
    "DistributedIterator": "element_spec get_next get_next_as_optional initialize initializer",
    "PerReplica": "values",
    "TPUClusterResolver": "cluster_spec connect environment get_coordination_service_leader get_job_name get_master "
    "get_tpu_system_metadata master num_accelerators set_tpu_topology task_id task_type tpu_hardware_feature",
    "DeviceAssignment": "build coordinates core_assignment host_device lookup_replicas num_cores_per_replica "
    "num_replicas topology tpu_device tpu_ordinal",
    "Topology": "cpu_device_name_at_coordinates device_coordinates mesh_rank mesh_shape missing_devices num_tasks "
    "num_tpus_per_task serialized task_ordinal_at_coordinates tpu_device_name_at_coordinates "
    "tpu_device_ordinal_at_coordinates",
    "ClusterResolver": "cluster_spec environment get_task_info master num_accelerators rpc_layer task_id task_type",
    "KubernetesExecutableLocation": "OFF_CLUSTER WITHIN_CLUSTER",
    "ClusterCoordinator": "create_per_worker_dataset done fetch join schedule strategy",
    "RemoteValue": "fetch get",
    "CrossDeviceOps": "batch_reduce batch_reduce_implementation broadcast broadcast_implementation reduce "
    "reduce_implementation",
    "PreemptionCheckpointHandler": "run save_checkpoint_if_preempted total_run_calls watch_preemption_scope",
    "PreemptionWatcher": "block_until_worker_exit preemption_message",
    "Server": "create_local_server join server_def start target",
    "DistributeConfig": "eval_distribute remote_cluster train_distribute",
    "CrossShardOptimizer": "apply_gradients compute_gradients get_name get_slot get_slot_names minimize variables",
    "TPUSystemMetadata": "devices num_cores num_hosts num_of_cores_per_host topology",
    "ReduceOp": "MEAN SUM",
    "InputReplicationMode": "PER_REPLICA PER_WORKER",
    "CommunicationImplementation": "AUTO NCCL RING",
    "Synchronization": "AUTO NONE ON_READ ON_WRITE",
    "Aggregation": "MEAN NONE ONLY_FIRST_REPLICA SUM",
    "AutoShardPolicy": "AUTO DATA FILE HINT OFF",
}
"""By what a value is, in today's words: the public names of 1.13 and later."""

TOWER_MEMBERS: dict[str, str] = {
    "Strategy": f"{_EXTENDED} batch_reduce between_graph broadcast call_for_each_tower colocate_vars_with configure "
    "distribute_dataset fetch finalize get_finalize_ops get_host_cpu_device get_initialization_ops group initialize "
    "is_single_tower map non_slot_devices num_hosts num_towers num_towers_per_host read_var reduce "
    "run_steps_on_dataset scope should_checkpoint should_init should_save_summary tower_local_var_scope unwrap "
    "update_non_slot worker_device_index",
    "ReplicaContext": "device distribution_strategy is_single_tower merge_call num_towers tower_id "
    "tower_local_var_scope",
    "MultiStepContext": MEMBERS["MultiStepContext"],
    "DistributedDataset": "make_initializable_iterator make_one_shot_iterator",
    "DistributedIterator": "get_next initializer",
    "Aggregation": "MEAN NONE ONLY_FIRST_TOWER SUM",
    "CrossDeviceOps": "batch_reduce broadcast reduce",
    "Step": "distribution initialize inputs step",
    "Monitor": "run_steps",
    "Optimizer": "_distributed_apply apply_gradients compute_gradients minimize",
}
"""The same of 1.9 to 1.12, the tower API."""

_GIVERS: dict[str, str] = {
    "Strategy": f"{_STRATEGIES} MultiWorkerMirroredStrategy CentralStorageStrategy ShardedStrategy DefaultStrategy "
    "Strategy DistributionStrategy CollectiveAllReduceStrategy get_strategy get_distribution_strategy "
    "get_cross_tower_context get_cross_replica_context Strategy.scope ReplicaContext.strategy "
    "ReplicaContext.distribution_strategy ClusterCoordinator.strategy StrategyExtended.strategy",
    "StrategyExtended": "StrategyExtended Strategy.extended",
    "ReplicaContext": "ReplicaContext TowerContext get_replica_context get_tower_context",
    "MultiStepContext": "MultiStepContext Strategy.run_steps Strategy.run_steps_on_dataset "
    "StrategyExtended.experimental_run_steps_on_iterator",
    "DistributedDataset": "DistributedDataset PerDeviceDataset Strategy.distribute_dataset "
    "Strategy.experimental_distribute_dataset Strategy.distribute_datasets_from_function "
    "Strategy.experimental_distribute_datasets_from_function",
    "DistributedIterator": "DistributedIterator Strategy.make_dataset_iterator Strategy.make_input_fn_iterator "
    "DistributedDataset.make_one_shot_iterator DistributedDataset.make_initializable_iterator",
    "PerReplica": "DistributedValues PerDevice PerReplica Strategy.run Strategy.experimental_run "
    "Strategy.experimental_run_v2 Strategy.experimental_distribute_values_from_function "
    "Strategy.distribute_values_from_function DistributedIterator.get_next",
    "ClusterResolver": _CLUSTERS.replace("TPUClusterResolver ", "") + " Strategy.cluster_resolver",
    "TPUClusterResolver": "TPUClusterResolver TPUClusterResolver.connect",
    "DeviceAssignment": "DeviceAssignment DeviceAssignment.build",
    "Topology": "Topology DeviceAssignment.topology initialize_tpu_system",
    "TPUSystemMetadata": "TPUSystemMetadata TPUClusterResolver.get_tpu_system_metadata",
    "CrossDeviceOps": f"{_CROSS} AllReduceCrossDeviceOps AllReduceCrossTowerOps CrossTowerOps MultiWorkerAllReduce "
    "ReductionToOneDeviceCrossDeviceOps ReductionToOneDeviceCrossTowerOps",
    "RemoteValue": "RemoteValue ClusterCoordinator.schedule",
    "Step": "Step StandardInputStep StandardSingleLossStep",
    "CommunicationImplementation": "CollectiveCommunication CommunicationImplementation",
    "Synchronization": "VariableSynchronization",
    "Aggregation": "VariableAggregation",
    "Model": "Model Sequential clone_model load_model",
    **{
        name: name
        for name in (
            *("InputContext", "ValueContext", "InputOptions", "RunOptions", "ClusterCoordinator", "Server", "Monitor"),
            *("PreemptionCheckpointHandler", "PreemptionWatcher", "DistributeConfig", "CrossShardOptimizer"),
            *("ReduceOp", "InputReplicationMode", "AutoShardPolicy", "KubernetesExecutableLocation"),
            *("Checkpoint", "CheckpointManager", "LossScaleOptimizer"),
        )
    },
}

KINDS: dict[str, str] = {name: kind for kind, givers in _GIVERS.items() for name in givers.split()}
"""What calling a name gives, what an attribute is, or, for an enum, what its members are."""

ROLES: dict[str, str] = {
    "merge_call": "Strategy",
    "distribute_datasets_from_function": "InputContext",
    "experimental_distribute_datasets_from_function": "InputContext",
    "make_input_fn_iterator": "InputContext",
    "distribute_values_from_function": "ValueContext",
    "experimental_distribute_values_from_function": "ValueContext",
    "run_steps_on_dataset": "MultiStepContext",
    "experimental_run_steps_on_iterator": "MultiStepContext",
    "run_steps": "MultiStepContext",
}
"""What a function gets first that is the first argument of these methods."""
