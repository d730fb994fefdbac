"""Derivatives: JAX's own, custom ones, and those of checkpointed code."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.programs.programs import normal, program, weights

Array = jax.Array


# --- custom rules ---------------------------------------------------------------------------------------


@jax.custom_jvp
def log1pexp(x: Array) -> Array:
    return jnp.log1p(jnp.exp(x))


@log1pexp.defjvp
def _log1pexp_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return log1pexp(x), jax.nn.sigmoid(x) * dx


@program("TTTMM", normal(4), shared=weights((4,)))
def custom_jvp(x: Array, a: Array) -> Any:
    out, tangent = jax.jvp(log1pexp, (a,), (x,))
    gradient = jax.grad(lambda v: log1pexp(v).sum())
    return log1pexp(x), gradient(x), tangent, out, gradient(a)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def clip_gradient(limit: float, x: Array) -> Array:
    return x


clip_gradient.defvjp(lambda limit, x: (x, None), lambda limit, _, g: (jnp.clip(g, -limit, limit),))


@jax.custom_vjp
def scaled(x: Array, scale: Array) -> Array:
    return jnp.tanh(x) * scale


def _scaled_forward(x: Array, scale: Array) -> Any:
    y = jnp.tanh(x)
    return y * scale, (y, scale)


def _scaled_backward(kept: Any, g: Array) -> Any:
    y, scale = kept
    return g * scale * (1 - y * y), (g * y).sum()


scaled.defvjp(_scaled_forward, _scaled_backward)


@program("TTTTT", normal(4), shared=lambda: (0.7,))
def custom_vjp(x: Array, scale: Array) -> Any:
    def loss(x: Array, scale: Array) -> Array:
        return (scaled(x, scale) ** 2).sum() + clip_gradient(0.1, x * scale).sum()

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, scale)
    return value, gradients, scaled(x, scale), jax.vmap(scaled, in_axes=(0, None))(x, scale)


@program("MMTM", normal(4), shared=weights((4,)))
def custom_vjp_of_what_does_not_vary(x: Array, a: Array) -> Any:
    scale = jnp.float32(2)
    mirrored = jax.grad(lambda a: scaled(a, scale).sum())(a)
    mixed = jax.grad(lambda a: (scaled(a, scale) * x).sum())(a)
    return scaled(a, scale), mirrored, mixed, jax.grad(lambda x: (clip_gradient(1.0, a) * x).sum())(x)


@program("TT", normal(4, 3), shared=weights((3,)))
def custom_vjp_in_scan(x: Array, a: Array) -> Any:
    def loss(a: Array) -> Array:
        def body(carry: Array, row: Array) -> Any:
            carry = clip_gradient(0.01, carry)
            return scaled(carry + row * a, jnp.float32(0.9)), None

        return (lax.scan(body, jnp.zeros(3), x)[0] ** 2).sum()

    return jax.value_and_grad(loss)(a)


@program("TM", normal(4))
def custom_gradient(x: Array) -> Any:
    @jax.custom_gradient
    def reversed_gradient(v: Array) -> Any:
        return v * 2, lambda g: (-g,)

    return jax.grad(lambda v: (reversed_gradient(v) * v).sum())(x), jax.grad(reversed_gradient)(3.0)


@program("TTM", normal(3), shared=weights((3,)))
def implicit_differentiation_of_a_fixed_point(x: Array, a: Array) -> Any:
    def solve(f: Any, start: Array) -> Array:
        def going(carry: Any) -> Array:
            return (jnp.abs(carry[1] - carry[0]).max() > 1e-6) & (carry[2] < 60)

        start_carry = (start, f(start), 0)
        return lax.while_loop(going, lambda c: (c[1], f(c[1]), c[2] + 1), start_carry)[1]

    @jax.custom_vjp
    def fixed_point(a: Array, b: Array) -> Array:
        return solve(lambda z: jnp.tanh(0.5 * z * a + b), jnp.zeros(3))

    def forward(a: Array, b: Array) -> Any:
        z = fixed_point(a, b)
        return z, (z, a, b)

    def backward(kept: Any, g: Array) -> Any:
        z, a, b = kept
        _, pull = jax.vjp(lambda z: jnp.tanh(0.5 * z * a + b), z)
        w = solve(lambda w: g + pull(w)[0], g)
        return jax.vjp(lambda a, b: jnp.tanh(0.5 * z * a + b), a, b)[1](w)

    fixed_point.defvjp(forward, backward)
    return *jax.grad(lambda a, b: fixed_point(a, b).sum(), argnums=(0, 1))(a, x), fixed_point(a, a)


@program("TTT", normal(3))
def custom_root_and_linear_solve(x: Array) -> Any:
    def cube_root(a: Array) -> Array:
        def newton(f: Any, start: Array) -> Array:
            return lax.fori_loop(0, 12, lambda _, z: z - f(z) / jax.grad(f)(z), start)

        return lax.custom_root(lambda z: z**3 - a, jnp.float32(1.5), newton, lambda g, y: y / g(jnp.float32(1)))

    def solve(b: Array) -> Array:
        diagonal = jnp.array([1.0, 2.0, 4.0])
        return lax.custom_linear_solve(lambda v: diagonal * v, b, lambda _, b: b / diagonal, symmetric=True)

    a = 1 + x[0] ** 2
    return cube_root(a), jax.grad(cube_root)(a), jax.grad(lambda b: (solve(b) ** 2).sum())(x)


# --- checkpointed code ----------------------------------------------------------------------------------


def _layer(w: Array, h: Array) -> Array:
    return checkpoint_name(jnp.tanh(h @ w), "activation") * 2


_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "but names": jax.checkpoint_policies.save_anything_except_these_names("activation"),
}


@program("TTM", normal(2, 3), shared=weights((3, 3)))
def checkpoint_under_policies(x: Array, w: Array) -> Any:
    def loss(w: Array, policy: Any, x: Array) -> Array:
        layer = jax.checkpoint(_layer, policy=policy)
        return (layer(w, layer(w, x)) ** 2).sum()

    gradients = [jax.grad(loss)(w, policy, x) for policy in _POLICIES.values()]
    return gradients, jax.grad(loss)(w, None, jnp.ones((2, 3)))


@program("TTM", normal(2, 3), shared=weights((4, 3, 3)))
def checkpointed_layers_in_scan(x: Array, ws: Array) -> Any:
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(carry: Any, w: Array) -> Any:
        h, penalty = carry
        return (_layer(w, h), penalty + (w**2).sum()), None

    def loss(ws: Array) -> Any:
        (h, penalty), _ = lax.scan(body, (x, jnp.float32(0)), ws)
        return (h**2).mean() + 0.1 * penalty, penalty

    (value, penalty), gradient = jax.value_and_grad(loss, has_aux=True)(ws)
    return value, gradient, penalty


@program("T", normal(4))
def checkpoint_with_a_static_argument_and_a_branch(x: Array) -> Any:
    @functools.partial(jax.checkpoint, static_argnums=(1,))
    def block(v: Array, squared: bool) -> Array:
        v = lax.cond(v[0] > 0, lambda: jnp.sin(v), lambda: jnp.ones(4))
        return (v**2 if squared else v).sum()

    return jax.grad(lambda v: block(v, True) + block(v * 2, False))(x)


# --- JAX's own ------------------------------------------------------------------------------------------


@program("TTTMM", normal(4, 3), shared=weights((3,), (3,)))
def gradients_of_data_and_of_constants(x: Array, w: Array, v: Array) -> Any:
    def loss(w: Array, v: Array) -> Array:
        return jnp.logaddexp(x @ w, 0.0).mean() + (v**2).sum()

    value, (dw, dv) = jax.value_and_grad(loss, argnums=(0, 1))(w, v)
    return value, dw, jax.grad(lambda w: loss(w, v))(w) + v, dv, jax.grad(lambda v: (v**3).sum())(v)


@program("TTTT", normal(3), shared=weights((3,)))
def second_derivatives(x: Array, w: Array) -> Any:
    def f(w: Array) -> Array:
        return jnp.sin(w * x).sum() * (w**2).sum()

    def hessian_times(v: Array) -> Array:
        return jax.jvp(jax.grad(f), (w,), (v,))[1]

    return jax.hessian(f)(w), jax.jacrev(jax.grad(f))(w), jax.jacfwd(lambda w: w * x)(w), hessian_times(w)


@program("TTTMT", normal(4), shared=weights((4,)))
def jvp_vjp_and_linearize(x: Array, a: Array) -> Any:
    def f(v: Array) -> Array:
        return jnp.sin(v) * v.sum()

    out, pull = jax.vjp(f, x)
    _, push = jax.linearize(f, a)
    (transposed,) = jax.linear_transpose(lambda v: jnp.cumsum(v) * 2, a)(x)
    return out, pull(a), push(x), push(jnp.ones(4)), transposed


@program("TTM", normal(5, 3), shared=weights((3,)))
def gradient_through_scan(x: Array, w: Array) -> Any:
    # The cotangent's carry starts from zeros in the transposed loop, though the data is in its inputs.
    def loss(w: Array, start: Array) -> Any:
        def body(carry: Any, row: Array) -> Any:
            h, decay = carry
            return (jnp.tanh(h * w + row), decay * 0.9), h.sum()

        (h, decay), sums = lax.scan(body, (start, jnp.float32(1)), x)
        return h.sum() * decay + sums.mean(), decay

    gradients, decay = jax.grad(loss, argnums=(0, 1), has_aux=True)(w, jnp.zeros(3))
    return gradients, decay


@program("TTM", normal(4), shared=weights((4,)))
def gradient_through_branches_and_bounded_loops(x: Array, a: Array) -> Any:
    def branch(v: Array) -> Array:
        return lax.cond(x[0] > 0, lambda v: (v**2).sum(), lambda v: jnp.float32(3) * v[0], v)

    def switch(v: Array) -> Array:
        powers = [lambda v: v, lambda v: v**2, lambda v: jnp.ones(4)]
        return (lax.switch(jnp.argmax(x[:3]), powers, v) * x).sum()

    def loop(v: Array) -> Array:
        return lax.fori_loop(0, 3, lambda i, c: c * jnp.cos(v), jnp.ones(4)).sum()

    return jax.grad(branch)(a), jax.jvp(switch, (a,), (x,))[1], jax.grad(loop)(a)


@program("TTM", normal(5, 3), shared=weights((3,)))
def gradients_of_each_example(x: Array, w: Array) -> Any:
    def loss(w: Array, row: Array) -> Array:
        return jnp.square(row @ w - 1)

    each = jax.vmap(jax.grad(loss), in_axes=(None, 0))(w, x)
    norms = jnp.linalg.norm(each, axis=1, keepdims=True)
    return (each / jnp.maximum(norms, 1.0)).mean(0), norms, jax.vmap(jax.grad(loss))(jnp.eye(3), jnp.eye(3))


@program("TTM", normal(4, 2), shared=weights((2,)))
def gradient_of_an_inner_training_loop(x: Array, w: Array) -> Any:
    def inner_loss(w: Array, rows: Array) -> Array:
        return jnp.square(rows @ w - 1).mean()

    def adapted(w: Array, rows: Array) -> Array:
        return lax.fori_loop(0, 3, lambda _, w: w - 0.1 * jax.grad(inner_loss)(w, rows), w)

    def outer_loss(w: Array, rows: Array) -> Array:
        return inner_loss(adapted(w, rows[:2]), rows[2:])

    return *jax.value_and_grad(outer_loss)(w, x), jax.grad(outer_loss)(w, jnp.ones((4, 2)))


@program("TMT", normal(4), shared=weights((4,)))
def stopped_and_straight_through_gradients(x: Array, a: Array) -> Any:
    def rounded(v: Array) -> Array:
        return v + lax.stop_gradient(jnp.round(v) - v)

    stopped = jax.grad(lambda a: (lax.stop_gradient(x) * a**2 + lax.stop_gradient(a * x)).sum())(a)
    return stopped, jax.grad(lambda a: rounded(a * 2).sum())(a), rounded(x * 3)
