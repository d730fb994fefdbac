"""Gradients, optimizers, losses, metrics, plans."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import replicax
from tests.misuses.world import ContextError, LocalityError, grads, here, inside, right_step, scoped


def _summed(w: Any, loss: Any) -> None:
    w.v.assign_sub(here().all_reduce("sum", replicax.value_and_grad(loss, [w.v])()[1][0]))


TRAINING = [
    ("an optimizer reset in a step", lambda w: inside(w, w.optimizer.reset), ContextError, "call it outside"),
    (
        "stopping early by a number",
        lambda w: replicax.EarlyStopping(0.1, "min"),
        TypeError,
        "name of a number, got 0.1",
    ),
    (
        "a text for a difference",
        lambda w: replicax.EarlyStopping("loss", "min", min_delta="1e-3"),
        ValueError,
        "min_delta must be a number of 0 or more, got '1e-3'",
    ),
    (
        "two metrics of one name",
        lambda w: replicax.train(right_step, [], 1, strategy=w.s, metrics=[w.mean, w.mean]),
        ValueError,
        "two metrics have one name: .*Pass a dict",
    ),
    (
        "a number for the folder of logs",
        lambda w: replicax.train(right_step, [], 1, strategy=w.s, logs=3),
        TypeError,
        "train: logs must be a path.*got 3",
    ),
    (
        "an event for the file that stops",
        lambda w: replicax.train(right_step, [], 1, strategy=w.s, stop_file=["stop"]),
        TypeError,
        "train: stop_file must be a path",
    ),
    *[
        (
            f"the folder {folder!r} for the file that stops",
            lambda w, folder=folder: replicax.train(right_step, [], 1, strategy=w.s, stop_file=folder),
            ValueError,
            f"train: stop_file must be {what}",
        )
        for folder, what in (("", "a path, got an empty string"), (".", "the path of a file, got the folder"))
    ],
    (
        "gradient and variable swapped",
        lambda w: inside(w, lambda x: w.optimizer.apply_gradients([(w.v, x)]), w.x),
        TypeError,
        "'v'.*the wrong way round: the gradient comes first",
    ),
    (
        "gradients without variables",
        lambda w: inside(w, lambda x: w.optimizer.apply_gradients([x]), w.x),
        TypeError,
        r"entry 0 must be a pair .* zip\(gradients, variables\)",
    ),
    (
        "no pairs to apply",
        lambda w: inside(w, lambda: w.optimizer.apply_gradients(3)),
        TypeError,
        "expected pairs.*got 3",
    ),
    ("a gradient alone", lambda w: inside(w, w.optimizer.apply_gradients, w.x), TypeError, "expected pairs.*zip"),
    (
        "a text for a gradient",
        lambda w: inside(w, lambda: w.optimizer.apply_gradients([("g", w.v)])),
        TypeError,
        "gradient of variable 'v'.*'g'.*numbers",
    ),
    (
        "a number for a variable",
        lambda w: inside(w, lambda: w.optimizer.apply_gradients([(jnp.ones(3), 3)])),
        TypeError,
        "entry 0 must be a variable, got 3",
    ),
    ("no transformation", lambda w: replicax.Optimizer(3), TypeError, "optax.GradientTransformation, got 3"),
    ("a transformation not called", lambda w: replicax.Optimizer(optax.sgd), TypeError, "optax.GradientTransformation"),
    (
        "a number for an optimizer's name",
        lambda w: replicax.Optimizer(optax.sgd(0.1), 3),
        TypeError,
        "name must be a str",
    ),
    ("nothing to optimise", lambda w: w.optimizer.build([]), ValueError, "no variables"),
    ("an integer to optimise", lambda w: w.optimizer.build([w.n]), TypeError, "'n'.*must be a float"),
    ("copies to optimise", lambda w: w.optimizer.build([w.own]), TypeError, "'own'.*on-write"),
    ("twice to optimise", lambda w: w.optimizer.build([w.v, w.v]), ValueError, "'v'.*listed twice"),
    ("a number to optimise", lambda w: w.optimizer.build([3]), TypeError, "expected Variables, got 3"),
    (
        "gradients from across",
        lambda w: scoped(w, lambda: w.optimizer.apply_gradients([(1.0, w.v)])),
        ContextError,
        "step",
    ),
    (
        "a gradient of another shape",
        lambda w: inside(w, lambda: w.optimizer.apply_gradients([(jnp.ones(2), w.v)])),
        ValueError,
        r"'v'.*shape \(2,\)",
    ),
    (
        "gradients reduced twice",
        lambda w: inside(w, lambda x: w.optimizer.apply_gradients([(here().all_reduce("sum", x), w.v)]), w.x),
        LocalityError,
        "aggregate=False",
    ),
    (
        "gradients not reduced",
        lambda w: inside(w, lambda x: w.optimizer.apply_gradients([(x, w.v)], aggregate=False), w.x),
        LocalityError,
        "aggregate=True",
    ),
    (
        "the gradient by a number",
        lambda w: replicax.value_and_grad(lambda: 1.0, [3.0]),
        TypeError,
        "expected Variables",
    ),
    (
        "the gradient by an integer",
        lambda w: replicax.value_and_grad(lambda: 1.0, [w.n]),
        TypeError,
        "'n'.*no gradient",
    ),
    ("the gradient by one twice", lambda w: replicax.value_and_grad(print, [w.v, w.v]), ValueError, "listed twice"),
    (
        "the gradient of no function",
        lambda w: replicax.value_and_grad(3, [w.v]),
        TypeError,
        "fn must be callable, got 3",
    ),
    ("a loss for each example", lambda w: grads(w, lambda x: w.v * x, [w.v]), TypeError, "compute_average_loss"),
    ("no loss", lambda w: grads(w, lambda x: None, [w.v]), TypeError, "value_and_grad.*the loss.*None"),
    ("a loss of integers", lambda w: grads(w, lambda x: 1, [w.v]), TypeError, "float scalar, got int32"),
    (
        "a mirrored loss",
        lambda w: grads(w, lambda x: here().all_reduce("mean", (w.v * x).sum()), [w.v]),
        LocalityError,
        "compute_average_loss",
    ),
    ("no aux", lambda w: grads(w, lambda x: (w.v * x).sum(), [w.v], has_aux=True), TypeError, r"a pair \(loss, aux\)"),
    ("the average of a scalar", lambda w: replicax.compute_average_loss(1.0), ValueError, "for each example"),
    (
        "a weight that does not fit",
        lambda w: replicax.compute_average_loss(np.ones(3), np.ones(2)),
        ValueError,
        "not fit",
    ),
    ("an empty global batch", lambda w: replicax.compute_average_loss(np.ones(2), None, 0), ValueError, "be positive"),
    (
        "a text for a size",
        lambda w: replicax.compute_average_loss(np.ones(2), None, "4"),
        TypeError,
        "global_batch_size.*'4'",
    ),
    (
        "half an example",
        lambda w: replicax.compute_average_loss(np.ones(2), None, 2.5),
        TypeError,
        "global_batch_size.*2.5",
    ),
    ("no losses", lambda w: replicax.compute_average_loss(None), TypeError, "per_example_loss.*None"),
    (
        "a loss from across",
        lambda w: scoped(w, lambda: replicax.compute_average_loss(np.ones(2))),
        ContextError,
        "step",
    ),
    (
        "a penalty from across",
        lambda w: scoped(w, lambda: replicax.scale_regularization_loss(1.0)),
        ContextError,
        "step",
    ),
    ("a share from across", lambda w: scoped(w, lambda: replicax.as_share(1.0)), ContextError, "as_share.*step"),
    ("a text for a share", lambda w: inside(w, lambda: replicax.as_share("1")), TypeError, "as_share.*'1'"),
    (
        "the mean over a replica's own examples",
        lambda w: inside(w, lambda x: _summed(w, lambda: jnp.mean(w.v * x)), w.x),
        replicax.errors.ShareWarning,
        "compute_average_loss",
    ),
    ("a metric from across", lambda w: scoped(w, lambda: w.mean.update(np.ones(2))), ContextError, "inside a step"),
    ("a metric read in a step", lambda w: inside(w, w.mean.result), ContextError, "Call it outside"),
    ("a metric reset in a step", lambda w: inside(w, w.mean.reset), ContextError, "Call it outside"),
    (
        "weights of a metric",
        lambda w: inside(w, lambda: w.mean.update(jnp.ones(2), jnp.ones(3))),
        ValueError,
        "not fit",
    ),
    (
        "labels and predictions",
        lambda w: inside(w, lambda: w.accuracy.update(jnp.ones(2, int), jnp.ones((3, 4)))),
        ValueError,
        "labels",
    ),
    ("a number for a metric's name", lambda w: scoped(w, lambda: replicax.Mean(3)), TypeError, "name must be a string"),
    (
        "a plan for no strategy",
        lambda w: replicax.plan("mirrored", print),
        TypeError,
        "expected a strategy, got 'mirrored'",
    ),
    ("a plan of no step", lambda w: replicax.plan(w.s, 3), TypeError, "replicax.plan.*fn must be callable"),
    (
        "a plan for no chip",
        lambda w: replicax.plan(w.s, print, chip="v5p"),
        TypeError,
        "replicax.planning.Chip or None, got 'v5p'",
    ),
    (
        "no path for a plan",
        lambda w: replicax.plan(w.s, lambda: None).write_html(None),
        TypeError,
        r"Plan.write_html\(path\) must be a path",
    ),
    ("a plan of what differs", lambda w: replicax.plan(w.s, lambda x: w.v.assign(x), w.x), LocalityError, "'v'"),
]
