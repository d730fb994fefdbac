"""Vision: detection, experts, statistics of batches, and metrics over all that is seen."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax
from tests.corpus.corpus import integers, normal, program, whole

# --- detection: anchors are matched to boxes, and the loss is divided by the matches of the whole batch ----------

ANCHORS = np.stack(np.meshgrid([0.25, 0.75], [0.25, 0.75], [0.3, 0.6]), -1).reshape(-1, 3).astype(np.float32)
IMAGES = normal(8, 6, 6, 2)
BOXES = np.concatenate([0.2 + 0.6 * np.random.default_rng(1).random((8, 2, 2)), np.full((8, 2, 1), 0.4)], -1)
BOXES = BOXES.astype(np.float32)
KINDS = integers(4, 8, 2)  # 0: there is no box


class Detector(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), strides=2, rngs=rngs)
        self.kinds = nnx.Linear(36, len(ANCHORS) * 4, rngs=rngs)
        self.boxes = nnx.Linear(36, len(ANCHORS) * 3, rngs=rngs)

    def __call__(self, images):
        h = nnx.relu(self.conv(images)).reshape(len(images), -1)
        return self.kinds(h).reshape(-1, len(ANCHORS), 4), self.boxes(h).reshape(-1, len(ANCHORS), 3)


def intersection_over_union(a, b):
    low = jnp.maximum(a[:2] - a[2] / 2, b[:2] - b[2] / 2)
    high = jnp.minimum(a[:2] + a[2] / 2, b[:2] + b[2] / 2)
    both = jnp.clip(high - low, 0).prod()
    return both / (a[2] ** 2 + b[2] ** 2 - both)


def detection_sums(model, images, boxes, kinds):
    """Of each image the sum of its anchors' losses, and the number of matches."""

    def of_image(logits, offsets, boxes, kinds):
        overlaps = jax.vmap(jax.vmap(intersection_over_union, (None, 0)), (0, None))(jnp.asarray(ANCHORS), boxes)
        overlaps = jnp.where(kinds > 0, overlaps, -1.0)
        matched = overlaps.argmax(1)
        positive = overlaps.max(1) > 0.2
        target = jnp.where(positive, kinds[matched], 0)
        cross = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        focal = (1 - jnp.exp(-cross)) ** 2 * cross
        box = optax.huber_loss(offsets, boxes[matched] - ANCHORS).sum(-1)
        return focal.sum() + jnp.where(positive, box, 0.0).sum(), positive.sum()

    return jax.vmap(of_image)(*model(images), boxes, kinds)


def detector_of():
    model = Detector(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)


def detection_step(total, model, optimizer, *batch):
    def loss_fn(model):
        sums, matches = detection_sums(model, *batch)
        return sums.sum() / jnp.maximum(total(matches.sum()), 1)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def detection_plain():
    objects = detector_of()
    step = nnx.jit(functools.partial(detection_step, lambda value: value))
    losses = [step(*objects, IMAGES, BOXES, KINDS) for _ in range(2)]
    return jax.tree.leaves(nnx.state(objects[0], nnx.Param)), losses


@program(detection_plain)
def object_detection(strategy):
    def total(value):
        return replicax.get_replica_context().all_reduce("sum", value)

    with strategy.scope():
        objects = detector_of()
    [batch] = whole(strategy, IMAGES, BOXES, KINDS)
    step = functools.partial(detection_step, total)
    losses = [strategy.reduce("sum", strategy.run(step, args=(*objects, *batch))) for _ in range(2)]
    return jax.tree.leaves(nnx.state(objects[0], nnx.Param)), losses


# --- a mixture of experts, whose load is balanced over all replicas ------------------------------------------------

X, LABELS = normal(16, 4), integers(3, 16)


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        router = self.param("router", nn.initializers.normal(1.0), (4, 4))
        up = self.param("up", nn.initializers.lecun_normal(), (4, 4, 6))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 6, 3))
        chances = jax.nn.softmax(x @ router)
        weights, chosen = jax.lax.top_k(chances, 2)
        dispatch = jax.nn.one_hot(chosen, 4)
        combine = jnp.einsum("bk,bke->be", weights / weights.sum(-1, keepdims=True), dispatch)
        out = jnp.einsum("bef,efo->beo", nn.gelu(jnp.einsum("bd,edf->bef", x, up)), down)
        return jnp.einsum("be,beo->bo", combine, out), chances.mean(0), dispatch.sum(1).mean(0)


def experts_loss(mean, params, x, labels):
    """The loss of this replica's examples, with a load that is that of all."""
    logits, chances, load = Experts().apply(params, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean() + 0.1 * 4 * (chances * jax.lax.stop_gradient(mean(load))).sum()


def experts_plain():
    params = jax.jit(Experts().init)(jax.random.key(0), X)
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: experts_loss(lambda v: v, p, X, LABELS))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(2):
        params, state, loss = step(params, state)
    return params, loss


@program(experts_plain)
def mixture_of_experts(strategy):
    params = jax.jit(Experts().init)(jax.random.key(0), X)
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    state = tx.init(params)

    def step(params, state, x, labels):
        def mean(value):
            return replicax.get_replica_context().all_reduce("mean", value)

        loss, grads = mean(jax.value_and_grad(lambda p: experts_loss(mean, p, x, labels))(params))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    [(x, labels)] = whole(strategy, X, LABELS)
    for _ in range(2):
        params, state, loss = strategy.run(step, args=(params, state, x, labels))
    return params, loss


# --- a small network with batch normalization, written with Linen's mutable collections ------------------------------


class Normalized(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(x))
        return nn.Dense(4)(nn.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1))


def initial_normalized(net):
    return jax.jit(functools.partial(net.init, train=False))(jax.random.key(0), IMAGES)


def normalized_plain():
    net = Normalized()
    variables = initial_normalized(net)
    params, statistics = variables["params"], variables["batch_stats"]

    @jax.jit
    def step(params, statistics):
        def loss_fn(params):
            logits, new = net.apply(
                {"params": params, "batch_stats": statistics}, IMAGES, True, mutable=["batch_stats"]
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, KINDS[:, 0]).mean(), new["batch_stats"]

        (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), statistics, loss

    for _ in range(2):
        params, statistics, loss = step(params, statistics)
    predict = jax.jit(functools.partial(net.apply, train=False))
    return params, statistics, loss, predict({"params": params, "batch_stats": statistics}, IMAGES)


@program(normalized_plain, fails={"executor": "collectives of jax.lax work in compiled steps only"}, quick=("2",))
def batch_normalization_over_replicas(strategy):
    net = Normalized(axis_name=replicax.REPLICA_AXIS)
    with strategy.scope():
        variables = initial_normalized(net)
        params, statistics = replicax.as_variables((variables["params"], variables["batch_stats"]))
        optimizer = replicax.Optimizer(optax.sgd(0.1))

    def step(images, kinds):
        def loss_fn(params):
            collections = {"params": params, "batch_stats": replicax.as_arrays(statistics)}
            logits, new = net.apply(collections, images, True, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, kinds[:, 0])
            return replicax.compute_average_loss(losses), new["batch_stats"]

        (loss, new), grads = replicax.value_and_grad(loss_fn, params, has_aux=True)(params)
        replicax.assign(statistics, new)
        optimizer.apply_gradients(grads, params)
        return loss

    def predict(images):
        params_, statistics_ = replicax.as_arrays((params, statistics))
        return net.apply({"params": params_, "batch_stats": statistics_}, images, False)

    [(images, kinds)] = whole(strategy, IMAGES, KINDS)
    for _ in range(2):
        loss = strategy.run(step, args=(images, kinds))
    logits = strategy.gather(strategy.run(predict, args=(images,)), axis=0)
    return *replicax.as_arrays((params, statistics)), strategy.reduce("sum", loss), logits


# --- metrics over batches that do not divide evenly -------------------------------------------------------------------

SCORES, TRUTH = normal(3, 8), integers(2, 3, 8, seed=3)
BATCHES = [(SCORES[0], TRUTH[0]), (SCORES[1, :5], TRUTH[1, :5]), (SCORES[2, :2], TRUTH[2, :2])]
THRESHOLDS = np.linspace(-1.0, 1.0, 5, dtype=np.float32)


def metrics_plain():
    scores, truth = (np.concatenate(parts) for parts in zip(*BATCHES, strict=True))
    said = scores > 0
    positives = scores[:, None] > THRESHOLDS
    losses = np.logaddexp(0, scores) - truth * scores
    return {
        "loss": losses.mean(),
        "accuracy": (said == truth).mean(),
        "precision": (said & (truth == 1)).sum() / said.sum(),
        "recall": np.stack([(positives & (truth == 1)[:, None]).sum(0), positives.sum(0)]).astype(np.float32),
    }


@program(metrics_plain, quick=("2",))
def metrics_over_uneven_batches(strategy):
    with strategy.scope():
        loss, accuracy = replicax.Mean("loss"), replicax.Mean("accuracy")
        hits, said, counts = (
            replicax.Variable(jnp.zeros(shape), name=name, synchronization="on_read", aggregation="sum")
            for name, shape in [("hits", ()), ("said", ()), ("counts", (2, 5))]
        )

    def step(scores, truth):
        positive = truth == 1
        loss.update(optax.sigmoid_binary_cross_entropy(scores, truth))
        accuracy.update((scores > 0) == positive)
        hits.assign_add(((scores > 0) & positive).sum().astype(jnp.float32))
        said.assign_add((scores > 0).sum().astype(jnp.float32))
        above = scores[:, None] > THRESHOLDS
        counts.assign_add(jnp.stack([(above & positive[:, None]).sum(0), above.sum(0)]).astype(jnp.float32))

    for batch in strategy.distribute_dataset(BATCHES):
        strategy.run(step, args=batch)
    found = {"loss": loss.result(), "accuracy": accuracy.result(), "recall": counts.value}
    return found | {"precision": hits.value / said.value}
