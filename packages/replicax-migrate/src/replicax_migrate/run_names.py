"""What TensorFlow had around a run and in a training step, and what takes its place: checkpoints, callbacks, tapes.

None of it is distribution, but every program that trains for long has some of it. It is never replaced without looking:
what has the same name is called otherwise.
"""

from __future__ import annotations

import collections

RUNS: dict[str, str] = {
    "train": "Checkpoint CheckpointManager CheckpointOptions CheckpointSaverHook ClusterSpec LoggingTensorHook "
    "MonitoredSession MonitoredTrainingSession NanTensorHook ProfilerHook Saver Scaffold SessionRunHook "
    "SingularMonitoredSession StepCounterHook StopAtStepHook SummarySaverHook Supervisor SyncReplicasOptimizer "
    "checkpoint_exists checkpoints_iterator get_checkpoint_state latest_checkpoint list_variables load_checkpoint "
    "load_variable replica_device_setter",
    "keras.callbacks": "BackupAndRestore CSVLogger Callback EarlyStopping History LambdaCallback LearningRateScheduler "
    "ModelCheckpoint ProgbarLogger ReduceLROnPlateau TensorBoard TerminateOnNaN",
    "keras.callbacks.experimental": "BackupAndRestore",
    "keras": "Model Sequential",
    "keras.models": "Model Sequential clone_model load_model",
    "keras.mixed_precision": "LossScaleOptimizer Policy global_policy set_global_policy",
    "keras.mixed_precision.experimental": "LossScaleOptimizer Policy global_policy set_policy",
    "train.experimental": "enable_mixed_precision_graph_rewrite",
    "mixed_precision": "enable_mixed_precision_graph_rewrite",
    "summary": "FileWriter audio create_file_writer histogram image merge_all scalar text",
    "estimator": "EvalSpec TrainSpec train_and_evaluate",
}
"""By module, after ``tf.`` or ``tf.compat.v1.``."""

_LATEST = "restore_latest() or latest_step, of a replicax.CheckpointManager"
_READ = "replicax.Checkpoint.restore(path, partial=True), into objects of these names and shapes"
_TRAINED = "replicax.train, with a replicax.CheckpointManager"
_EVALUATED = "replicax.train(step, dataset, steps, evaluate=(step, dataset))"
_LOGGED = "what the step returns, in replicax.train(…, log_every=…)"
_FOLDER = "replicax.train(…, logs=folder)"
_RATE = "a schedule of Optax as the learning rate"
_MODEL = "the same class of Keras 3, on JAX"
_CASTS = "keras.config.set_dtype_policy('mixed_bfloat16') of Keras 3; in a step of your own, casts to bfloat16"
_SUMMARY = f"what a step returns, in {_FOLDER}, or a replicax.TensorBoardLog"

TODAY_OF_RUNS: dict[str, str] = {
    "BackupAndRestore": "a replicax.CheckpointManager, for replicax.train, which goes on from its newest checkpoint",
    "CSVLogger": f"{_FOLDER}, or a replicax.CSVLog",
    "Callback": "replicax.Callback, for replicax.train",
    "Checkpoint": "replicax.Checkpoint(**objects)",
    "CheckpointManager": "replicax.CheckpointManager(checkpoint, directory, max_to_keep=…, every_steps=…)",
    "CheckpointOptions": "nothing to do: saves run in the background, and each worker writes its own part",
    "CheckpointSaverHook": "replicax.CheckpointManager(…, every_steps=…), for replicax.train",
    "ClusterSpec": "replicax.cluster.ClusterSpec, the cluster_spec() of every resolver",
    "EarlyStopping": "replicax.EarlyStopping, for replicax.train",
    "EvalSpec": _EVALUATED,
    "History": "replicax.TrainingRun, which replicax.train returns, and its CSV files",
    "LambdaCallback": "replicax.Callback, for replicax.train",
    "LearningRateScheduler": _RATE,
    "LoggingTensorHook": _LOGGED,
    "LossScaleOptimizer": "keras.optimizers.LossScaleOptimizer of Keras 3, for float16; bfloat16 needs none",
    "Model": _MODEL,
    "ModelCheckpoint": "replicax.CheckpointManager(…, best=(metric, 'min')), for replicax.train",
    "FileWriter": _SUMMARY,
    "MonitoredSession": _TRAINED,
    "MonitoredTrainingSession": _TRAINED,
    "NanTensorHook": "replicax.train(…, stop_at_nan=True)",
    "Policy": _CASTS,
    "ProfilerHook": "replicax.train(…, profile=(first, last))",
    "ProgbarLogger": "nothing to do: replicax.train shows a progress bar",
    "ReduceLROnPlateau": _RATE,
    "Saver": "replicax.Checkpoint, of a list or dict of variables, in a replicax.CheckpointManager for max_to_keep",
    "Scaffold": "nothing to do: variables have their values when they are created",
    "Sequential": _MODEL,
    "SessionRunHook": "replicax.Callback, for replicax.train",
    "SingularMonitoredSession": _TRAINED,
    "StepCounterHook": "nothing to do: replicax.train logs examples per second",
    "StopAtStepHook": "the argument steps of replicax.train",
    "SummarySaverHook": _FOLDER,
    "Supervisor": _TRAINED,
    "SyncReplicasOptimizer": "replicax.Optimizer, under ParameterServerStrategy(mode='sync') or MirroredStrategy",
    "TensorBoard": f"{_FOLDER}, or a replicax.TensorBoardLog",
    "TerminateOnNaN": "replicax.train(…, stop_at_nan=True)",
    "TrainSpec": "replicax.train(step, dataset, steps)",
    "audio": _SUMMARY,
    "checkpoint_exists": _LATEST,
    "checkpoints_iterator": _EVALUATED,
    "clone_model": "keras.models.clone_model of Keras 3, on JAX",
    "create_file_writer": _SUMMARY,
    "enable_mixed_precision_graph_rewrite": _CASTS,
    "get_checkpoint_state": _LATEST,
    "global_policy": _CASTS,
    "histogram": _SUMMARY,
    "image": _SUMMARY,
    "latest_checkpoint": _LATEST,
    "list_variables": "index.json, in the folder of a checkpoint",
    "load_checkpoint": _READ,
    "load_model": "keras.models.load_model of Keras 3, on JAX",
    "load_variable": _READ,
    "merge_all": "nothing to do: replicax.train logs everything a step returns",
    "replica_device_setter": "nothing to do: replicax.ParameterServerStrategy places variables on the servers",
    "scalar": _SUMMARY,
    "set_global_policy": _CASTS,
    "set_policy": _CASTS,
    "text": _SUMMARY,
    "train_and_evaluate": _EVALUATED,
}

_KERAS = (
    "set KERAS_BACKEND=jax before keras is imported, and make and compile the model in strategy.scope(): compile, fit, "
    "evaluate, predict and all callbacks stay as they are"
)

DIFFERENCES_OF_RUNS: dict[str, str] = {
    "BackupAndRestore": "also in the middle of an epoch, at the next example, and with other workers and replicas",
    "Checkpoint": "takes variables, optimizers, metrics, iterators, arrays and numbers; an error lists what is "
    "missing, left over or of another shape; it can't read TensorFlow's files",
    "CheckpointManager": "all workers call it, and it detects whether they share a disk; it skips a damaged or "
    "unfinished checkpoint, and logs why",
    "EarlyStopping": "uses what evaluate= returns; it does not restore weights: the manager's best= keeps them",
    "ModelCheckpoint": "saves everything, not only the weights, in the background; in fit the name of the file ends in "
    ".keras or .weights.h5",
    "Model": _KERAS,
    "MonitoredTrainingSession": "no session, and no chief to wait for: all workers run the same program",
    "Sequential": _KERAS,
    "TensorBoard": "in fit it needs TensorFlow installed, with which Keras writes the files",
    "scalar": "only the chief may write",
    "train_and_evaluate": "workers evaluate together, between steps; there is no separate evaluator",
}

_PATH = "path is the new folder, without a number appended; it is written whole or not at all"
MEMBERS_OF_RUNS: dict[str, dict[str, tuple[str, str | None]]] = {
    "Checkpoint": {
        "read": ("restore(path)", "everything is restored before it returns"),
        "restore": ("restore(path)", "everything is restored before it returns; if it does not fit, nothing changes"),
        "save": ("save(path)", _PATH),
        "save_counter": ("a number of your own among the objects", None),
        "sync": ("wait()", None),
        "write": ("save(path)", _PATH),
    },
    "CheckpointManager": {
        "checkpoint": ("checkpoint", None),
        "checkpoint_interval": ("the argument every_steps", None),
        "checkpoints": ("steps, their numbers", None),
        "directory": ("directory", None),
        "latest_checkpoint": ("latest_step, its number", None),
        "restore_or_initialize": ("restore_latest(), which returns the step, or None", None),
        "save": ("save(step)", "call it after every step: it saves when a save is due, or at once with force=True"),
        "sync": ("wait()", None),
    },
    "Model": {
        **dict.fromkeys(
            ("compile", "evaluate", "fit", "predict", "predict_on_batch", "test_on_batch", "train_on_batch"),
            ("the same", _KERAS),
        ),
        **dict.fromkeys(
            ("load_weights", "save", "save_weights"),
            ("the same", "files end in .keras or .weights.h5; Keras 3 can't read TensorFlow's checkpoints"),
        ),
    },
    "LossScaleOptimizer": {
        "get_scaled_loss": ("of Keras 3, scale_loss(loss)", "in a step of your own replicax.loop.Precision"),
        "get_unscaled_gradients": ("leave it out: apply divides the gradients", None),
    },
}
"""By what a value is: what takes the place of a member, and what is different."""


# --- training steps: a program is told of these only if it has distribution, too -------------------------

_OWN = "the same in model.compile, of Keras 3; in a step of your own"
_RATES = "the same for an optimizer of Keras 3; otherwise a schedule of Optax as the learning rate"
_DEVICES = "jax.devices()"
_EMULATED = "replicax.use_cpu_devices(n), for several devices on a machine that has none"
_MEMORY = "XLA_PYTHON_CLIENT_PREALLOCATE=false, in the environment"
_COMPILED = "nothing to do: strategy.run compiles the step with XLA"
_TRACE = "jax.profiler.trace(folder), or replicax.train(…, profile=(first, last))"

_METRICS = ("keras.metrics", "metrics")
_LOSSES = (
    "BinaryCrossentropy BinaryFocalCrossentropy CategoricalCrossentropy CategoricalFocalCrossentropy CosineSimilarity "
    "Hinge Huber KLDivergence LogCosh MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError "
    "MeanSquaredLogarithmicError Poisson SparseCategoricalCrossentropy SquaredHinge"
)
_FUNCTIONS = (
    "binary_crossentropy categorical_crossentropy cosine_similarity hinge huber kl_divergence log_cosh "
    "mean_absolute_error mean_squared_error poisson sparse_categorical_crossentropy"
)
_OLD_LOSSES = "absolute_difference huber_loss sigmoid_cross_entropy softmax_cross_entropy sparse_softmax_cross_entropy"
_OLD_OPTIMIZERS = (
    "AdadeltaOptimizer AdagradOptimizer AdamOptimizer FtrlOptimizer GradientDescentOptimizer MomentumOptimizer "
    "RMSPropOptimizer"
)
_OPTIMIZERS = "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lion Nadam RMSprop SGD"
_SCHEDULES = (
    "CosineDecay CosineDecayRestarts ExponentialDecay InverseTimeDecay LearningRateSchedule PiecewiseConstantDecay "
    "PolynomialDecay"
)

_ANSWERS: list[tuple[str, str | None, dict[str, str]]] = [
    (
        "replicax.value_and_grad(loss_fn, variables), in the step",
        "loss_fn takes the place of the with block; a train_step of a keras.Model is that of Keras 3 on JAX, without a "
        "tape",
        {"": "GradientTape gradients"},
    ),
    (
        "nothing to do: calls run immediately, in their order",
        None,
        {"": "InteractiveSession Session control_dependencies global_variables_initializer"},
    ),
    ("nothing to do: the strategy chooses the devices of variables and steps", None, {"": "device"}),
    (
        _COMPILED,
        "leave the decorator out; a loop over steps inside is strategy.run_steps(step, iterator, steps)",
        {"": "function"},
    ),
    (
        "replicax.Variable(initial_value), in strategy.scope()",
        "aggregation= and synchronization= are the same; reading one gives an array; value is no method",
        {"": "Variable"},
    ),
    ("jax.debug.print('{}', value)", None, {"": "print"}),
    ("optax.clip_by_global_norm(norm), in a chain with the optimizer", None, {"": "clip_by_global_norm"}),
    ("the same: strategy.distribute_dataset and model.fit take it", "or a grain.MapDataset", {"data": "Dataset"}),
    ("replicax.data.tfrecords(files)", None, {"data": "TFRecordDataset"}),
    ("nothing to do: sharding and prefetching are replicax.InputOptions", None, {"data": "Options"}),
    (
        "jax.random.key(seed), an argument of the step; keras.utils.set_random_seed(seed) of Keras 3",
        "replicax.get_replica_context().random_key(key) gives each replica its own numbers",
        {"random": "set_seed"},
    ),
    ("the same, of Keras 3", None, {"keras.utils": "set_random_seed"}),
    (
        f"{_OWN} replicax.Optimizer, of an Optax transformation",
        "Keras 3 has no keras.optimizers.legacy; count iterations in a replicax.Variable of your own",
        dict.fromkeys(
            ("keras.optimizers", "keras.optimizers.legacy", "keras.optimizers.experimental", "optimizers"), _OPTIMIZERS
        ),
    ),
    (
        "replicax.Optimizer, of an Optax transformation",
        "minimize is replicax.value_and_grad(loss_fn, variables), and optimizer.apply_gradients",
        {"train": _OLD_OPTIMIZERS},
    ),
    (
        "replicax.Variable(0), which the step counts up",
        None,
        {"train": "create_global_step get_global_step get_or_create_global_step"},
    ),
    (_RATES, None, dict.fromkeys(("keras.optimizers.schedules", "optimizers.schedules"), _SCHEDULES)),
    (
        f"{_OWN} the same of Optax, one number for each example",
        "for replicax.compute_average_loss, or a replicax.Mean",
        {
            **dict.fromkeys(("keras.losses", "keras.metrics", "metrics"), f"{_LOSSES} {_FUNCTIONS}"),
            "losses": f"{_LOSSES} {_FUNCTIONS} {_OLD_LOSSES}",
        },
    ),
    (
        "leave it out: losses of Optax are one for each example",
        None,
        dict.fromkeys(("keras.losses", "losses"), "Reduction"),
    ),
    (
        f"{_OWN} replicax.Accuracy",
        "update and reset instead of update_state and reset_state",
        {
            "keras.metrics": "Accuracy BinaryAccuracy CategoricalAccuracy SparseCategoricalAccuracy",
            "metrics": "Accuracy BinaryAccuracy CategoricalAccuracy SparseCategoricalAccuracy accuracy",
        },
    ),
    (
        f"{_OWN} replicax.Mean",
        "update and reset instead of update_state and reset_state",
        {"keras.metrics": "Mean", "metrics": "Mean mean"},
    ),
    (
        f"{_OWN} a metric of your own, of variables that are summed",
        None,
        dict.fromkeys(
            _METRICS,
            "AUC F1Score MeanIoU Metric Precision Recall RootMeanSquaredError SparseTopKCategoricalAccuracy Sum "
            "TopKCategoricalAccuracy",
        ),
    ),
    (
        "keras.layers.BatchNormalization(synchronized=True) of Keras 3",
        None,
        {"keras.layers.experimental": "SyncBatchNormalization"},
    ),
    (
        "optax.softmax_cross_entropy_with_integer_labels(logits, labels)",
        None,
        {"nn": "sparse_softmax_cross_entropy_with_logits"},
    ),
    ("optax.softmax_cross_entropy(logits, labels)", None, {"nn": "softmax_cross_entropy_with_logits"}),
    ("optax.sigmoid_binary_cross_entropy(logits, labels)", None, {"nn": "sigmoid_cross_entropy_with_logits"}),
    (
        _DEVICES,
        None,
        dict.fromkeys(("config", "config.experimental"), "list_logical_devices list_physical_devices"),
    ),
    (
        _EMULATED,
        None,
        {
            "config": "LogicalDeviceConfiguration set_logical_device_configuration",
            "config.experimental": "VirtualDeviceConfiguration set_virtual_device_configuration",
        },
    ),
    (_MEMORY, None, {"config.experimental": "set_memory_growth"}),
    (
        "the devices of the strategy, or CUDA_VISIBLE_DEVICES in the environment",
        None,
        dict.fromkeys(("config", "config.experimental"), "set_visible_devices"),
    ),
    ("replicax.debug()", None, {"config": "run_functions_eagerly"}),
    (_COMPILED, None, {"config.optimizer": "set_experimental_options set_jit"}),
    (
        "replicax.train(…, stop_at_nan=True), or JAX's option jax_debug_nans",
        None,
        {"debugging": "check_numerics enable_check_numerics"},
    ),
    ("replicax.models.export, or model.export of Keras 3", None, {"saved_model": "save"}),
    ("jax.export.deserialize, of what replicax.models.export wrote", None, {"saved_model": "load"}),
    (_TRACE, None, {"profiler.experimental": "Profile Trace start stop", "summary": "trace_export trace_on"}),
]

_modules: dict[str, list[str]] = collections.defaultdict(list)
TODAY_OF_STEPS: dict[str, str] = {}
DIFFERENCES_OF_STEPS: dict[str, str] = {}
for _today, _differs, _names_of in _ANSWERS:
    for _module, _names in _names_of.items():
        _modules[_module].append(_names)
        TODAY_OF_STEPS |= dict.fromkeys(_names.split(), _today)
        if _differs is not None:
            DIFFERENCES_OF_STEPS |= dict.fromkeys(_names.split(), _differs)
STEPS: dict[str, str] = {_module: " ".join(_names_in) for _module, _names_in in _modules.items()}
"""By module, after ``tf.``."""
