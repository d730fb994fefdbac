"""Collectives of ``jax.lax`` in loops, branches, batches and derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "replica"
ZERO = jnp.float32(0)
SWAP = [(0, 1), (1, 0)]


def psum(v):
    return lax.psum(v, AXIS)


def square(v):
    return v.reshape(2, 2)


@jax.custom_jvp
def total(v):
    return psum(v)


total.defjvp(lambda primals, tangents: (total(primals[0]), 2 * psum(tangents[0])))


@jax.custom_vjp
def summed(v):
    return psum(v)


summed.defvjp(lambda v: (psum(v), None), lambda _, g: (g * 3,))


CASES = {
    "psum": ("MM", lambda x, a: (psum(x), psum(a))),
    "psum of a tree": ("MM", lambda x, a: psum({"x": (x,), "a": a})["x"] + (psum(a),)),
    "psum of integers and bools": ("MM", lambda x, a: (psum((x > 0).astype(int)), psum(jnp.ones(2, jnp.int32)))),
    "pmean": ("M", lambda x, a: lax.pmean(x * a, AXIS)),
    "pmax and pmin": ("MM", lambda x, a: (lax.pmax(x, AXIS), lax.pmin(x, AXIS))),
    "all_gather": ("M", lambda x, a: lax.all_gather(x, AXIS)),
    "all_gather tiled": ("M", lambda x, a: lax.all_gather(x, AXIS, tiled=True)),
    "all_gather along the second dim": (
        "MM",
        lambda x, a: (lax.all_gather(square(x), AXIS, axis=1), lax.all_gather(square(x), AXIS, axis=1, tiled=True)),
    ),
    "psum_scatter": ("TT", lambda x, a: (lax.psum_scatter(x, AXIS, tiled=True), lax.psum_scatter(square(x), AXIS))),
    "psum_scatter of what all share": ("T", lambda x, a: lax.psum_scatter(a, AXIS, tiled=True)),
    "all_to_all": (
        "TT",
        lambda x, a: (lax.all_to_all(square(x), AXIS, 0, 0), lax.all_to_all(x, AXIS, 0, 0, tiled=True)),
    ),
    "ppermute": ("T", lambda x, a: lax.ppermute(x, AXIS, SWAP)),
    "axis_index and axis_size": (
        "TT",
        lambda x, a: (lax.axis_index(AXIS), a * lax.axis_size(AXIS) + lax.axis_index(AXIS).astype(float)),
    ),
    "what is reduced, computed on": ("MT", lambda x, a: (jnp.sin(psum(x)) * a, psum(x) * x)),
    "normalised by all": ("T", lambda x, a: (x - lax.pmean(x.mean(), AXIS)) / jnp.sqrt(lax.pmean((x**2).mean(), AXIS))),
    # inside control flow
    "in scan": ("MT", lambda x, a: lax.scan(lambda c, r: (c + psum(r), c * r), ZERO, x)),
    "in scan in scan": (
        "M",
        lambda x, a: lax.scan(lambda c, r: (lax.scan(lambda d, _: (d + psum(r), None), c, length=2)[0], None), ZERO, x)[
            0
        ],
    ),
    "in fori": ("M", lambda x, a: lax.fori_loop(0, 3, lambda i, c: psum(x) * 0.1 + c, a)),
    "in a while of all": (
        "M",
        lambda x, a: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] + psum(x), c[1] + 1), (a, 0))[0],
    ),
    "in the test of a while": (
        "MT",
        lambda x, a: (lambda r: (r[1], r[0]))(
            lax.while_loop(lambda c: psum(jnp.abs(c[0]).sum()) > 1.0, lambda c: (c[0] * 0.5, c[1] + 1), (x, 0))
        ),
    ),
    "in a branch of all": (
        "MT",
        lambda x, a: (
            lax.cond(a[0] > 9, lambda: a, lambda: psum(x)),
            lax.cond(psum(x.sum()) > 99, lambda: psum(x), lambda: x),
        ),
    ),
    "in a switch of all": ("M", lambda x, a: lax.switch(1, [lambda: a, lambda: psum(x), lambda: lax.pmax(x, AXIS)])),
    "in map": ("M", lambda x, a: lax.map(lambda r: psum(r) * 2, x)),
    "ring in scan": ("T", lambda x, a: lax.scan(lambda c, _: (lax.ppermute(c, AXIS, SWAP) + x, None), x, length=2)[0]),
    # inside batches and calls
    "in vmap": ("MM", lambda x, a: (jax.vmap(psum)(x), jax.vmap(lambda u: lax.all_gather(u, AXIS))(x))),
    "in vmap with an axis of its own": (
        "MT",
        lambda x, a: (
            jax.vmap(lambda u: lax.psum(u, ("rows", AXIS)), axis_name="rows")(x),
            jax.vmap(lambda u: lax.psum(u, "rows"), axis_name="rows")(x),
        ),
    ),
    "in vmap with out_axes": ("M", lambda x, a: jax.vmap(lambda u: psum(u * jnp.arange(3.0)), out_axes=1)(x)),
    "in jit": ("M", lambda x, a: jax.jit(psum)(x)),
    "in checkpoint": ("M", lambda x, a: jax.checkpoint(lambda v: psum(jnp.sin(v)))(x)),
    "in custom_jvp": ("M", lambda x, a: total(x)),
    "in custom_vjp": ("M", lambda x, a: summed(x)),
    # derivatives: each replica differentiates its own
    "jvp": ("MM", lambda x, a: jax.jvp(psum, (x,), (x * a,))),
    "grad of psum": ("M", lambda x, a: jax.grad(lambda v: (psum(v) * x).sum())(x)),
    "grad of pmean": ("T", lambda x, a: jax.grad(lambda v: (lax.pmean(v**2, AXIS) * x).sum())(x)),
    "grad of all_gather": ("T", lambda x, a: jax.grad(lambda v: (lax.all_gather(v, AXIS) ** 2).sum() * x[0])(x)),
    "grad of psum_scatter": (
        "M",
        lambda x, a: jax.grad(lambda v: (lax.psum_scatter(v, AXIS, tiled=True) ** 2).sum())(x),
    ),
    "grad of all_to_all": (
        "T",
        lambda x, a: jax.grad(lambda v: (lax.all_to_all(square(v), AXIS, 0, 0) * square(x)).sum())(x),
    ),
    "grad of ppermute": ("T", lambda x, a: jax.grad(lambda v: (lax.ppermute(v, AXIS, SWAP) * x).sum())(x)),
    "grad of psum in scan": (
        "M",
        lambda x, a: jax.grad(lambda v: (lax.scan(lambda c, r: (jnp.sin(c + psum(r)), None), ZERO, v)[0]) * x[0])(x),
    ),
    "grad of psum in a branch": (
        "T",
        lambda x, a: jax.grad(lambda v: (lax.cond(a[0] > 9, lambda: v, lambda: psum(v)) * x).sum())(x),
    ),
    "grad of psum in checkpoint": (
        "M",
        lambda x, a: jax.grad(lambda v: (jax.checkpoint(lambda v: jnp.sin(psum(v)))(v) * x).sum())(x),
    ),
    "grad of psum in vmap": ("M", lambda x, a: jax.grad(lambda v: (jax.vmap(psum)(v) * x).sum())(x)),
    "vmap of the grad of psum": ("M", lambda x, a: jax.vmap(jax.grad(lambda v: psum(v) ** 2 * x[0]))(x)),
    "grad of custom_jvp with a sum": ("M", lambda x, a: jax.grad(lambda v: (total(v) * x).sum())(x)),
    "grad of custom_vjp with a sum": ("T", lambda x, a: jax.grad(lambda v: (summed(v) * x).sum())(x)),
    "hessian with a sum": ("T", lambda x, a: jax.hessian(lambda v: (psum(v**2) * v).sum())(x)),
    "linear_transpose of psum": ("M", lambda x, a: jax.linear_transpose(psum, x)(x)[0]),
    "a step of descent": (
        "MT",
        lambda x, a: (lambda g: (a - 0.1 * lax.pmean(g, AXIS), g))(jax.grad(lambda w: ((w - x) ** 2).sum())(a)),
    ),
    "descent in a loop": (
        "M",
        lambda x, a: lax.fori_loop(
            0, 3, lambda _, w: w - 0.1 * lax.pmean(jax.grad(lambda w: ((w - x) ** 2).sum())(w), AXIS), a
        ),
    ),
}
