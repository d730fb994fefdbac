"""Every internal of JAX that Replicax uses, why, and what public road there is not.

No other file imports ``jax._src``, or more of ``jaxlib`` than its version and the bindings of MLIR.
``tests/_jax/test_internals.py`` checks that each name which is taken from these modules exists. What would give wrong
values in silence if JAX changed is checked when it is first used; see :func:`replicax._jax.traces.check_caches`.

=====================  ===================================================================================
module                 what for
=====================  ===================================================================================
core                   The trace that is active, and others in its place: public ``jax.core.eval_context`` and
                       ``jax.ensure_compile_time_eval`` know one other trace only. ``EvalTrace`` is the base of ours.
config                 ``trace_context``, the settings that decide about a program: what public settings there are is
                       known, but not which of them count, nor those that ``with`` blocks set on one thread.
mesh                   Whether a mesh is set while a program is traced; where JAX keeps it has moved between releases.
source_info_util       ``Transform``: whether an operation is part of a derivative. ``jax.extend`` has the rest.
ad                     ``fallback_linearize_rule``, while ``replicax.debug()`` runs, so that it traces a rule once.
partial_eval           ``trace_to_jaxpr``, JAX's cache of traced functions, to drop programs that hold old values.
ad_checkpoint          The same cache of ``jax.checkpoint``.
pxla                   ``batched_device_put``: NumPy arrays on one device in a fifth of ``jax.device_put``'s time.
dispatch               Names of the events of compiling, tokens of calls of the host that have failed, and whether an
                       operation is computed by being compiled.
compiler               The options of a program that ``debug()`` compiles once and loads on other devices.
compilation_cache      Whether there is one on disk; its programs can't be loaded so.
literals               The class of constants in programs, which is not NumPy's.
callback               Where its code is, to tell a call of the host from other Python.
distributed            The client of the coordination service. ``jax.distributed`` tells only whether it was started.
clusters               Which cluster ``jax.distributed.initialize`` would find, before it is called.
cloud_tpu_cluster      The hosts of a slice of TPUs.
xla_bridge             Whether devices were made, without making them.
jaxlib                 Classes of arrays, copies and devices; clients that compile only; compile options.
=====================  ===================================================================================
"""

from jax._src import (
    ad_checkpoint,
    callback,
    clusters,
    compilation_cache,
    compiler,
    config,
    core,
    dispatch,
    distributed,
    literals,
    mesh,
    source_info_util,
    xla_bridge,
)
from jax._src.clusters import cloud_tpu_cluster
from jax._src.interpreters import ad, partial_eval, pxla
from jaxlib import _jax as jaxlib
