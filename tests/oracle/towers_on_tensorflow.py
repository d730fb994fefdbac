"""The tower words on the TensorFlow of today, which has renamed them: each is the method that it has become there.

TensorFlow 1.12, the last release that had them, runs on no Python of today. What has replaced them, name by name, does
what they did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf


class Distribution:
    """A ``MirroredStrategy`` in tower words."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.extended = strategy.extended

    num_towers = property(lambda self: self.strategy.num_replicas_in_sync)
    is_single_tower = property(lambda self: self.strategy.num_replicas_in_sync == 1)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Distribution]:
        with self.strategy.scope():
            yield self

    def call_for_each_tower(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("run_concurrently", None)
        return self.extended.call_for_each_replica(fn, args=args, kwargs=kwargs)

    def reduce(self, method: Any, value: Any, destinations: Any = None) -> Any:
        where = value if destinations is None else destinations
        return self.extended.reduce_to(_reduce_op(method), value, where)

    def batch_reduce(self, method: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
        return self.extended.batch_reduce_to(_reduce_op(method), pairs)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        return self.extended.broadcast_to(tensor, destinations)  # it wants one value or device today

    def update(self, var: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group = kwargs.pop("grouped", True)
        return self.extended.update(var, fn, args=args, kwargs=kwargs, group=group)

    def update_non_slot(self, where: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group = kwargs.pop("grouped", True)
        return self.extended.update_non_slot(where, fn, args=args, kwargs=kwargs, group=group)

    def unwrap(self, value: Any) -> list[Any]:
        return list(self.strategy.experimental_local_results(value))

    def read_var(self, var: Any) -> Any:
        return self.extended.read_var(var)

    def value_container(self, value: Any) -> Any:
        return self.extended.value_container(value)

    def non_slot_devices(self, variables: Sequence[Any]) -> Any:
        return self.extended.non_slot_devices(variables)


class Tower:
    """A replica context in tower words."""

    def __init__(self, context: Any) -> None:
        self.context = context

    num_towers = property(lambda self: self.context.num_replicas_in_sync)
    is_single_tower = property(lambda self: self.context.num_replicas_in_sync == 1)
    tower_id = property(lambda self: self.context.replica_id_in_sync_group)

    def merge_call(self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def merge(strategy: Any, *args: Any, **kwargs: Any) -> Any:
            return merge_fn(Distribution(strategy), *args, **kwargs)

        return self.context.merge_call(merge, args=args, kwargs=kwargs)


def tower_context() -> Tower | None:
    """``get_tower_context()``."""
    context = tf.distribute.get_replica_context()
    return None if context is None else Tower(context)


def _reduce_op(method: Any) -> Any:
    return tf.distribute.ReduceOp(getattr(method, "name", str(method)).upper())
