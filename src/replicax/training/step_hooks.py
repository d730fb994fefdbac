"""Step hooks: the code of a step's wrapper around gradients and updates in the step.

Precision and gradient accumulation are such wrappers (:mod:`replicax.loop`). A step without one has no hooks.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from replicax.variables import Variable
from replicax.variables.store import Store


class GradientHook(Protocol):
    """A hook around the function that ``value_and_grad`` differentiates."""

    def reading(self, store: Store) -> Store:
        """The store through which the function reads variables, on top of ``store``."""

    def before(self, loss: Any) -> Any:
        """The scalar to differentiate, from the loss that the function has returned."""

    def after(self, loss: Any, gradients: list[Any]) -> tuple[Any, list[Any]]:
        """The loss and gradients for the step, from the differentiated scalar and its gradients."""


class UpdateHook(Protocol):
    """A hook around ``Optimizer.apply_gradients`` in a step."""

    def update(
        self,
        gradients: list[Any],
        variables: Sequence[Variable],
        extra: Mapping[str, Any],
        apply: Callable[[list[Any]], None],
    ) -> None:
        """Call ``apply`` with the gradients of all of the step: now, or when they are known.

        ``gradients`` are those of ``variables``, before they are summed over the replicas; ``apply`` sums them, and
        changes the variables. ``extra`` are further arguments of the transformation.
        """


gradient_hook: contextvars.ContextVar[GradientHook | None] = contextvars.ContextVar("gradient_hook", default=None)
update_hook: contextvars.ContextVar[UpdateHook | None] = contextvars.ContextVar("update_hook", default=None)


@contextlib.contextmanager
def using(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable, such as one of the hooks, for a while."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
