"""Evaluation: a function of the user's, or a step that runs over a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from replicax.data import DistributedDataset
from replicax.data.dataset import reader_of
from replicax.errors import shortened
from replicax.execution.tracing.function_key import Wrapper
from replicax.loop.endless_input import examples_in
from replicax.loop.step_metrics import Combination, named_numbers, numbers_in
from replicax.loop.stop_requests import StopRequests
from replicax.strategy import Strategy
from replicax.user_functions import checked_function, checked_result, function_name, signature_of, why_not_taken
from replicax.workers import heartbeat
from replicax.workers.heartbeat_page import Phase


class Evaluation:
    """The evaluation of a model. ``requests`` may end the run before each batch, and before the result.

    ``how`` is a function without arguments that returns numbers; or ``(step, dataset)``: then each number that the step
    returns is the mean over a global batch, and the evaluation's is the mean over all examples of the dataset.
    """

    def __init__(self, how: Any, strategy: Strategy, combination: Combination, requests: StopRequests) -> None:
        self._strategy = strategy
        self._combination = combination
        self._requests = requests
        self._function: Callable[[], Any] | None = None
        if isinstance(how, tuple) and len(how) == 2 and callable(how[0]):
            step, dataset = how
            _check_takes(step, ["the batch"])
            combination.functions += 1
            self._step = _EvaluationStep(step)
            is_distributed = isinstance(dataset, DistributedDataset)
            self._dataset = dataset if is_distributed else strategy.distribute_dataset(dataset)
            owner = self._dataset._pipeline.workers.owner
            if owner is not strategy.extended.replicas:
                raise ValueError(
                    f"replicax.train(evaluate=(step, dataset)): the dataset was distributed by {owner!r}, and the run "
                    f"is one of {strategy!r}: distribute it with that one"
                )
            if self._dataset._pipeline.source.is_endless:
                raise ValueError(
                    "replicax.train(evaluate=(step, dataset)): an evaluation is one pass over its dataset, and this "
                    "one repeats without end: leave repeat() out, or give the number of its passes"
                )
            return
        if not callable(how):
            raise TypeError(
                "replicax.train(evaluate=…) must be a function without arguments that returns numbers, or "
                f"(step, dataset), got {shortened(' '.join(repr(how).split()))}"
            )
        self._function = checked_function(how, "replicax.train", "evaluate")
        _check_takes(how, [])

    def __call__(self) -> dict[str, float]:
        """The numbers by name.

        Raises:
          RunStops: the run is to end.
          ValueError: the dataset has no examples.
        """
        if self._function is not None:
            name = getattr(self._function, "__name__", "evaluate")
            return _floats(numbers_in(checked_result(self._function(), self._function, "replicax.train"), name))
        totals, examples = None, 0
        with heartbeat.phase(Phase.STEPS):  # as the steps of training, these have to get on
            for batch, count in self._batches():
                numbers, weighed = self._strategy.run(self._step, args=(batch, jax.device_put(np.int32(count))))
                self._combination.check(numbers, "the evaluation")
                self._combination.check_scales(numbers)
                self._combination.warn_of_means(numbers)
                totals = weighed if totals is None else self._strategy.run(_added_totals, args=(totals, weighed))
                examples += count
        if totals is None or not examples:
            raise ValueError("replicax.train(evaluate=(step, dataset)): the dataset has no examples")
        combined = self._combination.combined(totals, self._strategy)
        with self._strategy.extended.replicas.lockstep.explaining(f"the evaluation {self._step.__name__!r}"):
            return {name: total / examples for name, total in _floats(combined).items()}

    def _batches(self) -> Iterator[tuple[Any, int]]:
        with iter(self._dataset) as batches:
            reader = reader_of(batches, self._strategy.extended.replicas)
            while True:
                try:
                    [group], *_ = reader.take(1, False, self._requests.check_wait)
                except StopIteration:
                    self._requests.begin_call()  # of what combines the numbers, which all workers run together, too
                    return
                self._requests.begin_call()
                [batch] = group.elements()
                yield batch, examples_in(group)


def _check_takes(fn: Callable[..., Any], arguments: list[str]) -> None:
    """Raise a TypeError unless ``fn`` takes these arguments; otherwise it would come after hours, at the last step."""
    if why := why_not_taken(fn, *arguments):
        name = function_name(fn)
        called = f"evaluate=({name}, dataset) calls {name}(batch)" if arguments else f"evaluate={name} calls {name}()"
        other = "" if arguments else "; for a step that takes batches: evaluate=(step, dataset)"
        bound = "bind other arguments with functools.partial"
        raise TypeError(f"replicax.train: {called}, but it is {name}{signature_of(fn)}: {why}; {bound}{other}")


class _EvaluationStep(Wrapper):
    """Returns the numbers of a step, and the same times the number of examples of its batch."""

    def __call__(self, element: Any, examples: Any) -> Any:
        returned = checked_result(self.fn(element), self.fn, "replicax.train")
        numbers = named_numbers(returned, self.__name__)
        weight = examples.astype(float)  # the widest float that JAX has
        return numbers, {name: value.astype(float) * weight for name, value in numbers.items()}


def _added_totals(totals: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return {name: total + more[name] for name, total in totals.items()}


def _floats(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in numbers.items()}
