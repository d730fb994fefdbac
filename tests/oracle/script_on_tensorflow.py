"""``examples/towers_tensorflow.py``, a script for TensorFlow 1.x, on the TensorFlow of today.

The script itself is run as it is. What it imports is what has become of it: the operations of ``tf.compat.v1``, and the
tower words of :mod:`tests.oracle.towers_on_tensorflow`, with the few more that it needs.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from tests.oracle.towers_on_tensorflow import Distribution, tower_context

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "towers_tensorflow.py"


class ScriptDistribution(Distribution):
    """With the words that have no counterpart of today, or another signature."""

    def tower_local_var_scope(self, reduce_method: str) -> Any:
        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            kwargs["synchronization"] = tf.VariableSynchronization.ON_READ
            kwargs["aggregation"] = tf.VariableAggregation[reduce_method.upper()]
            return next_creator(**{**kwargs, "trainable": False})

        return tf.variable_creator_scope(create)

    def fetch(self, value: Any) -> Any:
        return self.unwrap(self.read_var(value))[0]

    def distribute_dataset(self, dataset_fn: Callable[[], Any]) -> Any:
        dataset = self.strategy.distribute_datasets_from_function(lambda _: dataset_fn())
        return types.SimpleNamespace(make_one_shot_iterator=lambda: iter(dataset))

    def run_steps_on_dataset(
        self, fn: Callable[..., Any], iterator: Iterator[Any], iterations: int = 1, initial_loop_values: Any = None
    ) -> Any:
        outputs: dict[str, Any] = {}

        def set_last_step_output(name: str, output: Any, aggregation: Any) -> None:
            outputs[name] = self.strategy.reduce(aggregation.name, output, axis=None)

        context = types.SimpleNamespace(last_step_outputs=outputs, set_last_step_output=set_last_step_output)
        for _ in range(iterations):
            fn(context, *next(iterator))
        return context


class GradientDescentOptimizer(tf.compat.v1.train.GradientDescentOptimizer):
    """It takes a tower's share of the loss by itself, which those of today do for estimators only."""

    def compute_gradients(self, loss: Callable[[], Any]) -> Any:
        towers = tf.distribute.get_replica_context().num_replicas_in_sync
        return super().compute_gradients(lambda: loss() / towers)


def script() -> types.ModuleType:
    """The script, as a module."""
    v1 = tf.compat.v1
    names = {name: getattr(v1.train, name) for name in dir(v1.train)}
    train = types.SimpleNamespace(**{**names, "GradientDescentOptimizer": GradientDescentOptimizer})
    distribute = types.SimpleNamespace(get_tower_context=tower_context)
    modules: dict[str, Any] = {"tensorflow": types.ModuleType("tensorflow")}
    vars(modules["tensorflow"]).update({name: getattr(v1, name) for name in dir(v1)} | {"train": train})
    modules["tensorflow.contrib"] = types.SimpleNamespace(distribute=distribute)
    spec = importlib.util.spec_from_file_location("towers_tensorflow", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(module)
    return module
