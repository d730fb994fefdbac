"""Implicit layers, bilevel optimization, and methods of second order whose products replicas add up."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

import replicax
from tests.corpus.corpus import normal, program, whole

X, TARGETS = normal(16, 4), normal(16, seed=1)
LABELS = (TARGETS + X[:, 0] > 0).astype("float32")


def conjugate_gradients(product, b, steps):
    """The first iterations of conjugate gradients for ``product(x) == b``, as every TRPO has them."""

    def step(_, carry):
        x, r, p, rs = carry
        Ap = product(p)
        alpha = rs / (p @ Ap)
        x, r = x + alpha * p, r - alpha * Ap
        new = r @ r
        return x, r, r + (new / rs) * p, new

    return lax.fori_loop(0, steps, step, (jnp.zeros_like(b), b, b, b @ b))[0]


# --- bilevel: the penalty of each weight, by implicit hypergradients ---------------------------------------


def inner_loss(w, penalties, x, y):
    return 0.5 * jnp.square(x @ w - y).mean() + 0.5 * (jnp.exp(penalties) * w**2).sum()


def outer_loss(w, x, y):
    return jnp.square(x @ w - y).mean()


VALID_X, VALID_Y = normal(16, 4, seed=2), normal(16, seed=3)


def bilevel_plain():
    @jax.jit
    def step(w, penalties):
        gradient = functools.partial(jax.grad(inner_loss), x=X, y=TARGETS)
        for _ in range(5):
            w = w - 0.3 * gradient(w, penalties)
        loss, g = jax.value_and_grad(outer_loss)(w, VALID_X, VALID_Y)
        v = conjugate_gradients(lambda u: jax.jvp(lambda w: gradient(w, penalties), (w,), (u,))[1], g, 4)
        hypergradient = -jax.vjp(lambda p: gradient(w, p), penalties)[1](v)[0]
        return w, penalties - 0.5 * hypergradient, loss

    w, penalties = jnp.zeros(4), jnp.full(4, -2.0)
    for _ in range(3):
        w, penalties, loss = step(w, penalties)
    return w, penalties, loss


@program(bilevel_plain)
def bilevel_by_implicit_hypergradients(strategy):
    def step(w, penalties, x, y, valid_x, valid_y):
        mean = functools.partial(replicax.get_replica_context().all_reduce, "mean")
        local_gradient = functools.partial(jax.grad(inner_loss), x=x, y=y)
        for _ in range(5):
            w = w - 0.3 * mean(local_gradient(w, penalties))
        loss, g = mean(jax.value_and_grad(outer_loss)(w, valid_x, valid_y))

        def hessian_product(u):
            return mean(jax.jvp(lambda w: local_gradient(w, penalties), (w,), (u,))[1])

        v = conjugate_gradients(hessian_product, g, 4)
        hypergradient = mean(-jax.vjp(lambda p: local_gradient(w, p), penalties)[1](v)[0])
        return w, penalties - 0.5 * hypergradient, loss

    [batch] = whole(strategy, X, TARGETS, VALID_X, VALID_Y)
    w, penalties = jnp.zeros(4), jnp.full(4, -2.0)
    for _ in range(3):
        w, penalties, loss = strategy.run(step, args=(w, penalties, *batch))
    return w, penalties, loss


# --- Newton's method with conjugate gradients ---------------------------------------------------------------


def logistic_loss(w, x, y):
    return optax.sigmoid_binary_cross_entropy(x @ w, y).mean() + 0.05 * (w**2).sum()


def newton_plain(solve=conjugate_gradients):
    @jax.jit
    def step(w):
        gradient = jax.grad(logistic_loss)
        direction = solve(lambda v: jax.jvp(lambda w: gradient(w, X, LABELS), (w,), (v,))[1], gradient(w, X, LABELS), 4)
        return w - direction

    w = jnp.zeros(4)
    for _ in range(3):
        w = step(w)
    return w, logistic_loss(w, X, LABELS)


def newton(strategy, solve):
    def step(w, x, y):
        ctx = replicax.get_replica_context()

        def gradient(w):
            return ctx.all_reduce("mean", jax.grad(logistic_loss)(w, x, y))

        def hessian_product(v):
            local = jax.jvp(lambda w: jax.grad(logistic_loss)(w, x, y), (w,), (v,))[1]
            return ctx.all_reduce("mean", local)

        w = w - solve(hessian_product, gradient(w), 4)
        return w, ctx.all_reduce("mean", logistic_loss(w, x, y))

    [(x, y)] = whole(strategy, X, LABELS)
    w = jnp.zeros(4)
    for _ in range(3):
        w, loss = strategy.run(step, args=(w, x, y))
    return w, loss


@program(newton_plain)
def newton_with_conjugate_gradients_by_hand(strategy):
    return newton(strategy, conjugate_gradients)


def scipy_cg(product, b, steps):
    return jax.scipy.sparse.linalg.cg(product, b, maxiter=steps)[0]


@program(functools.partial(newton_plain, scipy_cg), quick=("2",))
def newton_with_conjugate_gradients_of_scipy(strategy):
    return newton(strategy, scipy_cg)


# --- a fixed point with a derivative of its own --------------------------------------------------------------


def iterate(f, z):
    def going(carry):
        previous, z, count = carry
        return (jnp.abs(z - previous).max() > 1e-7) & (count < 60)

    return lax.while_loop(going, lambda c: (c[1], f(c[1]), c[2] + 1), (z, f(z), 0))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, params, x):
    return iterate(lambda z: f(params, x, z), jnp.zeros_like(x))


def fixed_point_forward(f, params, x):
    z = fixed_point(f, params, x)
    return z, (params, x, z)


def fixed_point_backward(f, residuals, cotangent):
    params, x, z = residuals
    _, pull_z = jax.vjp(lambda z: f(params, x, z), z)
    w = iterate(lambda w: cotangent + pull_z(w)[0], jnp.zeros_like(z))
    return jax.vjp(lambda params, x: f(params, x, z), params, x)[1](w)


fixed_point.defvjp(fixed_point_forward, fixed_point_backward)


def contraction(params, x, z):
    return jnp.tanh(z @ params["W"] * 0.3 + x @ params["U"] + params["b"])


EQUILIBRIUM = {"W": normal(4, 4, seed=4), "U": normal(4, 4, seed=5), "b": jnp.zeros(4)}


def equilibrium_losses(params, x, y):
    return jnp.square(fixed_point(contraction, params, x).sum(-1) - y)


def fixed_point_plain():
    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(lambda p: equilibrium_losses(p, X, TARGETS).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), loss

    params = EQUILIBRIUM
    for _ in range(3):
        params, loss = step(params)
    return params, loss


@program(fixed_point_plain, quick=("2",))
def fixed_point_with_custom_vjp(strategy):
    with strategy.scope():
        params = replicax.as_variables(EQUILIBRIUM)

    def step(x, y):
        def loss_fn(params):
            return replicax.compute_average_loss(equilibrium_losses(params, x, y))

        loss, grads = replicax.value_and_grad(loss_fn, params)(params)
        loss, grads = replicax.get_replica_context().all_reduce("sum", (loss, grads))
        for name, variable in params.items():
            variable.assign_sub(0.05 * grads[name])
        return loss

    [(x, y)] = whole(strategy, X, TARGETS)
    losses = [strategy.run(step, args=(x, y)) for _ in range(3)]
    return replicax.as_arrays(params), losses[-1]


# --- an implicit layer by custom_root ------------------------------------------------------------------------


def cubic_layer(a, x):
    """The y of each row for which ``y + y ** 3 == a @ x``, whose derivative is that of the equation."""

    def residual(y):
        return y + y**3 - x @ a

    def solve(f, y):
        def newton_step(_, y):
            return y - f(y) / jax.jvp(f, (y,), (jnp.ones_like(y),))[1]

        return lax.fori_loop(0, 8, newton_step, y)

    def tangent_solve(g, b):
        return b / g(jnp.ones_like(b))

    return lax.custom_root(residual, jnp.zeros(len(x)), solve, tangent_solve)


def root_plain():
    @jax.jit
    def step(a):
        loss, gradient = jax.value_and_grad(lambda a: jnp.square(cubic_layer(a, X) - TARGETS).mean())(a)
        return a - 0.2 * gradient, loss

    a = jnp.full(4, 0.5)
    for _ in range(3):
        a, loss = step(a)
    return a, loss


@program(root_plain, quick=("2", "executor"))
def implicit_layer_by_custom_root(strategy):
    def step(a, x, y):
        loss, gradient = jax.value_and_grad(lambda a: jnp.square(cubic_layer(a, x) - y).mean())(a)
        loss, gradient = replicax.get_replica_context().all_reduce("mean", (loss, gradient))
        return a - 0.2 * gradient, loss

    [(x, y)] = whole(strategy, X, TARGETS)
    a = jnp.full(4, 0.5)
    for _ in range(3):
        a, loss = strategy.run(step, args=(a, x, y))
    return a, loss


# --- a deep equilibrium model: Anderson's acceleration, and the derivative of a last step ----------------------


class Cell(nn.Module):
    @nn.compact
    def __call__(self, z, x):
        h = nn.Dense(6, kernel_init=nn.initializers.normal(0.1))(z) + nn.Dense(6)(x)
        return nn.LayerNorm()(jnp.tanh(h)) * 0.5


def anderson(f, z, memory=2, steps=4):
    """``f`` maps ``[batch, features]`` to the same; each row is accelerated by itself."""
    zs, fs = [z], [f(z)]
    for _ in range(steps):
        z_last, f_last = jnp.stack(zs[-memory:], 1), jnp.stack(fs[-memory:], 1)
        G = f_last - z_last
        H = jnp.einsum("bnf,bmf->bnm", G, G) + 1e-2 * jnp.eye(G.shape[1])
        alpha = jnp.linalg.solve(H, jnp.ones((*H.shape[:2], 1)))[..., 0]
        alpha = alpha / alpha.sum(-1, keepdims=True)
        z = jnp.einsum("bn,bnf->bf", alpha, f_last)
        zs.append(z)
        fs.append(f(z))
    return zs[-1]


def equilibrium(variables, x):
    z = lax.stop_gradient(anderson(lambda z: Cell().apply(variables, z, x), jnp.zeros((len(x), 6))))
    return Cell().apply(variables, z, x)  # the derivative without a Jacobian


def deep_equilibrium_start():
    params = jax.jit(Cell().init)(jax.random.key(0), jnp.zeros((1, 6)), X[:1])
    return params, optax.sgd(1e-1).init(params)


def deep_equilibrium_step(reduce, params, state, x, y):
    def loss_fn(params):
        return optax.huber_loss(equilibrium(params, x).sum(-1), y).mean()

    loss, grads = reduce(jax.value_and_grad(loss_fn)(params))
    updates, state = optax.sgd(1e-1).update(grads, state)
    return optax.apply_updates(params, updates), state, loss


def deep_equilibrium_plain():
    params, state = deep_equilibrium_start()
    step = jax.jit(functools.partial(deep_equilibrium_step, lambda v: v))
    for _ in range(2):
        params, state, loss = step(params, state, X, TARGETS)
    return params, loss


@program(deep_equilibrium_plain)
def deep_equilibrium(strategy):
    def step(*args):
        ctx = replicax.get_replica_context()
        return deep_equilibrium_step(lambda value: ctx.all_reduce("mean", value), *args)

    [batch] = whole(strategy, X, TARGETS)
    params, state = deep_equilibrium_start()
    for _ in range(2):
        params, state, loss = strategy.run(step, args=(params, state, *batch))
    return params, loss


# --- L-BFGS of Optax, whose line search asks for the loss of all replicas ----------------------------------------


def lbfgs_plain():
    tx = optax.lbfgs(memory_size=3)
    w = jnp.zeros(4)
    state = tx.init(w)

    @jax.jit
    def step(w, state):
        value_fn = functools.partial(logistic_loss, x=X, y=LABELS)
        value, grad = optax.value_and_grad_from_state(value_fn)(w, state=state)
        updates, state = tx.update(grad, state, w, value=value, grad=grad, value_fn=value_fn)
        return optax.apply_updates(w, updates), state, value

    for _ in range(3):
        w, state, value = step(w, state)
    return w, value


@program(lbfgs_plain)
def lbfgs_with_line_search(strategy):
    with strategy.scope():
        w = replicax.Variable(jnp.zeros(4), name="w")
        optimizer = replicax.Optimizer(optax.lbfgs(memory_size=3))

    def step(x, y):
        def loss(w):
            losses = optax.sigmoid_binary_cross_entropy(x @ w, y)
            return replicax.compute_average_loss(losses) + replicax.scale_regularization_loss(0.05 * (w**2).sum())

        value, grads = replicax.value_and_grad(loss, w)(w)
        optimizer.apply_gradients(grads, w, value=value, grad=grads, value_fn=loss)
        return value

    [(x, y)] = whole(strategy, X, LABELS)
    values = [strategy.run(step, args=(x, y)) for _ in range(3)]
    return w.value, strategy.reduce("sum", values[-1])
