"""Placement: on which logical device each operation of a program runs, and each of its variables lives.

The rule, for a flat program in which values are assigned to devices:

- An operation on values that are on one logical device runs there.
- Backward operations follow their forward counterparts: the gradient of an assigned value goes back to where the
  value was.
- Variables, arguments and constants have no place of their own: they go where they are used. What is computed from
  variables alone (a cast of the parameters, say) goes there too. Afterwards a variable lives there for good.
- What depends on arguments, but on nothing that is on a device, runs on device 0. If what runs elsewhere needs it, it
  is sent there.
- Numbers and random keys (at most 16 bytes) decide nothing, and are sent wherever they are needed. What is made of
  nothing else (zeros, a mask of random bits) is made where it is used.

So a place comes down with the data, from assigned values to what is computed from them, and goes up from the
operations to the variables that they use, until nothing changes any more.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicax import _jax
from replicax._jax.primitive_families import CONTROL_FLOW, EXPENSIVE, UNRELIABLE
from replicax.errors import PlacementError
from replicax.execution.program.marks import assign_p
from replicax.execution.program.program import Program
from replicax.pipeline.flat_program import Flat, bytes_of
from replicax.variables.slots import Slot

SMALL = 16
"""Values of at most this many bytes, such as numbers and random keys, are sent wherever they are needed."""


class Hold(enum.Enum):
    """The strength of a value's place for the place of values computed from it."""

    CONSTANT = "constant"
    """It has none: it is a constant, or made of such, wherever it is used."""
    ARGUMENT = "argument"
    """It has none: the step is given it, wherever it is used."""
    FLOATING = "floating"
    """It has none yet: it is made of variables that have none yet."""
    DEFAULT = "default"
    """It is on device 0, as nothing says otherwise."""
    LIGHT = "light"
    """It is on a device, but small, or made of small values."""
    FIRM = "firm"
    """It is assigned to its device, or computed from such."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place of a value."""

    hold: Hold  # how firmly
    device: int | None = None  # the logical device; ``None`` if it has no place
    since: str = ""  # the reason for its place, in words


_DEFAULT = Place(Hold.DEFAULT, 0)


def place(flat: Flat, program: Program) -> Placement:
    """Find the place of each operation and variable of ``program``, whose operations are ``flat``."""
    uses = program.uses
    present = {slot: use.layout.logical_device for slot, use in uses.items()}
    homes = {slot: (k, f"{uses[slot].describe()} lives there") for slot, k in present.items() if k is not None}
    while homes_found := Placement(flat, program, homes).found_homes():
        homes |= homes_found
    for slot in uses:
        homes.setdefault(slot, (0, "nothing is said of it"))
    placement = Placement(flat, program, homes, final=True)
    placement.check_writes()
    return placement


class Placement:
    """The places of everything in a flat program. One pass finds them, from the known homes of variables.

    Args:
      flat: the program, and ``program`` what it was made of.
      homes: a logical device, and the reason, for each variable that has one.
      final: whether to raise.
    """

    def __init__(
        self, flat: Flat, program: Program, homes: Mapping[Slot, tuple[int, str]], final: bool = False
    ) -> None:
        self.flat, self.uses, self._homes, self.final = flat, program.uses, homes, final
        self.reads = {use.slot: v for use, v in zip(program.reads, flat.inputs, strict=False)}
        self.writes = {use.slot: v for use, v in zip(program.writes, flat.outputs, strict=False)}
        self.anew: dict[Any, int] = {}  # the operation that makes a value, if it is made wherever it is used
        self.leaves: dict[Any, tuple[Any, ...]] = {}  # the values that must be there for such a value to be made
        self.origins: dict[int, Place] = {}  # the places from which assigned values came, by the assignment's number
        self._before: dict[Any, Any] = {}  # the values that were assigned, by what they are called afterwards
        self.places: dict[Any, Place] = dict.fromkeys(flat.inputs, Place(Hold.ARGUMENT))
        self.places.update(dict.fromkeys(flat.closed_over, Place(Hold.CONSTANT)))
        for slot, atom in self.reads.items():
            device, since = homes.get(slot, (None, ""))
            hold = Hold.FLOATING if device is None else Hold.LIGHT if is_small(atom) else Hold.FIRM
            self.places[atom] = Place(hold, device, since)
        # The logical device of each operation; ``None`` for one that is done wherever its result is used.
        self.devices = [self._operation(i, o.equation) for i, o in enumerate(flat.operations)]

    def home_of(self, slot: Slot) -> int:
        """The logical device of a variable."""
        return self._homes[slot][0]

    def source(self, atom: Any) -> Any:
        """The value that ``atom`` was before it was assigned to a device; may be a literal."""
        return atom if isinstance(atom, _jax.Literal) else self._before.get(atom, atom)

    # --- down, from values to what is computed from them --------------------------------------------------

    def _operation(self, index: int, equation: Any) -> int | None:
        place = (
            self._place_of_assigned(equation) if equation.primitive is assign_p else self._place_of_computed(equation)
        )
        anew = place.hold is not Hold.FIRM and self._made_of_nothing(equation)
        anew = anew and (place.hold is Hold.CONSTANT or not all(map(is_small, equation.outvars)))
        if place.hold is Hold.CONSTANT and not anew:
            place = _DEFAULT
        for v in equation.outvars:
            light = place.hold is Hold.FIRM and is_small(v)
            self.places[v] = dataclasses.replace(place, hold=Hold.LIGHT) if light else place
            if anew:
                self.anew[v] = index
                self.leaves[v] = tuple(_needs(equation.invars, self.leaves))
        return None if anew else place.device

    def _place_of_assigned(self, equation: Any) -> Place:
        params, [operand], [result] = equation.params, equation.invars, equation.outvars
        self._before[result] = self.source(operand)
        source = Place(Hold.CONSTANT) if isinstance(operand, _jax.Literal) else self.places[operand]
        line = _jax.source_line(equation)
        if params["back"]:
            origin = self.origins[params["number"]].device
            device = params["device"] if origin is None else origin
            return Place(Hold.FIRM, device, f"as the gradient of what is assigned at {line}")
        before = self.origins.setdefault(params["number"], source)
        if before.device != source.device and self.final:
            raise PlacementError(
                f"the assignment to a logical device at {line} stands in a function that JAX keeps, and which gets "
                f"values from logical device {before.device} as well as {source.device}: move it out of jax.jit"
            )
        return Place(Hold.FIRM, params["device"], f"assigned at {line}")

    def _place_of_computed(self, equation: Any) -> Place:
        operands = _jax.without_literals(equation.invars)
        large = [self.places[v] for v in operands if not is_small(v) and v not in self.anew]
        firm = _by_device(p for p in large if p.hold is Hold.FIRM)
        if len(firm) > 1 and self.final:
            raise _conflict(equation, firm)
        if firm:
            return next(iter(firm.values()))
        light = self._small_places(operands)
        if any(p.hold in (Hold.ARGUMENT, Hold.DEFAULT) for p in large):
            device = next(iter(light)) if len(light) == 1 else 0
            return dataclasses.replace(light[device], hold=Hold.FIRM) if device else _DEFAULT
        holds = {p.hold for p in large} - {Hold.CONSTANT}
        if not holds:  # small values decide where there is nothing else
            if light:
                return next(iter(light.values())) if len(light) == 1 else _DEFAULT
            holds = {self.places[v].hold for v in operands}
        if Hold.FLOATING in holds:
            return Place(Hold.FLOATING)
        return _DEFAULT if holds - {Hold.CONSTANT} else Place(Hold.CONSTANT)

    def _small_places(self, operands: Sequence[Any]) -> dict[int, Place]:
        """The places of small operands on devices; only of the largest, if they differ in size."""
        light = [v for v in operands if self.places[v].hold is Hold.LIGHT]
        most = max((bytes_of(v.aval) for v in light), default=0)
        return _by_device(self.places[v] for v in light if bytes_of(v.aval) == most)

    def _made_of_nothing(self, equation: Any) -> bool:
        """Whether an operation may run wherever its result is needed, as next to nothing goes into it."""
        name = equation.primitive.name
        if name in UNRELIABLE | EXPENSIVE or _jax.has_side_effects(equation) or _jax.sub_jaxprs(equation):
            return False
        return all(
            isinstance(v, _jax.Literal) or is_small(v) or v in self.anew or self.places[v].hold is Hold.CONSTANT
            for v in equation.invars
        )

    # --- up, from operations to the variables that they use -----------------------------------------------

    def found_homes(self) -> dict[Slot, tuple[int, str]]:
        """Homes for variables that had none, from their uses and the values assigned to them."""
        demands: dict[Any, dict[int, str]] = {}
        for operation, device in reversed(list(zip(self.flat.operations, self.devices, strict=True))):
            equation = operation.equation
            if equation.outvars and equation.outvars[0] in self.anew:
                continue  # its users ask for its operands
            if equation.primitive is assign_p:
                device = equation.params["device"]  # where a cotangent comes from, too, before it goes back
            wanted = (
                {device: f"it is used at {_jax.source_line(equation)}"}
                if device is not None
                else self._wanted_places(equation, demands)
            )
            for leaf in _needs(equation.invars, self.leaves):
                if self.places[leaf].hold is Hold.FLOATING:
                    demands[leaf] = wanted | demands.get(leaf, {}) | wanted  # what comes first in the program is first
        homes = {}
        for slot, use in self.uses.items():
            atom = self.reads.get(slot)
            asked = demands.get(atom, {}) if atom is not None else {}
            if not asked and slot in self.writes:
                new = self.writes[slot]
                where = None if isinstance(new, _jax.Literal) else self.places[new]
                if where is not None and where.device is not None and where.hold is not Hold.DEFAULT:
                    asked = {where.device: f"what is written to it is {where.since}"}
            if slot not in self._homes and asked:
                several = len(asked) > 1 and is_small(atom)
                device = 0 if several else next(iter(asked))
                homes[slot] = device, f"{use.describe()} lives there, as {asked.get(device, 'it is used on several')}"
        return homes

    def _wanted_places(self, equation: Any, demands: Mapping[Any, dict[int, str]]) -> dict[int, str]:
        """The places in which an operation without a place wants its operands."""
        if all(map(is_small, equation.outvars)) and not all(map(is_small, equation.invars)):
            return {}  # its result is sent: it belongs where its large operands are
        return {k: line for v in equation.outvars for k, line in demands.get(v, {}).items()}

    def check_writes(self) -> None:
        """Raise if a variable would be assigned a value that is on another device."""
        for slot, atom in self.writes.items():
            where = Place(Hold.CONSTANT) if isinstance(atom, _jax.Literal) else self.places[atom]
            home, since = self._homes[slot]
            if where.hold is Hold.FIRM and where.device != home:
                raise PlacementError(
                    f"{self.uses[slot].describe()} would be assigned a value that is on logical device {where.device} "
                    f"({where.since}), but is on {home} ({since}). Bring the value there first: "
                    f"strategy.assign_to_logical_device(value, {home})"
                )


def _needs(atoms: Iterable[Any], leaves: Mapping[Any, tuple[Any, ...]]) -> list[Any]:
    return list(dict.fromkeys(leaf for v in _jax.without_literals(atoms) for leaf in leaves.get(v, (v,))))


def is_small(atom: Any) -> bool:
    """Whether a value is a number or a random key, or no bigger than one."""
    return bytes_of(atom.aval) <= SMALL


def _by_device(places: Iterable[Place]) -> dict[int, Place]:
    found: dict[int, Place] = {}
    for p in places:
        assert p.device is not None
        found.setdefault(p.device, p)
    return found


def _conflict(equation: Any, firm: Mapping[int, Place]) -> PlacementError:
    (a, first), (b, second), *_ = firm.items()
    whole = ", and a loop or branch runs on one device as a whole" if equation.primitive.name in CONTROL_FLOW else ""
    return PlacementError(
        f"{equation.primitive.name} at {_jax.source_line(equation)} has operands on two logical devices: on {a} "
        f"({first.since}) and on {b} ({second.since}){whole}. Nothing is copied unasked: bring one to the other with "
        f"strategy.assign_to_logical_device(value, {b}). A variable that is needed on both is assigned to the one "
        "where it is to live, and the result of that to the other."
    )
