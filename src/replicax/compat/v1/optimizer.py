"""``Optimizer``: gradients in towers, updates across them; and the original's whose rules Optax has to the letter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from replicax.compat.v1.aggregation import VariableAggregation, parse
from replicax.compat.v1.distribution import DistributionStrategy, get_tower_context
from replicax.compat.v1.error_translation import translating_errors
from replicax.compat.v1.variables import trainable_variables
from replicax.errors import ContextError
from replicax.training.gradients import value_and_grad
from replicax.training.losses import scale_regularization_loss
from replicax.training.optimizer import Optimizer as CoreOptimizer
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    import optax

_BEFORE = "call the model before, so that get_variable makes them, or pass var_list"

Pairs = Iterable[tuple[Any, Variable]]


class Optimizer:
    """Any Optax transformation, with the methods of a 1.x optimizer; :class:`replicax.Optimizer`.

    Losses of one optimizer depend on the same variables, or on none in common, such as those of two networks that are
    trained in turn. Variables that change together are a group, with slots and counters of its own.

    Args:
      tx: an ``optax.GradientTransformation``.
      name: the name of its slots.
      loss_reduction: how the loss comes from the examples. Of a ``"mean"`` over a tower's examples
        ``compute_gradients`` takes the tower's share (``replicax.scale_regularization_loss``), so that the gradients
        add up to that of the mean over all; a ``"sum"`` is left as it is, as is right for ``compute_average_loss``.

    Attributes:
      optimizers: a :class:`replicax.Optimizer` for each group, in the order in which they first had gradients.

    >>> import optax
    >>> from replicax.compat import v1
    >>> distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with distribution.scope():
    ...     w = v1.get_variable("w", initializer=1.0)
    ...     optimizer = v1.Optimizer(optax.sgd(0.5))
    ...     distribution.call_for_each_tower(lambda x: optimizer.minimize(lambda: x * w.value, var_list=[w]), 1.0)
    >>> float(w)
    0.5
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        name: str = "optimizer",
        loss_reduction: VariableAggregation | str = VariableAggregation.MEAN,
    ) -> None:
        self.optimizers = [CoreOptimizer(tx, name)]
        self._name = name
        self._scales = parse(loss_reduction, "Optimizer(loss_reduction)") is VariableAggregation.MEAN

    @translating_errors
    def compute_gradients(
        self, loss: Callable[[], Any], var_list: Sequence[Variable] | None = None
    ) -> list[tuple[Any, Variable]]:
        """Return this tower's gradients, each with its variable; ``replicax.value_and_grad``.

        The gradient of a variable that the loss does not depend on is ``None``.

        Args:
          loss: a function without arguments that returns this tower's loss, a scalar.
          var_list: by default all trainable variables that ``get_variable`` has made.

        Raises:
          ValueError: there are none, or the loss itself makes further ones: make them before, or name them all.
        """
        tower = get_tower_context()
        if tower is None:
            raise ContextError("Optimizer.compute_gradients is for a tower, but was called in cross-tower context")
        if not callable(loss):
            raise TypeError(f"compute_gradients(loss): expected a function that returns the loss, got {loss!r}")
        variables = trainable_variables() if var_list is None else list(var_list)
        if not variables:
            raise ValueError(f"compute_gradients: there are no variables yet; {_BEFORE}")

        def share() -> Any:
            return scale_regularization_loss(loss()) if self._scales else loss()

        _, gradients = value_and_grad(share, variables, unconnected_gradients="none")()
        late = [] if var_list is not None else [v.name for v in trainable_variables()[len(variables) :]]
        if late:
            raise ValueError(f"compute_gradients: the loss has created the variables {late}; {_BEFORE}")
        return list(zip(gradients, variables, strict=True))

    @translating_errors
    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Variable | None = None, name: str | None = None
    ) -> None:
        """Change variables by the sum of all towers' gradients; ``replicax.Optimizer.apply_gradients``.

        Variables whose gradient is ``None`` are left out.

        Raises:
          ContextError: called across, where there is ``_distributed_apply``.
          ValueError: there are no pairs, or all gradients are ``None``; the variables that have gradients are some of a
            group and not all, or of several.
        """
        tower = get_tower_context()
        if tower is None:
            raise ContextError(
                "Optimizer.apply_gradients is for a tower, but was called in cross-tower context: there use "
                "optimizer._distributed_apply(distribution, grads_and_vars)"
            )
        tower.merge_call(self._distributed_apply, _present(grads_and_vars), global_step, name)

    @translating_errors
    def _distributed_apply(
        self,
        distribution: DistributionStrategy,
        grads_and_vars: Pairs,
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> None:
        """Apply gradients in cross-tower context; ``replicax.Optimizer.apply_gradients`` in each tower."""
        distribution._check_across("_distributed_apply")
        gradients, variables = zip(*_present(grads_and_vars), strict=True)
        optimizer = self._of_group(variables)

        def apply(gradients: Sequence[Any]) -> None:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        distribution.call_for_each_tower(apply, gradients)
        if global_step is not None:
            distribution.update(global_step, _count)

    def minimize(
        self,
        loss: Callable[[], Any],
        global_step: Variable | None = None,
        var_list: Sequence[Variable] | None = None,
        name: str | None = None,
    ) -> None:
        """``compute_gradients`` and ``apply_gradients``; ``replicax.value_and_grad`` and an ``apply_gradients``."""
        self.apply_gradients(self.compute_gradients(loss, var_list), global_step, name)

    def variables(self) -> list[Variable]:
        """Its slots and counters; ``replicax.Optimizer.variables``."""
        return [slot for optimizer in self.optimizers for slot in optimizer.variables]

    def _of_group(self, variables: Sequence[Variable]) -> CoreOptimizer:
        """The optimizer of these variables; where they overlap with a group, that of the group, which raises."""
        chosen = {id(v) for v in variables}
        for optimizer in self.optimizers:
            if chosen & {id(v) for v in optimizer.parameters or ()}:
                return optimizer
        # One that has no variables yet, or none any more because the step that gave it some has failed.
        unused = next((optimizer for optimizer in self.optimizers if optimizer.parameters is None), None)
        if unused is None:
            first = self.optimizers[0]
            unused = CoreOptimizer(first.tx, self._name)
            self.optimizers.append(unused)
        return unused


class GradientDescentOptimizer(Optimizer):
    """The original's rule of that name, ``w -= learning_rate * gradient``; ``replicax.Optimizer(optax.sgd(…))``.

    Args:
      learning_rate: a number, or an Optax schedule.
      use_locking: takes no effect: no other thread updates the variables meanwhile.
      name: the name of its slots.

    >>> from replicax.compat import v1
    >>> distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with distribution.scope():
    ...     w = v1.get_variable("w", initializer=1.0)
    ...     optimizer = v1.GradientDescentOptimizer(0.5)
    ...     distribution.call_for_each_tower(lambda x: optimizer.minimize(lambda: x * w.value, var_list=[w]), 1.0)
    >>> float(w)
    0.5
    """

    def __init__(
        self, learning_rate: optax.ScalarOrSchedule, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        import optax

        super().__init__(optax.sgd(learning_rate), name)


class MomentumOptimizer(Optimizer):
    """The original's, with Nesterov's variant; ``replicax.Optimizer(optax.sgd(…, momentum=…))``.

    ``velocity = momentum * velocity + gradient``, and ``w -= learning_rate * velocity``; with ``use_nesterov``,
    ``w -= learning_rate * (gradient + momentum * velocity)``.

    Args:
      learning_rate: a number, or an Optax schedule.
      momentum: a number.
      use_locking: takes no effect: no other thread updates the variables meanwhile.
      name: the name of its slots.
      use_nesterov: whether it is Nesterov's.
    """

    def __init__(
        self,
        learning_rate: optax.ScalarOrSchedule,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        import optax

        super().__init__(optax.sgd(learning_rate, momentum, use_nesterov), name)


def _present(grads_and_vars: Pairs) -> list[tuple[Any, Variable]]:
    """The pairs that have a gradient."""
    pairs = [(gradient, v) for gradient, v in grads_and_vars]
    if not pairs:
        raise ValueError("apply_gradients: no variables provided: grads_and_vars is empty")
    present = [(gradient, v) for gradient, v in pairs if gradient is not None]
    if not present:
        raise ValueError(
            f"apply_gradients: no gradients provided for any variable: {[getattr(v, 'name', v) for _, v in pairs]}. "
            "Does the loss read them, and not behind jax.lax.stop_gradient?"
        )
    return present


def _count(step: Variable) -> Variable:
    step.assign_add(1)
    return step
