"""Derivatives that a program defines itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero


@jax.custom_jvp
def sin3(v):
    return jnp.sin(v)


sin3.defjvp(lambda primals, tangents: (sin3(primals[0]), 3 * jnp.cos(primals[0]) * tangents[0]))


@jax.custom_jvp
def product(u, v):
    return u * v


product.defjvps(lambda du, out, u, v: 2 * du * v, lambda dv, out, u, v: 3 * u * dv)


@jax.custom_jvp
def half_defined(u, v):
    return u * v


half_defined.defjvps(lambda du, out, u, v: du * v, None)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def applied(f, v, power):
    return f(v) ** power


@applied.defjvp
def _applied_jvp(f, power, primals, tangents):
    return applied(f, primals[0], power), 10 * f(primals[0]) * tangents[0]


@jax.custom_jvp
def only_where_needed(u, v):
    return u * 2 + v * 3


@functools.partial(only_where_needed.defjvp, symbolic_zeros=True)
def _only_where_needed_jvp(primals, tangents):
    out = only_where_needed(*primals)
    change = jnp.zeros_like(out)
    for tangent, weight in zip(tangents, (7.0, 11.0), strict=True):
        if type(tangent) is not SymbolicZero:
            change = change + weight * tangent
    return out, change


@jax.custom_vjp
def sin5(v):
    return jnp.sin(v)


sin5.defvjp(lambda v: (jnp.sin(v), jnp.cos(v)), lambda c, g: (5 * c * g,))


@jax.custom_vjp
def pair(u, v):
    return u * v, u + v


pair.defvjp(lambda u, v: (pair(u, v), (u, v)), lambda kept, g: (g[0] * kept[1] * 2, g[0] * kept[0] * 3 + g[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def clipped(low, high, v):
    return v


clipped.defvjp(lambda low, high, v: (v, None), lambda low, high, _, g: (jnp.clip(g, low, high),))


@jax.custom_vjp
def of_a_tree(tree):
    return tree["u"] * tree["v"][0]


of_a_tree.defvjp(lambda t: (of_a_tree(t), t), lambda t, g: ({"u": g * t["v"][0], "v": [g * t["u"] * 4]},))


@jax.custom_vjp
def with_an_integer(v, n):
    return v * n


with_an_integer.defvjp(lambda v, n: (v * n, n), lambda n, g: (g * n * 2, None))


@jax.custom_vjp
def told_what_is_needed(u, v):
    return u * v


def _told_forward(u, v):
    return u.value * v.value, (u.value if v.perturbed else None, v.value if u.perturbed else None)


def _told_backward(kept, g):
    u, v = kept
    return None if v is None else g * v * 2, None if u is None else g * u * 3


told_what_is_needed.defvjp(_told_forward, _told_backward, symbolic_zeros=True)


@jax.custom_gradient
def tripled(v):
    return v**2, lambda g: (3 * g,)


@jax.custom_vjp
def straight_through(v):
    return jnp.round(v)


straight_through.defvjp(lambda v: (jnp.round(v), None), lambda _, g: (g,))


def minimum(f, start):
    """By ``closure_convert``, whose function may close over what is differentiated."""
    converted, consts = jax.closure_convert(f, start)
    return _minimum(converted, start, *consts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _minimum(f, start, *consts):
    return lax.fori_loop(0, 30, lambda _, v: v - 0.2 * jax.grad(f)(v, *consts), start)


def _minimum_forward(f, start, *consts):
    found = _minimum(f, start, *consts)
    return found, (found, consts)


def _minimum_backward(f, kept, g):
    found, consts = kept
    curvature = jax.grad(jax.grad(f))(found, *consts)
    _, pull = jax.vjp(lambda *c: -jax.grad(f)(found, *c) / curvature, *consts)
    return jnp.zeros_like(found), *pull(g)


_minimum.defvjp(_minimum_forward, _minimum_backward)


def root(v):
    def solve(f, start):
        return lax.fori_loop(0, 8, lambda _, z: z - f(z) / jax.grad(f)(z), start)

    return lax.custom_root(lambda z: z**3 - v, jnp.float32(1.2), solve, lambda g, y: y / g(jnp.float32(1)))


def solved(b, d):
    return lax.custom_linear_solve(lambda v: d * v, b, lambda _, b: b / d, symmetric=True)


def grad(f):
    return jax.grad(lambda *args: f(*args).sum())


CASES = {
    # custom_jvp
    "custom_jvp": ("TM", lambda x, a: (sin3(x), sin3(a))),
    "gradient of custom_jvp": ("TM", lambda x, a: (grad(sin3)(x), grad(sin3)(a))),
    "jvp of custom_jvp": ("MT", lambda x, a: jax.jvp(sin3, (a,), (x,))),
    "second derivative of custom_jvp": ("T", lambda x, a: jax.vmap(jax.grad(jax.grad(sin3)))(x)),
    "defjvps": ("MT", lambda x, a: jax.grad(lambda u, v: product(u, v).sum(), (0, 1))(x, a)),
    "defjvps with None": ("T", lambda x, a: jax.grad(lambda u, v: half_defined(u, v).sum())(a, x)),
    "custom_jvp with static arguments": (
        "TM",
        lambda x, a: (grad(lambda v: applied(jnp.sin, v, 2))(x), applied(jnp.cos, a, 3)),
    ),
    "custom_jvp with symbolic zeros": (
        "TM",
        lambda x, a: (
            jax.jvp(lambda u: only_where_needed(u, a), (a,), (x,))[1],
            grad(lambda v: only_where_needed(a, v))(a),
        ),
    ),
    "custom_jvp in jit": ("T", lambda x, a: grad(jax.jit(sin3))(x)),
    "custom_jvp in vmap": ("TM", lambda x, a: (jax.vmap(jax.grad(sin3))(x), jax.vmap(product, (0, None))(a, 2.0))),
    "custom_jvp in scan": (
        "T",
        lambda x, a: jax.grad(lambda v: lax.scan(lambda c, r: (sin3(c) * r, None), v, a)[0])(x[0]),
    ),
    "custom_jvp in cond": ("T", lambda x, a: grad(lambda v: lax.cond(x[0] > 0, sin3, jnp.cos, v))(a)),
    "custom_jvp in checkpoint": ("T", lambda x, a: grad(jax.checkpoint(lambda v: sin3(sin3(v))))(x)),
    "custom_jvp linearized": ("T", lambda x, a: jax.linearize(sin3, a)[1](x)),
    "custom_jvp of custom_jvp": (
        "TM",
        lambda x, a: (grad(lambda v: product(sin3(v), v))(x), grad(lambda v: sin3(product(v, v)))(a)),
    ),
    # custom_vjp
    "custom_vjp": ("TM", lambda x, a: (sin5(x), sin5(a))),
    "gradient of custom_vjp": ("TM", lambda x, a: (grad(sin5)(x), grad(sin5)(a))),
    "custom_vjp of two results": (
        "MT",
        lambda x, a: jax.grad(lambda u, v: (pair(u, v)[0] * 2 + pair(u, v)[1]).sum(), (0, 1))(x, a),
    ),
    "custom_vjp with static arguments": (
        "TM",
        lambda x, a: (grad(lambda v: clipped(-0.5, 0.5, v) * x)(a), grad(lambda v: clipped(-0.5, 0.5, v) * a)(a)),
    ),
    "custom_vjp of a tree": (
        "MT",
        lambda x, a: (lambda g: (g["u"], g["v"][0]))(jax.grad(lambda t: of_a_tree(t).sum())({"u": x, "v": [a]})),
    ),
    "custom_vjp with an integer": ("M", lambda x, a: grad(lambda v: with_an_integer(v, 3))(x) + a),
    "custom_vjp with symbolic zeros": (
        "MM",
        lambda x, a: (grad(lambda v: told_what_is_needed(v, a))(x), grad(lambda v: told_what_is_needed(a, v))(a)),
    ),
    "custom_gradient": ("MM", lambda x, a: (jax.vmap(jax.grad(tripled))(x), tripled(a[0]))),
    "straight through": ("TT", lambda x, a: (straight_through(x * 2), grad(lambda v: straight_through(v) * x)(a))),
    "custom_vjp in jit": ("T", lambda x, a: grad(jax.jit(sin5))(x)),
    "custom_vjp in vmap": ("TM", lambda x, a: (jax.vmap(jax.grad(sin5))(x), jax.vmap(jax.grad(sin5))(a))),
    "custom_vjp in scan": (
        "T",
        lambda x, a: jax.grad(lambda v: lax.scan(lambda c, r: (sin5(c) + r, None), v, x)[0])(a[0]),
    ),
    "custom_vjp in while": (
        "T",
        lambda x, a: lax.while_loop(lambda c: c[1] < 2, lambda c: (grad(sin5)(c[0]), c[1] + 1), (x, 0))[0],
    ),
    "custom_vjp in cond": ("T", lambda x, a: grad(lambda v: lax.cond(a[0] > 9, jnp.cos, sin5, v))(x)),
    "custom_vjp in checkpoint": ("T", lambda x, a: grad(jax.checkpoint(lambda v: sin5(v) * x))(a)),
    "custom_vjp of custom_vjp": ("T", lambda x, a: grad(lambda v: sin5(clipped(-1.0, 1.0, v)))(x)),
    "custom_vjp in a second derivative": ("T", lambda x, a: jax.vmap(jax.grad(jax.grad(lambda v: sin5(v) * v)))(x)),
    "pulled back by hand": ("TM", lambda x, a: (jax.vjp(sin5, a)[1](x)[0], jax.vjp(sin5, a)[1](a)[0])),
    "closure_convert": (
        "M",
        lambda x, a: jax.vmap(jax.grad(lambda c: minimum(lambda v: (v - c * jnp.abs(a[0])) ** 2, 0.0)))(x),
    ),
    "custom_root": ("TT", lambda x, a: (root(1 + x[0] ** 2), jax.grad(root)(1 + x[0] ** 2))),
    "custom_linear_solve": ("TT", lambda x, a: (solved(x, a), grad(lambda b: solved(b, a) ** 2)(x))),
}
