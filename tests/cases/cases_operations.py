"""Operations with rules of their own: reductions, windows, sorting, scatters, contractions, transforms, randomness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

ZERO = jnp.float32(0)
SCATTERS = lax.ScatterDimensionNumbers((), (0,), (0,))


def square(v):
    return v.reshape(2, 2)


def positive(v):
    return square(v) @ square(v).T + 2 * jnp.eye(2)


def image(v):
    return v.reshape(1, 1, 2, 2)


def both(f):
    return lambda x, a: (f(x), f(a))


CASES = {
    "reductions": ("TM", both(lambda v: jnp.stack([v.sum(), v.max(), v.min(), v.prod(), v.mean(), v.std()]))),
    "logical reductions": (
        "TM",
        both(lambda v: jnp.stack([(v > 0).any(), (v > -9).all(), jnp.logical_xor.reduce(v > 0)])),
    ),
    "lax.reduce with a function": (
        "TM",
        both(lambda v: lax.reduce(v, ZERO, lambda p, q: p + 2 * q, (0,)) * 0 + lax.reduce(v, ZERO, lax.max, (0,))),
    ),
    "lax.reduce of a pair": (
        "TM",
        both(
            lambda v: lax.reduce(
                (v, jnp.arange(4)), (ZERO, 0), lambda p, q: (lax.max(p[0], q[0]), lax.max(p[1], q[1])), (0,)
            )[0]
        ),
    ),
    "lax.reduce from a start of each replica": ("T", lambda x, a: lax.reduce(a, x[0], lax.add, (0,))),
    "reduce_precision": ("TM", both(lambda v: lax.reduce_precision(v, 5, 4))),
    "reduce_window": ("TM", both(lambda v: lax.reduce_window(v, 0.0, lax.add, (2,), (1,), "SAME"))),
    "reduce_window with a function": (
        "TM",
        both(lambda v: lax.reduce_window(v, -jnp.inf, lax.max, (2,), (2,), "VALID")),
    ),
    "gradient of pooling": (
        "TM",
        both(lambda v: jax.grad(lambda v: lax.reduce_window(v, -jnp.inf, lax.max, (2,), (2,), "VALID").sum())(v)),
    ),
    "select_and_gather": (
        "T",
        lambda x, a: jax.jvp(lambda v: lax.reduce_window(v, -jnp.inf, lax.max, (2,), (2,), "VALID"), (a,), (x,))[1],
    ),
    "sort": ("TM", both(lambda v: lax.sort(v))),
    "sort of several": ("TT", lambda x, a: lax.sort((x, a), num_keys=1)),
    "argsort": ("TM", both(lambda v: jnp.argsort(v))),
    "top_k": ("TTMM", lambda x, a: (*lax.top_k(x, 2), *lax.top_k(a, 2))),
    "argmax and argmin": ("TM", both(lambda v: jnp.stack([jnp.argmax(v), jnp.argmin(v)]))),
    "searchsorted": ("TT", lambda x, a: (jnp.searchsorted(jnp.sort(a), x), jnp.searchsorted(jnp.sort(x), a))),
    "unique of a fixed size": ("TM", both(lambda v: jnp.unique(jnp.round(v), size=4))),
    "median and quantile": ("TM", both(lambda v: jnp.stack([jnp.median(v), jnp.quantile(v, 0.3)]))),
    "histogram": ("TM", both(lambda v: jnp.histogram(v, bins=3, range=(-2.0, 2.0))[0])),
    "bincount": ("TM", both(lambda v: jnp.bincount(jnp.abs(v).astype(int), length=3))),
    "segment_sum": (
        "TT",
        lambda x, a: (
            jax.ops.segment_sum(x, jnp.array([0, 1, 0, 1]), 2),
            jax.ops.segment_sum(a, (x > 0).astype(int), 2),
        ),
    ),
    "gather": ("TTM", lambda x, a: (x[jnp.array([3, 1])], a[jnp.argsort(x)], a[jnp.array([3, 1])])),
    "gather out of bounds": ("TM", both(lambda v: v.at[jnp.array([1, 9, -1])].get(mode="fill", fill_value=7.0))),
    "gather with modes": (
        "TM",
        both(lambda v: jnp.stack([jnp.take(v, jnp.array([1, 9]), mode=m) for m in ("clip", "wrap")])),
    ),
    "scatter": ("TTM", lambda x, a: (x.at[1].set(9.0), a.at[jnp.argmax(x)].set(9.0), a.at[1].set(9.0))),
    "scatter add": ("TM", both(lambda v: v.at[jnp.array([0, 0, 2])].add(1.0))),
    "scatter min and max": ("TM", both(lambda v: v.at[jnp.array([0, 1])].min(0.0).at[2].max(0.0))),
    "scatter mul": ("TM", both(lambda v: v.at[jnp.array([0, 0])].multiply(3.0).at[1].power(2.0))),
    "scatter that drops": ("TM", both(lambda v: v.at[jnp.array([1, 9])].add(5.0, mode="drop"))),
    "scatter that clips": ("TM", both(lambda v: v.at[jnp.array([1, 9])].add(5.0, mode="clip"))),
    "scatter of what all share by data": ("T", lambda x, a: jnp.zeros(4).at[(x > 0).astype(int)].add(a)),
    "scatter_apply": ("TM", both(lambda v: v.at[jnp.array([0, 2])].apply(jnp.sin))),
    "lax.scatter": ("TM", both(lambda v: lax.scatter_add(v, jnp.array([[1], [2]]), jnp.ones(2), SCATTERS))),
    "dynamic slices": (
        "TTM",
        lambda x, a: (
            lax.dynamic_slice(x, (1,), (2,)),
            lax.dynamic_slice(a, (jnp.argmax(x),), (2,)),
            lax.dynamic_slice(a, (9,), (2,)),
        ),
    ),
    "dynamic updates": (
        "TTM",
        lambda x, a: (
            # Of other elements than it writes over: XLA of JAX 0.12.0 gets those wrong in a shard_map on CPUs.
            lax.dynamic_update_slice(a, x[:2], (1,)),
            lax.dynamic_update_slice(a, jnp.sin(a[2:]), (jnp.argmax(x),)),
            lax.dynamic_update_slice(a, jnp.sin(a[2:]), (0,)),
        ),
    ),
    "moving elements": (
        "TM",
        both(
            lambda v: jnp.concatenate(
                [jnp.roll(v, 1), v[::-1], jnp.pad(v, 1, mode="wrap"), jnp.repeat(v, 2), jnp.tile(v, 2)]
            )
        ),
    ),
    "shapes": ("TM", both(lambda v: jnp.einsum("ij->ji", square(v))[None].transpose(2, 0, 1).squeeze(1))),
    "broadcasting": ("TM", both(lambda v: jnp.broadcast_to(v, (2, 4)) + lax.broadcasted_iota(jnp.float32, (2, 4), 0))),
    "triangles and diagonals": (
        "TM",
        both(lambda v: jnp.tril(square(v)) + jnp.diag(jnp.diag(square(v))) + jnp.triu(square(v), 1)),
    ),
    "meshgrid": ("TM", lambda x, a: tuple(jnp.meshgrid(x, a))),
    "dot_general": (
        "TMT",
        lambda x, a: (
            x @ a,
            a @ a,
            lax.dot_general(square(x), square(a), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32),
        ),
    ),
    "batched contraction": (
        "TM",
        both(lambda v: jnp.einsum("bij,bjk->bik", jnp.stack([square(v)] * 2), jnp.stack([square(v)] * 2))),
    ),
    "outer and kron": ("TM", lambda x, a: (jnp.outer(x, a), jnp.kron(a, a))),
    "integer product": ("TM", both(lambda v: (v * 3).astype(jnp.int32) @ jnp.arange(4))),
    "convolution": ("TM", both(lambda v: lax.conv(image(v), jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"))),
    "convolution with a kernel of each replica": ("T", lambda x, a: lax.conv(image(a), image(x), (1, 1), "SAME")),
    "convolution with strides and dilation": (
        "TM",
        both(
            lambda v: lax.conv_general_dilated(
                jnp.pad(image(v), ((0, 0), (0, 0), (1, 1), (1, 1))),
                jnp.ones((1, 1, 2, 2)),
                (2, 1),
                "VALID",
                rhs_dilation=(2, 1),
            )
        ),
    ),
    "transposed convolution": (
        "TM",
        both(
            lambda v: lax.conv_transpose(
                image(v), jnp.ones((1, 1, 2, 2)), (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
            )
        ),
    ),
    "gradient of a convolution": (
        "TT",
        lambda x, a: jax.grad(lambda u, k: (lax.conv(image(u), image(k), (1, 1), "SAME") ** 2).sum(), (0, 1))(x, a),
    ),
    "fft": ("TM", both(lambda v: jnp.fft.fft(v))),
    "rfft and back": ("TM", both(lambda v: jnp.fft.irfft(jnp.fft.rfft(v) * 2, 4))),
    "fft of two dims": ("TM", both(lambda v: jnp.fft.fft2(square(v)))),
    "cholesky and triangular_solve": (
        "TM",
        both(
            lambda v: lax.linalg.triangular_solve(
                jnp.linalg.cholesky(positive(v)), jnp.ones((2, 1)), left_side=True, lower=True
            )
        ),
    ),
    "solve": ("TT", lambda x, a: (jnp.linalg.solve(positive(a), square(x)), jnp.linalg.solve(positive(x), square(a)))),
    "eigh": ("TM", both(lambda v: jnp.linalg.eigh(positive(v))[0])),
    "svd": ("TM", both(lambda v: jnp.linalg.svd(square(v), compute_uv=False))),
    "qr and lu": (
        "TM",
        both(lambda v: jnp.abs(jnp.linalg.qr(square(v))[1]) + jax.scipy.linalg.lu_factor(square(v))[0]),
    ),
    "expm and determinant": (
        "TM",
        both(lambda v: jax.scipy.linalg.expm(0.1 * square(v)) + jnp.linalg.slogdet(square(v))[1]),
    ),
    "random numbers of a constant key": ("M", lambda x, a: jax.random.normal(jax.random.key(3), (2, 2))),
    "random numbers of a key of each replica": (
        "T",
        lambda x, a: jax.random.uniform(jax.random.fold_in(jax.random.key(3), (x[0] > 0).astype(int)), (3,)),
    ),
    "random distributions": (
        "MM",
        lambda x, a: (jax.random.categorical(jax.random.key(0), a), jax.random.permutation(jax.random.key(1), a)),
    ),
    "random distributions of data": (
        "TTT",
        lambda x, a: (
            jax.random.categorical(jax.random.key(0), x),
            jax.random.permutation(jax.random.key(1), x),
            jax.random.bernoulli(jax.random.key(2), jax.nn.sigmoid(x)),
        ),
    ),
    "keys": (
        "MM",
        lambda x, a: (jax.random.split(jax.random.key(4), 2), jax.random.key_data(jax.random.clone(jax.random.key(4)))),
    ),
    "rng_bit_generator": ("MM", lambda x, a: lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (2,))),
    "dtypes": ("TM", both(lambda v: (v * 9).astype(jnp.int8).astype(jnp.float16).astype(jnp.float32))),
    "bits": ("TM", both(lambda v: lax.population_count(lax.bitcast_convert_type(v, jnp.uint32)) ^ jnp.uint32(5))),
    "complex numbers": ("TM", both(lambda v: jnp.abs(jnp.exp(lax.complex(v, v)) * jnp.conj(lax.complex(v, -v))))),
    "special functions": (
        "TM",
        both(lambda v: lax.erf(v) + lax.lgamma(jnp.abs(v) + 1) + lax.digamma(jnp.abs(v) + 1) + lax.bessel_i1e(v)),
    ),
    "nothing at all": ("TM", both(lambda v: v[:0])),
    "comparisons with nan": ("TM", both(lambda v: jnp.where(jnp.isnan(jnp.log(v)), 0.0, jnp.log(v)))),
    "clamp and nan_to_num": ("TM", both(lambda v: lax.clamp(-0.5, jnp.nan_to_num(v / 0.0), 0.5))),
    "polynomials": ("TM", both(lambda v: jnp.polyval(v, jnp.arange(3.0)))),
    "interpolation": ("TT", lambda x, a: (jnp.interp(x, jnp.sort(a), a), jnp.interp(a, jnp.sort(x), x))),
    "named computations": ("TM", both(lambda v: jax.named_call(jnp.sin, name="replica")(v))),
    "barriers": ("TM", lambda x, a: lax.optimization_barrier((x * 2, a * 2))),
    "derivatives through barriers": (
        "TM",
        jax.grad(lambda x, a: sum(jnp.sum(v) for v in lax.optimization_barrier((x * x, a * a))), (0, 1)),
    ),
    "gamma distribution": ("M", lambda x, a: jax.random.gamma(jax.random.key(2), jnp.abs(a))),
}
