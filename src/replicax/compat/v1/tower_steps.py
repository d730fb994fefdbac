"""``MultiStepContext``: what a step among several says that its caller shall see."""

from __future__ import annotations

from typing import Any

from replicax.compat.v1.tower_aggregation import VariableAggregation, parse
from replicax.compat.v1.tower_words import in_tower_words
from replicax.execution.many_steps.step_outputs import MultiStepContext as StepOutputs


class MultiStepContext:
    """What a step of ``run_steps_on_dataset`` gets first, and what that returns; :class:`replicax.MultiStepContext`.

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

    @in_tower_words
    def set_last_step_output(
        self, name: str, output: Any, aggregation: VariableAggregation | str = VariableAggregation.NONE
    ) -> None:
        """Let the caller see the last step's ``output``; ``replicax.MultiStepContext.set_last_step_output``.

        In a tower there has to be an aggregation; across, a PerDevice value without one stays PerDevice.
        """
        combined = parse(aggregation, f"set_last_step_output({name!r}, …)", none=True)
        self._outputs.set_last_step_output(name, output, combined.aggregation)

    @in_tower_words
    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Let the caller see a Python object; ``replicax.MultiStepContext.set_non_tensor_output``."""
        self._outputs.set_non_tensor_output(name, output)
