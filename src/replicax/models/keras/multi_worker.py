"""Several workers: all read the data in the chief's order, and only the chief writes files.

Each worker runs Keras' loop on the same data, and its replicas take their rows of each batch.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.workers.digests import digest
from replicax.workers.lockstep import Lockstep
from replicax.workers.replicas import Replicas

_log = logging.getLogger("replicax")

WRITERS = ("save", "save_weights", "export")
"""Methods of a model that write files."""


def is_silent(replicas: Replicas) -> bool:
    """Return whether this worker writes no files, because it is not the chief."""
    lockstep = replicas.lockstep
    return lockstep.several and lockstep.workers.index > 0


def adapt(model: Any, replicas: Replicas) -> None:
    """Make ``model.fit`` shuffle as the chief does, and ``model.save`` of other workers write nothing."""
    if not replicas.lockstep.several:
        return
    object.__setattr__(model, "fit", _shuffling_alike(model.fit, replicas.lockstep))
    if is_silent(replicas):
        for name in WRITERS:
            object.__setattr__(model, name, _left_to_the_chief(getattr(model, name), replicas))


def _shuffling_alike(fit: Callable[..., Any], lockstep: Lockstep) -> Callable[..., Any]:
    """``fit`` with the chief's random state: Keras shuffles arrays with NumPy, and other datasets also with Python."""

    @functools.wraps(fit)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        chiefs = lockstep.from_chief("calls fit", (random.getstate(), np.random.get_state()))
        random.setstate(chiefs[0])
        np.random.set_state(chiefs[1])
        return fit(*args, **kwargs)

    return wrapper


def _left_to_the_chief(method: Callable[..., Any], replicas: Replicas) -> Callable[..., None]:
    @functools.cache
    def tell() -> None:  # once, as callbacks may save in each epoch
        _log.warning(
            "worker %d: model.%s writes nothing here; the chief, worker 0, writes the file for all workers",
            replicas.lockstep.workers.index,
            method.__name__,
        )

    @functools.wraps(method)
    def nothing(*args: Any, **kwargs: Any) -> None:
        tell()

    return nothing


def check_same(data: Any, lockstep: Lockstep) -> None:
    """Raise unless all workers have the same batch."""
    leaves, tree = jax.tree_util.tree_flatten(data)
    differing = lockstep.agree("has a batch for a Keras model", (str(tree), *map(digest, leaves)))
    if differing is not None:
        raise ValueError(
            f"worker {differing[1]} has another batch for the Keras model than worker 0. Each worker takes the rows of "
            "its replicas, so all must be given the same data in the same order. Seed what makes or shuffles them "
            "alike on all workers (keras.utils.set_random_seed), or don't shuffle."
        )
