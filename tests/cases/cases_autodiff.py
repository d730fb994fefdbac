"""Derivatives of JAX's own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

ONE, ZERO = jnp.float32(1), jnp.float32(0)
policies = jax.checkpoint_policies


def grad(f, argnums=0):
    return jax.grad(lambda *args: f(*args).sum(), argnums)


def layers(v, w, policy=None):
    layer = jax.checkpoint(lambda v: checkpoint_name(jnp.tanh(v * w), "kept") * 2, policy=policy)
    return layer(layer(v))


def wave(v):
    return jnp.sin(v) * v.sum()


CASES = {
    "grad": ("TM", lambda x, a: (grad(jnp.sin)(x), grad(jnp.sin)(a))),
    "grad of two arguments": ("TT", lambda x, a: grad(lambda u, v: u**2 * v, (0, 1))(x, a)),
    "grad of what is mirrored by data": ("T", lambda x, a: grad(lambda v: v * x)(a)),
    "grad of data by what is mirrored": ("M", lambda x, a: grad(lambda v: v * a)(x)),
    "value_and_grad": ("TT", lambda x, a: jax.value_and_grad(lambda v: (v * x).sum())(a)),
    "has_aux": (
        "TTM",
        lambda x, a: (lambda r: (r[0][0], r[1], r[0][1]))(
            jax.value_and_grad(lambda v: ((v * x).sum(), a * 2), has_aux=True)(a)
        ),
    ),
    "grad of a tree": (
        "TM",
        lambda x, a: (lambda g: (g["u"], g["v"][0]))(
            jax.grad(lambda t: (t["u"] ** 2 + t["v"][0] * a).sum())({"u": x, "v": (a,)})
        ),
    ),
    "grad of grad": ("TM", lambda x, a: (jax.vmap(jax.grad(jax.grad(jnp.sin)))(x), jax.grad(jax.grad(jnp.tanh))(a[0]))),
    "third derivative": ("T", lambda x, a: jax.grad(jax.grad(jax.grad(lambda v: v**5)))(x[0])),
    "jvp": ("TTMT", lambda x, a: (*jax.jvp(jnp.sin, (x,), (a,)), *jax.jvp(jnp.sin, (a,), (x,)))),
    "jvp of two arguments": ("TT", lambda x, a: jax.jvp(lambda u, v: u * v, (x, a), (a, a))),
    "vjp": ("TTM", lambda x, a: (lambda r, s: (r[0], r[1](a)[0], s[1](a)[0]))(jax.vjp(wave, x), jax.vjp(wave, a))),
    "vjp with aux": (
        "TM",
        lambda x, a: (lambda r: (r[1](x)[0], r[2]))(jax.vjp(lambda v: (v**2, v.sum()), a, has_aux=True)),
    ),
    "vjp called twice": ("TT", lambda x, a: (lambda pull: (pull(x)[0], pull(a * x)[0]))(jax.vjp(wave, a)[1])),
    "linearize": ("TM", lambda x, a: (lambda r: (r[1](x), r[1](a)))(jax.linearize(wave, a))),
    "linear_transpose": (
        "TM",
        lambda x, a: tuple(jax.linear_transpose(lambda v: jnp.cumsum(v) * a, a)(w)[0] for w in (x, a)),
    ),
    "linear_transpose of a scan": (
        "T",
        lambda x, a: jax.linear_transpose(lambda v: lax.scan(lambda c, r: (c * 0.5 + r, c), ZERO, v)[1], x)(x)[0],
    ),
    "jacfwd": ("TM", lambda x, a: (jax.jacfwd(wave)(x), jax.jacfwd(wave)(a))),
    "jacrev": ("TM", lambda x, a: (jax.jacrev(wave)(x), jax.jacrev(wave)(a))),
    "jacobian of a tree": (
        "TM",
        lambda x, a: (lambda j: (j["u"]["x"], j["v"]["a"]))(
            jax.jacrev(lambda t: {"u": t["x"] ** 2, "v": t["a"] ** 2})({"x": x, "a": a})
        ),
    ),
    "hessian": ("TM", lambda x, a: (jax.hessian(lambda v: wave(v).sum())(x), jax.hessian(lambda v: (v**3).sum())(a))),
    "hessian by rev over rev": ("T", lambda x, a: jax.jacrev(jax.jacrev(lambda v: (jnp.sin(v) * x).sum()))(a)),
    "hessian vector product": ("T", lambda x, a: jax.jvp(jax.grad(lambda v: (v**3).sum()), (a,), (x,))[1]),
    "gauss newton product": (
        "T",
        lambda x, a: (lambda out, push: jax.vjp(wave, a)[1](2 * push))(*jax.jvp(wave, (a,), (x,)))[0],
    ),
    "stop_gradient": (
        "TM",
        lambda x, a: (
            (
                *(
                    grad(lambda v: lax.stop_gradient(v) * v)(x),
                    grad(lambda v: lax.stop_gradient(v * x[0]) * 0 + v)(a) * 0 + a,
                )[:1],
                grad(lambda v: v * lax.stop_gradient(v))(a),
            )
        ),
    ),
    "stop_gradient of data": (
        "TT",
        lambda x, a: (grad(lambda v: v * lax.stop_gradient(x))(a), grad(lambda v: lax.stop_gradient(x * v) + v * x)(a)),
    ),
    "holomorphic": (
        "TM",
        lambda x, a: tuple(jax.grad(lambda z: jnp.sin(z).sum(), holomorphic=True)(lax.complex(w, w)) for w in (x, a)),
    ),
    "complex to real": ("T", lambda x, a: jax.grad(lambda z: jnp.abs(z).sum())(lax.complex(x, a))),
    "argnums by name of a static function": (
        "T",
        lambda x, a: jax.grad(lambda f, v: f(v).sum(), argnums=1)(jax.tree_util.Partial(jnp.sin), x),
    ),
    "integers that are not differentiated": (
        "M",
        lambda x, a: jax.grad(lambda v, n: (v * n.astype(float)).sum(), allow_int=True)(x, jnp.arange(4)) + a,
    ),
    "float0": (
        "M",
        lambda x, a: jax.grad(lambda t: (t[0] * t[1].astype(float)).sum(), allow_int=True)((x, jnp.arange(4)))[0] + a,
    ),
    # through control flow
    "through a scan": (
        "TT",
        lambda x, a: grad(lambda u, v: lax.scan(lambda c, r: (jnp.tanh(c * v[0] + r), c), u[0], u)[1], (0, 1))(x, a),
    ),
    "through a scan with a mirrored carry": (
        "MT",
        lambda x, a: grad(lambda u, v: lax.scan(lambda c, r: (c * 0.5, c * r), v[0], u)[1], (0, 1))(x, a),
    ),
    "through a fori of a fixed length": (
        "T",
        lambda x, a: grad(lambda v: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * v, a))(x),
    ),
    "forward through a while": (
        "T",
        lambda x, a: jax.jvp(
            lambda v: lax.while_loop(lambda c: c < 3, lambda c: c + v, v), (jnp.abs(x[0]) + 0.5,), (ONE,)
        )[1],
    ),
    "through a cond": (
        "TT",
        lambda x, a: grad(lambda u, v: lax.cond(x[0] > 0, lambda: u * v, lambda: u + v), (0, 1))(x, a),
    ),
    "through a mirrored cond": (
        "MT",
        lambda x, a: grad(
            lambda u, v: (
                lax.cond(a[0] > 9, lambda: jnp.sin(u) * a, lambda: u * jnp.exp(a) * u).sum() + (v * a).sum() * x[0]
            ),
            (0, 1),
        )(a, a),
    ),
    "through branches that keep other values": (
        "MM",
        lambda x, a: (
            jax.vjp(lambda v: lax.cond(a[0] > 9, lambda v: v * v, lambda v: jnp.sin(v) * jnp.exp(v), v), a)[1](a)[0],
            grad(lambda v: lax.switch(1, [lambda v: v, lambda v: v * jnp.sin(v), lambda v: jnp.exp(v) * v * v], v))(a),
        ),
    ),
    "through a switch of each replica": (
        "T",
        lambda x, a: grad(lambda v: lax.switch(jnp.argmax(x), [jnp.sin, lambda v: v * v, lambda v: v, jnp.exp], v))(a),
    ),
    "through map and associative_scan": (
        "TT",
        lambda x, a: (
            grad(lambda v: lax.map(lambda r: r**2, v))(x),
            grad(lambda v: lax.associative_scan(jnp.multiply, v))(x),
        ),
    ),
    "a loop of gradients": (
        "TT",
        lambda x, a: lax.scan(lambda v, _: (v - 0.1 * grad(lambda v: (v - x) ** 2)(v), v[0]), a, length=3),
    ),
    "the derivative of a loop of gradients": (
        "T",
        lambda x, a: jax.grad(
            lambda rate: (lax.fori_loop(0, 3, lambda _, v: v - rate * grad(lambda v: (v - x) ** 2)(v), a) ** 2).sum()
        )(ONE * 0.1),
    ),
    "through sorting and indexing": (
        "TM",
        lambda x, a: (grad(lambda v: jnp.sort(v) * a)(x), grad(lambda v: v[jnp.array([0, 0, 3])])(a)),
    ),
    "through scatters and slices": (
        "MT",
        lambda x, a: (
            grad(lambda v: a.at[1].mul(v[0]))(x),
            grad(lambda v: lax.dynamic_slice(v, (1,), (2,)) * x[:2])(a),
        ),
    ),
    "through a maximum with ties": (
        "MT",
        lambda x, a: (grad(lambda v: jnp.max(jnp.concatenate([v, v])))(a), grad(lambda v: jnp.maximum(v, 0.0) * x)(a)),
    ),
    "through logsumexp and softmax": (
        "TM",
        lambda x, a: (grad(jax.nn.logsumexp)(x), grad(lambda v: jax.nn.softmax(v)[:2])(a)),
    ),
    "through linear algebra": (
        "TM",
        lambda x, a: (
            grad(lambda v: jnp.linalg.inv(v.reshape(2, 2) + 3 * jnp.eye(2)))(x),
            grad(lambda v: jnp.linalg.det(v.reshape(2, 2)))(a),
        ),
    ),
    # checkpoint
    "checkpoint": ("TM", lambda x, a: (grad(layers)(x, a), grad(layers)(a, a))),
    "checkpoint that saves all": ("T", lambda x, a: grad(lambda v: layers(v, x, policies.everything_saveable))(a)),
    "checkpoint that saves nothing": ("T", lambda x, a: grad(lambda v: layers(v, x, policies.nothing_saveable))(a)),
    "checkpoint that saves names": (
        "T",
        lambda x, a: grad(lambda v: layers(v, x, policies.save_only_these_names("kept")))(a),
    ),
    "checkpoint that saves all but names": (
        "T",
        lambda x, a: grad(lambda v: layers(v, x, policies.save_anything_except_these_names("kept")))(a),
    ),
    "checkpoint in scan": (
        "T",
        lambda x, a: grad(lambda v: lax.scan(jax.checkpoint(lambda c, r: (jnp.sin(c * r), None)), v, x)[0])(a),
    ),
    "scan in checkpoint": (
        "T",
        lambda x, a: grad(jax.checkpoint(lambda v: lax.scan(lambda c, r: (jnp.sin(c * r), None), v, x)[0]))(a),
    ),
    "checkpoint of cond": (
        "T",
        lambda x, a: grad(jax.checkpoint(lambda v: lax.cond(x[0] > 0, jnp.sin, lambda v: v * v, v)))(a),
    ),
    "checkpoint with static arguments": (
        "T",
        lambda x, a: grad(lambda v: jax.checkpoint(lambda v, twice: v**3 if twice else v, static_argnums=1)(v, True))(
            x
        ),
    ),
    "checkpoint in a second derivative": (
        "T",
        lambda x, a: jax.hessian(lambda v: jax.checkpoint(lambda v: (jnp.sin(v) * x).sum() ** 2)(v))(a),
    ),
    "checkpoint of checkpoint": ("T", lambda x, a: grad(jax.checkpoint(lambda v: jax.checkpoint(jnp.sin)(v) * x))(a)),
    # of jitted functions
    "jit of grad of jit": ("T", lambda x, a: jax.jit(grad(jax.jit(wave)))(x)),
    "jitted with static arguments": (
        "TM",
        lambda x, a: tuple(functools.partial(jax.jit, static_argnums=1)(lambda v, n: v**n)(w, 3) for w in (x, a)),
    ),
}
