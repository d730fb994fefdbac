"""What programs may ask of a library. Whatever TensorFlow and Replicax call by the same name, they ask directly.

Programs get at strategies, variables, contexts and values as they are: ``d.strategy.run``, ``variable.assign_add``,
``context.merge_call`` and so on are the libraries' own. This class has only what they call differently, and turns
what comes out into plain Python, so that it can be compared.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Library(abc.ABC):
    """One of the two libraries, with a strategy.

    Attributes:
      distribute: the module with ``get_strategy``, ``get_replica_context`` and their kin.
      clusters: what tells of clusters: ``ClusterSpec`` and the resolvers, by the names that they have here.
      strategy: a ``MirroredStrategy``.
      replicas: how many replicas it has.
      on_workers: a module with what functions may ask that are sent to workers of parameter servers.
    """

    on_workers: Any
    distribute: Any
    clusters: Any
    strategy: Any

    def __init__(self, replicas: int, strategy: Any = None) -> None:
        self.replicas = replicas
        self.strategy = self.new_strategy(replicas) if strategy is None else strategy

    @property
    def context(self) -> Any:
        """The current replica context; ``None`` in cross-replica context."""
        return self.distribute.get_replica_context()

    def each(self, value: Any) -> list[Any]:
        """What each replica has of ``value``, which the strategy has made.

        Both libraries hand out what is one for all replicas without a wrapper: TensorFlow if it is the same Python
        object, Replicax if it is the same by what it is computed from.
        """
        results = list(self.strategy.experimental_local_results(value))
        return results if len(results) == self.replicas else results * self.replicas

    def per_replica(self, components: Sequence[Any]) -> Any:
        """A value with one component for each replica; numbers and lists become arrays."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda ctx: self.arrays(components[ctx.replica_id_in_sync_group])
        )

    def arrays(self, tree: Any) -> Any:
        """``tree`` with arrays for its numbers and lists of numbers. Tuples and dicts are structure."""
        if isinstance(tree, dict):
            return {key: self.arrays(value) for key, value in tree.items()}
        if isinstance(tree, tuple):
            items = [self.arrays(value) for value in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
        return self.array(tree)

    def attempt(self, fn: Callable[[], Any]) -> Any:
        """What ``fn`` returns, or the kind of error that it raises: for programs that go on after an error."""
        try:
            return self.to_plain(fn())
        except Exception as error:
            return {"error": self.kind_of(error)}

    def kind_of(self, error: BaseException) -> str:
        """The built-in exception that an ``except`` clause would name."""
        builtin = (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError, IndexError)
        return next((kind.__name__ for kind in builtin if isinstance(error, kind)), type(error).__name__)

    def to_plain(self, value: Any) -> Any:
        """``value`` as what JSON can hold: the kind of each container and the type of each number are kept."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if self.is_per_replica(value):
            return {"PerReplica": [self.to_plain(v) for v in value.values]}
        if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)):
            return {type(value).__name__: {k: self.to_plain(v) for k, v in zip(fields, value, strict=True)}}
        if isinstance(value, tuple):
            return {"tuple": [self.to_plain(v) for v in value]}
        if isinstance(value, list):
            return [self.to_plain(v) for v in value]
        if isinstance(value, Mapping):
            return {type(value).__name__: {str(k): self.to_plain(value[k]) for k in sorted(value)}}
        if hasattr(value, "numpy"):
            value = value.numpy()
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(f"a program returned {value!r}, which can't be compared")

    # --- what each library says in its own way -----------------------------------------------------------

    @abc.abstractmethod
    def new_strategy(self, replicas: int) -> Any:
        """A ``MirroredStrategy`` of the first few CPU devices."""

    @abc.abstractmethod
    def set_strategy(self, strategy: Any) -> None:
        """Make ``strategy`` the current one, outside every scope."""

    @abc.abstractmethod
    def is_per_replica(self, value: Any) -> bool:
        """Whether ``value`` has a component for each replica."""

    @abc.abstractmethod
    def coordinator(self, parts: str = "whole") -> Any:
        """A ``ClusterCoordinator`` of two workers and two parameter servers.

        Args:
          parts: how variables are split: ``"whole"``, ``"fixed"`` (two parts), ``"least"`` (16 bytes at least), or
            ``"largest"`` (32 bytes at most). Programs that ask for the same share it, and other names give others.
        """

    @abc.abstractmethod
    def servers_of(self, variable: Any) -> list[int]:
        """The numbers of the servers that have its parts."""

    @abc.abstractmethod
    def shapes_of_parts(self, variable: Any) -> list[list[int]]:
        """The shapes of the parts that servers have of it."""

    @classmethod
    @abc.abstractmethod
    def close(cls) -> None:
        """End the processes that were started for programs."""

    @abc.abstractmethod
    def towers(self) -> Any:
        """The strategy in the words of the tower API, 1.9 to 1.12."""

    @abc.abstractmethod
    def tower_context(self) -> Any:
        """The current tower context; ``None`` across towers."""

    @abc.abstractmethod
    def tower_script(self) -> tuple[Any, Any]:
        """The training script in tower words that is among the examples, as a module; and what it is to train with."""

    @abc.abstractmethod
    def array(self, value: Any) -> Any:
        """An array, of float32 or int32."""

    @abc.abstractmethod
    def variable(
        self, value: Any, synchronization: str = "auto", aggregation: str = "none", trainable: bool | None = None
    ) -> Any:
        """A variable of the strategy in whose scope we are."""

    @abc.abstractmethod
    def total(self, array: Any) -> Any:
        """The sum of all elements."""

    @abc.abstractmethod
    def to_float(self, array: Any) -> Any:
        """``array`` as float32."""

    @abc.abstractmethod
    def value_and_grad(self, loss: Callable[[], Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The loss, and its gradients with respect to variables."""

    @abc.abstractmethod
    def derivative(self, fn: Callable[[Any], Any], at: Any) -> Any:
        """The gradient of a scalar function of an array."""

    @abc.abstractmethod
    def average_loss(self, losses: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
        """``compute_average_loss``."""

    @abc.abstractmethod
    def regularization(self, loss: Any) -> Any:
        """``scale_regularization_loss``."""

    @abc.abstractmethod
    def optimizer(self, rule: str) -> Any:
        """An optimizer: ``"sgd"``, ``"momentum"`` or ``"adam"``."""

    @abc.abstractmethod
    def dataset(self, examples: Any, batch: int) -> Any:
        """A dataset of global batches, of examples that lie along dim 0."""
