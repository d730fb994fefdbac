"""Settings, devices and processes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax.sharding import SingleDeviceSharding

from replicax._jax.internals import (
    callback as _callback,
    cloud_tpu_cluster as _clusters,
    clusters as _cluster_kinds,
    config as _config,
    core as _core,
    dispatch as _dispatch,
    distributed as _distributed,
    jaxlib as _jaxlib,
    pxla as _pxla,
    xla_bridge as _xla_bridge,
)
from replicax._jax.tracebacks import Args, Result, hiding_frames

_FOLDER = os.path.dirname(jax.__file__) + os.sep
_COMPILATION = (_dispatch.JAXPR_TRACE_EVENT, _dispatch.JAXPR_TO_MLIR_MODULE_EVENT, _dispatch.BACKEND_COMPILE_EVENT)


def setting(name: str) -> Any:
    """The value of a JAX setting for all threads, whatever a ``with`` block has changed in this one."""
    return jax.config.values[name]


def local_settings() -> list[tuple[Any, Any]]:
    """What holds each JAX setting, and the value that a ``with`` block has given it in this thread, or ``unset``."""
    return [(h, h.get_local()) for h in jax.config._value_holders.values() if hasattr(h, "get_local")]


def settings_of_this_thread() -> Callable[[], None]:
    """A function that gives another thread the JAX settings that a ``with`` block has changed in this one."""
    changed = [(h, value) for h, value in local_settings() if value is not _config.config_ext.unset]

    def adopt() -> None:
        for holder, value in changed:
            holder.set_local(value)

    return adopt


def public_call(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """A public function whose programs use the strategy's mesh: a mesh set by ``jax.set_mesh`` is left for the call.

    While something is traced, its mesh stays. Errors show users' frames only, as with :func:`hiding_frames`.
    """

    @hiding_frames
    @functools.wraps(fn)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        if jax.sharding.get_abstract_mesh().empty or _core.trace_ctx.trace is not _core.eval_trace:
            return fn(*args, **kwargs)
        with jax.set_mesh(None):
            return fn(*args, **kwargs)

    return call


def trace_settings() -> Any:
    """A hashable digest of every JAX setting that changes what is traced or compiled (x64, precision, …)."""
    global _settings_at_first
    settings = _config.trace_context()
    if _settings_at_first is None:
        _settings_at_first = len(settings)
    elif len(settings) > _settings_at_first:
        # Parts of JAX that are imported later, such as Pallas, bring settings with them: until one is set,
        # nothing has changed.
        later = enumerate(settings[_settings_at_first:])
        settings = (*settings[:_settings_at_first], *((i, value) for i, value in later if value not in (None, False)))
    return settings, _config.debug_nans.value, _config.debug_infs.value


_settings_at_first: int | None = None


def looks_for_nans() -> bool:
    """Return whether JAX raises when a program has computed a NaN or an infinity."""
    return bool(_config.debug_nans.value or _config.debug_infs.value)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Trace and compile inside, whatever JAX's settings are; its eager folding of constants would ignore the mesh."""
    with jax.disable_jit(False), _config.eager_constant_folding(False):
        yield


def without_compilation_cache() -> contextlib.AbstractContextManager[None]:
    """Compile inside without JAX's persistent cache."""
    return _config.enable_compilation_cache(False)


def drop_failed_tokens() -> None:
    """Drop the tokens of programs that called the host, and have failed.

    JAX would raise their errors again from the next wait for such calls, and give that of an ordered one to all later.
    """
    for tokens in (_dispatch.runtime_tokens.current_tokens, _dispatch.runtime_tokens.output_runtime_tokens):
        for key, token in list(tokens.items()):
            try:
                token.block_until_ready()
            except Exception:
                del tokens[key]


def copy_on(device: jax.Device, array: Any) -> jax.Array:
    """A copy of an array on ``device``.

    If it is there, this takes a tenth of the time of ``jax.device_put``.
    """
    if type(array) is not _jaxlib.ArrayImpl or not array.is_fully_replicated:
        return jax.device_put(array, device, may_alias=False)
    places = array.sharding._addressable_device_assignment
    if device not in places:
        return jax.device_put(array, device, may_alias=False)
    [copy] = _jaxlib.batched_copy_array_to_devices_with_sharding(
        [array.addressable_data(places.index(device))],
        [_jaxlib.DeviceList((device,))],
        [SingleDeviceSharding(device)],
        [_jaxlib.ArrayCopySemantics.ALWAYS_COPY],
    )
    return copy


def copies(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[jax.Array]:
    """Copies of arrays, or arrays whose memory is never written to, each with its sharding: one transfer.

    If each is on its only device already, this takes a tenth of the time of ``jax.device_put``.
    """
    if all(map(_is_there, arrays, shardings)):
        devices = [_jaxlib.DeviceList(s._addressable_device_assignment) for s in shardings]
        always = [_jaxlib.ArrayCopySemantics.ALWAYS_COPY] * len(devices)
        return _jaxlib.batched_copy_array_to_devices_with_sharding(list(arrays), devices, list(shardings), always)
    return jax.device_put(list(arrays), list(shardings), may_alias=False)


def _is_there(array: Any, sharding: Any) -> bool:
    """Return whether ``array`` is on the one device of ``sharding``."""
    if type(array) is not _jaxlib.ArrayImpl:
        return False
    wanted = sharding._addressable_device_assignment
    return len(wanted) == 1 and bool(array.sharding._addressable_device_assignment == wanted)


def put_alone(arrays: Sequence[np.ndarray[Any, Any]], sharding: Any) -> list[jax.Array] | None:
    """NumPy arrays on the one device of ``sharding``; ``None`` if a dtype becomes another there.

    JAX may use their memory itself. This takes a fifth of the time of ``jax.device_put``.
    """
    if not all(type(a) is np.ndarray and a.dtype == jax.dtypes.canonicalize_dtype(a.dtype) for a in arrays):
        return None
    where = list(sharding._addressable_device_assignment)
    avals = [jax.core.ShapedArray(a.shape, a.dtype) for a in arrays]
    return [_pxla.batched_device_put(v, sharding, [a], where) for v, a in zip(avals, arrays, strict=True)]


def is_absent(device: jax.Device) -> bool:
    """Return whether ``device`` is one that programs can be compiled for, but that is not there to run them."""
    return isinstance(device.client, _jaxlib.CompileOnlyPyClient)


def backends_are_initialized() -> bool:
    """Return whether JAX has made its devices already, so that their number can't change any more."""
    return bool(_xla_bridge.backends_are_initialized())


def default_platform_is_cpu() -> bool:
    """Return whether JAX will choose CPUs if no device is named, without making any device.

    False if a package for other devices is installed, even if there are no such devices.
    """
    platforms = setting("jax_platforms")  # where there are TPUs, JAX itself has set it
    if platforms:
        return bool(platforms.split(",")[0] == "cpu")
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else spec.submodule_search_locations or []
    in_folders = next(pkgutil.iter_modules(folders), None)
    return in_folders is None and not importlib.metadata.entry_points(group="jax_plugins")


# --- processes ------------------------------------------------------------------------------------------


def coordination_client() -> Any:
    """The client of the service that ``jax.distributed.initialize`` has started; ``None`` if it was not called."""
    return _distributed.global_state.client


def process_index_and_count() -> tuple[int, int]:
    """This process's number, and how many there are, without making devices."""
    return _distributed.global_state.process_id, _distributed.global_state.num_processes


def wait_for_key(client: Any, key: str, seconds: float) -> bytes | None:
    """The value of ``key`` in the coordination service, now or within that time; ``None`` if none comes."""
    try:
        value: bytes = client.blocking_key_value_get_bytes(key, max(1, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
    return value


def set_unless_set(client: Any, key: str, value: bytes) -> bytes:
    """Set ``key`` in the coordination service, unless it has a value already; return the value."""
    try:
        client.key_value_set_bytes(key, value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        value = client.key_value_try_get_bytes(key)
    return value


def catches_sigterm() -> bool:
    """Return whether JAX catches SIGTERM, as it does after ``jax.distributed.initialize`` unless told not to."""
    return _distributed.global_state.preemption_sync_manager is not None


def preemption_notice(client: Any) -> bool:
    """Return whether a process has got a SIGTERM that JAX has caught."""
    try:
        return bool(client.key_value_try_get_bytes("RECEIVED_PREEMPTION_NOTICE"))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return False


def on_compilations(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call ``begin`` and ``end`` around whatever JAX traces, lowers and compiles, in the thread that does it."""

    def began(event: str, *_: Any, **__: Any) -> None:
        if event in _COMPILATION:
            begin()

    def ended(event: str, *_: Any, **__: Any) -> None:
        if event in _COMPILATION:
            end()

    jax.monitoring.register_scalar_listener(began)
    jax.monitoring.register_event_duration_secs_listener(ended)


def is_host_callback(code: CodeType) -> bool:
    """Return whether ``code`` is JAX's own that runs where a program calls Python on the host."""
    return code.co_filename == _callback.__file__


def is_of_jax(code: CodeType) -> bool:
    """Return whether ``code`` is JAX's own."""
    return code.co_filename.startswith(_FOLDER)


def coordinator_host() -> str:
    """The host of the coordination service, as this process knows it; ``"localhost"`` if there is none."""
    address: str = _distributed.global_state.coordinator_address or ""
    return address.rsplit(":", 1)[0].strip("[]") or "localhost"


def abandon_coordination() -> None:
    """Let go of the coordination service: at its end this process does not wait for the others, as JAX would."""
    state = _distributed.global_state
    for held in (state.client, state.service, state.preemption_sync_manager):
        if held is not None:  # for good, as destroying it waits, too
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None


def tpu_cluster() -> tuple[str, list[str]] | None:
    """The cloud that the TPUs of this machine belong to, and the addresses of the hosts of the slice; if any."""
    for name, cluster in (("gke", _clusters.GkeTpuCluster), ("google_cloud", _clusters.GceTpuCluster)):
        if cluster.is_env_present():
            return name, cluster._get_worker_list_in_slice()
    return None


@dataclasses.dataclass(frozen=True)
class DetectedCluster:
    """The cluster that ``jax.distributed.initialize()`` would find by itself."""

    name: str  # JAX's name of the kind: ``"slurm"``, ``"ompi"``, ``"k8s"``, ``"gcetpu"``, …
    coordinator: str  # the address of process 0, with the port that JAX would choose
    count: int  # how many processes there are
    index: int  # the number of this one


def detected_cluster(seconds: float) -> DetectedCluster | None:
    """The cluster that JAX detects, if there are several processes; otherwise ``None``.

    JAX waits at most so many ``seconds`` until the coordinator's name is known.
    """
    for env in _cluster_kinds.ClusterEnv._cluster_types:
        name = env.name or env.__name__.removesuffix("Cluster").lower()
        if name == "k8s" and "JOB_COMPLETION_INDEX" not in os.environ:
            continue  # a pod that belongs to no indexed job is alone
        if env.opt_in_only_method or not env.is_env_present():
            continue
        count = env.get_process_count()
        if count == 1:
            return None
        port = os.environ.get("JAX_COORDINATOR_PORT")
        coordinator = env.get_coordinator_address(timeout_secs=int(min(seconds, 1e6)), override_coordinator_port=port)
        return DetectedCluster(name, coordinator, count, env.get_process_id())
    return None
