"""The meaning of JAX's error messages about functions that it traces."""

from __future__ import annotations

import os
import re
import traceback

import jax

_ABOUT_A_FUNCTION = re.compile(r"\s*The error occurred while tracing the function \S+ at ([^\n]*):\d+ for \S+?\.(?=\s)")
_ITS_ARGUMENTS = re.compile(r"\s*This concrete value was not available in Python because it depends on [^\n]*")

_ABOUT_ANOTHER_MESH = (
    "should match the mesh passed to shard_map",
    "passed to shard_map: ",
    "shard_map inside jit with device ids",
    "is not found in mesh",
    "contains a manual axes",
    "passed to with_sharding_constraint can only refer to",
    "with_sharding_constraint requires a non-empty mesh",
)

_UNBOUND_AXIS = re.compile(
    r"unbound axis name: (\S+?)\.?(?:\s|$)|Evaluation rule for '(?:ppermute|pbroadcast)' not implemented"
    r"|pvary should be called under jax.shard_map|must be used within a mapped context"
)

_PMAP = os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), "_src", "pmap.py")


def asked_for_a_value(error: Exception) -> str | None:
    """The kind of value that traced code has asked for; ``None`` if ``error`` is about something else.

    ``"bool"``, for a branch or a loop; ``"number"``, such as a size or an index; ``"mask"``, to choose elements;
    ``"array"``, for what is not a function of JAX's.
    """
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "bool"
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return "mask"
    if isinstance(error, jax.errors.TracerIntegerConversionError):
        return "number"
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        return "array"
    is_shape = isinstance(error, TypeError) and str(error).startswith("Shapes must be 1D")
    return "number" if is_shape else None


def asked_for_an_array(error: Exception) -> bool:
    """Return whether a function of ``jax.lax`` has got an object that only converts to an array."""
    return isinstance(error, TypeError | ValueError) and "__jax_array__" in str(error)


def unbound_axis(error: Exception) -> str | None:
    """The axis that a collective is over and nothing maps over, ``""`` if not known; ``None`` for other errors."""
    if not isinstance(error, NameError | NotImplementedError | ValueError | RuntimeError):
        return None
    found = _UNBOUND_AXIS.search(str(error))
    return found and (found[1] or "")


def missed_a_mesh(error: Exception) -> str | None:
    """The mistake with a mesh that ``error`` is about; ``None`` if it is about something else.

    ``"array"`` if traced code can't take up an array from outside that lies on a mesh with explicit axes; ``"mesh"`` if
    there is none for a ``shard_map``; ``"other"`` if a ``pmap``, a ``shard_map`` or a sharding is over one that is not
    there.
    """
    if isinstance(error, NotImplementedError) and "sharded on `Explicit` axes" in str(error):
        return "array"
    if not isinstance(error, ValueError | RuntimeError):
        return None
    if "context mesh cannot be empty" in str(error):
        return "mesh"
    if any(words in str(error) for words in _ABOUT_ANOTHER_MESH):
        return "other"
    # What a pmap makes of arguments that have not a row for each device.
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return "other" if str(error).startswith("cannot select an axis to squeeze out") and _PMAP in files else None


def missed_axis_types(error: AssertionError) -> bool:
    """Return whether ``jax.lax.pcast`` was called where no mesh has axes."""
    return str(error).startswith("ManualAxisType(")


def arguments_named(message: str, file: str) -> tuple[list[int], str]:
    """Read from JAX's message on which arguments of a function in ``file`` a value depends.

    Returns their positions, and the message without what it says of that function.
    """
    about = _ABOUT_A_FUNCTION.search(message)
    if about is None or not about[1].endswith(file):
        return [], message
    positions = [int(n) for n in re.findall(r"\bvalues\[(\d+)\]", message)]
    return list(dict.fromkeys(positions)), _ITS_ARGUMENTS.sub("", _ABOUT_A_FUNCTION.sub("", message)).strip()
