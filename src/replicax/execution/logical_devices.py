"""Model parallelism: values of a step on the logical devices of its replica."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from replicax import context
from replicax.devices.host_values import as_array, check_integers, dtype_and_shape
from replicax.devices.logical_axes import Axes, constrained, parted, spec_of
from replicax.devices.mesh import in_logical_mesh
from replicax.errors import ContextError, PlacementError
from replicax.execution.program.marks import assign_p
from replicax.pytrees import is_leaf, registered
from replicax.values import PerReplica, Stacked
from replicax.variables.initial_layout import checked_logical_device
from replicax.variables.variable import Variable
from replicax.workers.replicas import Replicas


class LogicalDevices:
    """The part of :class:`replicax.Strategy` that is about the logical devices of each replica."""

    @property
    @abc.abstractmethod
    def _replicas(self) -> Replicas:
        """The strategy's replicas."""

    def split_to_logical_devices(self, tensor: Any, partition_dimensions: Any) -> Any:
        """Split a value over the logical devices of its replica, and with it the computations that use it.

        The result equals ``tensor``; only its placement changes. The compiler splits the work to match: a
        matrix product with a split operand is computed in parts, a convolution over a split image exchanges the
        rows at the borders, and so does its gradient. It works anywhere in a step, under ``jit``, ``scan``, ``vmap``
        and ``grad``; the gradient of the value is split in the same way.

        Args:
          tensor: an array, of one replica's shape, or a variable; or a pytree of them. Outside a step also a
            ``PerReplica``, so that an argument of a step need not be whole on any device.
          partition_dimensions: the number of parts of each dim. Their product is the number of logical
            devices of a replica.

        Returns:
          The same value, of the same locality. On the per-replica executor nothing is split, but all is checked.

        Raises:
          ValueError: not one positive int for each dim of ``tensor``; a product that is not the number of logical
            devices; a dim whose size does not divide by its number of parts.
          ContextError: called in another strategy's step.

        Issues no collective by itself. Computations with the parts may need some.

        >>> import jax, numpy as np, jax.numpy as jnp, replicax
        >>> devices = np.array(jax.devices()).reshape(2, 4)  # 2 replicas of 4 logical devices
        >>> strategy = replicax.Strategy(replicax.StrategyExtended(devices))
        >>> def step(x, w):
        ...     x = strategy.split_to_logical_devices(x, [2, 2])
        ...     return x @ w
        >>> program = strategy.extended.trace(step, args=(jnp.ones((64, 32)), jnp.ones((32, 8))))
        >>> [(c.kind, c.bytes) for c in program.collectives()][:1]  # partial sums of 32 rows each
        [('all-reduce', 1024)]
        """
        count = self._replicas.num_logical_devices

        def split(value: Any, shape: tuple[int, ...], what: str) -> Any:
            axes = parted(shape, partition_dimensions, count, f"split_to_logical_devices: {what}")
            return _spread(self._replicas, value, axes)

        return _each("split_to_logical_devices", self._replicas, tensor, split)

    def replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Make a value whole on all logical devices of its replica.

        Without it the compiler decides whether a value is split. Use it for a value that is needed whole, such as the
        logits of a loss.

        Args:
          tensor: an array, of one replica's shape, or a variable; or a pytree of them.

        Returns:
          The same value, of the same locality.

        Raises:
          ContextError: called in another strategy's step.

        If the value is split over the logical devices, one all-gather among the logical devices of each replica.

        >>> import jax, numpy as np, jax.numpy as jnp, replicax
        >>> strategy = replicax.Strategy(replicax.StrategyExtended(np.array(jax.devices()).reshape(2, 4)))
        >>> def step(x):
        ...     parts = strategy.split_to_logical_devices(x, [4, 1])
        ...     return strategy.replicate_to_logical_devices(parts * 2)
        >>> [c.kind for c in strategy.extended.trace(step, args=(jnp.ones((8, 3)),)).collectives()]
        ['all-gather']
        """
        replicas = self._replicas
        return _each("replicate_to_logical_devices", replicas, tensor, lambda value, *_: _spread(replicas, value, ()))

    def assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Put a value on one logical device of its replica, and with it the operations that use it.

        These operations run there, and their memory is there, forward and backward: so each stage of a model gets its
        own device (pipeline parallelism). With a Python loop over microbatches in the step, the devices work on
        different microbatches at the same time. The rules are in
        :mod:`replicax.pipeline.placement`; in short:

        - An operation runs on the logical device of its operands, and so does its gradient. The value itself is
          computed where its operands are, and then sent: to run an operation on a device, assign its operands.
        - A variable moves to the device that uses it, for good, with its gradient and its slots.
        - Operations that use no assigned value run on device 0.
        - An operation with operands on two devices is an error, and so is a variable that is used on two: nothing is
          copied unless you assign it, except numbers and random keys.

        Args:
          tensor: an array, a variable, or a pytree of them.
          logical_device_id: the logical device of the replica, from 0.

        Returns:
          The same value, of the same locality. On the per-replica executor nothing moves, but the id is checked.

        Raises:
          ValueError: there is no such logical device.
          TypeError: ``logical_device_id`` is not an int.
          ContextError: called outside a step, or in another strategy's step.
          PlacementError: before the step runs, if an operation can't be placed.

        Issues no collective. Values on another device are sent, within each replica.

        >>> import jax, numpy as np, jax.numpy as jnp, replicax
        >>> strategy = replicax.Strategy(replicax.StrategyExtended(np.array(jax.devices()).reshape(4, 2)))
        >>> with strategy.scope():
        ...     first, second = (replicax.Variable(jnp.ones((64, 64)), name=name) for name in ("first", "second"))
        >>> def step(x):
        ...     h = jnp.tanh(x @ first)  # on logical device 0, as nothing is said
        ...     h = strategy.assign_to_logical_device(h, 1)
        ...     return jnp.mean(h @ second)
        >>> float(strategy.run(step, args=(jnp.ones((8, 64)),)))
        64.0
        >>> sorted(d.id for d in second.value.devices())  # those of the replicas' logical devices 1
        [1, 3, 5, 7]
        """
        method = "assign_to_logical_device"
        device = checked_logical_device(logical_device_id, self._replicas.num_logical_devices, method)
        if not context.in_step():
            raise ContextError(f"{method} says where a step's operations run: call it inside a step (strategy.run)")

        def assign(value: Any, shape: tuple[int, ...], what: str) -> Any:
            value = jnp.asarray(value)
            if not in_logical_mesh():
                return value
            replica = context.get_replica_context()
            if replica is not None and replica._communicator.examples and replica._communicator.examples.parts > 1:
                raise PlacementError(
                    f"{method}: the step's gradients are accumulated. A step that assigns values to logical devices "
                    "divides its batch into microbatches itself: have more of them there, in place of accumulating"
                )
            return assign_p.bind(value, device=device, number=next(_assignments), back=False)

        return _each(method, self._replicas, tensor, assign)

    experimental_assign_to_logical_device = assign_to_logical_device
    experimental_split_to_logical_devices = split_to_logical_devices
    experimental_replicate_to_logical_devices = replicate_to_logical_devices


_assignments = itertools.count()


def _each(method: str, replicas: Replicas, tree: Any, spread: Callable[[Any, tuple[int, ...], str], Any]) -> Any:
    """``spread(array, shape, name)`` of each leaf of a pytree; the shape is that of one replica's array."""
    if context.in_step_of_another(replicas):
        raise ContextError(f"{method} of {replicas!r} was called in a step of {context.current_replicas()!r}")

    def one(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path) or "the array"
        if isinstance(leaf, Variable):
            return spread(leaf.read_value(), leaf.shape, leaf.describe())
        if isinstance(leaf, PerReplica):
            if not isinstance(leaf.form, Stacked):
                raise TypeError(f"{method}: {leaf!r} is not an array of the same shape on every replica")
            aval = jax.ShapeDtypeStruct(leaf.form.array.shape[1:], leaf.form.array.dtype)
            return spread(leaf, aval.shape, f"{name} ({dtype_and_shape(aval)})")
        what = f"{method}: {name}"
        check_integers(leaf, what)
        value = leaf if isinstance(leaf, jax.Array | np.ndarray) else as_array(leaf, what)
        return spread(value, value.shape, f"{name} ({dtype_and_shape(value)})")

    return jax.tree_util.tree_map_with_path(one, registered(tree), is_leaf=is_leaf)


def _spread(replicas: Replicas, value: Any, axes: Axes) -> Any:
    if context.in_step() or replicas.num_logical_devices == 1:
        return value if isinstance(value, PerReplica) else constrained(jnp.asarray(value), axes)
    mesh = replicas.mesh
    if isinstance(value, PerReplica):
        assert isinstance(value.form, Stacked)
        array = jax.device_put(value.form.array, NamedSharding(mesh, spec_of(((), *axes), 0)))
        return PerReplica(Stacked(array), value.mask, value.dim)
    return jax.device_put(value, NamedSharding(mesh, spec_of(axes)))
