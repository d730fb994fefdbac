"""TensorFlow: ``MirroredStrategy`` over logical CPU devices, the step inside a ``tf.function``.

Variables and operations are TensorFlow's own, and so is the Adam with one fused operation for each variable
(``tf.compat.v1.train.AdamOptimizer``, which adds up the replicas' gradients as ``MirroredStrategy`` has it).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.peers import problems
from benchmarks.peers.libraries.training import Training
from benchmarks.peers.problems import Problem

STRIDE = 10


def train(problem: Problem, replicas: int) -> Training:
    """``strategy.run`` in a ``tf.function``, with the batch on the devices already."""
    strategy, params, replica_step, (inputs, labels) = _step(problem, replicas)

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(inputs, labels))

    def steps(n: int) -> float:
        for _ in range(n):
            share = step(inputs, labels)
        return float(strategy.reduce("SUM", share, axis=None))

    return Training(_count(params), steps)


def loop(problem: Problem, replicas: int) -> Training:
    """The same ten times in one ``tf.function``: a loop of the graph, as Keras' ``steps_per_execution`` has it."""
    strategy, params, replica_step, (inputs, labels) = _step(problem, replicas)

    @tf.function
    def ten(inputs: Any, labels: Any) -> Any:
        for _ in tf.range(STRIDE - 1):
            strategy.run(replica_step, args=(inputs, labels))
        return strategy.run(replica_step, args=(inputs, labels))

    def steps(n: int) -> float:
        for _ in range(n // STRIDE):
            share = ten(inputs, labels)
        return float(strategy.reduce("SUM", share, axis=None))

    return Training(_count(params), steps, STRIDE)


def _step(problem: Problem, replicas: int) -> Any:
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ.get("OMP_NUM_THREADS", "0")))
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    losses, global_batch = LOSSES[problem.name], len(problem.inputs)
    with strategy.scope():
        params = {name: tf.Variable(value, name=name.replace(".", "_")) for name, value in problem.initial.items()}
        optimizer = tf.compat.v1.train.AdamOptimizer(
            problems.LEARNING_RATE, problems.BETA_1, problems.BETA_2, problems.EPSILON
        )

    def replica_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            share = tf.reduce_sum(losses(params, inputs, labels)) / global_batch
        variables = list(params.values())
        optimizer.apply_gradients(list(zip(tape.gradient(share, variables), variables, strict=True)))
        return share

    def value(ctx: Any) -> Any:
        inputs, labels = problem.rows(ctx.replica_id_in_sync_group, replicas)
        with tf.device(f"CPU:{ctx.replica_id_in_sync_group}"):
            return tf.constant(inputs), tf.constant(labels)

    return strategy, params, replica_step, strategy.experimental_distribute_values_from_function(value)


def _count(params: Any) -> int:
    return sum(int(np.prod(v.shape)) for v in params.values())


def mlp(params: Any, x: Any, labels: Any) -> Any:
    """See :func:`benchmarks.peers.problems.mlp`."""
    for i in range(len(problems.MLP_SIZES) - 1):
        x = _dense(params, f"dense{i}", tf.nn.relu(x) if i else x)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)


def cnn(params: Any, x: Any, labels: Any) -> Any:
    """See :func:`benchmarks.peers.problems.cnn`."""
    for i in range(2):
        x = tf.nn.bias_add(tf.nn.conv2d(x, params[f"conv{i}.kernel"], 1, "SAME"), params[f"conv{i}.bias"])
        x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")
    x = tf.nn.relu(_dense(params, "dense0", tf.reshape(x, (x.shape[0], -1))))
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, _dense(params, "dense1", x))


def transformer(params: Any, tokens: Any, labels: Any) -> Any:
    """See :func:`benchmarks.peers.problems.transformer`."""
    x = tf.gather(params["tokens"], tokens) + params["positions"]
    length = problems.LENGTH
    bias = tf.constant(np.where(np.tri(length, dtype=bool), 0, -1e30).astype(np.float32))
    for i in range(problems.LAYERS):
        y = _norm(params, f"{i}.norm0", x)
        q, k, v = (_heads(y, params[f"{i}.{name}"]) for name in ("query", "key", "value"))
        weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * problems.HEAD**-0.5 + bias)
        attended = tf.reshape(tf.transpose(tf.matmul(weights, v), (0, 2, 1, 3)), (-1, problems.WIDTH))
        out = tf.reshape(params[f"{i}.out"], (problems.WIDTH, problems.WIDTH))
        x = x + tf.reshape(tf.matmul(attended, out), x.shape)
        y = tf.nn.gelu(_dense(params, f"{i}.up", _norm(params, f"{i}.norm1", x)), approximate=True)
        x = x + _dense(params, f"{i}.down", y)
    logits = _matmul(_norm(params, "norm", x), params["head"])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits), -1)


LOSSES: dict[str, Callable[..., Any]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def _matmul(x: Any, kernel: Any) -> Any:
    """One product of matrices, whatever the dims before: quicker than a batch of them."""
    flat = tf.matmul(tf.reshape(x, (-1, x.shape[-1])), kernel)
    return tf.reshape(flat, (*x.shape[:-1], kernel.shape[-1]))


def _dense(params: Any, name: str, x: Any) -> Any:
    return _matmul(x, params[f"{name}.kernel"]) + params[f"{name}.bias"]


def _heads(x: Any, kernel: Any) -> Any:
    """``[batch, heads, length, head]``."""
    projected = _matmul(x, tf.reshape(kernel, (problems.WIDTH, problems.WIDTH)))
    return tf.transpose(tf.reshape(projected, (*x.shape[:-1], problems.HEADS, problems.HEAD)), (0, 2, 1, 3))


def _norm(params: Any, name: str, x: Any) -> Any:
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    scale, bias = params[f"{name}.scale"], params[f"{name}.bias"]
    return tf.nn.batch_normalization(x, mean, variance, bias, scale, problems.NORM_EPSILON)
