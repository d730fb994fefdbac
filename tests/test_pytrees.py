"""Nests of every kind go into a step, out of it, across and back."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax

EXECUTORS = ["compiled", "per_replica"]


class Point(NamedTuple):
    x: Any
    y: Any


class NearPoint(Point):
    pass


class Record(dict):
    def __init__(self, **entries: Any) -> None:  # what rebuilds it can't know this
        super().__init__(entries)


class Ordered(collections.OrderedDict):
    pass


class Default(collections.defaultdict):
    pass


class Row(list):
    pass


class Pair(tuple):
    __slots__ = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    x: Any
    y: Any


NESTS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": lambda a, b: Point(a, b),
    "subclass of a namedtuple": lambda a, b: NearPoint(a, b),
    "dict": lambda a, b: {"a": a, "b": b},
    "OrderedDict": lambda a, b: collections.OrderedDict(z=a, b=b),
    "defaultdict": lambda a, b: collections.defaultdict(list, a=a, b=b),
    "subclass of dict": lambda a, b: Record(a=a, b=b),
    "subclass of OrderedDict": lambda a, b: Ordered(z=a, b=b),
    "subclass of defaultdict": lambda a, b: Default(list, a=a, b=b),
    "subclass of list": lambda a, b: Row([a, b]),
    "subclass of tuple": lambda a, b: Pair((a, b)),
    "registered dataclass": lambda a, b: Batch(a, b),
    "nested": lambda a, b: Record(a=Row([Pair((a,)), None]), b=[Point(b, {})]),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", NESTS)
def test_a_nest_keeps_its_structure_everywhere(pair: replicax.Strategy, kind: str, executor: str) -> None:
    strategy, make, n = pair, NESTS[kind], 2
    options = replicax.RunOptions(executor)
    x = strategy.distribute_values_from_function(lambda ctx: jnp.float32(1 + ctx.replica_id_in_sync_group))
    total = n * (n + 1) / 2

    def step(nest: Any, x: Any) -> Any:
        context = replicax.get_replica_context()
        assert context is not None
        merged = context.merge_call(lambda s, nest: nest, args=(nest,))
        return nest, merged, context.all_reduce("sum", nest), make(x[None], 2 * x[None])

    args = make(x, jnp.float32(5)), x
    back, merged, summed, rows = strategy.run(step, args, options=options)
    expected = make(jnp.float32(total), jnp.float32(5 * n))
    for found in (back, merged, summed, rows):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert type(found) is type(expected)
    for i, mine in enumerate(strategy.local_results(merged)[:n]):
        assert jax.tree.map(float, mine) == jax.tree.map(float, make(1.0 + i, 5.0))
    assert jax.tree.map(float, summed) == jax.tree.map(float, expected)
    assert jax.tree.map(float, strategy.reduce("mean", back)) == jax.tree.map(float, make(total / n, 5.0))
    whole = strategy.gather(rows, axis=0)
    assert jax.tree.map(jnp.shape, whole) == jax.tree.map(jnp.shape, make(jnp.zeros(n), jnp.zeros(n)))
    if isinstance(back, collections.defaultdict):
        assert back.default_factory is list


@pytest.mark.parametrize("loaded", [True, False])
def test_traced_once_for_all_containers_of_a_kind(
    pair: replicax.Strategy, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    class Own(dict):
        pass

    if not loaded:  # which would register them before
        monkeypatch.delitem(sys.modules, "flax.nnx", raising=False)
    traced = []

    def step(nest: Any) -> Any:
        traced.append(1)
        return nest["a"] + 1

    for value in (1.0, 2.0, 3.0):
        assert float(pair.run(step, args=(Own(a=value),))) == value + 1
    assert len(traced) == 1


class AttributesAreItems(dict):
    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


class LooksUpAttributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class BothWays(collections.OrderedDict):
    def __setitem__(self, name: Any, value: Any) -> None:
        super().__setitem__(name, value)
        vars(self)[name] = value


class Named(dict):
    def __init__(self, name: str, **entries: Any) -> None:
        super().__init__(entries)
        self.name = name


@pytest.mark.parametrize("executor", EXECUTORS)
def test_attributes_that_are_items_stay_so(pair: replicax.Strategy, executor: str) -> None:
    options = replicax.RunOptions(executor)

    def run(step: Any, nest: Any) -> Any:
        return pair.run(step, args=(nest,), options=options)

    for kind in (AttributesAreItems, LooksUpAttributes, BothWays):
        nest = run(lambda nest: jax.tree.map(lambda x: x + nest.x, nest), kind(x=1.0))
        assert (type(nest), float(nest.x), float(nest["x"])) == (kind, 2.0, 2.0)


def test_other_attributes_of_containers_are_left_out(pair: replicax.Strategy) -> None:
    def step(batch: Any) -> bool:
        return hasattr(batch, "name")

    batches = [Named(str(i), x=np.ones(2, np.float32)) for i in range(3)]
    for batch in pair.distribute_dataset(batches):
        assert pair.run(step, args=(batch,)) is False
    assert pair.extended.trace_count(step) == 1  # a name of each is no reason to trace again


def test_threads_that_meet_a_container_together(pair: replicax.Strategy) -> None:
    class Shared(list):
        pass

    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(pair.run(lambda v: v, args=(Shared([1.0]),)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [type(r) for r in results] == [Shared] * 4


def test_a_class_that_jax_does_not_know_is_refused_with_traced_values_in_it(pair: replicax.Strategy) -> None:
    @dataclasses.dataclass
    class Unknown:
        x: Any

    with pytest.raises(TypeError, match="a step returned a Unknown, whose field 'x' .* jax.tree_util.register_datacla"):
        pair.run(lambda: Unknown([jnp.ones(2) * 2]))
    assert pair.run(lambda: Unknown(3)) == Unknown(3)  # no array: an object like any other


def test_keys_that_have_no_order(pair: replicax.Strategy) -> None:
    def step(x: Any) -> Record:
        record = Record(b=x + 1)
        record[1] = x
        return record

    found = pair.run(step, args=(1.0,))
    assert {k: float(v) for k, v in found.items()} == {1: 1.0, "b": 2.0}


@jax.tree_util.register_pytree_with_keys_class
class Checked:
    def __init__(self, w: Any) -> None:
        self.w = jnp.asarray(w)
        assert self.w.ndim == 2

    def tree_flatten_with_keys(self) -> Any:
        return ((jax.tree_util.GetAttrKey("w"), self.w),), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> Checked:
        return cls(*parts)


@jax.tree_util.register_pytree_node_class
class StaticNumbers:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> Any:
        is_static = [isinstance(part, int | float) for part in self.parts]
        return [None if s else x for s, x in zip(is_static, self.parts, strict=True)], (is_static, self.parts[:1])

    @classmethod
    def tree_unflatten(cls, static: Any, parts: Any) -> StaticNumbers:
        return cls(*(n if s else x for s, n, x in zip(static[0], [*static[1], None], parts, strict=False)))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_classes_that_look_at_their_parts_are_arguments(strategy: replicax.Strategy, executor: str) -> None:
    def step(x: Any, checked: Any, static: Any) -> Any:
        n, w = static["of"].parts
        return x + checked.w.sum() * n * w

    x = strategy.distribute_values_from_function(lambda ctx: jnp.float32(ctx.replica_id_in_sync_group))
    args = (x, Checked(jnp.ones((2, 3))), {"of": StaticNumbers(2, jnp.float32(1))})
    found = strategy.run(step, args, options=replicax.RunOptions(executor))
    assert [*map(float, strategy.local_results(found))] == [12.0 + i for i in range(strategy.num_replicas_in_sync)]


def test_the_name_of_an_argument_beside_classes_that_look_at_their_parts(pair: replicax.Strategy) -> None:
    def step(batch: Any) -> Any:
        return int(batch["x"]) + batch["model"].w

    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"depends on the argument batch\['x'\]\."):
        pair.run(step, args=({"model": Checked(jnp.ones((2, 3))), "x": 1.0},))


@jax.tree_util.register_pytree_node_class
class Converted(StaticNumbers):
    def tree_flatten(self) -> Any:
        return [jnp.asarray(part) for part in self.parts], ([False], ())


def test_a_class_that_looks_at_its_parts_is_no_result_that_differs(strategy: replicax.Strategy) -> None:
    def step(x: Any) -> Any:
        return Checked(x)

    assert strategy.run(step, args=(jnp.ones((2, 3)),)).w.shape == (2, 3)
    value = jnp.ones((2 * strategy.num_replicas_in_sync, 3))
    [batch] = strategy.distribute_dataset([value])
    if strategy.num_replicas_in_sync == 1:
        assert strategy.run(step, args=(batch,)).w.shape == (2, 3)
        return
    for call in (
        lambda: strategy.run(step, args=(batch,)),
        lambda: next(iter(strategy.distribute_dataset([Checked(value)]))),
        lambda: strategy.distribute_values_from_function(lambda ctx: Checked(value)),
        lambda: strategy.local_results(strategy.run(Converted, args=(batch,))),
    ):
        with pytest.raises(replicax.errors.LocalityError) as caught:
            call()
        assert "Use its arrays, jax.tree.leaves" in caught.value.__notes__[0]
