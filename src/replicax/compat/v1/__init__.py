"""The API with towers: runs programs for ``DistributionStrategy`` (1.9) and ``contrib.distribute`` (1.10 to 1.12).

A thin translation: each docstring names the equivalent in Replicax, whose objects the API takes and returns. Signatures
are the original ones; where revisions differ, all of them work. Work that a graph would do later is done at the call,
as when the original runs eagerly.

>>> from replicax.compat import v1 as tf
>>> def merge_fn(distribution, three_plus_tower_id):
...     return sum(distribution.unwrap(three_plus_tower_id))
>>> def fn(three):
...     tower = tf.get_tower_context()
...     v = three + tower.tower_id
...     return tower.merge_call(merge_fn, v) + v
>>> distribution = tf.MirroredStrategy(["cpu:0", "cpu:1"])
>>> with distribution.scope():
...     merged_results = distribution.call_for_each_tower(fn, 3)
...     [int(v) for v in distribution.unwrap(merged_results)]
[10, 11]
"""

from replicax.compat.v1.aggregation import VariableAggregation
from replicax.compat.v1.datasets import Operation, PerDeviceDataset, PerDeviceIterator
from replicax.compat.v1.distribution import (
    DistributionStrategy,
    get_cross_tower_context,
    get_distribution_strategy,
    get_tower_context,
    has_distribution_strategy,
)
from replicax.compat.v1.map import MapOutput
from replicax.compat.v1.optimizer import GradientDescentOptimizer, MomentumOptimizer, Optimizer
from replicax.compat.v1.placements import MirroredStrategy, OneDeviceStrategy, TPUStrategy
from replicax.compat.v1.steps import MultiStepContext
from replicax.compat.v1.towers import TowerContext
from replicax.compat.v1.values import Mirrored, PerDevice
from replicax.compat.v1.variables import (
    AUTO_REUSE,
    VariableScope,
    create_global_step,
    get_global_step,
    get_or_create_global_step,
    get_variable,
    get_variable_scope,
    trainable_variables,
    variable_scope,
)
from replicax.tpu.resolver import TPUClusterResolver

__all__ = [
    "AUTO_REUSE",
    "DistributionStrategy",
    "GradientDescentOptimizer",
    "MapOutput",
    "Mirrored",
    "MirroredStrategy",
    "MomentumOptimizer",
    "MultiStepContext",
    "OneDeviceStrategy",
    "Operation",
    "Optimizer",
    "PerDevice",
    "PerDeviceDataset",
    "PerDeviceIterator",
    "TPUClusterResolver",
    "TPUStrategy",
    "TowerContext",
    "VariableAggregation",
    "VariableScope",
    "create_global_step",
    "get_cross_tower_context",
    "get_distribution_strategy",
    "get_global_step",
    "get_or_create_global_step",
    "get_tower_context",
    "get_variable",
    "get_variable_scope",
    "has_distribution_strategy",
    "trainable_variables",
    "variable_scope",
]
