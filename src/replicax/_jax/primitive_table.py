"""The table of JAX's primitives: one entry for each, with its parameters and a column for each analysis.

The passes of :mod:`replicax.execution` tell primitives apart and read their parameters, and JAX promises neither their
names nor those of their parameters. So both are declared here, and ``make primitives`` compares them with the JAX that
is installed, before any other test: it names each primitive that a new JAX has renamed, or given other parameters.

No pass uses a name. For primitives there are the columns, and the families of
:mod:`replicax._jax.primitive_families`, which are made of them. Parameters are read by
:mod:`replicax._jax.operation_params`, :mod:`replicax._jax.control_flow` and others of this package.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax

# A line has names, a colon, the parameters that each of them has, and a word for each analysis that has a rule for it.
# Indented lines continue a line. To an analysis, a primitive without a word may do anything.
#
#   examples  where the examples of a padded batch are in the result (padding/example_rules.py)
#   terms     what becomes of the terms of a loss (checks/loss_scale/operation_rules.py)
#   replicas  whether replicas may differ in the result, where that does not just follow from the operands
#             (execution/program/locality_rules.py, collective_operations.py). own: they may; position: the result is
#             their position; same: a collective that gives all the same; kept: they are the operands, in their places
#   also      other families of replicax._jax.primitive_families
_KNOWN = {
    (0, 10): """
abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e ceil clz complex cosh digamma eq eq_to erf
    erf_inv erfc floor ge gt igamma igamma_grad_a igammac imag is_finite le le_to lgamma lt lt_to mulhi ne nextafter not
    or polygamma population_count pow real regularized_incomplete_beta rem shift_left shift_right_arithmetic
    shift_right_logical sign sinh square stop_gradient xor zeta: | examples elementwise
add add_any sub: | examples elementwise | terms added
addupdate swap: tree | examples reference | also write
all_gather: all_gather_dimension axis_index_groups axis_name axis_size tiled | examples together | replicas same
all_gather_invariant: all_gather_dimension axis_name axis_size tiled | examples together | replicas same
all_to_all: axis_index_groups axis_name concat_axis split_axis tiled
argmax argmin: axes index_dtype | examples reduced
axis_index: axis_name | replicas position
bitcast_convert_type: new_dtype | examples part
broadcast_in_dim: broadcast_dimensions shape sharding | examples moved | terms first | also moving
cbrt cos exp exp2 expm1 log log1p logistic rsqrt sin sqrt tan tanh: accuracy | examples elementwise
cholesky: | examples matrices | also expensive
clamp max min: | examples elementwise | also bound
concatenate: dimension | examples along | terms together | also moving
cond: branches
conj: input_dtype | examples elementwise
conv_general_dilated: batch_group_count dimension_numbers feature_group_count lhs_dilation out_sharding padding
    precision preferred_element_type rhs_dilation window_strides | examples convolution | also expensive
convert_element_type: new_dtype sharding weak_type | examples elementwise | terms first | also cast
copy: | examples elementwise | terms first | also cast
create_token: | replicas own
cumlogsumexp cummax cummin cumprod cumsum: axis reverse | examples along
custom_jvp_call: call_jaxpr jvp_jaxpr_fun num_consts symbolic_zeros | also call
custom_lin: bwd in_zeros num_res out_avals symbolic_zeros
custom_linear_solve: const_lengths jaxprs
custom_vjp_call: bwd call_jaxpr fwd_jaxpr_thunk num_consts out_trees symbolic_zeros | also call
custom_vmap_call: call in_tree out_tree rule
debug_callback: callback effect partitioned | also host
debug_print: fmt has_placeholders in_tree logging_record np_printoptions ordered partitioned static_args | also host
device_put: copy_semantics devices srcs | examples each | terms first | also placing
div: | examples elementwise | terms divided
dot_general: dimension_numbers out_sharding precision preferred_element_type | examples product | terms product |
    also expensive
dynamic_slice: slice_sizes | examples part | terms first | also moving cutting
dynamic_update_slice: | examples part | terms together
eigh: algorithm lower sort_eigenvalues subset_by_index | examples matrices
empty: dtype out_sharding shape
empty2: dtype memory_space
empty_ref: memory_space ty | examples reference
ffi_call: attributes custom_call_api_version has_side_effect input_layouts input_output_aliases
    legacy_backend_config output_layouts result_avals target_name vmap_method
fft: fft_lengths fft_type | examples along | also expensive
free_ref:
freeze: | examples reference
gather: dimension_numbers fill_value indices_are_sorted mode slice_sizes unique_indices | examples lookup | terms
    first | also moving cutting
get: tree | examples reference
householder_product lu: | examples matrices
integer_pow: y | examples elementwise
io_callback: callback ordered result_avals sharding | replicas own | also host
iota: dimension dtype shape sharding
jit: compiler_options_kvs ctx_mesh donated_invars in_layouts in_shardings inline jaxpr keep_unused name out_layouts
    out_shardings | also call placing
mul: out_dtype | examples elementwise | terms times
name: name | examples each | terms first
neg: | examples elementwise | terms first
new_ref: kind memory_space | examples reference
optimization_barrier: | examples each | terms first | replicas kept
pad: padding_config | examples windowed | terms together | also moving
pbroadcast: axis_name source | replicas same
pmax pmin psum: axes axis_index_groups | examples together | replicas same
ppermute psend: axis_name perm
precv: axis_name out_shape perm
psum_invariant: axes | examples together | replicas same
pure_callback: callback result_avals sharding vmap_method | also host
pvary: axes | examples each | terms first
qr: full_matrices pivoting use_magma | examples matrices
ragged_all_to_all: axis_index_groups axis_name
ragged_dot_general: group_offset out_sharding precision preferred_element_type ragged_dot_dimension_numbers | also
    expensive
random_bits: bit_width shape | examples random | also draw
random_clone random_fold_in random_unwrap threefry2x32: | examples random
random_gamma: log_space | examples random | also draw
random_seed random_wrap: impl | examples random
random_split: shape | examples random
reduce: computation dimensions jaxpr | examples reduced
reduce_and reduce_max reduce_min reduce_or: axes | examples reduced | also idempotent
reduce_precision: exponent_bits mantissa_bits | examples elementwise
reduce_prod reduce_xor: axes | examples reduced
reduce_scatter: axis_index_groups axis_name axis_size scatter_dimension tiled
reduce_sum: axes out_sharding | examples reduced | terms sum
reduce_window: base_dilation consts jaxpr padding window_dilation window_dimensions window_strides | examples
    windowed
reduce_window_max reduce_window_min reduce_window_sum: base_dilation padding window_dilation window_dimensions
    window_strides | examples windowed
remat2: differentiated jaxpr policy prevent_cse
reshape: dimensions new_sizes sharding | examples reshaped | terms first | also moving
rev: dimensions | examples reversed | terms first | also moving
rng_bit_generator: algorithm dtype out_sharding shape
rng_uniform: shape | replicas own
round: rounding_method | examples elementwise
scan: jaxpr length num_carry num_consts reverse unroll
scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub: dimension_numbers indices_are_sorted mode
    unique_indices update_consts update_jaxpr | examples scattered
select_and_gather_add: base_dilation padding select_prim window_dilation window_dimensions window_strides | examples
    windowed
select_and_scatter_add: padding select_prim window_dimensions window_strides | examples windowed
select_n: | examples elementwise | terms selected
shard_map: check_vma in_specs jaxpr mesh newly_manual_axes out_specs | also placing
sharding_constraint: context_mesh layout sharding unconstrained_dims | examples each | terms first | also placing
slice: limit_indices start_indices strides | examples part | terms first | also moving cutting
sort: dimension is_stable num_keys | examples sorted | also expensive
split: axis sizes | examples along | terms first | also cutting
squeeze: dimensions | examples taken | terms first | also moving cutting
stack: axis | examples stacked | terms together
svd: algorithm compute_uv full_matrices subset_by_index | examples matrices
tile: reps | examples part
top_k: axis k | examples sorted
transpose: permutation | examples moved | terms first | also moving
triangular_solve: conjugate_a left_side lower transpose_a unit_diagonal | examples matrices
unstack: axis | examples taken | terms first | also cutting
while: body_jaxpr body_nconsts cond_jaxpr cond_nconsts
""",
    # What has come or changed since.
    (0, 11): """
empty_ref: memory_space pin ty
log2: accuracy | examples elementwise
new_ref: kind memory_space pin
one_minus_square: | examples elementwise
reduce_max reduce_min: axes out_sharding
scan: ft_in ft_out jaxpr length reverse unroll
top_k: axis is_stable k
""",
    (0, 12): """
erfc: accuracy
""",
}

VERSIONS = tuple(_KNOWN)
"""The versions of JAX in which primitives have come or changed."""


_COLUMNS = ("examples", "terms", "replicas", "also")


class _Entry(NamedTuple):
    parameters: frozenset[str]
    words: Mapping[str, str]
    """By column."""


@functools.cache
def _entries(since: tuple[int, int]) -> dict[str, _Entry]:
    found = {}
    for line in _KNOWN[since].replace("\n    ", " ").strip().splitlines():
        names, rest = line.split(":")
        parameters, *columns = rest.split("|")
        words = {column: text for column, _, text in (c.strip().partition(" ") for c in columns)}
        assert words.keys() <= set(_COLUMNS), line
        found.update(dict.fromkeys(names.split(), _Entry(frozenset(parameters.split()), words)))
    return found


def parameters(version: tuple[int, ...] = jax.__version_info__) -> dict[str, frozenset[str]]:
    """The parameters of each primitive that is known, by its name, in this version of JAX."""
    found: dict[str, frozenset[str]] = {}
    for since in sorted(_KNOWN):
        if since <= version:
            found.update({name: entry.parameters for name, entry in _entries(since).items()})
    return found


@functools.cache
def column(name: str) -> Mapping[str, str]:
    """The words in a column, by primitive: in ``terms``, that of ``mul`` is ``times``."""
    entries = (pair for since in _KNOWN for pair in _entries(since).items())
    return {primitive: entry.words[name] for primitive, entry in entries if name in entry.words}


def primitives_with(name: str, word: str) -> frozenset[str]:
    """The primitives with this word in a column: a family, which must not be empty."""
    found = frozenset(primitive for primitive, words in column(name).items() if word in words.split())
    if not found:
        raise ValueError(f"no primitive has {word!r} in the column {name!r} of replicax._jax.primitive_table")
    return found


def primitives_named(names: str) -> frozenset[str]:
    """The primitives with these names, parted by spaces, all declared here: a family."""
    found = frozenset(names.split())
    if unknown := found.difference(*map(_entries, _KNOWN)):
        raise ValueError(f"{sorted(unknown)} are no primitives of JAX that replicax._jax.primitive_table declares")
    return found
