"""The parts of JAX that Replicax uses and JAX does not promise: the one place that imports its internals.

Everything here is a few lines around something that ``jax`` has, but does not yet promise. When a new JAX
release moves one of them, this package changes and no other; but for ``replicax.per_replica.eager``, which computes
operations with what :mod:`replicax._jax.internals` imports.
"""

from replicax._jax.collective_params import (
    exchanged_along as exchanged_along,
    gathered_along as gathered_along,
    groups_of as groups_of,
    has_groups as has_groups,
    is_over_all_of as is_over_all_of,
    names_axis as names_axis,
    own_dims as own_dims,
    scattered_along as scattered_along,
    senders as senders,
)
from replicax._jax.compile_requests import (
    CompileRequest as CompileRequest,
    compile_for as compile_for,
    compile_request as compile_request,
)
from replicax._jax.contractions import (
    product_flops as product_flops,
    summed_up as summed_up,
    sums_up as sums_up,
)
from replicax._jax.control_flow import (
    Branches as Branches,
    Scan as Scan,
    While as While,
    called_program as called_program,
    closed_over as closed_over,
    control_flow_of as control_flow_of,
    executed_sum as executed_sum,
    has_rules as has_rules,
    pruned as pruned,
    scan_of as scan_of,
    with_calls_for_solves as with_calls_for_solves,
)
from replicax._jax.jaxprs.keys import (
    BY_VALUE as BY_VALUE,
    CONTAINERS as CONTAINERS,
    ById as ById,
    Hashed as Hashed,
    Keys as Keys,
    digested as digested,
    is_record as is_record,
)
from replicax._jax.jaxprs.program_meshes import (
    NO_MESH as NO_MESH,
    abstract_mesh as abstract_mesh,
    foreign_mesh as foreign_mesh,
    fresh as fresh,
    on_mesh as on_mesh,
)
from replicax._jax.jaxprs.programs import (
    bind as bind,
    callback_of as callback_of,
    called as called,
    calls_back as calls_back,
    calls_back_in_loops as calls_back_in_loops,
    check_freed_once as check_freed_once,
    computing as computing,
    contains as contains,
    enable_x64_as_in as enable_x64_as_in,
    enable_x64_for as enable_x64_for,
    equations_of as equations_of,
    evaluate as evaluate,
    has_outer_effects as has_outer_effects,
    has_side_effects as has_side_effects,
    host_function as host_function,
    interpret as interpret,
    is_action as is_action,
    is_deterministic as is_deterministic,
    is_mutable as is_mutable,
    leaked_tracer as leaked_tracer,
    map_jaxprs as map_jaxprs,
    opened as opened,
    prints as prints,
    program_of as program_of,
    pruned_fn as pruned_fn,
    replace_inputs as replace_inputs,
    spliced as spliced,
    sub_jaxprs as sub_jaxprs,
    traced as traced,
    traced_once as traced_once,
    with_callback as with_callback,
)
from replicax._jax.jaxprs.source_lines import (
    comes_from as comes_from,
    from_line_of as from_line_of,
    is_backward as is_backward,
    located as located,
    source_line as source_line,
    source_place as source_place,
)
from replicax._jax.jaxprs.types import (
    ClosedJaxpr as ClosedJaxpr,
    Equation as Equation,
    Jaxpr as Jaxpr,
    Literal as Literal,
    Primitive as Primitive,
    ShapedArray as ShapedArray,
    shape_of as shape_of,
    without_literals as without_literals,
)
from replicax._jax.messages import (
    arguments_named as arguments_named,
    asked_for_a_value as asked_for_a_value,
    asked_for_an_array as asked_for_an_array,
    missed_a_mesh as missed_a_mesh,
    missed_axis_types as missed_axis_types,
    unbound_axis as unbound_axis,
)
from replicax._jax.primitives import (
    asking_primitive as asking_primitive,
    collective_primitive as collective_primitive,
    composite_primitive as composite_primitive,
    identity_primitive as identity_primitive,
    linear_primitive as linear_primitive,
    resized as resized,
    two_way_primitive as two_way_primitive,
)
from replicax._jax.runtime import (
    abandon_coordination as abandon_coordination,
    backends_are_initialized as backends_are_initialized,
    catches_sigterm as catches_sigterm,
    compiling as compiling,
    coordination_client as coordination_client,
    coordinator_host as coordinator_host,
    copies as copies,
    copy_on as copy_on,
    default_platform_is_cpu as default_platform_is_cpu,
    detected_cluster as detected_cluster,
    drop_failed_tokens as drop_failed_tokens,
    is_absent as is_absent,
    is_host_callback as is_host_callback,
    is_of_jax as is_of_jax,
    looks_for_nans as looks_for_nans,
    on_compilations as on_compilations,
    preemption_notice as preemption_notice,
    process_index_and_count as process_index_and_count,
    public_call as public_call,
    put_alone as put_alone,
    set_unless_set as set_unless_set,
    setting as setting,
    settings_of_this_thread as settings_of_this_thread,
    tpu_cluster as tpu_cluster,
    trace_settings as trace_settings,
    wait_for_key as wait_for_key,
    without_compilation_cache as without_compilation_cache,
)
from replicax._jax.tracebacks import (
    debugging as debugging,
    hide_frames as hide_frames,
    hiding_frames as hiding_frames,
    hiding_frames_of as hiding_frames_of,
    raised_by as raised_by,
)
from replicax._jax.traces import (
    as_one_program as as_one_program,
    current_trace as current_trace,
    eval_trace as eval_trace,
    kept_programs as kept_programs,
    note_read as note_read,
    outside_tracing as outside_tracing,
    renew_kept_programs as renew_kept_programs,
    set_current_trace as set_current_trace,
    staging_trace as staging_trace,
    trace_of_this_thread as trace_of_this_thread,
    traced_for as traced_for,
    transformation_of as transformation_of,
)
