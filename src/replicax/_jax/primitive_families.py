"""Families of JAX's primitives that a pass treats alike.

They are made of the columns of :mod:`replicax._jax.primitive_table`, where a new primitive is added, and of its names,
so each is compared with the JAX that is installed. Replicax's own primitives are added where they are defined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from replicax._jax.primitive_table import primitives_named, primitives_with

Rule = TypeVar("Rule")


def by_primitive(rules: Mapping[frozenset[str], Rule]) -> dict[str, Rule]:
    """Rules by the name of a primitive, from rules by family; no primitive may be in two of the families."""
    by_name = {name: rule for family, rule in rules.items() for name in family}
    if len(by_name) < sum(map(len, rules)):
        raise ValueError("families that have rules of their own must not have primitives in common")
    return by_name


# --- what elements are computed from --------------------------------------------------------------------

ELEMENTWISE = primitives_with("examples", "elementwise")
"""Each element of the result is computed from those in its place, wherever it is."""

ADDITIONS = primitives_named("add")
DIFFERENCES = primitives_named("sub")
PRODUCTS = primitives_named("mul")
QUOTIENTS = primitives_named("div")
NEGATIONS = primitives_named("neg")
NONLINEAR_FUNCTIONS = primitives_named(
    "abs cbrt exp exp2 expm1 integer_pow log log1p logistic pow rsqrt sqrt square tanh"
)
"""Functions of numbers, of which that of a sum is not the sum of those of its terms."""

BOUNDS = primitives_with("also", "bound")
LESS_THAN = primitives_named("lt")
SELECTIONS = primitives_named("select_n")

CASTS = primitives_with("also", "cast")
"""Elements keep their values, as far as the dtype has them."""

BITCASTS = primitives_named("bitcast_convert_type")
"""Elements keep their bits."""

DRAWS = primitives_with("also", "draw")
"""Their results are random numbers, and no keys."""

HANDED_ON = primitives_with("replicas", "kept")
"""Their results are their operands, each in its place."""

IDENTITIES = primitives_with("examples", "each")
"""Their results have the values of their operands, each in its place, if not on the same devices."""

# --- dims -----------------------------------------------------------------------------------------------

MOVING = primitives_with("also", "moving")
"""They only move elements about."""

CUTTING = primitives_with("also", "cutting")
"""Their results may lack elements of the operand."""

SLICES = primitives_named("slice dynamic_slice")

UNSTACKS = primitives_named("unstack")
"""Their results are the slices along a dim; JAX 0.12 goes through the rows of an array this way."""

SUMS = primitives_named("reduce_sum")

IDEMPOTENT_REDUCTIONS = primitives_with("also", "idempotent")
"""It does not matter to the result that an element comes twice."""

CONCATENATIONS = primitives_named("concatenate")

BROADCASTS = primitives_named("broadcast_in_dim")

TRANSPOSITIONS = primitives_named("transpose")

DIM_MOVES = primitives_with("examples", "moved")
"""Each dim of the operand becomes one of the result."""

RESHAPES = primitives_named("reshape")

SQUEEZES = primitives_named("squeeze")

STACKS = primitives_named("stack")

PADS = primitives_named("pad")

FILLED = primitives_named(
    "cumlogsumexp cummax cummin cumprod reduce_window reduce_window_max reduce_window_min select_and_gather_add "
    "select_and_scatter_add"
)
"""Beyond the edges their windows may find another value than zero."""

POOLING_GRADIENTS = primitives_named("select_and_scatter_add")
"""They hand each window's cotangent to the element that the window has chosen."""

IOTAS = primitives_named("iota")
"""Each element is its own position along a dim."""

SCATTERS = primitives_with("examples", "scattered")
REPLACING_SCATTERS = primitives_named("scatter")

MATRIX_PRODUCTS = primitives_named("dot_general")

CONVOLUTIONS = primitives_named("conv_general_dilated")

EXPENSIVE = primitives_with("also", "expensive")
"""They are computed once rather than twice."""

# --- programs inside, and the world outside -------------------------------------------------------------

CALLS = primitives_with("also", "call")
"""They apply a program to their operands."""

CHECKPOINTS = primitives_named("remat2")
"""The calls of ``jax.checkpoint``: they apply a program, and apply it again for its derivative."""

SCANS = primitives_named("scan")

WHILE_LOOPS = primitives_named("while")

BRANCHES = primitives_named("cond")

CONTROL_FLOW = SCANS | WHILE_LOOPS | BRANCHES
"""They apply programs several times, or one of several."""

FORWARD_OF_CUSTOM_VJPS = primitives_named("custom_lin")
"""Tangents of a ``jax.custom_vjp`` function. JAX can't compute them, and raises an error if they are needed."""

LINEAR_SOLVES = primitives_named("custom_linear_solve")
"""They apply one program to some of their operands; the other programs and operands are for the derivative."""

BATCHING_CALLS = primitives_named("custom_vmap_call")
"""They apply a program to their operands, and another one under ``jax.vmap``."""

SHARD_MAPS = primitives_named("shard_map")
"""They apply a program to each device's part of their operands."""

SPLITS = primitives_named("sharding_constraint")
"""They say how a value is split over devices."""

PLACING = primitives_with("also", "placing")
"""They may name a mesh, over which they map or lay values."""

PURE_HOST_CALLS = primitives_named("pure_callback")
"""They call a Python function on the host that does nothing but compute."""

PRINTS = primitives_named("debug_print")
"""They print on the host, and call nothing of the user's."""

HOST_CALLS = primitives_with("also", "host")
USERS_HOST_CALLS = HOST_CALLS - PRINTS
"""They call Python on the host."""

UNRELIABLE = primitives_with("replicas", "own")
"""Their results are no functions of their operands.

Each device asks the host or its own generator, and gets what it gets. (Uninitialised memory counts as the same on all:
``jnp.empty`` and JAX's own functions, such as ``rankdata``, overwrite all of it, and its content means nothing.)
"""

UNBATCHED = primitives_named("ragged_dot_general rng_bit_generator")
"""They make other bits for several states at once than for each alone, or JAX can't do several at once."""

FOREIGN_CALLS = primitives_named("ffi_call")
"""They call functions that are compiled elsewhere."""

WRITES = primitives_with("also", "write")
"""They write into a mutable array."""

REFERENCES = primitives_with("examples", "reference")
"""They have to do with mutable arrays."""

AXIS_SUMS = primitives_named("psum psum_invariant")

AXIS_MAXIMA = primitives_named("pmax")

AXIS_MINIMA = primitives_named("pmin")

AXIS_REDUCTIONS = AXIS_SUMS | AXIS_MAXIMA | AXIS_MINIMA
"""Reductions over an axis of the mesh; each result belongs to the operand in its place."""

AXIS_SCATTERS = primitives_named("reduce_scatter")
"""They add up, and each device gets a part of the sum."""

AXIS_ARITHMETIC = AXIS_REDUCTIONS | AXIS_SCATTERS
"""Collectives that compute."""

AXIS_GATHERS = primitives_named("all_gather all_gather_invariant")
"""They put all devices' operands together."""

ALIKE_ALONG_AXIS = primitives_with("replicas", "same")
"""Collectives that hand the same to every device along the axis."""

AXIS_EXCHANGES = primitives_named("all_to_all")
"""Each device gives each other one a part of its operand."""

AXIS_PERMUTATIONS = primitives_named("ppermute")
"""Each device sends its operand to one other at most."""

AXIS_CASTS = primitives_named("pvary shard_map")
"""They name an axis and change nothing but what JAX's own types say."""

AXIS_POSITION = primitives_with("replicas", "position")
"""Where a device lies along an axis of the mesh."""

COTANGENT_SUMS = primitives_named("add_any")
"""In derivatives: they add up what comes back from several uses of a value."""

JITTED = primitives_named("jit")
"""Calls of functions that are jitted, and nothing else."""
