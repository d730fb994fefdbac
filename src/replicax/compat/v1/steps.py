"""``MultiStepContext``: outputs of a step among several for its caller."""

from __future__ import annotations

from typing import Any

from replicax.compat.v1.aggregation import VariableAggregation, parse
from replicax.compat.v1.error_translation import translating_errors
from replicax.execution.many_steps.step_outputs import MultiStepContext as StepOutputs


class MultiStepContext:
    """The first argument of a step of ``run_steps_on_dataset``, and its result; :class:`replicax.MultiStepContext`.

    >>> import numpy as np
    >>> from replicax.compat import v1
    >>> distribution = v1.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step(ctx, x):
    ...     doubled = distribution.call_for_each_tower(lambda x: 2 * x.sum(), x)
    ...     ctx.set_last_step_output("total", doubled, v1.VariableAggregation.SUM)
    >>> with distribution.scope():
    ...     dataset = distribution.distribute_dataset(lambda: [np.full(1, float(i)) for i in range(4)])
    ...     distribution.run_steps_on_dataset(step, dataset.make_one_shot_iterator(), iterations=2).last_step_outputs
    {'total': Array(10., dtype=float32)}
    """

    def __init__(self, outputs: StepOutputs | None = None) -> None:
        self._outputs = StepOutputs() if outputs is None else outputs

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """The last step's outputs by name; ``replicax.MultiStepContext.last_step_outputs``."""
        return self._outputs.last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """Python objects by name; ``replicax.MultiStepContext.non_tensor_outputs``."""
        return self._outputs.non_tensor_outputs

    @property
    def run_op(self) -> None:
        """``None``: the steps have run already, as those of ``replicax.Strategy.run_steps``."""

    @translating_errors
    def set_last_step_output(
        self, name: str, output: Any, aggregation: VariableAggregation | str = VariableAggregation.NONE
    ) -> None:
        """Set an output of the last step for the caller; ``replicax.MultiStepContext.set_last_step_output``.

        In a tower an aggregation is required; in cross-tower context a PerDevice value without one stays PerDevice.
        """
        combined = parse(aggregation, f"set_last_step_output({name!r}, …)", none=True)
        self._outputs.set_last_step_output(name, output, combined.aggregation)

    @translating_errors
    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set a Python object for the caller; ``replicax.MultiStepContext.set_non_tensor_output``."""
        self._outputs.set_non_tensor_output(name, output)
