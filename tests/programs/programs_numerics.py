"""Linear algebra, sorting and indexing, and every kind of dtype and structure."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.programs.programs import integers, normal, program, together, weights

Array = jax.Array


def _positive(a: Array) -> Array:
    return a @ a.T + 3 * jnp.eye(a.shape[0])


# --- linear algebra -------------------------------------------------------------------------------------


@program("TTTM", normal(3), shared=weights((3, 3)))
def solving_linear_systems(x: Array, a: Array) -> Any:
    a = _positive(a)
    factor = jax.scipy.linalg.cho_factor(a)
    iterated, _ = jax.scipy.sparse.linalg.cg(lambda v: a @ v, x, tol=1e-6, maxiter=8)
    return jnp.linalg.solve(a, x), jax.scipy.linalg.cho_solve(factor, x), iterated, factor[0]


@program("TTTTMM", normal(3, 3), shared=weights((3, 3)))
def decompositions(x: Array, a: Array) -> Any:
    q, r = jnp.linalg.qr(x)
    values = jnp.linalg.eigvalsh(_positive(x)), jnp.linalg.svd(x, compute_uv=False)
    return q @ r, *values, jnp.linalg.det(x), jnp.linalg.cholesky(_positive(a)), jnp.linalg.inv(_positive(a))


@program("TTTM", normal(2, 3, 4), shared=weights((4, 5), (2, 3)))
def contractions(x: Array, w: Array, v: Array) -> Any:
    tables = jnp.einsum("bij,jk->bik", x, w), jnp.einsum("bij,bi->j", x, v)
    return *tables, lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,)))), jnp.tensordot(v, v, 2)


@program("TTM", normal(8), shared=weights((8,), (3,)))
def fourier_transforms_and_convolutions(x: Array, a: Array, kernel: Array) -> Any:
    filtered = jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(a), n=8)
    return filtered, jnp.fft.fft(x), jnp.convolve(a, kernel)


@program("TM", normal(2), shared=weights((2,)))
def an_adaptive_ode_solver(x: Array, a: Array) -> Any:
    from jax.experimental.ode import odeint

    def end(start: Array) -> Array:
        return odeint(lambda y, t: -(a**2) * y + jnp.sin(t), start, jnp.array([0.0, 1.0]))[-1]

    return end(x), end(a)  # how many steps it takes is up to the data


@program("TTTM", normal(6), shared=weights((6,)))
def special_functions(x: Array, a: Array) -> Any:
    return (
        jax.scipy.special.gammaln(jnp.abs(x) + 0.5),
        jax.scipy.stats.norm.logcdf(x),
        jax.nn.logsumexp(x),
        jax.scipy.special.erfinv(jnp.tanh(a)),
    )


# --- sorting and indexing -------------------------------------------------------------------------------


@program("TTTTTM", normal(6), shared=weights((6,)))
def sorting_and_searching(x: Array, a: Array) -> Any:
    largest, places = lax.top_k(x, 3)
    found = jnp.searchsorted(jnp.sort(a), x), jnp.unique(jnp.round(x), size=6, fill_value=0.0)
    return jnp.sort(x), largest, a[places], *found, jnp.argsort(a)


@program("TTTM", together(ids=integers(0, 4, 6), x=normal(6, 2)))
def counting_and_segments(data: Any) -> Any:
    ids, x = data["ids"], data["x"]
    constant = jax.ops.segment_sum(jnp.ones(4), jnp.array([0, 1, 1, 3]), num_segments=4)
    return (
        jax.nn.one_hot(ids, 4).sum(0),
        jax.ops.segment_sum(x, ids, num_segments=4),
        jnp.bincount(ids, weights=x[:, 0], length=4),
        constant,
    )


@program("TTTTM", together(ids=integers(0, 5, 4), x=normal(5, 2)), shared=weights((5, 2)))
def gathering_and_scattering(data: Any, table: Array) -> Any:
    ids, x = data["ids"], data["x"]
    gradient = jax.grad(lambda table: (table[ids] ** 2).sum())(table)
    fixed = jnp.array([2, 0])
    return table[ids], gradient, table.at[ids].add(1.0), x[fixed], table.at[fixed].multiply(2.0)


@program("TTTTM", together(start=integers(0, 4), x=normal(2)), shared=weights((6,)))
def slicing_at_a_place_of_its_own(data: Any, a: Array) -> Any:
    start, x = data["start"], data["x"]
    return (
        lax.dynamic_slice(a, (start,), (2,)),
        lax.dynamic_update_slice(a, x, (start,)),
        lax.dynamic_update_slice(jnp.zeros(6), jnp.ones(2), (start,)),
        jnp.roll(a, start),
        lax.dynamic_slice(a, (jnp.int32(2),), (3,)),
    )


@program("TTM", normal(1, 6, 6, 2), shared=weights((3, 3, 2, 4)))
def convolution_and_pooling(x: Array, kernel: Array) -> Any:
    def network(kernel: Array, x: Array) -> Array:
        h = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return lax.reduce_window(jax.nn.relu(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    loss = jax.value_and_grad(lambda kernel: network(kernel, x).mean())
    return *loss(kernel), network(kernel, jnp.ones((1, 6, 6, 2)))


# --- dtypes and structures ------------------------------------------------------------------------------


@program("TTTM", normal(4), shared=weights((4,)))
def complex_numbers(x: Array, a: Array) -> Any:
    z = lax.complex(x, a)
    gradient = jax.grad(lambda z: jnp.real(z * jnp.conj(z)).sum())(z)
    return z * 1j, gradient, jnp.angle(z), jnp.exp(lax.complex(a, a))


@program("TTTM", normal(4, 4), shared=weights((4, 3)))
def half_precision(x: Array, w: Array) -> Any:
    low, weight = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    wide = jnp.matmul(low, weight, preferred_element_type=jnp.float32)
    return low @ weight, wide, x.astype(jnp.float16) * 2, weight


@program("TTTTM", normal(8), shared=weights((8,)))
def quantised_to_bytes(x: Array, a: Array) -> Any:
    scale = jnp.abs(x).max() / 127
    packed = jnp.round(x / scale).astype(jnp.int8)
    masks = (x > 0, jnp.packbits(x > 0))
    dot = jnp.dot(packed, jnp.ones(8, jnp.int8), preferred_element_type=jnp.int32)
    return packed, dot, *masks, (a > 0) ^ (a < 0.3)


@program("TTTMM", integers(-1000, 1000, 5))
def bits_and_unsigned_integers(x: Array) -> Any:
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    mixed = (raw ^ (raw >> 3)) * jnp.uint32(2654435761)
    constant = jnp.arange(5, dtype=jnp.uint8)
    return mixed, lax.population_count(raw), x // 7 - x % 3, constant << 2, ~constant


class Pair(NamedTuple):
    mean: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Report:
    loss: Any
    parts: dict[str, Any]
    label: str = dataclasses.field(default="report", metadata={"static": True})


@program("TMMMTMTM", normal(4), shared=weights((4,)))
def results_in_containers(x: Array, a: Array) -> Any:
    report = Report(loss=x.sum(), parts={"b": [a, (x, None)], "a": Pair(jnp.float32(1), jnp.arange(3))})
    return report, {"pair": Pair(x * 2, a), "none": None, "a": a}


@program("TMMMTT", normal(4), shared=lambda: (2, 0.5, np.arange(3, dtype=np.int16)))
def constants_and_arguments_as_results(x: Array, integer: Array, number: Array, array: Array) -> Any:
    return x, integer, number, jnp.asarray(np.arange(4)), x, x + number


@program("MMMT", normal(3), shared=lambda: (np.zeros((0, 4), np.float32),))
def empty_arrays(x: Array, empty: Array) -> Any:
    return x[:0].shape[0] + jnp.zeros((0, 2)), empty.sum(), empty @ jnp.ones((4, 2)), empty.sum(0)[:3] + x


@program("TM", normal(4), shared=weights((4,)))
def a_pallas_kernel(x: Array, a: Array) -> Any:
    from jax.experimental import pallas

    def kernel(source: Any, target: Any) -> None:
        target[...] = jnp.tanh(source[...]) * 2

    call = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32), interpret=True)
    return call(x), call(a)
