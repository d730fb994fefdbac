"""Families of JAX's primitives: those that are alike in what a pass asks about.

The names are those of :mod:`replicax._jax.primitive_table`, so each is compared with the JAX that is installed.
Replicax's own primitives are added where they are defined.
"""

from __future__ import annotations

from replicax._jax.primitive_table import primitives_named

ELEMENTWISE = primitives_named(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log
    log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or polygamma pow real reduce_precision rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
    """
)
"""Each element of the result is computed from those in its place, wherever it is."""

MOVING = primitives_named("broadcast_in_dim concatenate dynamic_slice gather pad reshape rev slice squeeze transpose")
"""They only move elements about."""

IDEMPOTENT_REDUCTIONS = primitives_named("reduce_max reduce_min reduce_and reduce_or")
"""It does not matter to the result that an element comes twice."""

EXPENSIVE = primitives_named("dot_general conv_general_dilated ragged_dot_general sort cholesky fft")
"""What one does once rather than twice."""

HANDED_ON = primitives_named("optimization_barrier")
"""Their results are their operands, each in its place."""

CALLS = primitives_named("jit custom_jvp_call custom_vjp_call")
"""They apply a program to their operands."""

CONTROL_FLOW = primitives_named("scan while cond")
"""They apply programs several times, or one of several."""

HOST_CALLS = primitives_named("debug_callback debug_print io_callback pure_callback")
"""They call Python on the host."""

UNRELIABLE = primitives_named("io_callback rng_uniform empty create_token")
"""Their results are no functions of their operands.

Each device asks the host, its own generator or memory that nobody has written, and gets what it gets. (What is called
"empty2" is zeros: JAX fills in with it what one branch needs to keep for its derivative, and another has not.)
"""

WRITES = primitives_named("swap addupdate")
"""They write into a mutable array."""

REFERENCES = WRITES | primitives_named("get empty_ref new_ref freeze")
"""They have to do with mutable arrays."""

AXIS_REDUCTIONS = primitives_named("pmax pmin psum psum_invariant")
"""Reductions over an axis of the mesh; each result belongs to the operand in its place."""

ALIKE_ALONG_AXIS = AXIS_REDUCTIONS | primitives_named("all_gather all_gather_invariant pbroadcast")
"""Collectives that hand the same to every device along the axis."""

AXIS_CASTS = primitives_named("pvary shard_map")
"""They name an axis and change nothing but what JAX's own types say."""

AXIS_POSITION = primitives_named("axis_index")
"""Where a device lies along an axis of the mesh."""

COTANGENT_SUMS = primitives_named("add_any")
"""In derivatives: they add up what comes back from several uses of a value."""

JITTED = primitives_named("jit")
"""Calls of functions that are jitted, and nothing else."""

SPLITS = primitives_named("sharding_constraint")
"""They say how a value is split over devices."""
