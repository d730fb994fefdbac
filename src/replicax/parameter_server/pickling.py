"""Pickles functions for workers, with references to objects that each process has.

Variables, optimizers and the strategy exist in all processes, and are not copied: the pickle refers to them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from replicax.errors import WorkerError
from replicax.strategy import Strategy
from replicax.training.optimizer import Optimizer
from replicax.variables.variable import Variable

Reference = tuple[Any, ...]
"""A kind, such as ``"variable"``, and the identity of the object among those of that kind."""


class Named:
    """An object with a reference, such as a worker's iterator."""

    reference: Reference

    def check_owner(self, dispatcher: Any) -> None:
        """Raise if this object can't be used by functions of this dispatcher."""


class References:
    """References to objects that are not copied, on the coordinator's side.

    Args:
      strategy: the strategy of the variables.
      number_of: returns the number of an optimizer.
    """

    def __init__(self, strategy: Strategy, number_of: Callable[[Optimizer], int]) -> None:
        self._strategy = strategy
        self._number_of = number_of
        self.dispatcher: Any = None
        """The dispatcher of the functions whose results may be used."""

    def name_of(self, value: Any) -> Reference | None:
        """The reference to ``value``; ``None`` if it must be copied.

        Raises:
          ValueError: it belongs to another strategy or coordinator.
          WorkerError: it is the result of a function that has failed.
        """
        if isinstance(value, Named):
            value.check_owner(self.dispatcher)
            return value.reference
        if isinstance(value, Variable):
            if value.strategy is not self._strategy:
                raise ValueError(
                    f"{value.describe()} belongs to {value.strategy!r}, and can't be used by a function that is "
                    f"scheduled for {self._strategy!r}: create it inside this strategy's scope()"
                )
            return "variable", value.number
        if isinstance(value, Optimizer):
            return "optimizer", self._number_of(value), value.name
        if isinstance(value, Strategy):
            if value is not self._strategy:
                raise ValueError(f"a scheduled function uses {value!r}, but runs under {self._strategy!r}")
            return ("strategy",)
        return None

    def dumps(self, value: Any, what: str, uses: list[Any] | None = None) -> bytes:
        """Pickle ``value``.

        Args:
          value: any object.
          what: its name in messages.
          uses: collects the objects that the pickle refers to.

        Raises:
          TypeError: something in it can't be pickled; the message names ``what``, and the reason.
          ValueError: see :meth:`name_of`.
        """
        from ray import cloudpickle

        def persistent_id(_: Any, value: Any) -> Reference | None:
            name = self.name_of(value)
            if name is not None and uses is not None:
                uses.append(value)
            return name

        methods = {"persistent_id": persistent_id}
        make: Any = type("Pickler", (cloudpickle.CloudPickler,), methods)
        buffer = io.BytesIO()
        pickler = make(buffer)
        try:
            pickler.dump(value)
        except (ValueError, WorkerError):
            raise
        except Exception as error:
            raise TypeError(
                f"{what} can't be sent to workers: {type(error).__name__}: {error}. What a scheduled function uses is "
                "copied to another process: locks, open files, iterators and connections can't be. Make them inside "
                "the function, or with create_per_worker_dataset."
            ) from error
        return buffer.getvalue()


def loads(data: bytes, find: Callable[[Reference], Any], what: str) -> Any:
    """Unpickle data.

    Args:
      data: the pickle.
      find: returns the object for a reference; its errors pass through.
      what: the name of the data in messages.

    Raises:
      UnpicklingError: this process can't read the pickle; the message says why.
    """
    unpickler = _Unpickler(data, find)
    try:
        return unpickler.load()
    except Exception as error:
        if unpickler.is_finding:
            raise
        raise pickle.UnpicklingError(
            f"{what} was pickled in the coordinator's program, and this process can't read it: "
            f"{type(error).__name__}: {error}. What it uses of modules is not copied: they have to be there, and the "
            "same, on every machine."
        ) from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, find: Callable[[Reference], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._find = find
        self.is_finding = False

    def persistent_load(self, reference: Reference) -> Any:
        self.is_finding = True
        found = self._find(reference)
        self.is_finding = False
        return found
