"""The tower words of 1.9 to 1.12: ``replicax.compat.v1`` beside what TensorFlow has made of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("towers")


def _each(d: Library, distribution: Any, value: Any) -> Any:
    """What each tower has of a value; one that is the same for all counts for each."""
    results = distribution.unwrap(value)
    return results if len(results) == distribution.num_towers else results * distribution.num_towers


def _numbered(d: Library, distribution: Any, *components: float) -> Any:
    """A value with a component for each tower."""
    numbers = d.array(list(components or (1.0, 2.0)))
    return distribution.call_for_each_tower(lambda: numbers[d.tower_context().tower_id])


@topic.program("the example of the documents: merge_call sums what unwrap shows")
def documented(d: Library) -> Any:
    def merge_fn(distribution: Any, three_plus_tower_id: Any) -> Any:
        return sum(distribution.unwrap(three_plus_tower_id))

    def fn(three: Any) -> Any:
        v = three + d.to_float(d.tower_context().tower_id)
        return d.tower_context().merge_call(merge_fn, v) + v

    distribution = d.towers()
    with distribution.scope():
        return _each(d, distribution, distribution.call_for_each_tower(fn, d.array(3.0)))


@topic.program("arguments by position and by name; run_concurrently is taken out")
def arguments(d: Library) -> Any:
    def fn(x: Any, *, scale: Any) -> Any:
        return x * scale

    distribution = d.towers()
    with distribution.scope():
        x = _numbered(d, distribution)
        result = distribution.call_for_each_tower(fn, x, scale=d.array(10.0), run_concurrently=False)
        return _each(d, distribution, result)


@topic.program("how many towers, and which")
def numbers(d: Library) -> Any:
    def fn() -> Any:
        tower = d.tower_context()
        return d.to_float(tower.tower_id) + 10.0 * tower.num_towers

    distribution = d.towers()
    with distribution.scope():
        facts = (distribution.num_towers, distribution.is_single_tower)
        return facts, _each(d, distribution, distribution.call_for_each_tower(fn))


@topic.program("one tower", replicas=1)
def single(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        result = distribution.call_for_each_tower(lambda x: x + 1.0, d.array(1.0))
        return distribution.is_single_tower, distribution.unwrap(result)


@topic.program("outside every scope there is one tower")
def default(d: Library) -> Any:
    tower = d.tower_context()
    merged = tower.merge_call(lambda distribution, x: x + 1.0, d.array(1.0))
    return tower.num_towers, tower.is_single_tower, merged


@topic.program("in a scope there is no tower")
def across(d: Library) -> Any:
    with d.towers().scope():
        return d.tower_context() is None


@topic.program("a nest of results")
def nested(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        x = _numbered(d, distribution)
        result = distribution.call_for_each_tower(lambda x: {"a": x, "b": (x * 2.0, x * 3.0)}, x)
        return {"a": _each(d, distribution, result["a"]), "b": [_each(d, distribution, part) for part in result["b"]]}


@topic.program("reduce: the sum, in a tower's middle")
def reduces(d: Library) -> Any:
    def fn(x: Any) -> Any:
        return d.tower_context().merge_call(lambda distribution, x: distribution.reduce("sum", x), x)

    distribution = d.towers()
    with distribution.scope():
        return _each(d, distribution, distribution.call_for_each_tower(fn, _numbered(d, distribution)))


@topic.program("reduce: the mean, from across")
def mean(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        return distribution.unwrap(distribution.reduce("mean", _numbered(d, distribution)))[0]


@topic.program("reduce: to where a variable is")
def reduces_to_variable(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        v = d.variable(0.0)
        return distribution.unwrap(distribution.reduce("sum", _numbered(d, distribution), v))[0]


@topic.program("reduce: the mean of what all towers share is itself")
def mean_of_shared(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        return distribution.unwrap(distribution.reduce("mean", d.array(3.0), "/cpu:0"))[0]


@topic.program("reduce: the sum of what all towers share")
def sum_of_shared(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        return distribution.reduce("sum", d.array(3.0), "/cpu:0")


@topic.program("batch_reduce: a list, in order")
def batch(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        v = d.variable(0.0)
        pairs = [(_numbered(d, distribution), v), (_numbered(d, distribution, 10.0, 20.0), v)]
        return [distribution.unwrap(total)[0] for total in distribution.batch_reduce("sum", pairs)]


@topic.program("broadcast to where a variable is, and as an argument")
def broadcast(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        everywhere = distribution.broadcast(d.array(3.0), d.variable(0.0))
        result = distribution.call_for_each_tower(lambda x, y: x + y, everywhere, _numbered(d, distribution))
        return _each(d, distribution, result)


@topic.program("update: a variable, by what has been reduced to it")
def updates(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        v = d.variable(10.0)
        total = distribution.reduce("sum", _numbered(d, distribution), v)
        distribution.update(v, lambda v, x: v.assign_sub(x), total)
        return v


@topic.program("update: grouped=False gives what fn has returned")
def updates_apart(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        v = d.variable(10.0)
        results = distribution.update(v, lambda v, x: v * x, d.array(2.0), grouped=False)
        return results[0]


@topic.program("update_non_slot")
def updates_non_slot(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        v = d.variable(1.0)
        where = distribution.non_slot_devices([v])
        distribution.update_non_slot(where, lambda: v.assign_add(2.0))
        return d.total(v)


@topic.program("a tower-local sum: each tower adds its own, and read_var adds up")
def tower_local(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        v = d.variable(0.0, "on_read", "sum")
        distribution.call_for_each_tower(lambda x: v.assign_add(x), _numbered(d, distribution))
        distribution.call_for_each_tower(lambda x: v.assign_add(x), _numbered(d, distribution))
        return distribution.read_var(v), distribution.unwrap(v)


@topic.program("a tower-local mean")
def tower_local_mean(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        v = d.variable(0.0, "on_read", "mean")
        distribution.call_for_each_tower(lambda x: v.assign(x), _numbered(d, distribution))
        return distribution.read_var(v)


@topic.program("the update pattern: gradients, batch_reduce, update")
def pattern(d: Library) -> Any:
    def merge_fn(distribution: Any, gradients: Any, variables: Any) -> Any:
        totals = distribution.batch_reduce("sum", list(zip(gradients, variables, strict=True)))
        for variable, total in zip(variables, totals, strict=True):
            distribution.update(variable, lambda v, g: v.assign_sub(0.1 * g), total)

    distribution = d.towers()
    with distribution.scope():
        w, b = d.variable(1.0), d.variable(0.5)

        def tower_fn(x: Any) -> Any:
            value, gradients = d.value_and_grad(lambda: (w * x + b) ** 2, [w, b])
            d.tower_context().merge_call(lambda distribution, g: merge_fn(distribution, g, [w, b]), gradients)
            return value

        losses = [
            distribution.reduce("sum", distribution.call_for_each_tower(tower_fn, _numbered(d, distribution)))
            for _ in range(3)
        ]
        return [distribution.unwrap(loss)[0] for loss in losses], w, b


@topic.program("a value knows what it belongs to")
def container(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        v = d.variable(1.0)
        return distribution.value_container(v) is v


@topic.program("call_for_each_tower inside a tower")
def inside(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        return distribution.call_for_each_tower(lambda: distribution.call_for_each_tower(lambda: d.array(1.0)))


@topic.program("reduce inside a tower")
def reduce_inside(d: Library) -> Any:
    distribution = d.towers()
    with distribution.scope():
        x = _numbered(d, distribution)
        return distribution.call_for_each_tower(lambda x: distribution.reduce("sum", x, "/cpu:0"), x)


@topic.program("a training script: what examples/towers.py was, and what it is")
def script(d: Library) -> Any:
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(256, 64)).astype(np.float32), rng.integers(10, size=256).astype(np.int32)
    first = [0.1 * rng.normal(size=shape).astype(np.float32) for shape in ((64, 32), (32, 10))]
    module, distribution = d.tower_script()

    class SameStart(module.Model):
        def __init__(self) -> None:
            super().__init__()
            for variable, value in zip((self.kernel, self.logits_kernel), first, strict=True):
                variable.assign(value)

    # Data of its own: scikit-learn is in none of the environments of both.
    with mock.patch.multiple(module, load_data=lambda: (images, labels), Model=SameStart):
        return module.train(distribution, epochs=3)
