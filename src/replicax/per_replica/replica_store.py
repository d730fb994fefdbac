"""The store of the per-replica executor: one replica's variables, and the facts about its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _jax
from replicax.devices.arrays import local_array
from replicax.devices.host_values import check_x64
from replicax.errors import LocalityError
from replicax.execution.program.marks import Obligation, mark_p
from replicax.locality import Locality, M, T
from replicax.per_replica.array_facts import Localities, Places
from replicax.per_replica.collectives import PerReplicaCommunicator
from replicax.per_replica.eager.eager_trace import WatchingTrace
from replicax.values import Local, PerReplica, components_in
from replicax.variables.layout import Split
from replicax.variables.store import Creations, check_owner, check_write_trace
from replicax.variables.variable import Variable
from replicax.workers.replicas import Replicas


class PerReplicaStore:
    """The store of one replica; see :class:`replicax.variables.store.Store`."""

    def __init__(
        self,
        replicas: Replicas,
        communicator: PerReplicaCommunicator,
        localities: Localities,
        places: Places | None,
        creations: Creations,
        fetch: Callable[[Variable], None],
    ) -> None:
        self.create = creations.create
        self.if_it_fails = creations.if_it_fails
        self._fetch = fetch
        self.replicas = replicas
        self.communicator = communicator
        self.localities = localities
        self.places = places
        self.values: dict[Variable, Any] = {}
        self.written: dict[Variable, str | None] = {}
        self.mirrored: list[tuple[Any, frozenset[Locality], str]] = []
        self.differing: list[tuple[Any, frozenset[Locality], str]] = []
        self.obligations: list[Obligation] = []
        self.trace = WatchingTrace(self.watch, communicator.device, each=places is not None)

    def read(self, variable: Variable) -> Any:
        check_owner(variable, self.replicas)
        if variable not in self.values:
            check_x64(variable.dtype, variable.describe)
            with _jax.outside_tracing():
                self._fetch(variable)
                self.values[variable] = (
                    self._put_together(variable)
                    if variable.is_spread
                    else local_value(variable, self.communicator.replica)
                )
            self.localities.note(self.values[variable], T if variable.is_stacked else M)
        _jax.note_read(self.trace)
        return self.values[variable]

    def _put_together(self, variable: Variable) -> jax.Array:
        """The whole value, from the pieces of all replicas on all workers."""
        layout = variable.layout
        assert isinstance(layout, Split)
        k = self.replicas.per_device
        mine = layout.pieces_here(variable.stored())[self.communicator.replica // k]
        pieces = self.communicator.gathered(f"reading {variable.describe()}, which is split over several workers", mine)
        return layout.joined(pieces[: layout.replicas * k : k])  # the first group of replicas has all pieces

    def write(self, variable: Variable, value: Any, error_unless_mirrored: str | None) -> None:
        check_owner(variable, self.replicas)
        check_write_trace(variable, self.trace)
        if error_unless_mirrored is not None:
            self.expect([value], frozenset({T}), error_unless_mirrored)
        self.values[variable] = value
        _jax.renew_kept_programs()
        self.written[variable] = error_unless_mirrored

    def copies(self, variable: Variable) -> PerReplica:
        return PerReplica(Local(self.read(variable), self.communicator))

    def expect(
        self, values: Sequence[Any], refused: frozenset[Locality], message: str, *, is_loss: bool = False
    ) -> list[Any]:
        # The mark checks this, as in a compiled step: inside value_and_grad it gets the values, not their tracers.
        self.obligations.append(Obligation(refused, message, is_loss))
        return mark_p.bind(*map(jnp.asarray, values), mark_id=len(self.obligations) - 1)

    def answer(self, value: Any, mark_id: int) -> None:
        """Check the locality of ``value``, which a mark has received."""
        # A difference is an error at once; equality is known only when all replicas have ended.
        refused, message = self.obligations[mark_id].refused, self.obligations[mark_id].message
        locality = self.localities.of(value)
        several = self.replicas.num_replicas > 1
        if several and locality in refused and (locality is T or M not in refused):
            raise LocalityError(message)
        (self.mirrored if T in refused else self.differing).append((value, refused, message))

    def watch(self, primitive: Any, args: Sequence[Any], params: Any, results: Sequence[Any]) -> None:
        """Note the facts of an operation's results, or answer a mark."""
        if primitive is mark_p:
            self.answer(args[0], params["mark_id"])
        else:
            self.localities.watch(primitive, args, params, results)
        if self.places is not None:
            self.places.watch(primitive, args, params, results)

    def end(self) -> None:
        """Drop the trace, which refers to this store: without the cycle the step's arrays are freed immediately."""
        del self.trace


def local_value(variable: Variable, replica: int) -> jax.Array:
    """One replica's value of a variable, on its device."""
    device = variable.replicas.worker_devices[replica]
    if not variable.is_stacked:
        return _jax.copy_on(device, local_array(variable.from_storage()))
    return jax.device_put(jnp.squeeze(components_in(variable.stored())[replica], 0), device)
