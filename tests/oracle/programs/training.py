"""Losses, gradients, and optimizers over several steps."""

from __future__ import annotations

from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("training")

MIRRORED_LOSS = (
    "Every replica would differentiate the whole loss, and the sum of the gradients would be n times too large. "
    "Differentiate this replica's share, and reduce the loss afterwards, to show it."
)

EXAMPLES = [[[1.0, 2.0], [3.0, 5.0]], [[2.0, 1.0], [0.5, 4.0]]]


def _average(d: Library, losses: list[Any], **options: Any) -> Any:
    share = d.strategy.run(lambda x: d.average_loss(x, **options), args=(d.per_replica(losses),))
    return [d.each(share), d.strategy.reduce("sum", share, axis=None)]


@topic.program("compute_average_loss: the shares, and their sum")
def average_loss(d: Library) -> Any:
    return _average(d, [[1.0, 2.0], [3.0, 6.0]])


@topic.program("compute_average_loss: on four replicas", replicas=4)
def average_loss_four(d: Library) -> Any:
    return _average(d, [[1.0], [2.0], [3.0], [6.0]])


@topic.program("compute_average_loss: with the global batch size")
def average_loss_global(d: Library) -> Any:
    return _average(d, [[1.0, 2.0], [3.0, 6.0]], global_batch_size=10)


@topic.program("compute_average_loss: with weights")
def average_loss_weights(d: Library) -> Any:
    return _average(d, [[1.0, 2.0], [3.0, 6.0]], sample_weight=[0.5, 2.0])


@topic.program(
    "compute_average_loss: a batch of 3 and one of 1",
    differs=(
        "The shares must add up to the mean of all four losses, which is 3: Replicax counts what replicas have "
        "(in the per-replica executor). TensorFlow takes each replica's batch times n, and gets 4."
    ),
)
def average_loss_uneven(d: Library) -> Any:
    return _average(d, [[1.0, 2.0, 3.0], [6.0]])


@topic.program("compute_average_loss: a batch of 3 and one of 1, with the global batch size")
def average_loss_uneven_global(d: Library) -> Any:
    return _average(d, [[1.0, 2.0, 3.0], [6.0]], global_batch_size=4)


@topic.program("compute_average_loss: losses of rank 2")
def average_loss_rank_2(d: Library) -> Any:
    return _average(d, [[[1.0, 2.0]], [[3.0, 6.0]]])


@topic.program("compute_average_loss: a scalar")
def average_loss_scalar(d: Library) -> Any:
    return _average(d, [1.0, 2.0])


@topic.program("compute_average_loss: integers")
def average_loss_integers(d: Library) -> Any:
    return _average(d, [[1, 2], [3, 7]])


@topic.program("compute_average_loss: across replicas")
def average_loss_across(d: Library) -> Any:
    with d.strategy.scope():
        return d.average_loss(d.array([1.0, 2.0]))


@topic.program("compute_average_loss: outside every scope")
def average_loss_outside(d: Library) -> Any:
    return d.average_loss(d.array([1.0, 2.0]))


@topic.program("compute_average_loss: an empty batch everywhere")
def average_loss_empty(d: Library) -> Any:
    share = d.strategy.run(lambda x: d.average_loss(x[:0]), args=(d.per_replica([[1.0], [2.0]]),))
    return d.each(share)


@topic.program(
    "compute_average_loss: a global batch of 0",
    differs="A batch of nothing that has losses is a mistake. TensorFlow calls its mean 0.",
)
def average_loss_zero(d: Library) -> Any:
    return _average(d, [[1.0], [2.0]], global_batch_size=0)


@topic.program("scale_regularization_loss", replicas=4)
def regularization(d: Library) -> Any:
    share = d.strategy.run(lambda: d.regularization(d.array(6.0)))
    return d.each(share)


@topic.program("scale_regularization_loss: the sum of the shares")
def regularization_sum(d: Library) -> Any:
    share = d.strategy.run(lambda: d.regularization(d.array(6.0)))
    return d.strategy.reduce("sum", share, axis=None)


@topic.program("scale_regularization_loss: across replicas")
def regularization_across(d: Library) -> Any:
    with d.strategy.scope():
        return d.regularization(d.array(6.0))


@topic.program("gradients are each replica's own")
def own_gradients(d: Library) -> Any:
    with d.strategy.scope():
        w = d.variable([1.0, 2.0])

    def step(x: Any) -> Any:
        return d.value_and_grad(lambda: d.total(x * w * w), [w])

    return d.each(d.strategy.run(step, args=(d.per_replica([[1.0, 2.0], [3.0, 5.0]]),)))


@topic.program("the gradient of a loss that has been all-reduced", differs=MIRRORED_LOSS)
def gradient_of_mirrored_loss(d: Library) -> Any:
    with d.strategy.scope():
        w = d.variable(3.0)

    def step(x: Any) -> Any:
        return d.value_and_grad(lambda: d.context.all_reduce("mean", x * w * w), [w])[1]

    return d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))


@topic.program("the gradient of a loss of a mirrored value only", differs=MIRRORED_LOSS)
def gradient_without_data(d: Library) -> Any:
    with d.strategy.scope():
        w = d.variable(3.0)
    return d.each(d.strategy.run(lambda: d.value_and_grad(lambda: w * w * 1.0, [w])[1]))


@topic.program("a variable is written inside a differentiated function")
def write_in_gradient(d: Library) -> Any:
    with d.strategy.scope():
        w, seen = d.variable(3.0), d.variable(0.0, "on_read", "sum")

    def step(x: Any) -> Any:
        def loss() -> Any:
            seen.assign_add(x)
            return x * w

        return d.value_and_grad(loss, [w])[1]

    gradients = d.each(d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),)))
    with d.strategy.scope():
        return [gradients, seen.read_value()]


def _train(d: Library, rule: str, steps: int) -> Any:
    """Weights and losses of a small regression, after each of several steps."""
    with d.strategy.scope():
        w, b = d.variable([0.5, -0.5]), d.variable(0.0)
        optimizer = d.optimizer(rule)
        optimizer.build([w, b])

    def step(x: Any) -> Any:
        def loss() -> Any:
            errors = x[:, 0] * w[0] + x[:, 1] * w[1] + b - 1.0
            return d.average_loss(errors * errors)

        share, gradients = d.value_and_grad(loss, [w, b])
        optimizer.apply_gradients(list(zip(gradients, [w, b], strict=True)))
        return share

    x = d.per_replica(EXAMPLES[: d.replicas])
    history = []
    for _ in range(steps):
        share = d.strategy.run(step, args=(x,))
        history.append(d.to_plain([d.strategy.reduce("sum", share, axis=None), d.each(w), d.each(b)]))
    return history


@topic.program("five steps of SGD")
def sgd(d: Library) -> Any:
    return _train(d, "sgd", 5)


@topic.program("five steps of SGD with momentum")
def momentum(d: Library) -> Any:
    return _train(d, "momentum", 5)


@topic.program("five steps of Adam")
def adam(d: Library) -> Any:
    return _train(d, "adam", 5)


@topic.program("five steps of Adam with one replica", replicas=1)
def adam_alone(d: Library) -> Any:
    return _train(d, "adam", 5)


@topic.program("apply_gradients sums what replicas have")
def apply_sums(d: Library) -> Any:
    with d.strategy.scope():
        v, optimizer = d.variable(1.0), d.optimizer("sgd")
        optimizer.build([v])
    d.strategy.run(lambda g: (optimizer.apply_gradients([(g, v)]), None)[1], args=(d.per_replica([1.0, 2.0]),))
    return d.each(v)


@topic.program(
    "apply_gradients with gradients that have been all-reduced",
    differs=(
        "They would be counted n times, as TensorFlow does. Replicax knows that they have been reduced, and asks "
        "for aggregate=False."
    ),
)
def apply_twice_reduced(d: Library) -> Any:
    with d.strategy.scope():
        v, optimizer = d.variable(1.0), d.optimizer("sgd")
        optimizer.build([v])

    def step(g: Any) -> None:
        optimizer.apply_gradients([(d.context.all_reduce("sum", g), v)])

    d.strategy.run(step, args=(d.per_replica([1.0, 2.0]),))
    return d.each(v)


@topic.program("apply_gradients without any gradient")
def apply_nothing(d: Library) -> Any:
    with d.strategy.scope():
        v, optimizer = d.variable(1.0), d.optimizer("sgd")
        optimizer.build([v])
    d.strategy.run(lambda: (optimizer.apply_gradients([(None, v)]), None)[1])
    return d.each(v)
