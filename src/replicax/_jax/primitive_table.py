"""What is known of JAX's primitives: the name and the parameters of each that a pass looks into.

The passes of :mod:`replicax.execution` tell primitives apart and read their parameters, and JAX promises neither their
names nor those of their parameters. So both are declared here, and ``make primitives`` compares them with the JAX that
is installed, before any other test: a new JAX that has renamed a primitive, or changed its parameters, is told by name.

No pass uses a name. For primitives there are the families of :mod:`replicax._jax.primitive_families`, whose names are
looked up here; parameters are read by :mod:`replicax._jax.operation_params`, :mod:`replicax._jax.control_flow` and
others of this package.
"""

from __future__ import annotations

import functools

import jax

# A line has names, a colon, and the parameters that each of them has. A longer one goes on in indented lines.
_KNOWN = {
    (0, 10): """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e ceil cholesky clamp clz complex copy
    cosh create_token digamma div dynamic_update_slice eq eq_to erf erf_inv erfc floor free_ref freeze ge gt
    householder_product igamma igamma_grad_a igammac imag is_finite le le_to lgamma lt lt_to lu max min mulhi ne neg
    nextafter not optimization_barrier or polygamma population_count pow random_clone random_fold_in random_unwrap
    real regularized_incomplete_beta rem select_n shift_left shift_right_arithmetic shift_right_logical sign sinh
    square stop_gradient sub threefry2x32 xor zeta:
addupdate get swap: tree
all_gather: all_gather_dimension axis_index_groups axis_name axis_size tiled
all_gather_invariant: all_gather_dimension axis_name axis_size tiled
all_to_all: axis_index_groups axis_name concat_axis split_axis tiled
argmax argmin: axes index_dtype
axis_index: axis_name
bitcast_convert_type: new_dtype
broadcast_in_dim: broadcast_dimensions shape sharding
cbrt cos exp exp2 expm1 log log1p logistic rsqrt sin sqrt tan tanh: accuracy
concatenate: dimension
cond: branches
conj: input_dtype
conv_general_dilated: batch_group_count dimension_numbers feature_group_count lhs_dilation out_sharding padding
    precision preferred_element_type rhs_dilation window_strides
convert_element_type: new_dtype sharding weak_type
cumlogsumexp cummax cummin cumprod cumsum: axis reverse
custom_jvp_call: call_jaxpr jvp_jaxpr_fun num_consts symbolic_zeros
custom_linear_solve: const_lengths jaxprs
custom_vjp_call: bwd call_jaxpr fwd_jaxpr_thunk num_consts out_trees symbolic_zeros
custom_vmap_call: call in_tree out_tree rule
debug_callback: callback effect partitioned
debug_print: fmt has_placeholders in_tree logging_record np_printoptions ordered partitioned static_args
device_put: copy_semantics devices srcs
dot_general: dimension_numbers out_sharding precision preferred_element_type
dynamic_slice: slice_sizes
eigh: algorithm lower sort_eigenvalues subset_by_index
empty: dtype out_sharding shape
empty2: dtype memory_space
empty_ref: memory_space ty
ffi_call: attributes custom_call_api_version has_side_effect input_layouts input_output_aliases legacy_backend_config
    output_layouts result_avals target_name vmap_method
fft: fft_lengths fft_type
gather: dimension_numbers fill_value indices_are_sorted mode slice_sizes unique_indices
integer_pow: y
io_callback: callback ordered result_avals sharding
iota: dimension dtype shape sharding
jit: compiler_options_kvs ctx_mesh donated_invars in_layouts in_shardings inline jaxpr keep_unused name out_layouts
    out_shardings
mul: out_dtype
name: name
new_ref: kind memory_space
pad: padding_config
pbroadcast: axis_name source
pmax pmin psum: axes axis_index_groups
ppermute psend: axis_name perm
precv: axis_name out_shape perm
psum_invariant pvary reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor: axes
pure_callback: callback result_avals sharding vmap_method
qr: full_matrices pivoting use_magma
ragged_all_to_all: axis_index_groups axis_name
ragged_dot_general: group_offset out_sharding precision preferred_element_type ragged_dot_dimension_numbers
random_bits: bit_width shape
random_gamma: log_space
random_seed random_wrap: impl
random_split rng_uniform: shape
reduce: computation dimensions jaxpr
reduce_precision: exponent_bits mantissa_bits
reduce_scatter: axis_index_groups axis_name axis_size scatter_dimension tiled
reduce_sum: axes out_sharding
reduce_window: base_dilation consts jaxpr padding window_dilation window_dimensions window_strides
reduce_window_max reduce_window_min reduce_window_sum: base_dilation padding window_dilation window_dimensions
    window_strides
remat2: differentiated jaxpr policy prevent_cse
reshape: dimensions new_sizes sharding
rev squeeze: dimensions
rng_bit_generator: algorithm dtype out_sharding shape
round: rounding_method
scan: jaxpr length num_carry num_consts reverse unroll
scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub: dimension_numbers indices_are_sorted mode
    unique_indices update_consts update_jaxpr
select_and_gather_add: base_dilation padding select_prim window_dilation window_dimensions window_strides
select_and_scatter_add: padding select_prim window_dimensions window_strides
shard_map: check_vma in_specs jaxpr mesh newly_manual_axes out_specs
sharding_constraint: context_mesh layout sharding unconstrained_dims
slice: limit_indices start_indices strides
sort: dimension is_stable num_keys
split: axis sizes
stack unstack: axis
svd: algorithm compute_uv full_matrices subset_by_index
tile: reps
top_k: axis k
transpose: permutation
triangular_solve: conjugate_a left_side lower transpose_a unit_diagonal
while: body_jaxpr body_nconsts cond_jaxpr cond_nconsts
""",
    # What has come or changed since.
    (0, 11): """
empty_ref: memory_space pin ty
log2: accuracy
new_ref: kind memory_space pin
one_minus_square:
reduce_max reduce_min: axes out_sharding
scan: ft_in ft_out jaxpr length reverse unroll
top_k: axis is_stable k
""",
    (0, 12): """
erfc: accuracy
""",
}

VERSIONS = tuple(_KNOWN)
"""Of JAX, from which on something else is known."""


@functools.cache
def _entries(since: tuple[int, int]) -> dict[str, frozenset[str]]:
    found = {}
    for line in _KNOWN[since].replace("\n    ", " ").strip().splitlines():
        names, params = line.split(":")
        found.update(dict.fromkeys(names.split(), frozenset(params.split())))
    return found


def parameters(version: tuple[int, ...] = jax.__version_info__) -> dict[str, frozenset[str]]:
    """The parameters of each primitive that is known, by its name, in this version of JAX."""
    found: dict[str, frozenset[str]] = {}
    for since in sorted(_KNOWN):
        if since <= version:
            found.update(_entries(since))
    return found


def primitives_named(names: str) -> frozenset[str]:
    """The primitives with these names, parted by spaces: a family.

    Raises:
      ValueError: one of them is not declared here, for any version.
    """
    found = frozenset(names.split())
    if unknown := found.difference(*map(_entries, _KNOWN)):
        raise ValueError(f"{sorted(unknown)} are no primitives of JAX that replicax._jax.primitive_table declares")
    return found
