"""Pytrees of variables: the parameters of a model that another library has made, and back to arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _jax
from replicax.argument_checks import checked_name, parse_enum
from replicax.devices.arrays import put_copies
from replicax.devices.host_values import check_x64, is_key
from replicax.pytrees import is_leaf, registered
from replicax.values import USE_LEAVES, rebuilt
from replicax.variables.aggregation import Aggregation, Synchronization
from replicax.variables.layout import Mirrored
from replicax.variables.partitioners import Partitioner
from replicax.variables.slots import store_each
from replicax.variables.store import ConcreteStore, current_store
from replicax.variables.variable import Variable

Tree = TypeVar("Tree")


def as_variables(
    tree: Tree,
    *,
    trainable: bool | None = None,
    name: str | None = None,
    synchronization: Synchronization | str = "auto",
    aggregation: Aggregation | str = "none",
    partitioner: Partitioner | None = None,
) -> Tree:
    """The same pytree, with a :class:`Variable` for each array in it.

    Call it in the strategy's scope, which places the variables as it places others. Variables, and leaves that are no
    arrays (functions, numbers, strings, ``None``), stay unchanged.

    Args:
      tree: a pytree of arrays of JAX or NumPy: the parameters of a Flax Linen or Haiku model, an Equinox module.
      trainable: of all variables; by default true for those of a float dtype.
      name: what their names begin with. They are called by their paths: ``params/dense/kernel``.
      synchronization: of all variables; see :class:`Variable`.
      aggregation: of all variables; ``"mean"`` and ``"sum"`` only of those that can be averaged or added up: random
        keys, and integers with ``"mean"``, have ``"none"``.
      partitioner: of all variables; by default the strategy's.

    Returns:
      A pytree of the same structure.

    Raises:
      ValueError, TypeError: as :class:`Variable` does; names the variable. None of them is kept then.
      TypeError: a class in the tree does not keep the variables that it is given.

    >>> import replicax, numpy as np
    >>> strategy = replicax.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     params = replicax.as_variables({"dense": {"kernel": np.ones(2, np.float32)}, "steps": np.int32(3)})
    >>> params["dense"]["kernel"]
    <Variable 'dense/kernel' float32[2] mirrored on 2 replicas: [1. 1.]>
    >>> params["steps"].trainable
    False
    """
    checked_name(name, "as_variables")
    leaves, structure = jax.tree_util.tree_flatten_with_path(registered(tree), is_leaf=is_leaf)
    wanted = parse_enum(Aggregation, aggregation, "aggregation")

    def one(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        inexact = bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
        return Variable(
            leaf,
            name="/".join(filter(None, [name, jax.tree_util.keystr(path, simple=True, separator="/")])) or None,
            trainable=trainable if trainable is not None or inexact else False,
            synchronization=synchronization,
            aggregation=wanted if _can_be_combined(leaf.dtype, wanted) else Aggregation.NONE,
            partitioner=partitioner,
        )

    made = [one(path, leaf) for path, leaf in leaves]
    result = rebuilt(structure, made)
    kept = {id(leaf) for leaf in jax.tree_util.tree_leaves(result, is_leaf=is_leaf)}
    for variable in made:
        if isinstance(variable, Variable) and id(variable) not in kept:
            raise TypeError(
                f"as_variables: a class in the tree keeps no variable in the place of the array {variable.name!r}. "
                f"{USE_LEAVES}"
            )
    return result


def as_arrays(tree: Tree) -> Tree:
    """The same pytree, with the present value of each variable in the variable's place.

    Inside a step these are this replica's values; inside the function of :func:`value_and_grad` those by which it is
    differentiated. Outside they are those that ``variable.value`` gives.

    Args:
      tree: any pytree, such as :func:`as_variables` returns.

    Returns:
      A pytree of the same structure, without variables.

    Raises:
      LocalityError: as ``variable.value`` does.

    >>> import replicax, numpy as np
    >>> params = replicax.as_variables({"w": np.ones(2, np.float32), "activation": "relu"})
    >>> replicax.as_arrays(params)
    {'activation': 'relu', 'w': Array([1., 1.], dtype=float32)}
    """
    return jax.tree_util.tree_map(
        lambda leaf: leaf.value if isinstance(leaf, Variable) else leaf, registered(tree), is_leaf=is_leaf
    )


def assign(variables: Tree, values: Tree) -> None:
    """Set each variable in ``variables`` to the value at its place in ``values``, as ``variable.assign`` does.

    Mirrored variables get theirs in one transfer.

    Args:
      variables: a pytree of variables. Its other leaves stay unchanged.
      values: a pytree of the same structure, of arrays or of variables.

    Raises:
      ValueError: another structure; another value for a number, which is no variable; or, with the variable's name,
        another shape.
      TypeError, LocalityError: as ``variable.assign`` does. A shape or a dtype that does not fit is found before any
        variable is changed.

    Issues the collectives of ``variable.assign``.

    >>> import replicax, numpy as np
    >>> params = replicax.as_variables({"w": np.ones(2, np.float32)})
    >>> replicax.assign(params, {"w": np.zeros(2, np.float32)})
    >>> params["w"].numpy().tolist()
    [0.0, 0.0]
    """
    structure: Any
    paths, structure = jax.tree_util.tree_flatten_with_path(registered(variables), is_leaf=is_leaf)
    try:
        new = structure.flatten_up_to(registered(values))
    except (ValueError, TypeError) as error:
        found = jax.tree_util.tree_structure(values, is_leaf=is_leaf)
        raise ValueError(
            f"replicax.assign(variables, values): values must have the structure of the variables, {structure}, but "
            f"have {found}"
        ) from error
    pairs = []
    for (path, leaf), value in zip(paths, new, strict=True):
        if isinstance(leaf, Variable):
            pairs.append((leaf, as_arrays(value)))
        elif isinstance(leaf, int | float | complex) and not _is_same_number(leaf, value):
            raise ValueError(
                f"replicax.assign: variables{jax.tree_util.keystr(path)} is the number {leaf!r} and no variable, so it "
                f"can't become {value!r}. Make it an array before as_variables, as in jnp.asarray({leaf!r})"
            )
    assign_all(pairs)


@_jax.public_call
def assign_all(pairs: Sequence[tuple[Variable, Any]]) -> None:
    """Assign each variable its value, as ``variable.assign`` does, one after the other.

    Mirrored variables get theirs in one transfer, outside of a step. A shape or a dtype that does not fit is found
    before any variable is changed.
    """
    checked = [(variable, _checked_value(variable, value)) for variable, value in pairs]
    coalesced: dict[Variable, Any] = {}
    is_outside = isinstance(current_store(), ConcreteStore) and _jax.current_trace() is _jax.eval_trace()
    for variable, value in checked:
        if is_outside and _is_plain(variable):
            coalesced[variable] = value
        else:
            variable.assign(value)
    if not coalesced:
        return
    shardings = [variable.layout.sharding(variable.replicas.mesh) for variable in coalesced]
    stored = put_copies(list(coalesced.values()), shardings)
    store_each({variable.slot: array for variable, array in zip(coalesced, stored, strict=True)})


def _is_same_number(number: complex, value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):
        return False  # computed in the step
    return value is number or bool(np.array_equal(np.asarray(value), number, equal_nan=True))


def _checked_value(variable: Variable, value: Any) -> Any:
    """An array of the variable's shape and dtype; a NumPy array stays one, in memory that is never written to."""
    if (
        isinstance(value, jax.Array)
        and not getattr(value, "weak_type", False)  # random keys have none
        and value.dtype == variable.dtype
        and value.shape == variable.shape
    ):
        check_x64(variable.dtype, variable.describe)
        return value
    return variable.checked(value)


def _is_plain(variable: Variable) -> bool:
    """Whether every device gets the whole value, and no other worker's value has to be compared."""
    replicas = variable.replicas
    is_here = not (replicas.is_absent or replicas.lockstep.several)
    return is_here and type(variable) is Variable and type(variable.layout) is Mirrored


def _can_be_combined(dtype: Any, aggregation: Aggregation) -> bool:
    return not is_key(dtype) and (aggregation is not Aggregation.MEAN or bool(jnp.issubdtype(dtype, jnp.inexact)))
