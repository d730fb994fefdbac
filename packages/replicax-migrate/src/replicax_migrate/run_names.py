"""What TensorFlow had around a run, and what takes its place: Keras' models, checkpoints, callbacks, sessions.

None of it is distribution, but every program that trains for long has some of it. It is never replaced without looking:
what has the same name is called otherwise.
"""

from __future__ import annotations

RUNS: dict[str, str] = {
    "train": "Checkpoint CheckpointManager CheckpointOptions CheckpointSaverHook ClusterSpec LoggingTensorHook "
    "MonitoredSession MonitoredTrainingSession NanTensorHook ProfilerHook Saver Scaffold SessionRunHook "
    "SingularMonitoredSession StepCounterHook StopAtStepHook SummarySaverHook Supervisor checkpoint_exists "
    "checkpoints_iterator get_checkpoint_state latest_checkpoint list_variables load_checkpoint load_variable",
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
    "ModelCheckpoint": "saves everything, not only the weights, in the background",
    "Model": _KERAS,
    "MonitoredTrainingSession": "no session, and no chief to wait for: all workers run the same program",
    "Sequential": _KERAS,
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
    "Model": dict.fromkeys(
        ("compile", "evaluate", "fit", "predict", "predict_on_batch", "test_on_batch", "train_on_batch"),
        ("the same", _KERAS),
    ),
}
"""By what a value is: what takes the place of a member, and what is different."""
