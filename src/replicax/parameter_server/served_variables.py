"""Variables on servers, as the coordinator's process sees them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax.devices.host_values import is_key
from replicax.errors import WorkerError
from replicax.parameter_server.actors import ActorDiedError, NoRoomError
from replicax.parameter_server.definitions import Definitions, OptimizerDefinition
from replicax.parameter_server.server.messages import OptimizerPart
from replicax.parameter_server.server.optimizer_update import check_by_parts, update_of
from replicax.parameter_server.server.servers import Servers
from replicax.parameter_server.server.shards import ShardChoice, Shards
from replicax.pytrees import is_leaf
from replicax.training.optimizer import Optimizer
from replicax.training.optimizer_state import owners_of
from replicax.variables.collection import VariableCollection
from replicax.variables.partitioners import GroupPartitioner, Partitioner, PieceCounts
from replicax.variables.slots import Slot, launching
from replicax.variables.variable import Variable

if TYPE_CHECKING:
    from replicax.parameter_server.dispatcher import Dispatcher

_MOST_DEATHS = 5
"""How many servers may die during one call; with more, the caller is told before all recovery ends."""


class ServedSlot(Slot):
    """The array of a variable in the coordinator's process, synchronized with the servers.

    Storing an array sends it to the servers, and each read fetches what has changed there. Without servers it is a slot
    like any other.
    """

    __slots__ = ("_known", "home", "number")

    def __init__(self, array: jax.Array) -> None:
        super().__init__(array)
        self._known: Any = None
        self.home: VariableHome | None = None
        self.number = -1

    @property
    def array(self) -> Any:
        if self.home is not None and not self.is_new:
            self.home.refresh(self)
        return super().array

    @array.setter
    def array(self, array: Any) -> None:
        Slot.array.fset(self, array)  # type: ignore[attr-defined]
        if self.home is not None:
            self.home.assign(self.number)

    @property
    def here(self) -> Any:
        """The array of this process."""
        return super().array

    @property
    def is_new(self) -> bool:
        """Return whether the servers don't have this array yet."""
        return super().array is not self._known

    def agree(self, array: Any) -> None:
        """Note that the servers have this array, too."""
        self._known = array
        Slot.array.fset(self, array)  # type: ignore[attr-defined]


class ServedCollection(VariableCollection):
    """The variables of a strategy with parameter servers, in the coordinator's process."""

    has_copies = False

    def slot(self, array: jax.Array) -> Slot:
        return ServedSlot(array)

    def add(self, variable: Variable) -> int:
        if variable.is_on_read:
            raise ValueError(
                f"{variable.describe()}: on parameter servers a variable has one value, and no copy for each replica. "
                "Leave synchronization='on_read' out, and choose an aggregation: what steps add with assign_add is "
                "added up on the servers."
            )
        if is_key(variable.dtype):
            raise TypeError(
                f"{variable.describe()}: parameter servers keep no random keys, and several workers would draw alike "
                "from one. Make a key in the step, of a number that changes: "
                "jax.random.fold_in(jax.random.key(seed), number)"
            )
        for_servers(variable.partitioner)
        return super().add(variable)


def for_servers(partitioner: Partitioner | None) -> PieceCounts | None:
    """Return ``partitioner``, which must be able to split variables over servers."""
    if isinstance(partitioner, GroupPartitioner):
        raise ValueError(
            f"{partitioner!r} splits variables within groups of replicas. On parameter servers the servers have the "
            "parts, and there are no groups: use FixedShardsPartitioner, MinSizePartitioner or MaxSizePartitioner"
        )
    return partitioner


class VariableHome:
    """The variables of a strategy on its servers, as long as there are servers.

    Threads of the program and the dispatcher's call it, one at a time: they hold :data:`launching`, which reading and
    assigning a variable takes anyway. What they send, they send with the dispatcher's lock, so not during a snapshot,
    nor while servers go back. The dispatcher's thread takes :data:`launching` before its own lock, never after.

    What was sent since the last snapshot would be lost with a server, and is sent again when servers go back: values
    that functions begin with before these run again, and values that the program has assigned since then after that.
    """

    dispatcher: Dispatcher  # takes snapshots, and makes servers that have died go back

    def __init__(
        self,
        variables: VariableCollection,
        servers: Servers,
        choice: ShardChoice,
        dumps: Callable[[Any, str], bytes],
    ) -> None:
        self._variables = variables
        self._dumps = dumps
        self.servers = servers
        self._choice = choice
        self.definitions = Definitions()
        self.definitions.define(("servers", 0), servers.actors)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._defined: dict[int, tuple[Sequence[int], OptimizerPart]] = {}
        self._sent: dict[int, Any] = {}
        # Values that the program has assigned, and functions since the last snapshot have not begun with.
        self.assigned: dict[int, Any] = {}
        self.lost: str | None = None  # why the servers could not be restored; their present state is useless

    # --- variables --------------------------------------------------------------------------------------

    def assign(self, number: int) -> None:
        """Send the servers a variable that the program has assigned."""
        self._try(lambda: self._send([self._variables[number]]))
        self.dispatcher.save()

    def _send(self, variables: Iterable[Variable]) -> None:
        """Send those of them that are new or changed here."""
        if gone := self.definitions.forget():
            self.servers.drop(gone)
        for kind, number in gone:
            if kind == "variable":
                for values in (self._sent, self.assigned):
                    values.pop(number, None)
            elif kind == "optimizer":
                self._defined.pop(number, None)
        new = [variable for variable in variables if _slot(variable).is_new]
        assigned = {variable.number for variable in new if variable.number in self.definitions.shards}
        for variable in new:
            slot = _slot(variable)
            slot.home, slot.number = self, variable.number
            if variable.number not in assigned:
                shards = self._choice.shards_of(variable, for_servers(variable.partitioner))
                self.definitions.define_variable(variable, shards)
        self._put(new, assigned)

    def _put(self, variables: Iterable[Variable], assigned: Collection[int] = ()) -> None:
        arrays = {variable: _slot(variable).here for variable in variables}
        values = {}
        for variable, array in arrays.items():
            number = variable.number
            values[number] = self.definitions.shards[number], np.asarray(array), variable.aggregation.value
            self.assigned.pop(number, None)
            (self.assigned if number in assigned else self._sent)[number] = values[number]
        self.servers.put(values)
        for variable, array in arrays.items():
            _slot(variable).agree(array)

    def refresh(self, slot: ServedSlot) -> None:
        """Fetch the servers' value into a slot."""
        self._try(lambda: self._refresh(slot), reads=True)

    def _refresh(self, slot: ServedSlot) -> None:
        shards = self.definitions.shards[slot.number]
        values = self.servers.pull({slot.number: shards}, lambda _: slot.here)
        if slot.number in values:
            slot.agree(self._variables[slot.number].to_storage(np.array(values[slot.number])))

    def restore_servers(self) -> None:
        """Restore servers that have died, if any."""
        self._try(self.servers.wait_until_ready)

    def leave(self) -> None:
        """Fetch all variables, which from now on exist only here."""
        with launching:
            slots = [_slot(v) for v in self._variables if v.number in self.definitions.shards]
            try:
                self._check_lost()
                for slot in slots:
                    if not slot.is_new:
                        self._refresh(slot)
            except (ActorDiedError, NoRoomError, TimeoutError) as error:
                raise WorkerError(
                    f"{error}. Variables have the values that this program has read last; restore them from a "
                    "checkpoint."
                ) from None
            finally:
                for slot in slots:
                    slot.home = None

    # --- servers that die -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let the next functions begin with the assigned values: none has run since the last snapshot."""
        self._sent |= self.assigned
        self.assigned.clear()

    def saved(self) -> None:
        """A snapshot has all values."""
        self._sent.clear()
        self.assigned.clear()

    def resend(self) -> None:
        """Send what functions begin with, and optimizers, after the servers have gone back to the last snapshot."""
        self.servers.put(self._sent)
        for servers, part in self._defined.values():
            self.servers.define(servers, part)

    def _try(self, call: Callable[[], Any], reads: bool = False) -> Any:
        """Call the servers while no other thread does; repeat it if one has died and all have gone back.

        If it ``reads``, also repeat it if the servers have gone back for another reason. After they have gone back, no
        call is made until they have again all changes that the program knows of.
        """
        with launching:
            deaths, lost_in = 0, None
            while True:
                era = self.dispatcher.settled(lost_in)
                lost_in = None
                try:
                    with contextlib.nullcontext() if reads else self.dispatcher.lock:
                        self._check_lost()
                        result = call()
                except ActorDiedError:
                    deaths += 1
                    if deaths > _MOST_DEATHS:
                        raise
                    lost_in = era
                else:
                    if not reads or self.dispatcher.settled() == era:
                        return result

    def _check_lost(self) -> None:
        if self.lost is not None:
            raise ActorDiedError(self.lost)

    # --- optimizers -------------------------------------------------------------------------------------

    def number_of(self, optimizer: Optimizer) -> int:
        """The number of an optimizer on workers and servers."""
        with launching:
            if optimizer not in self._optimizers:
                definition = OptimizerDefinition(optimizer.name)
                _, self._optimizers[optimizer] = self.definitions.define_new("optimizer", optimizer, definition)
            return self._optimizers[optimizer]

    def build(self, number: int, variables: Any) -> None:
        """Build and define an optimizer for the variables of a worker's gradients, a pytree of their numbers."""
        with launching:
            [optimizer] = [known for known, its in self._optimizers.items() if its == number]
            optimizer.build(jax.tree_util.tree_map(lambda its: self._variables[its], variables))
        try:
            self.define()
        except (ActorDiedError, TimeoutError):
            raise
        except Exception:  # the servers can't apply it; functions that do not use it are no worse for that
            optimizer.forget()
            raise

    def define(self) -> None:
        """Send the servers new variables, and define new optimizers."""
        self._try(self._define_new)

    def _define_new(self) -> None:
        self._send(self._variables)
        for optimizer, number in list(self._optimizers.items()):
            if number not in self._defined and optimizer.parameters is not None:
                self._define(number, optimizer)

    def _define(self, number: int, optimizer: Optimizer) -> None:
        shards = self.definitions.shards
        places, _ = jax.tree_util.tree_flatten_with_path(optimizer.parameters, is_leaf=is_leaf)
        variables = [v for _, v in places]
        servers = sorted({server for v in variables for server in shards[v.number].servers})
        slots: list[Variable] = []
        owners: list[Variable | None] = []
        leaves, _ = jax.tree_util.tree_flatten_with_path(optimizer.state, is_leaf=is_leaf)
        for (_, slot), found in zip(leaves, owners_of(leaves, places), strict=True):
            owner = None if found is None else found[1]
            if owner is not None and owner.shape == slot.shape:
                beside = shards[owner.number]
            else:
                owner, beside = None, Shards(None, dict.fromkeys(servers, (0, 0)))
            if beside != shards[slot.number]:
                self.servers.drop([("variable", slot.number)])
                self.definitions.define_variable(slot, beside)
                self._put([slot])
            slots.append(slot)
            owners.append(owner)
        split = {v for v in variables if shards[v.number].is_split}
        check_by_parts(update_of(optimizer.tx, optimizer._tree), variables, slots, owners, split, len(servers))
        tree = jax.tree_util.tree_unflatten(optimizer._tree, [v.number for v in variables])
        empty = {}
        for v in (*variables, *slots):
            if (split_dim := shards[v.number].dim) is not None:
                shape = [0 if dim == split_dim else size for dim, size in enumerate(v.shape)]
                empty[v.number] = np.zeros(shape, v.dtype)
        part = OptimizerPart(number, optimizer.tx, tree, tuple(s.number for s in slots), empty)
        self.servers.define(servers, part)
        self._defined[number] = servers, part
        pickled = self._dumps(optimizer.parameters, "the pytree of an optimizer's variables")
        self.definitions.define(("optimizer", number), OptimizerDefinition(optimizer.name, pickled))


def _slot(variable: Variable) -> ServedSlot:
    slot = variable.slot
    assert isinstance(slot, ServedSlot)
    return slot
