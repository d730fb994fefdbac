"""The functions that Keras' loop calls for each batch: they run one step on each replica."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from keras.src.layers.normalization.batch_normalization import BatchNormalization

from replicax.devices.host_values import strongly_typed
from replicax.execution.many_steps.loop import Step, Taken, run_steps
from replicax.execution.run import COMPILED, Dispatch, RunOptions, cached_dispatch, default_options
from replicax.models.keras.batches import Batch, Feed, taken
from replicax.models.keras.model_state import ModelState, ShownGroup, StateCell, keras_variables
from replicax.models.keras.multi_worker import check_same
from replicax.models.keras.patches import patched
from replicax.models.keras.replica_step import ReplicaStep
from replicax.strategy import Strategy
from replicax.values import PerReplica


class _Steps(Step):
    """A step that runs several times in one loop."""

    def __call__(self, element: Any) -> Any:
        return {"last": self.fn(element), "objects": {}}


class StepFunction:
    """``function(state, iterator)`` for Keras' loop: runs a model's ``method`` on each replica.

    That is ``"train_step"``, ``"test_step"`` or ``"predict_step"``; ``groups`` are the groups of variables in the
    function's ``state``.
    """

    def __init__(
        self, model: Any, strategy: Strategy, state: ModelState, feed: Feed, method: str, groups: Sequence[str]
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._state = state
        self._feed = feed
        self._method = method
        self._names = groups
        self._variables: list[list[Any]] = []
        self._groups: tuple[ShownGroup, ...] = ()
        self._is_to_compare = False
        self._statistics: set[int] = set()
        self._options = RunOptions("per_replica") if model.run_eagerly else None
        replicas = strategy.extended.replicas
        self._is_alone = replicas.num_replicas == 1 and self._options is None
        self._known: dict[Any, Dispatch] = {}

        def step(batch: Batch) -> Any:
            return self._step(batch)

        # Retraces are counted by code; those of another model don't count for this one.
        step.__name__ = f"{model.name}.{method}"
        step.__code__ = step.__code__.replace(co_name=step.__name__)
        self._fn = step
        self._steps = _Steps(step)

    def __call__(self, state: Sequence[Sequence[Any]], iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run the next steps of an execution; return logs or predictions, as Keras' own does, and the new state."""
        try:
            if state is not self._groups:
                self._groups = ()
                self._take(state)
            return self._results(iterator), self._groups
        except BaseException:
            self._store_state(self._groups or state)
            self._model.jax_state_sync()
            raise

    def _results(self, iterator: Iterator[Any]) -> Any:
        steps = self._model.steps_per_execution
        first, batches = taken(iter(iterator), steps)
        if self._is_to_compare:
            check_same(first, self._strategy.extended.replicas.lockstep)
            self._is_to_compare = False
        if self._method == "predict_step":
            result = self._predictions(batches)
        elif steps == 1 or self._options is not None:
            for data in batches:
                result = self._run(data)
        else:
            elements = Taken(self._feed.groups(batches, steps))
            count = sum(group.count for group in elements.groups)
            programs = self._strategy.extended.programs
            result = run_steps(programs, self._steps, lambda *_: elements, count, None).last_step_outputs
        if self._method != "predict_step" and self._strategy.extended.replicas.num_replicas > 1:
            result = jax.tree_util.tree_map(self._common, result)
        return result

    def _run(self, data: Any) -> Any:
        """Run the step with ``strategy.run``; with one replica directly, which saves most of a small step's time."""
        if not self._is_alone:
            return self._strategy.run(self._fn, (self._feed.batch(data),), options=self._options)
        kind, arrays = self._feed.kind(data)
        programs, is_compiled = self._strategy.extended.programs, default_options() is COMPILED
        last = self._known.get(kind)
        if last is not None and is_compiled and last.is_current:
            return last.with_inputs(arrays).launch()
        batch = self._feed.batch(data)
        result = self._strategy.run(self._fn, (batch,))
        if kind is not None and is_compiled and (dispatch := cached_dispatch(programs, self._fn, (batch,), None)):
            self._known[kind] = dispatch.with_inputs(())
        return result

    def _common(self, log: Any) -> Any:
        """Average a number in the logs, such as a loss, over the replicas, which have as many rows each."""
        return self._strategy.reduce("mean", log) if isinstance(log, PerReplica) else log

    def _predictions(self, batches: Iterator[Any]) -> Any:
        """The outputs for some batches, in the order of their rows."""
        outputs = []
        for data in batches:
            batch = self._feed.batch(data)
            own = self._strategy.run(self._fn, (batch,), options=self._options)
            joined = functools.partial(self._joined_rows, batch=batch)
            outputs.append(jax.tree_util.tree_map(joined, own))
        if len(outputs) == 1:
            return outputs[0]
        return jax.tree_util.tree_map(lambda *parts: jnp.concatenate(parts), *outputs)

    def _joined_rows(self, output: Any, batch: Batch) -> Any:
        """The replicas' rows, concatenated; those of a batch that all replicas have only once."""
        replicas = len(batch.sizes)
        if isinstance(output, PerReplica):
            gathered = self._strategy.gather(output, axis=0)
            return gathered if len(gathered) <= batch.rows else gathered[: batch.rows]
        if replicas > batch.copies and output.ndim and len(output) == batch.sizes[0]:
            return jnp.concatenate([output] * replicas)  # independent of the input: each replica has the same rows
        return output

    # --- state ------------------------------------------------------------------------------------------

    def _take(self, state: Sequence[Sequence[Any]]) -> None:
        if [len(group) for group in state] != [len(group) for group in self._variables]:
            self._known.clear()
            self._variables = [list(keras_variables(self._model, name)) for name in self._names]
            layers = [x for x in self._model._flatten_layers() if isinstance(x, BatchNormalization)]
            self._statistics = {id(v) for layer in layers for v in layer.non_trainable_variables}
        self._groups = self._state.take(self._variables, state)
        self._store_state(self._groups)
        self._is_to_compare = self._strategy.extended.replicas.lockstep.several  # at the beginning of each epoch

    def _store_state(self, state: Sequence[Sequence[Any]]) -> None:
        """Store the arrays where Keras looks for them to restore its variables, from which its loop has taken them.

        Keras does this after the step, which is too late if the step fails or is interrupted.
        """
        object.__setattr__(self._model, "_jax_state", dict(zip(self._names, state, strict=True)))

    # --- one replica --------------------------------------------------------------------------------------

    def _step(self, batch: Batch) -> Any:
        """The step of each replica."""
        step = ReplicaStep(batch)
        values = [[cell.variable.value for cell in group.cells] for group in self._groups]
        with step.running(), patched(self._model):
            state = tuple(list(group) for group in values)
            result, new = getattr(self._model, self._method)(state, batch.data)
        if self._method == "predict_step":
            new = (values[0], new)
        self._assign(step, values, new)
        if self._method != "predict_step" and len(set(batch.sizes)) > 1:
            result = step.means_in(result, lambda log: bool(jnp.issubdtype(jnp.result_type(log), jnp.inexact)))
        return jax.tree_util.tree_map(lambda leaf: strongly_typed(jnp.asarray(leaf)), result)

    def _assign(self, step: ReplicaStep, values: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]]) -> None:
        """Assign the changes of the step; a layer's batch statistics are those of all rows."""
        statistics: list[tuple[StateCell, Any]] = []
        for group, before, after in zip(self._groups, values, new, strict=True):
            for cell, old, value in zip(group.cells, before, after, strict=True):
                if value is old:
                    continue
                value = getattr(value, "value", value)  # a Keras variable if a metric has not been updated
                if self._is_statistic(cell):
                    statistics.append((cell, value))
                else:
                    cell.variable.assign(value)
        means = step.mean([value for _, value in statistics])
        for (cell, _), value in zip(statistics, means, strict=True):
            cell.variable.assign(value)

    def _is_statistic(self, cell: StateCell) -> bool:
        if not jnp.issubdtype(cell.variable.dtype, jnp.inexact):
            return False
        return id(cell.keras) in self._statistics or getattr(cell.keras, "aggregation", "none") == "mean"
