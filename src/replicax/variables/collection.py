"""The variables of a strategy, and the values on which all workers must agree."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from replicax import _jax, collectives
from replicax.devices.arrays import put
from replicax.devices.host_values import dtype_and_shape
from replicax.devices.logical_axes import over_replicas
from replicax.devices.mesh import REPLICA_AXIS
from replicax.errors import LocalityError
from replicax.variables.layout import Copies, Layout, Split
from replicax.variables.partitioners import Partitioner
from replicax.variables.slots import Slot
from replicax.workers.digests import digest
from replicax.workers.replicas import Replicas

if TYPE_CHECKING:
    from replicax.variables.variable import Variable


class VariableCollection:
    """The variables of a strategy, by number and name. Both are the same on all workers.

    They lie on the devices of ``replicas``. The ``partitioner`` splits on-write variables; those that it does not split
    have the ``default_layout``. ``run`` runs a step in cross-replica context, which combines copies that differ.
    """

    has_copies = True
    """Whether each replica can have a value of its own: on-read variables."""

    def __init__(
        self,
        replicas: Replicas,
        partitioner: Partitioner | None,
        default_layout: Layout,
        run: Callable[[Callable[..., Any], tuple[Any, ...]], Any],
    ) -> None:
        self.replicas = replicas
        self.partitioner = partitioner
        self.default_layout = default_layout
        self.run = run
        self._numbers = itertools.count()
        self._variables: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
        self._owners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def named(self, owner: Any, wanted: str) -> str:
        """The name of ``owner``: ``wanted``, with a number while another object that lives has that name."""
        name, number = wanted, 0
        while self._owners.get(name, owner) is not owner:
            number += 1
            name = f"{wanted}_{number}"
        self._owners[name] = owner
        return name

    def rename(self, owner: Any, name: str) -> None:
        """Give ``owner`` the name that it has on another worker."""
        self._owners[name] = owner

    def slot(self, array: jax.Array) -> Slot:
        """The slot for the stored array of a new variable."""
        return Slot(array)

    def add(self, variable: Variable) -> int:
        """Add a new variable, and return its number."""
        number = next(self._numbers)
        self._variables[number] = variable
        return number

    def __iter__(self) -> Iterator[Variable]:
        """Iterate over the variables that exist, in the order of their creation."""
        return (self._variables[number] for number in sorted(self._variables))

    def __getitem__(self, number: int) -> Variable:
        return self._variables[number]


@dataclasses.dataclass(frozen=True)
class Initial:
    """The initial value of a new variable on this worker."""

    stored: Callable[[], jax.Array]  # makes the stored array
    whole: Callable[[], Any]  # makes this worker's own value, whole
    # Makes a digest of it to compare with other workers'. Used for variables that are split over the replicas: each
    # worker has other pieces then, which can't be compared.
    digest: Callable[[], Any]


def agreed_initial(variable: Variable, initial: Initial) -> jax.Array:
    """The stored array that a new variable starts with: the chief's, if the workers' initial values differ.

    Usually all workers compute the same initial value, and only a digest is sent. But ``np.random`` without a seed
    gives other numbers in every process, and copies that differ at the start would differ for ever. Pieces that differ
    would be those of several values. Raises a ValueError if the workers create different variables here, and a
    DeadlockError if some don't create one.
    """
    lockstep = variable.replicas.lockstep
    if not lockstep.several:
        return initial.stored()
    is_split = isinstance(variable.layout, Split)
    stored = None if is_split else initial.stored()
    options = f"{variable.synchronization.value}, {variable.aggregation.value}, {variable.layout}"
    if stored is None:
        digests = [initial.digest()]
    else:
        own = isinstance(variable.layout, Copies)  # one of them, as all begin alike
        parts = {repr(s.index[own:]): s.data[0] if own else s.data for s in stored.addressable_shards}
        digests = [digest(part) for part in parts.values()]
    offer_here = (dtype_and_shape(variable), options, digests, variable.name)
    offers = lockstep.exchange("creates a variable", offer_here, repr(variable.name))
    for worker, offer in enumerate(offers):
        if offer[:2] != offers[0][:2]:
            raise ValueError(
                f"{variable.describe()}: the workers create different variables here, worker 0 one of "
                f"{', '.join(offers[0][:2])}, and worker {worker} one of {', '.join(offer[:2])}. All workers must "
                "create the same variables in the same order."
            )
    # Which names are free may depend on what the garbage collector has collected already.
    variable.name = offers[0][3]
    variable.collection.rename(variable, variable.name)
    if all(offer[:3] == offers[0][:3] for offer in offers):
        return initial.stored() if stored is None else stored
    if stored is None:  # for once each device has it whole
        return _from_first(variable, put(initial.whole(), variable.layout.whole_sharding(variable.replicas.mesh)))
    return _from_first(variable, stored)


def check_all_read(variable: Variable) -> None:
    """Raise unless all workers are about to read the variable, if several of them have its pieces."""
    if variable.is_spread:
        variable.stored()
        variable.replicas.lockstep.exchange("reads the whole of a split variable", None, repr(variable.name))


def check_agreed(variable: Variable, value: Any) -> None:
    """Raise unless all workers assign the same value from outside a step."""
    lockstep = variable.replicas.lockstep
    if not lockstep.several or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return  # an array on all workers was computed by all
    differing = lockstep.agree(f"assigns to variable {variable.name!r}", digest(value))
    if differing is not None:
        raise LocalityError(
            f"{variable.describe()} was assigned a plain value, which must be the same on all workers, but worker "
            f"{differing[1]} has another than worker 0. Reduce the value first, or assign it inside a step."
        )


@_jax.compiling()
def _from_first(variable: Variable, array: jax.Array) -> jax.Array:
    """The stored array for all replicas, from replica 0's part of ``array`` (one all-reduce).

    ``array`` is the stored array, or the whole value of a split variable. Workers have different ones.
    """
    is_split = isinstance(variable.layout, Split)
    spec = over_replicas(variable.layout.whole_spec if is_split else variable.layout.spec)
    mapped = jax.shard_map(
        collectives.from_first,
        mesh=variable.replicas.mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names={REPLICA_AXIS},
        check_vma=False,
    )
    layout, mesh = variable.layout, variable.replicas.mesh
    if not is_split:
        return jax.jit(mapped, out_shardings=variable.sharding)(array)
    sharding = layout.laid_out_sharding(mesh)
    return layout.to_stored(jax.jit(lambda whole: layout.laid_out(mapped(whole)), out_shardings=sharding)(array), mesh)
