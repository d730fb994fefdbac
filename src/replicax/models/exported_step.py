"""Export: a prediction step and its weights as one file, which JAX runs without Replicax."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax, context
from replicax.argument_checks import checked_path
from replicax.collectives import of_key_data
from replicax.devices.arrays import gathered
from replicax.devices.host_values import is_key
from replicax.errors import ContextError, TraceError
from replicax.pytrees import is_leaf, registered
from replicax.system.packages import check_installed
from replicax.user_functions import checked_function, checked_result, function_name
from replicax.values import PerReplica
from replicax.variables import Variable
from replicax.variables.store import ConcreteStore, use_store

if TYPE_CHECKING:
    import jax.export


def export(
    step: Callable[..., Any],
    spec: Any,
    path: str | os.PathLike[str],
    *,
    any_batch: bool = False,
    platforms: Sequence[str] | None = None,
) -> jax.export.Exported:
    """Write ``step``, a prediction for one batch, with the weights that it reads, to one file.

    Whatever the strategy, the exported program runs on one device: a server needs JAX alone, and no Replicax:
    ``jax.export.deserialize(open(path, "rb").read()).call(batch)``. All workers call it, and the chief writes.

    Args:
      step: ``step(batch)``, or with several arguments ``step(*spec)``; it reads variables and returns arrays, in
        tuples, lists and dicts. Models of Flax NNX are bound to it: ``functools.partial(step, model)``.
      spec: what it takes: arrays, or ``jax.ShapeDtypeStruct`` objects, or a pytree of these; a tuple for several
        arguments.
      path: the path of the file; it is written as a whole.
      any_batch: whether dim 0 of all arrays, their number of examples, may be any. By default it is as in ``spec``.
      platforms: where it is to run, such as ``("cpu", "cuda", "tpu")``; by default where it is exported.

    Returns:
      What was written, as JAX's object: ``in_avals``, ``out_avals``, ``call``.

    Raises:
      TypeError: the step can't be called, or returns something else than arrays; ``spec`` has no shapes; ``path`` is
        not a path, or ``platforms`` a string.
      TraceError: the step assigns a variable, or an array of a model that is bound to it.
      ContextError: called inside a step.
      ImportError: the package flatbuffers is not installed, in which JAX writes programs.
      Exception: as ``jax.export`` raises for what it can't export, such as callbacks.

    >>> import pathlib, tempfile, jax, numpy as np, replicax
    >>> with replicax.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     w = replicax.Variable(np.ones((3, 2), np.float32), name="w")
    >>> path = pathlib.Path(tempfile.mkdtemp(), "model.bin")
    >>> spec = jax.ShapeDtypeStruct((8, 3), np.float32)
    >>> exported = replicax.models.export(lambda x: x @ w, spec, path, any_batch=True)
    >>> loaded = jax.export.deserialize(path.read_bytes())
    >>> loaded.call(np.ones((2, 3), np.float32)).tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    import jax.export

    checked_function(step, "replicax.models.export", "step")
    if context.in_step():
        raise ContextError(
            "replicax.models.export was called inside a step: call it outside, when the model is trained"
        )
    if isinstance(platforms, str):
        raise TypeError(f"replicax.models.export: platforms must be a list of names, as [{platforms!r}], got a string")
    check_installed("replicax.models.export", "flatbuffers", "export")
    file = pathlib.Path(checked_path(path, "replicax.models.export(path=…)"))
    specs = _specs(spec, any_batch)
    store = _Weights(function_name(step))

    def predict(*batch: Any) -> Any:
        with use_store(store), context.alone():
            try:
                returned = checked_result(_bound_on_host(step)(*batch), step, "replicax.models.export")
            except ValueError as error:
                if "read-only" not in str(error):  # as NumPy says of an array that is bound to the step
                    raise
                raise store.assigning("a read-only array, as a model has that is bound to it") from error
            leaves, tree = jax.tree_util.tree_flatten(registered(returned), is_leaf=is_leaf)
            return jax.tree_util.tree_unflatten(tree, [_array(leaf, store.name) for leaf in leaves])

    with jax.disable_jit(False):
        exported = jax.export.export(jax.jit(predict), platforms=platforms)(*specs)
    if jax.process_index() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        part.write_bytes(exported.serialize())
        part.replace(file)
    return exported


class _Weights(ConcreteStore):
    """A store in which variables are constants, with the values that they have now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._values: dict[Variable, Any] = {}

    def create(self, make: Callable[[], Variable]) -> NoReturn:
        raise TraceError(f"{self.name} creates a variable, and an exported step has only those that are there")

    def read(self, variable: Variable) -> Any:
        if variable not in self._values:
            with _jax.outside_tracing(), use_store(ConcreteStore()):
                self._values[variable] = _on_host(variable.read_value())
        return jnp.asarray(self._values[variable])

    def write(self, variable: Variable, value: Any, error_unless_mirrored: str | None) -> NoReturn:
        raise self.assigning(variable.describe())

    def assigning(self, what: str) -> TraceError:
        """The error for a step that assigns ``what``."""
        return TraceError(
            f"{self.name} assigns {what}, and what is exported is a prediction, which changes nothing: leave metrics, "
            "and the updates of batch statistics and random streams, out of it (Flax NNX: model.eval())"
        )

    def copies(self, variable: Variable) -> PerReplica:
        raise TraceError(
            f"{self.name} reads {variable.describe()}, which has a copy on each replica, and an exported step has one "
            "replica: read it before, value = variable.numpy(), and let the step use that value"
        )


def _specs(spec: Any, any_batch: bool) -> list[Any]:
    """The arguments of the step, described."""
    import jax.export

    arguments = spec if isinstance(spec, tuple) else (spec,)
    leaves, tree = jax.tree_util.tree_flatten(registered(list(arguments)), is_leaf=is_leaf)
    for leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or isinstance(leaf, Variable | PerReplica):
            raise TypeError(
                f"replicax.models.export(step, spec, path): spec describes one batch by arrays or "
                f"jax.ShapeDtypeStruct(shape, dtype), got {leaf!r}"
            )
    scope = jax.export.SymbolicScope()
    described = []
    for leaf in leaves:
        shape: Any = tuple(leaf.shape)
        if any_batch and shape:
            [rows] = jax.export.symbolic_shape("batch", scope=scope)
            shape = rows, *shape[1:]
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        described.append(jax.ShapeDtypeStruct(shape, dtype))
    return list(jax.tree_util.tree_unflatten(tree, described))


def _bound_on_host(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` with the arrays that are bound to it, such as those of a model, on the host."""

    def one(leaf: Any) -> Any:
        return _on_host(leaf) if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) else leaf

    if not isinstance(step, functools.partial):
        return step
    args, kwargs = jax.tree_util.tree_map(one, (step.args, step.keywords), is_leaf=is_leaf)
    return functools.partial(_bound_on_host(step.func), *args, **kwargs)


def _on_host(array: jax.Array) -> Any:
    """A NumPy array; or keys, which NumPy does not have, where JAX puts a value of the host."""
    with _jax.outside_tracing():
        return of_key_data(np.asarray, array) if is_key(array.dtype) else np.asarray(gathered(array))


def _array(leaf: Any, name: str) -> Any:
    value = leaf.value if isinstance(leaf, Variable) else leaf
    if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"{name} returned {value!r}; an exported step returns arrays, in tuples, lists and dicts")
    return jnp.asarray(value)
