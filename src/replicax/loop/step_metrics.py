"""Numbers of a step: what it returns by name, how replicas' numbers are combined, and fetching them without waiting."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax, context
from replicax.collectives import ReduceOp
from replicax.devices.host_values import as_array, check_numbers, strongly_typed
from replicax.errors import ShareWarning, warn
from replicax.execution.cross_replica import warn_of_means
from replicax.execution.many_steps.loop import Step
from replicax.execution.replica_values import ARRAYS
from replicax.pytrees import is_leaf, registered
from replicax.strategy import Strategy
from replicax.training.step_hooks import using
from replicax.user_functions import checked_result
from replicax.values import PerReplica
from replicax.variables.variable import Variable

DONE = "\0done"
"""The name of a number that every step has: it is there when the step is done."""
NOT_FINITE = "\0not finite"
"""The name of the number of :meth:`FiniteWatch.note`."""


step_outcome: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("step_outcome", default=None)
"""While a step runs: a list, to which is added whether the step takes effect, where that is not certain."""


class NumberedStep(Step):
    """A user's step, as ``run_steps`` takes it: it gets an element, and its outputs are the numbers by name."""

    def __init__(self, fn: Callable[..., Any], finite: FiniteWatch | None) -> None:
        super().__init__(fn, None, None if finite is None else _jax.ById(finite))
        self.finite = finite
        self._traces = [0]  # in a list, which copies of the step share

    @property
    def traces(self) -> int:
        """The number of times that the step's Python has run."""
        return self._traces[0]

    def __call__(self, element: Any) -> Any:
        self._traces[0] += 1
        outcome: list[Any] = []
        with using(step_outcome, outcome):
            returned = self.fn(element)
        checked_result(returned, self.fn, "replicax.train")
        numbers = named_numbers(returned, self.__name__)
        hidden = {DONE: jnp.int32(0)}
        if self.finite is not None:
            hidden[NOT_FINITE] = self.finite.note(numbers, outcome)
        return {"last": {**numbers, **hidden}, "objects": {}}


def is_shown(name: str) -> bool:
    """Return whether ``name`` is a number that the user's step has returned."""
    return not name.startswith("\0")


def named_numbers(returned: Any, whose: str) -> dict[str, Any]:
    """The numbers that a step has returned, by name: scalar arrays; see :func:`numbers_in`."""
    numbers = numbers_in(returned, whose)
    return {name: strongly_typed(as_array(value, _source(whose, name))) for name, value in numbers.items()}


def _source(whose: str, name: str) -> str:
    return f"what {whose} returned as {name!r}"


def numbers_in(returned: Any, whose: str) -> dict[str, Any]:
    """The numbers that a function called ``whose`` has returned, by name, as they are.

    That is a number, which is called ``"loss"``; a dict of numbers, also of further dicts; or ``None``. For
    anything else a TypeError or ValueError names it.
    """
    if not isinstance(returned, Mapping):
        returned = {} if returned is None else {"loss": returned}
    numbers: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(registered(dict(returned)), is_leaf=is_leaf)[0]:
        name = number_name(path)
        check_names([name], f"{whose} returned", dict.fromkeys(numbers, "another one has that name"))
        value = leaf.value if isinstance(leaf, Variable) else leaf
        if isinstance(value, np.ndarray | np.generic | jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise TypeError(f"{whose} returned the random key {name!r}, and replicax.train logs numbers")
        if isinstance(value, PerReplica):
            raise TypeError(
                f"{whose} returned {value!r} as {name!r}, a value of each replica, and replicax.train logs numbers: "
                "combine them with strategy.reduce('sum', …) or strategy.reduce('mean', …)."
            )
        if not isinstance(value, ARRAYS):
            raise TypeError(
                f"{whose} returned {value!r} as {name!r}, and replicax.train logs numbers: return a number, a dict of "
                "numbers, or None, and keep other values in variables."
            )
        check_number(value, whose, name)
        numbers[name] = value
    return numbers


def check_number(value: Any, whose: str, name: str) -> None:
    """Raise a TypeError or ValueError unless ``value``, which a function has returned, is one real number."""
    check_numbers(value, _source(whose, name))
    if np.ndim(value):
        raise ValueError(
            f"{whose} returned an array of shape {np.shape(value)} as {name!r}, and replicax.train logs numbers: "
            "reduce it first, for a mean over the global batch with replicax.compute_average_loss, or keep it in a "
            "variable: kept = replicax.as_variables(state), and in the step replicax.assign(kept, new_state)."
        )
    if np.iscomplexobj(value):
        raise TypeError(
            f"{whose} returned a complex number as {name!r}, and replicax.train logs real numbers: return its "
            "jnp.real, jnp.imag or jnp.abs."
        )


TAKEN = {"step": "train.csv and evaluation.csv have the step's number in the column of that name"}
"""The name that no number may have, and why."""


def check_names(names: Iterable[str], source: str, taken: Mapping[str, str] = TAKEN) -> None:
    """Raise a ValueError if a number has a name that is taken; ``source`` begins it, and ``taken`` says by what."""
    taken = TAKEN | dict(taken)
    for name in names:
        if name in taken:
            raise ValueError(f"{source} a number called {name!r}: {taken[name]}. Give yours another name.")


def results_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The results of metrics by name, which must be numbers; resets the metrics."""
    results = {name: metric.result() for name, metric in metrics.items()}
    for name, metric in metrics.items():
        check_number(results[name], f"{type(metric).__name__}.result()", name)
        metric.reset()
    return results


# --- over replicas --------------------------------------------------------------------------------------


class Combination:
    """The way in which numbers that differ between replicas become one: ``replicax.train``'s ``reduce``."""

    def __init__(self, ops: ReduceOp | str | Mapping[str, ReduceOp | str]) -> None:
        self._of_all = ReduceOp.SUM
        self._of: dict[str, ReduceOp] = {}
        if isinstance(ops, Mapping):
            self._of = {name: ReduceOp.parse(op) for name, op in ops.items()}
        else:
            self._of_all = ReduceOp.parse(ops)
        self.functions = 1  # that return numbers
        self._returned: dict[str, list[str]] = {}
        self._looked_at: set[str] = set()

    @property
    def means(self) -> frozenset[str] | bool:
        """The names of the numbers that are averaged; ``True`` if all are."""
        if self._of_all is ReduceOp.MEAN:
            return True
        return frozenset(name for name, op in self._of.items() if op is ReduceOp.MEAN)

    def check(self, numbers: Mapping[str, Any], whose: str = "the step") -> None:
        """Note the names of a function's numbers; when all have run, raise a ValueError if a name is none of theirs."""
        self._returned[whose] = list(filter(is_shown, numbers))
        if len(self._returned) < self.functions:
            return
        for name in self._of:
            if not any(name in names for names in self._returned.values()):
                has = [f"{who} returns {str(names)[1:-1] or 'none'}" for who, names in self._returned.items()]
                raise ValueError(
                    f"replicax.train(reduce={{{name!r}: …}}): no number is called {name!r}; {', '.join(has)}"
                )

    def check_scales(self, numbers: Mapping[str, Any]) -> None:
        """Warn, once for each name, of the means over replicas' own examples that are added up."""
        for name, value in numbers.items():
            if name in self._looked_at or name in self._of or self._of_all is not ReduceOp.SUM:
                continue
            self._looked_at.add(name)
            if isinstance(value, PerReplica) and value.scale in ("mean", "ragged mean"):
                warn(
                    f"replicax.train: the step returns a mean over one replica's own examples as {name!r}, and numbers "
                    f"in which replicas differ are added up: {name!r} is {value.count} times the mean. Return "
                    "replicax.compute_average_loss(values), this replica's share of the mean over the global batch, or "
                    f"pass replicax.train(reduce={{{name!r}: 'mean'}}).",
                    ShareWarning,
                )

    def combined(self, numbers: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
        """The numbers as arrays that are the same for all; they may still be being computed.

        At most two all-reduces, for those that are summed and those that are averaged.
        """
        result = {name: value for name, value in numbers.items() if name != DONE}
        for op in (ReduceOp.SUM, ReduceOp.MEAN):
            if ours := self._combined_by(op, result):
                result.update(strategy.reduce(op, ours))
        return result

    def warn_of_means(self, numbers: Mapping[str, Any]) -> None:
        """Warn, as ``strategy.reduce`` does, of numbers that are averaged, but must not be."""
        warn_of_means(self._combined_by(ReduceOp.MEAN, numbers).values())

    def _combined_by(self, op: ReduceOp, numbers: Mapping[str, Any]) -> dict[str, PerReplica]:
        return {
            name: value
            for name, value in numbers.items()
            if isinstance(value, PerReplica) and self._of.get(name, self._of_all) is op
        }


# --- fetching -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pending:
    """Numbers of a step on their way from the devices: scalar arrays, and numbers of Python."""

    step: int
    numbers: Mapping[str, Any]
    examples: int
    """How many examples this process had had by then."""
    launched: float
    """When the step was launched, in seconds of training."""

    def __post_init__(self) -> None:
        for value in self.numbers.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()

    def values(self) -> dict[str, float]:
        """The numbers; waits until they are there."""
        return {name: float(np.asarray(value)) for name, value in self.numbers.items() if is_shown(name)}


# --- numbers that are not finite ------------------------------------------------------------------------


class FiniteWatch:
    """Notes, on the devices, the first step one of whose numbers was NaN or infinite.

    One scalar all-reduce in each step. Each run uses one watch, whose variables its step reads and writes. The strategy
    keeps the watches of finished runs, so that the next run does not trace the step again.
    """

    @classmethod
    def of(cls, strategy: Strategy) -> FiniteWatch:
        """A watch of ``strategy`` that no run is using."""
        free: list[FiniteWatch] = vars(strategy).setdefault("_free_finite_watches", [])
        if free:
            return free.pop()
        with strategy.scope():
            return cls(free)

    def __init__(self, free: list[FiniteWatch]) -> None:
        self._steps = Variable(0, name="replicax.train/steps", trainable=False)
        self._first = Variable(0, name="replicax.train/first_not_finite", trainable=False)
        self._start = 0
        self._free = free

    def start(self, step: int) -> None:
        """Begin to watch after ``step``."""
        self._start = step
        for variable in (self._steps, self._first):
            variable.assign(0)

    def end(self) -> None:
        """End the watch: another run may use it."""
        self._free.append(self)

    def note(self, numbers: Mapping[str, Any], outcome: Sequence[Any]) -> jax.Array:
        """Return the place of the first of a step's ``numbers`` that was not finite, from 1; 0 if all were.

        A step that takes no effect, as ``outcome`` says, does not count.
        """
        bad = jnp.zeros((), jnp.bool_)
        for value in numbers.values():
            if jnp.issubdtype(value.dtype, jnp.inexact):
                bad = bad | jnp.logical_not(jnp.isfinite(value))
        steps, first = self._steps.value + 1, self._first.value
        any_bad = context.current_replica().all_reduce("sum", bad.astype(jnp.int32)) > 0
        for took_effect in outcome:
            any_bad = any_bad & took_effect
        first = jnp.where((first == 0) & any_bad, steps, first)
        self._steps.assign(steps)
        self._first.assign(first)
        return first

    def check(self, numbers: Mapping[str, Any]) -> None:
        """Raise a FloatingPointError if a number was not finite up to the step with these numbers; waits for them."""
        first = int(np.asarray(numbers[NOT_FINITE]))
        if first:
            raise FloatingPointError(
                f"step {self._start + first} returned a number that is NaN or infinite, and replicax.train was called "
                "with stop_at_nan=True. Variables have the values that it and later steps gave them; no checkpoint was "
                "saved of these. To find the operation, restore the last checkpoint, and run the step under "
                "jax.debug_nans(True), or in replicax.debug()."
            )


def number_name(path: Sequence[Any]) -> str:
    """The name of a number that a step returns, by where it stands in the dict: the keys, separated by slashes.

    A number that is returned by itself is called ``"loss"``.
    """
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) if path else "loss"
