"""For each primitive of JAX that a pass knows, a tiny program that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import parallel  # what has no public name, or one that is deprecated
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.extend.random import threefry_2x32
from jax.sharding import NamedSharding, PartitionSpec

Program = Callable[[], Any]
"""Computes something from nothing. It is traced and never run."""

_UNARY = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1
floor is_finite lgamma log log1p log2 logistic neg one_minus_square round rsqrt sign sin sinh sqrt square tan tanh
""".split()  # noqa: SIM905 (names, not punctuation)
_BINARY = """
add atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter polygamma pow rem sub zeta
""".split()  # noqa: SIM905
_OF_INTEGERS = {
    "and": lax.bitwise_and,
    "mulhi": lax.mulhi,
    "or": lax.bitwise_or,
    "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
    "xor": lax.bitwise_xor,
}
_SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-max": lax.scatter_max,
    "scatter-min": lax.scatter_min,
    "scatter-mul": lax.scatter_mul,
    "scatter-sub": lax.scatter_sub,
}
_KEYED: dict[str, Callable[[jax.Array], Any]] = {
    "random_bits": jax.random.bits,
    "random_clone": jax.random.clone,
    "random_fold_in": lambda key: jax.random.fold_in(key, 1),
    "random_gamma": lambda key: jax.random.gamma(key, 1.0),
    "random_split": jax.random.split,
    "random_unwrap": jax.random.key_data,
}


def _row(n: int = 4) -> jax.Array:
    return jnp.ones(n)


def _square() -> jax.Array:
    return jnp.eye(4)


def _ref(use: Callable[[Any], Any]) -> Program:
    return lambda: use(jax.new_ref(_row()))


def _scattered(scatter: Callable[..., Any]) -> Any:
    return scatter(_row(), jnp.array([[1]]), _row(1), lax.ScatterDimensionNumbers((), (0,), (0,)))


def _windows(init: Any, fn: Callable[..., Any]) -> Any:
    return lax.reduce_window(_square(), init, fn, (2, 2), (2, 2), "VALID")


def _maxima(x: jax.Array) -> Any:
    return lax.reduce_window(x, -np.inf, lax.max, (2, 2), (2, 2), "VALID")


def _over_two() -> NamedSharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2], dtype=object), ("replica",))
    return NamedSharding(mesh, PartitionSpec("replica"))


def _on_two(fn: Callable[[jax.Array], Any], *, check_vma: bool = False) -> Any:
    """``fn`` of one of two devices."""
    sharding = _over_two()
    mapped = jax.shard_map(fn, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=check_vma)
    return mapped(_row())


def _collective(fn: Callable[[jax.Array], Any], *, check_vma: bool = False) -> Program:
    return lambda: _on_two(lambda x: (fn(x), x)[1], check_vma=check_vma)


def _sent(x: jax.Array) -> Any:
    token = parallel.psend(x, "replica", [(0, 1)])
    return parallel.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "replica", [(0, 1)])


def _gathered_alike(x: jax.Array) -> Any:
    if hasattr(parallel, "all_gather_invariant"):  # before JAX 0.12
        return parallel.all_gather_invariant(x, "replica")
    return lax.all_gather(x, "replica", to="invarying")


def _ragged(x: jax.Array) -> Any:
    ones = jnp.ones(2, jnp.int32)
    return lax.ragged_all_to_all(x, x, ones, ones, ones, ones, axis_name="replica")


@jax.custom_jvp
def _with_jvp(x: Any) -> Any:
    return x


_with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


@jax.custom_vjp
def _with_vjp(x: Any) -> Any:
    return x


_with_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


PROGRAMS: dict[str, Program] = {
    **{name: lambda name=name: getattr(lax, name)(_row()) for name in _UNARY},
    **{name: lambda name=name: getattr(lax, name)(_row(), _row()) for name in _BINARY},
    **{name: lambda fn=fn: fn(jnp.arange(4), jnp.arange(4)) for name, fn in _OF_INTEGERS.items()},
    **{name: lambda fn=fn: _scattered(fn) for name, fn in _SCATTERS.items()},
    **{name: lambda fn=fn: fn(jax.random.key(0)) for name, fn in _KEYED.items()},
    **{
        name: lambda name=name: getattr(lax, name)(_row())
        for name in ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
    },
    **{
        name: lambda name=name: getattr(lax, name)(_row(), axes=(0,))
        for name in ("reduce_max", "reduce_min", "reduce_prod", "reduce_sum")
    },
    **{name: lambda name=name: getattr(lax, name)(_row() > 0, axes=(0,)) for name in ("reduce_and", "reduce_or")},
    **{name: lambda name=name: getattr(lax, f"{name}_p").bind(_row(), _row()) for name in ("eq_to", "le_to", "lt_to")},
    "reduce_xor": lambda: lax.reduce_xor(jnp.arange(4), axes=(0,)),
    "add_any": lambda: jax.grad(lambda x: x * x)(1.0),
    "argmax": lambda: lax.argmax(_row(), 0, jnp.int32),
    "argmin": lambda: lax.argmin(_row(), 0, jnp.int32),
    "bitcast_convert_type": lambda: lax.bitcast_convert_type(_row(), jnp.int32),
    "broadcast_in_dim": lambda: lax.broadcast_in_dim(_row(), (4, 4), (0,)),
    "cholesky": lambda: lax.linalg.cholesky(_square()),
    "clamp": lambda: lax.clamp(0.0, _row(), 1.0),
    "clz": lambda: lax.clz(jnp.arange(4)),
    "concatenate": lambda: lax.concatenate([_row(), _row()], 0),
    "cond": lambda: lax.cond(_row().sum() > 0, lambda: 1, lambda: 2),
    "conj": lambda: lax.conj(lax.complex(_row(), _row())),
    "conv_general_dilated": lambda: lax.conv(jnp.ones((1, 1, 4, 4)), jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"),
    "convert_element_type": lambda: _row().astype(jnp.int32),
    "copy": lambda: jnp.copy(_row()),
    "create_token": lambda: lax.create_token(),
    "custom_jvp_call": lambda: _with_jvp(_row()),
    "custom_lin": lambda: jax.jvp(_with_vjp, (_row(),), (_row(),)),
    "custom_linear_solve": lambda: lax.custom_linear_solve(
        lambda x: x, _row(), lambda _, b: b, transpose_solve=lambda _, b: b
    ),
    "custom_vjp_call": lambda: _with_vjp(_row()),
    "custom_vmap_call": lambda: jax.custom_batching.sequential_vmap(lambda x: x)(_row()),
    "debug_callback": lambda: jax.debug.callback(lambda x: None, _row()),
    "debug_print": lambda: jax.debug.print("{}", _row()),
    "device_put": lambda: jax.device_put(_row(), jax.devices()[0]),
    "dot_general": lambda: _square() @ _square(),
    "dynamic_slice": lambda: lax.dynamic_slice(_row(), (jnp.int32(1),), (2,)),
    "dynamic_update_slice": lambda: lax.dynamic_update_slice(_row(), _row(1), (jnp.int32(1),)),
    "eigh": lambda: lax.linalg.eigh(_square()),
    "fft": lambda: jnp.fft.fft(_row()),
    "ffi_call": lambda: jax.ffi.ffi_call("nothing", _shape_of(_row()))(_row()),
    "gather": lambda: _row()[jnp.arange(2)],
    "householder_product": lambda: lax.linalg.householder_product(_square(), _row()),
    "imag": lambda: lax.imag(lax.complex(_row(), _row())),
    "integer_pow": lambda: lax.integer_pow(_row(), 3),
    "io_callback": lambda: io_callback(lambda x: x, _shape_of(_row()), _row()),
    "iota": lambda: lax.iota(jnp.int32, 4),
    "jit": lambda: jax.jit(lambda x: x)(_row()),
    "lu": lambda: lax.linalg.lu(_square()),
    "name": lambda: checkpoint_name(_row(), "name"),
    "not": lambda: lax.bitwise_not(jnp.arange(4)),
    "optimization_barrier": lambda: lax.optimization_barrier(_row()),
    "pad": lambda: lax.pad(_row(), 0.0, [(1, 0, 0)]),
    "population_count": lambda: lax.population_count(jnp.arange(4)),
    "pure_callback": lambda: jax.pure_callback(lambda x: x, _shape_of(_row()), _row()),
    "qr": lambda: lax.linalg.qr(_square()),
    "ragged_dot_general": lambda: lax.ragged_dot(_square(), _square()[None], jnp.array([2])),
    "random_seed": lambda: jax.random.key(0),
    "random_wrap": lambda: jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32)),
    "real": lambda: lax.real(lax.complex(_row(), _row())),
    "reduce": lambda: lax.reduce(_row(), 1.0, lambda a, b: a * b + a, (0,)),
    "reduce_precision": lambda: lax.reduce_precision(_row(), 5, 10),
    "reduce_window": lambda: _windows(0.0, lambda a, b: a * b + a),
    "reduce_window_max": lambda: _windows(-np.inf, lax.max),
    "reduce_window_min": lambda: _windows(np.inf, lax.min),
    "reduce_window_sum": lambda: _windows(0.0, lax.add),
    "regularized_incomplete_beta": lambda: lax.betainc(_row(), _row(), _row()),
    "remat2": lambda: jax.checkpoint(jnp.sin)(_row()),
    "reshape": lambda: lax.reshape(_row(), (2, 2)),
    "rev": lambda: lax.rev(_row(), (0,)),
    "rng_bit_generator": lambda: lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (4,)),
    "rng_uniform": lambda: lax.rng_uniform(0.0, 1.0, (4,)),
    "scan": lambda: lax.scan(lambda c, x: (c + x, c), 0.0, _row()),
    "select_and_gather_add": lambda: jax.jvp(_maxima, (_square(),), (_square(),)),
    "select_and_scatter_add": lambda: jax.grad(lambda x: _maxima(x).sum())(_square()),
    "select_n": lambda: lax.select(_row() > 0, _row(), _row()),
    "sharding_constraint": lambda: lax.with_sharding_constraint(_row(), _over_two()),
    "slice": lambda: lax.slice(_row(), (1,), (3,)),
    "sort": lambda: lax.sort(_row()),
    "split": lambda: lax.split(_row(), (2, 2)),
    "squeeze": lambda: lax.squeeze(_row(1), (0,)),
    "stack": lambda: lax.stack([_row(), _row()]),
    "stop_gradient": lambda: lax.stop_gradient(_row()),
    "svd": lambda: lax.linalg.svd(_square()),
    "threefry2x32": lambda: threefry_2x32(jnp.zeros(2, jnp.uint32), jnp.zeros(4, jnp.uint32)),
    "tile": lambda: lax.tile(_row(), (2,)),
    "top_k": lambda: lax.top_k(_row(), 2),
    "transpose": lambda: lax.transpose(_square(), (1, 0)),
    "triangular_solve": lambda: lax.linalg.triangular_solve(_square(), _square()),
    "unstack": lambda: lax.unstack(_row()),
    "while": lambda: lax.while_loop(lambda x: x < 1, lambda x: x + 1, 0.0),
    # arrays that nobody has filled
    "empty": lambda: lax.empty((4,), jnp.float32),
    "empty2": lambda: jax.grad(lambda x: lax.cond(x > 0, jnp.sin, lambda x: 2 * x, x))(_row()[0]),
    # mutable arrays
    "addupdate": _ref(lambda ref: ref.addupdate(_row())),
    "empty_ref": lambda: (jax.empty_ref(_shape_of(_row())), 0)[1],
    "free_ref": _ref(jax.free_ref),
    "freeze": _ref(jax.freeze),
    "get": _ref(lambda ref: ref[...]),
    "new_ref": _ref(lambda ref: None),
    "swap": _ref(lambda ref: ref.__setitem__(..., _row())),
    # several devices
    "shard_map": _collective(lambda x: x),
    "all_gather": _collective(lambda x: lax.all_gather(x, "replica")),
    "all_gather_invariant": _collective(_gathered_alike, check_vma=True),
    "all_to_all": _collective(lambda x: lax.all_to_all(x, "replica", 0, 0, tiled=True)),
    "axis_index": _collective(lambda x: lax.axis_index("replica")),
    "pbroadcast": _collective(lambda x: lax.pbroadcast(x, ("replica",), 0)),
    "pmax": _collective(lambda x: lax.pmax(x, "replica")),
    "pmin": _collective(lambda x: lax.pmin(x, "replica")),
    "ppermute": _collective(lambda x: lax.ppermute(x, "replica", [(0, 1), (1, 0)])),
    "precv": _collective(_sent),
    "psend": _collective(_sent),
    "pvary": _collective(lambda x: lax.pcast(jnp.zeros(2), "replica", to="varying"), check_vma=True),
    "psum": _collective(lambda x: lax.psum(x, "replica")),
    "psum_invariant": _collective(lambda x: lax.psum(x, "replica"), check_vma=True),
    "ragged_all_to_all": _collective(_ragged),
    "reduce_scatter": _collective(lambda x: lax.psum_scatter(x, "replica")),
}
