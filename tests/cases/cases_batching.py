"""Batching: what ``jax.vmap`` makes of everything else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ONE, ZERO = jnp.float32(1), jnp.float32(0)
vmap = jax.vmap


@jax.custom_batching.custom_vmap
def doubled(v):
    return v * 2


doubled.def_vmap(lambda size, batched, v: (v * 3, batched[0]))


def square(v):
    return v.reshape(2, 2)


CASES = {
    "vmap": ("TM", lambda x, a: (vmap(jnp.sin)(x), vmap(jnp.sin)(a))),
    "vmap of both": ("T", lambda x, a: vmap(lambda u, v: u * v)(x, a)),
    "in_axes of one": (
        "TT",
        lambda x, a: (vmap(lambda u, v: u * v, (0, None))(x, a), vmap(lambda u, v: u * v, (None, 0))(x, a)),
    ),
    "in_axes of a tree": (
        "T",
        lambda x, a: vmap(lambda t: t["x"] @ t["a"], ({"x": 0, "a": None},))({"x": square(x), "a": a[:2]}),
    ),
    "in_axes of columns": ("TT", lambda x, a: (vmap(jnp.sum, 1)(square(x)), vmap(jnp.cumsum, -1)(square(x)))),
    "out_axes": (
        "TM",
        lambda x, a: vmap(lambda u, v: (u * jnp.arange(3.0), v * jnp.arange(3.0)), out_axes=(1, -1))(x, a),
    ),
    "out_axes None": ("TM", lambda x, a: vmap(lambda u: (u, a), out_axes=(0, None))(x)),
    "vmap in vmap": ("T", lambda x, a: vmap(lambda u: vmap(lambda v: u * v + 1)(a))(x)),
    "vmap of a matrix product": (
        "TT",
        lambda x, a: (vmap(jnp.dot, (0, None))(square(x), a[:2]), vmap(lambda r: square(a) @ r)(square(x))),
    ),
    "axis_name and psum": (
        "TM",
        lambda x, a: vmap(lambda u, v: (u / lax.psum(u, "rows"), lax.pmax(v, "rows")), axis_name="rows")(x, a),
    ),
    "axis_index of a batch": (
        "MT",
        lambda x, a: vmap(
            lambda u: (lax.axis_index("rows"), u * lax.axis_index("rows").astype(float)), axis_name="rows"
        )(x),
    ),
    "all_gather in a batch": ("T", lambda x, a: vmap(lambda u: lax.all_gather(u, "rows") * u, axis_name="rows")(x)),
    "ppermute in a batch": (
        "TM",
        lambda x, a: vmap(
            lambda u, v: tuple(lax.ppermute(w, "rows", [(i, (i + 1) % 4) for i in range(4)]) for w in (u, v)),
            axis_name="rows",
        )(x, a),
    ),
    "vmap of cond": (
        "TM",
        lambda x, a: (
            vmap(lambda u: lax.cond(u > 0, jnp.sin, jnp.cos, u))(x),
            vmap(lambda u: lax.cond(u > 0, jnp.sin, jnp.cos, u))(a),
        ),
    ),
    "vmap of cond by what is not batched": (
        "TT",
        lambda x, a: (
            vmap(lambda u: lax.cond(x[0] > 0, jnp.sin, jnp.cos, u))(a),
            vmap(lambda u: lax.cond(a[0] > 9, jnp.sin, jnp.cos, u))(x),
        ),
    ),
    "vmap of switch": (
        "T",
        lambda x, a: vmap(lambda i, u: lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], u))(jnp.array([0, 1, 2, 1]), x),
    ),
    "vmap of switch by data": (
        "T",
        lambda x, a: vmap(lambda u, v: lax.switch(u.astype(int), [jnp.sin, jnp.cos], v))(x, a),
    ),
    "vmap of scan": ("TT", lambda x, a: vmap(lambda u: lax.scan(lambda c, r: (c + r * u, c), ZERO, a))(x)),
    "vmap of scan over what is not batched": (
        "TM",
        lambda x, a: (
            vmap(lambda u: lax.scan(lambda c, r: (c * u, None), ONE, length=2)[0])(x),
            vmap(lambda u: lax.scan(lambda c, r: (c + r, None), u, a)[0])(a),
        ),
    ),
    "vmap of while": (
        "TM",
        lambda x, a: (
            vmap(lambda u: lax.while_loop(lambda c: c < 3, lambda c: c + jnp.abs(u) + 0.1, u))(x),
            vmap(lambda u: lax.while_loop(lambda c: c < 3, lambda c: c + 1, u))(a),
        ),
    ),
    "vmap of while with a common test": (
        "TT",
        lambda x, a: (
            (*vmap(lambda u: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * u), (0, u)))(x)[1:], x)
        ),
    ),
    "vmap of fori with bounds of their own": (
        "TM",
        lambda x, a: (
            vmap(lambda n: lax.fori_loop(0, n, lambda i, c: c + i, 0))(jnp.abs(x * 3).astype(int)),
            vmap(lambda n: lax.fori_loop(0, n, lambda i, c: c + i, 0))(jnp.arange(4)),
        ),
    ),
    "vmap of dynamic slices": (
        "TT",
        lambda x, a: (
            vmap(lambda i: lax.dynamic_slice_in_dim(x, i, 2))(jnp.arange(3)),
            vmap(lambda u: lax.dynamic_slice_in_dim(a, (u > 0).astype(int), 2))(x),
        ),
    ),
    "vmap of updates": (
        "T",
        lambda x, a: vmap(lambda i, u: lax.dynamic_update_index_in_dim(a, u, i, 0))(jnp.arange(4), x),
    ),
    "vmap of gather and scatter": (
        "TT",
        lambda x, a: (
            vmap(lambda i: x[i])(jnp.array([[3, 0], [1, 1]])),
            vmap(lambda i, u: a.at[i].add(u))(jnp.arange(4), x),
        ),
    ),
    "vmap of a sort": ("TT", lambda x, a: (vmap(jnp.sort)(square(x)), vmap(jnp.argsort)(square(x)))),
    "vmap of a solver": ("T", lambda x, a: vmap(lambda u: jnp.linalg.solve(square(a) + 2 * jnp.eye(2), u))(square(x))),
    "vmap of cholesky": ("T", lambda x, a: vmap(lambda u: jnp.linalg.cholesky(jnp.eye(2) * (2 + u)))(jnp.abs(x))),
    "vmap of random numbers": (
        "MT",
        lambda x, a: (
            vmap(lambda k: jax.random.normal(k, (2,)))(jax.random.split(jax.random.key(0), 3)),
            vmap(lambda k, u: u + jax.random.uniform(k))(jax.random.split(jax.random.key(1), 4), x),
        ),
    ),
    "vmap of a convolution": ("T", lambda x, a: vmap(lambda u: jnp.convolve(u, a, mode="same"))(jnp.stack([x, 2 * x]))),
    "vmap of grad": (
        "TT",
        lambda x, a: (vmap(jax.grad(jnp.sin))(x), vmap(jax.grad(lambda w, u: (w * u).sum() ** 2), (None, 0))(a, x)),
    ),
    "grad of vmap": ("T", lambda x, a: jax.grad(lambda w: (vmap(lambda u: (w * u).sum() ** 2)(x)).sum())(a)),
    "vmap of jvp": ("T", lambda x, a: vmap(lambda u, v: jax.jvp(jnp.sin, (u,), (v,))[1])(a, x)),
    "vmap of vjp": ("T", lambda x, a: vmap(lambda ct: jax.vjp(jnp.cumsum, a)[1](ct)[0])(jnp.stack([x, a]))),
    "vmap of jit": ("T", lambda x, a: vmap(jax.jit(lambda u: u * 2 + 1))(x)),
    "jit of vmap": ("TM", lambda x, a: jax.jit(vmap(lambda u, v: (u * 2, v * 2)))(x, a)),
    "vmap of checkpoint": ("T", lambda x, a: vmap(jax.grad(jax.checkpoint(lambda u: jnp.sin(jnp.sin(u)))))(x)),
    "vmap of a callback": (
        "TM",
        lambda x, a: tuple(
            vmap(
                lambda u: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), u, vmap_method="expand_dims")
            )(w)
            for w in (x, a)
        ),
    ),
    "vmap of an axis of one": ("TM", lambda x, a: (vmap(jnp.sum)(x[None]), vmap(jnp.sum)(a[None]))),
    "custom_vmap": ("TM", lambda x, a: (vmap(doubled)(x), doubled(a))),
    "vmap of a linear transpose": ("T", lambda x, a: vmap(lambda u: jax.linear_transpose(lambda v: v * 3, u)(u)[0])(x)),
    "vmap over a dict of trees": (
        "TM",
        lambda x, a: (lambda r: (r["x"][0], r["a"]))(
            vmap(lambda t: {"x": (t["x"] * 2,), "a": t["a"] + 1})({"x": x, "a": a})
        ),
    ),
    "numpy's vectorize": (
        "TM",
        lambda x, a: (
            jnp.vectorize(lambda u, v: u @ v, signature="(n),(n)->()")(square(x), square(a)),
            jnp.vectorize(jnp.sin)(a),
        ),
    ),
}
