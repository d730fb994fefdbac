"""TensorFlow: the real ``tf.distribute``, on logical CPU devices."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tests.oracle import servers_on_tensorflow, workers_on_tensorflow
from tests.oracle.library import Library
from tests.oracle.script_on_tensorflow import ScriptDistribution, script
from tests.oracle.towers_on_tensorflow import Distribution, tower_context

MOST_REPLICAS = 4

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * MOST_REPLICAS
)

SYNCHRONIZATION = {
    "auto": tf.VariableSynchronization.AUTO,
    "on_write": tf.VariableSynchronization.ON_WRITE,
    "on_read": tf.VariableSynchronization.ON_READ,
}
AGGREGATION = {
    "none": tf.VariableAggregation.NONE,
    "sum": tf.VariableAggregation.SUM,
    "mean": tf.VariableAggregation.MEAN,
    "only_first_replica": tf.VariableAggregation.ONLY_FIRST_REPLICA,
}
PARTITIONERS = {
    "fixed": tf.distribute.experimental.partitioners.FixedShardsPartitioner(2),
    "least": tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=16, max_shards=2),
    "largest": tf.distribute.experimental.partitioners.MaxSizePartitioner(max_shard_bytes=32),
}
# The class of the values that it hands out has no public name with a constructor of its own.
DISTRIBUTED = tf.distribute.DistributedValues


class TensorFlow(Library):
    """See :class:`Library`."""

    distribute = tf.distribute
    clusters = types.SimpleNamespace(
        **vars(tf.distribute.cluster_resolver),
        ClusterSpec=tf.train.ClusterSpec,
        UnionClusterResolver=tf.distribute.cluster_resolver.UnionResolver,
    )
    on_workers = workers_on_tensorflow
    _strategies: ClassVar[dict[int, Any]] = {}
    _coordinators: ClassVar[dict[str, Any]] = {}

    def __init__(self, replicas: int) -> None:
        # Strategies number their collectives alike, so that those of a second one could take those of the first
        # for their own. Programs that make a second strategy ask it for no collective.
        if replicas not in self._strategies:
            self._strategies[replicas] = self.new_strategy(replicas)
        super().__init__(replicas, self._strategies[replicas])

    def new_strategy(self, replicas: int) -> Any:
        return tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(replicas)])

    def set_strategy(self, strategy: Any) -> None:
        tf.distribute.experimental_set_strategy(strategy)

    def kind_of(self, error: BaseException) -> str:
        # Its own errors derive from Exception; these two say what ValueError and RuntimeError do.
        if isinstance(error, tf.errors.InvalidArgumentError):
            return "ValueError"
        if isinstance(error, tf.errors.FailedPreconditionError | tf.errors.InternalError):
            return "RuntimeError"
        return super().kind_of(error)

    def is_per_replica(self, value: Any) -> bool:
        return isinstance(value, DISTRIBUTED) and not isinstance(value, tf.Variable)

    def coordinator(self, parts: str = "whole") -> Any:
        if parts not in self._coordinators:
            strategy = tf.distribute.ParameterServerStrategy(servers_on_tensorflow.cluster(), PARTITIONERS.get(parts))
            self._coordinators[parts] = tf.distribute.coordinator.ClusterCoordinator(strategy)
        return self._coordinators[parts]

    def servers_of(self, variable: Any) -> list[int]:
        parts = getattr(variable, "variables", [variable])
        return [tf.DeviceSpec.from_string(part.device).task for part in parts]

    def shapes_of_parts(self, variable: Any) -> list[list[int]]:
        return [part.shape.as_list() for part in getattr(variable, "variables", [variable])]

    @classmethod
    def close(cls) -> None:
        """There are none: its servers are threads."""

    def towers(self) -> Any:
        return Distribution(self.strategy)

    def tower_context(self) -> Any:
        return tower_context()

    def tower_script(self) -> tuple[Any, Any]:
        return script(), ScriptDistribution(self.strategy)

    def array(self, value: Any) -> Any:
        return tf.constant(value)

    def variable(
        self, value: Any, synchronization: str = "auto", aggregation: str = "none", trainable: bool | None = None
    ) -> Any:
        return tf.Variable(
            value,
            trainable=trainable,
            synchronization=SYNCHRONIZATION[synchronization],
            aggregation=AGGREGATION[aggregation],
        )

    def total(self, array: Any) -> Any:
        return tf.reduce_sum(array)

    def to_float(self, array: Any) -> Any:
        return tf.cast(array, tf.float32)

    def value_and_grad(self, loss: Callable[[], Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, list(variables))

    def derivative(self, fn: Callable[[Any], Any], at: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(at)
            value = fn(at)
        return tape.gradient(value, at)

    def average_loss(self, losses: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
        return tf.nn.compute_average_loss(losses, sample_weight, global_batch_size)

    def regularization(self, loss: Any) -> Any:
        return tf.nn.scale_regularization_loss(loss)

    def optimizer(self, rule: str) -> Any:
        match rule:
            case "sgd":
                return tf.optimizers.SGD(0.1)
            case "momentum":
                return tf.optimizers.SGD(0.1, momentum=0.9)
            case "adam":
                return tf.optimizers.Adam(0.1, epsilon=1e-8)
        raise ValueError(rule)

    def dataset(self, examples: Any, batch: int) -> Any:
        return tf.data.Dataset.from_tensor_slices(examples).batch(batch)
