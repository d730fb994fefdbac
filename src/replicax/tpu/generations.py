"""The generations of TPUs: cores of a chip, links of a slice, chips of a host.

Sources: the pages of the Cloud TPU documentation on v4, v5e, v5p, v6e and TPU7x
(https://docs.cloud.google.com/tpu/docs/v5p and so on: cores, pods, hosts, and that v5p slices of 4x4x4 chips and more
are tori and smaller ones are not); Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural
Networks", CACM 2020 (v2 and v3: tori of 16x16 and 32x32); Austin et al., "How to Scale Your Model", part 2,
https://jax-ml.github.io/scaling-book/tpus (v5e and v6e wrap around along each dim of 16); and what libtpu 0.0.51
has of slices that are not there (names of device kinds, hosts of 2x2x1 chips, devices of a chip).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

HOST = (2, 2, 1)
"""The chips that belong to one host, in every generation: four, in a square."""


@dataclass(frozen=True)
class Generation:
    """One generation of TPUs."""

    name: str  # as in the names of topologies: ``"v5e"`` in ``"v5e:4x4"``
    device_kinds: tuple[str, ...]  # ``jax.Device.device_kind`` of its devices
    cores_per_chip: int  # TensorCores
    # JAX devices. If they are fewer than the cores, both cores act as one device (megacore). ``core_on_chip``
    # distinguishes two devices of a chip.
    devices_per_chip: int
    chips: int  # the number of chips of the largest slice
    # If chips form a plane: the number of chips of a whole pod along x, and along y. ``None`` if slices consist of
    # cubes of 4x4x4 chips.
    side: int | None
    slices: tuple[str, ...]  # the shapes of slices that one can rent, or some of them

    @property
    def sold_as(self) -> str:
        """The generation in Cloud's names of slices."""
        return "v5litepod" if self.name == "v5e" else self.name

    @property
    def dims(self) -> int:
        """2 if chips form a plane, 3 otherwise."""
        return 3 if self.side is None else 2

    def has_room(self, shape: tuple[int, int, int]) -> bool:
        """Return whether a slice of this shape can exist."""
        flat = self.side is None or (max(shape) <= self.side and shape[2] == 1)
        return flat and 0 < prod(shape) <= self.chips

    def accelerator_type(self, shape: tuple[int, int, int]) -> str:
        """Cloud's name of a slice: the generation and the number of cores.

        >>> generation_of("TPU v5e").accelerator_type((4, 4, 1)), generation_of("TPU v5p").accelerator_type((4, 4, 4))
        ('v5litepod-16', 'v5p-128')
        """
        return f"{self.sold_as}-{prod(shape) * self.cores_per_chip}"

    def wrap(self, shape: tuple[int, int, int]) -> tuple[bool, bool, bool]:
        """The dims along which a slice of ``shape`` chips wraps around.

        Slices of full cubes wrap around along all dims, as their wrap-around links are switched. Planes do so along
        dims as long as a whole pod.

        >>> generation_of("TPU v5p").wrap((4, 4, 8)), generation_of("TPU v5p").wrap((2, 4, 4))
        ((True, True, True), (False, False, False))
        >>> generation_of("TPU v5e").wrap((8, 16, 1))
        (False, True, False)
        """
        if self.side is None:
            full = all(size % 4 == 0 for size in shape)
            return full, full, full
        return shape[0] == self.side, shape[1] == self.side, False


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")

GENERATIONS = (
    Generation("v2", ("TPU v2",), 2, 2, 256, 16, ("2x2", "4x4", "8x8", "16x16")),
    Generation("v3", ("TPU v3",), 2, 2, 1024, 32, ("2x2", "4x4", "8x8", "16x16", "32x32")),
    Generation("v4", ("TPU v4",), 2, 1, 4096, None, _CUBES),
    Generation("v5e", ("TPU v5 lite", "TPU v5e"), 1, 1, 256, 16, _FLAT),
    Generation("v5p", ("TPU v5", "TPU v5p"), 2, 1, 8960, None, (*_CUBES, "16x16x24")),
    Generation("v6e", ("TPU v6 lite", "TPU v6e"), 1, 1, 256, 16, _FLAT),
    Generation("tpu7x", ("TPU7x", "TPU v7x"), 2, 2, 9216, None, _CUBES),
)


def generation_of(device_kind: str) -> Generation | None:
    """The generation of a ``device_kind``; ``None`` for unknown TPUs."""
    return next((one for one in GENERATIONS if device_kind in one.device_kinds), None)


def slice_name(name: str) -> str:
    """The name of a slice by its chips, also for Google's names, which have a generation and a number of cores.

    A number of cores means the default shape if there are several. Any other name is returned unchanged.

    >>> slice_name("v5p-128"), slice_name("v5litepod-16"), slice_name("v5p:4x4x8")
    ('v5p:4x4x4', 'v5e:4x4', 'v5p:4x4x8')
    """
    match = re.fullmatch(r"(\w+)-(\d+)", str(name))
    kind = match and next((one for one in GENERATIONS if match[1] in (one.name, one.sold_as)), None)
    if not match or not kind:
        return name
    sold = {prod(_shape(text)) * kind.cores_per_chip: text for text in kind.slices}
    cores = int(match[2])
    if cores not in sold:
        choices = ", ".join(f"{kind.sold_as}-{n} ({kind.name}:{text})" for n, text in sold.items())
        raise ValueError(f"{name!r} is not a TPU slice: {kind.name} has none of {cores} cores. Known slices: {choices}")
    return f"{kind.name}:{sold[cores]}"


def _shape(text: str) -> tuple[int, int, int]:
    x, y, z = map(int, f"{text}x1".split("x")[:3])
    return x, y, z


def parse_slice(name: str) -> tuple[Generation, tuple[int, int, int]]:
    """The generation and the chips along x, y and z for a name such as ``"v5e:4x4"`` or ``"v5litepod-16"``.

    >>> parse_slice("v5p:2x2x4")[1], parse_slice("v5e:4x8")[1], parse_slice("v5p-32")[1]
    ((2, 2, 4), (4, 8, 1), (2, 2, 4))
    """
    match = re.fullmatch(r"(\w+):(\d+x\d+(?:x\d+)?)(?:_untwisted)?", str(slice_name(name)))
    if match is None:
        raise ValueError(
            f"{name!r} is not a TPU slice: expected a name such as 'v5e:4x4' or 'v5p:4x4x8', or 'v5p-128'.\n{_kinds()}"
        )
    kind = next((one for one in GENERATIONS if one.name == match[1]), None)
    if kind is None:
        known = ", ".join(one.name for one in GENERATIONS)
        raise ValueError(
            f"{name!r} is not a TPU slice: there is no TPU generation {match[1]!r}; known: {known}.\n{_kinds()}"
        )
    shape = _shape(match[2])
    chips = "x".join(map(str, shape))
    if not kind.has_room(shape):
        whole = f"{kind.chips} chips" if kind.side is None else f"{kind.side}x{kind.side} chips"
        raise ValueError(f"{name!r} is not a TPU slice: {kind.name} has at most {whole}, not {chips}.\n{_kinds(kind)}")
    if prod(shape) > 1 and any(size % tile for size, tile in zip(shape, HOST, strict=True)):
        raise ValueError(
            f"{name!r} is not a TPU slice: hosts have {'x'.join(map(str, HOST))} chips, and these do not fill "
            f"{chips} chips.\n{_kinds(kind)}"
        )
    return kind, shape


def _kinds(*kinds: Generation) -> str:
    return "Known slices: " + "; ".join(f"{kind.name}: {', '.join(kind.slices)}" for kind in kinds or GENERATIONS)
