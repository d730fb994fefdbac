"""The parts of JAX that Replicax uses and JAX does not promise: the one place that imports its internals.

Everything here is a few lines around something that ``jax`` has, but does not yet promise. When a new JAX
release moves one of them, this package changes and no other; but for ``replicax.per_replica.eager``, which computes
operations with what :mod:`replicax._jax.internals` imports.
"""

from replicax._jax.collective_params import (
    exchanged_along,
    gathered_along,
    groups_of,
    has_groups,
    is_over_all_of,
    names_axis,
    own_dims,
    scattered_along,
    senders,
)
from replicax._jax.compile_requests import CompileRequest, compile_for, compile_request
from replicax._jax.contractions import product_flops, summed_up, sums_up
from replicax._jax.control_flow import (
    Branches,
    Scan,
    While,
    called_program,
    closed_over,
    control_flow_of,
    executed_sum,
    has_rules,
    is_rule,
    pruned,
    scan_of,
    with_calls_for_solves,
)
from replicax._jax.jaxprs.keys import BY_VALUE, CONTAINERS, ById, Hashed, Keys, digested, is_record
from replicax._jax.jaxprs.program_meshes import NO_MESH, abstract_mesh, foreign_mesh, fresh, on_mesh
from replicax._jax.jaxprs.programs import (
    bind,
    callback_of,
    called,
    calls_back,
    calls_back_in_loops,
    check_freed_once,
    computing,
    constants,
    contains,
    enable_x64_as_in,
    enable_x64_for,
    equations_of,
    evaluate,
    has_outer_effects,
    has_side_effects,
    host_function,
    interpret,
    is_deterministic,
    is_mutable,
    is_or_contains,
    is_outer_action,
    leaked_tracer,
    map_jaxprs,
    opened,
    prints,
    program_of,
    pruned_fn,
    replace_inputs,
    spliced,
    sub_jaxprs,
    traced,
    traced_once,
    with_callback,
)
from replicax._jax.jaxprs.source_lines import comes_from, from_line_of, is_backward, located, source_line, source_place
from replicax._jax.jaxprs.types import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Primitive,
    ShapedArray,
    shape_of,
    without_literals,
)
from replicax._jax.messages import (
    arguments_named,
    asked_for_a_value,
    asked_for_an_array,
    missed_a_mesh,
    missed_axis_types,
    unbound_axis,
)
from replicax._jax.primitives import (
    asking_primitive,
    collective_primitive,
    composite_primitive,
    identity_primitive,
    linear_primitive,
    resized,
    two_way_primitive,
)
from replicax._jax.runtime import (
    abandon_coordination,
    backends_are_initialized,
    catches_sigterm,
    compiling,
    coordination_client,
    coordinator_host,
    copies,
    copy_on,
    default_platform_is_cpu,
    detected_cluster,
    drop_failed_tokens,
    is_absent,
    is_host_callback,
    is_of_jax,
    looks_for_nans,
    on_compilations,
    preemption_notice,
    process_index_and_count,
    public_call,
    put_alone,
    set_unless_set,
    setting,
    settings_of_this_thread,
    tpu_cluster,
    trace_settings,
    wait_for_key,
    without_compilation_cache,
)
from replicax._jax.tracebacks import debugging, hide_frames, hiding_frames, hiding_frames_of, raised_by
from replicax._jax.traces import (
    as_one_program,
    current_trace,
    eval_trace,
    kept_programs,
    note_read,
    outside_tracing,
    renew_kept_programs,
    set_current_trace,
    staging_trace,
    trace_of_this_thread,
    traced_for,
    transformation_of,
)
