"""Optimal control and dynamical systems: programs that roll a system out in time."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

import replicax
from tests.corpus.corpus import normal, program, whole

# --- iterative LQR: each replica plans for the initial states that it has --------------------------------


def pendulum(state, control):
    angle, speed = state
    speed = speed + 0.1 * (-jnp.sin(angle) + control[0])
    return jnp.stack([angle + 0.1 * speed, speed])


def stage_cost(state, control):
    return 0.1 * (state**2).sum() + 0.01 * (control**2).sum()


def final_cost(state):
    return 5.0 * (state**2).sum()


def rollout(start, controls):
    def step(state, control):
        following = pendulum(state, control)
        return following, following

    _, states = lax.scan(step, start, controls)
    return jnp.concatenate([start[None], states])


def total_cost(start, controls):
    states = rollout(start, controls)
    return jax.vmap(stage_cost)(states[:-1], controls).sum() + final_cost(states[-1])


def ilqr_iteration(start, controls):
    states = rollout(start, controls)

    def backward(carry, inputs):
        V_x, V_xx = carry
        x, u = inputs
        A, B = jax.jacfwd(pendulum, argnums=(0, 1))(x, u)
        l_x, l_u = jax.grad(stage_cost, argnums=(0, 1))(x, u)
        l_xx = jax.hessian(stage_cost)(x, u)
        l_uu = jax.hessian(stage_cost, argnums=1)(x, u)
        Q_x, Q_u = l_x + A.T @ V_x, l_u + B.T @ V_x
        Q_xx, Q_uu, Q_ux = l_xx + A.T @ V_xx @ A, l_uu + B.T @ V_xx @ B, B.T @ V_xx @ A
        k, K = -jnp.linalg.solve(Q_uu, Q_u), -jnp.linalg.solve(Q_uu, Q_ux)
        return (Q_x + K.T @ Q_u, Q_xx + K.T @ Q_ux), (k, K)

    end = jax.grad(final_cost)(states[-1]), jax.hessian(final_cost)(states[-1])
    _, (ks, Ks) = lax.scan(backward, end, (states[:-1], controls), reverse=True)

    def forward(x, inputs):
        x_old, u_old, k, K = inputs
        u = u_old + 0.8 * k + K @ (x - x_old)
        return pendulum(x, u), u

    return lax.scan(forward, start, (states[:-1], controls, ks, Ks))[1]


def ilqr(start):
    controls = lax.fori_loop(0, 3, lambda _, u: ilqr_iteration(start, u), jnp.zeros((6, 1)))
    return controls, total_cost(start, controls)


STARTS = normal(4, 2)


def ilqr_plain():
    controls, costs = jax.jit(jax.vmap(ilqr))(STARTS)
    return controls, costs.mean()


@program(ilqr_plain)
def iterative_lqr(strategy):
    def plan(starts):
        controls, costs = jax.vmap(ilqr)(starts)
        return controls, replicax.get_replica_context().all_reduce("mean", costs.mean())

    [(starts,)] = whole(strategy, STARTS)
    controls, cost = strategy.run(plan, args=(starts,))
    return strategy.gather(controls, axis=0), cost


# --- shooting: one plan for many scenarios, which the replicas divide -------------------------------------


def landing_cost(plan, mass):
    def step(state, thrust):
        height, speed = state
        speed = speed + 0.2 * (jnp.tanh(thrust) * 3.0 / mass - 1.0)
        return (height + 0.2 * speed, speed), thrust**2

    (height, speed), effort = lax.scan(step, (jnp.float32(2.0), jnp.float32(0.0)), plan)
    return height**2 + speed**2 + 0.01 * effort.sum()


MASSES = 1.0 + 0.1 * normal(16)


def shooting_plain():
    adam = optax.adam(0.1)
    plan = jnp.zeros(8)
    state = adam.init(plan)

    @jax.jit
    def step(plan, state):
        cost, gradient = jax.value_and_grad(lambda p: jax.vmap(landing_cost, (None, 0))(p, MASSES).mean())(plan)
        updates, state = adam.update(gradient, state)
        return optax.apply_updates(plan, updates), state, cost

    costs = []
    for _ in range(4):
        plan, state, cost = step(plan, state)
        costs.append(cost)
    return plan, costs


@program(shooting_plain, quick=("2",))
def shooting_over_scenarios(strategy):
    with strategy.scope():
        plan = replicax.Variable(jnp.zeros(8), name="plan")
        optimizer = replicax.Optimizer(optax.adam(0.1))

    def step(masses):
        def loss():
            return replicax.compute_average_loss(jax.vmap(landing_cost, (None, 0))(plan.value, masses))

        cost, gradients = replicax.value_and_grad(loss, [plan])()
        optimizer.apply_gradients(zip(gradients, [plan], strict=True))
        return cost

    [(masses,)] = whole(strategy, MASSES)
    costs = [strategy.reduce("sum", strategy.run(step, args=(masses,))) for _ in range(4)]
    return plan.value, costs


# --- the cross-entropy method: candidates are divided, the best of all are found by all ------------------


def candidates(mean, spread, keys):
    return mean + spread * jax.vmap(lambda key: jax.random.normal(key, mean.shape))(keys)


def refit(plans, costs):
    _, best = lax.top_k(-costs, 4)
    return plans[best].mean(0), plans[best].std(0) + 0.05


def cross_entropy_plain():
    @jax.jit
    def search(keys):
        mean, spread = jnp.zeros(5), jnp.ones(5)
        for i in range(3):
            plans = candidates(mean, spread, keys[:, i])
            mean, spread = refit(plans, jax.vmap(landing_cost, (0, None))(plans, 1.0))
        return mean, spread

    return search(jax.random.split(jax.random.key(0), (16, 3)))


@program(cross_entropy_plain)
def cross_entropy_method(strategy):
    def search(keys):
        keys = jax.random.wrap_key_data(keys)
        ctx = replicax.get_replica_context()
        mean, spread = jnp.zeros(5), jnp.ones(5)
        for i in range(3):
            plans = candidates(mean, spread, keys[:, i])
            everyone = ctx.all_gather((plans, jax.vmap(landing_cost, (0, None))(plans, 1.0)), axis=0)
            mean, spread = refit(*everyone)
        return mean, spread

    [(keys,)] = whole(strategy, jax.random.key_data(jax.random.split(jax.random.key(0), (16, 3))))
    return strategy.run(search, args=(keys,))


# --- a Kalman filter, whose noise is found by the likelihood of many series -------------------------------


def negative_log_likelihood(params, series):
    q, r, decay = jnp.exp(params["q"]), jnp.exp(params["r"]), jax.nn.sigmoid(params["decay"])
    F = jnp.array([[1.0, 0.1], [0.0, 1.0]]).at[1, 1].set(decay)
    H = jnp.array([[1.0, 0.0]])

    def step(carry, y):
        m, P = carry
        m, P = F @ m, F @ P @ F.T + q * jnp.eye(2)
        S = H @ P @ H.T + r
        gain = P @ H.T / S
        error = y - (H @ m)[0]
        m, P = m + gain[:, 0] * error, P - gain @ H @ P
        return (m, P), 0.5 * (jnp.log(S[0, 0]) + error**2 / S[0, 0])

    _, losses = lax.scan(step, (jnp.zeros(2), jnp.eye(2)), series)
    return losses.mean()


NOISE = {"q": jnp.float32(-2.0), "r": jnp.float32(0.0), "decay": jnp.float32(1.0)}
SERIES = normal(8, 10).cumsum(1) * 0.3


def kalman_plain():
    sgd = optax.sgd(0.1, momentum=0.9)
    params, state = NOISE, sgd.init(NOISE)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda p: jax.vmap(negative_log_likelihood, (None, 0))(p, SERIES).mean())(
            params
        )
        updates, state = sgd.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(3):
        params, state, loss = step(params, state)
    return params, loss


@program(kalman_plain)
def kalman_filter_by_maximum_likelihood(strategy):
    sgd = optax.sgd(0.1, momentum=0.9)
    params, state = NOISE, sgd.init(NOISE)

    def step(params, state, series):
        def loss_fn(params):
            return jax.vmap(negative_log_likelihood, (None, 0))(params, series).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        loss, grads = replicax.get_replica_context().all_reduce("mean", (loss, grads))
        updates, state = sgd.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    [(series,)] = whole(strategy, SERIES)
    for _ in range(3):
        params, state, loss = strategy.run(step, args=(params, state, series))
    return params, loss


# --- a neural ODE, with a Runge-Kutta method of its own ----------------------------------------------------


class NeuralODE(eqx.Module):
    field: eqx.nn.MLP
    scale: jax.Array

    def __init__(self, key):
        self.field = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=key)
        self.scale = jnp.ones(2)

    def __call__(self, y0, times):
        def f(y):
            return self.scale * self.field(y)

        def rk4(y, dt):
            k1 = f(y)
            k2 = f(y + dt / 2 * k1)
            k3 = f(y + dt / 2 * k2)
            k4 = f(y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return y, y

        _, ys = lax.scan(rk4, y0, jnp.diff(times))
        return jnp.concatenate([y0[None], ys])


TIMES = jnp.linspace(0.0, 1.0, 5)
ORBITS = jnp.stack([jnp.cos(TIMES[None] + normal(8, 1)), jnp.sin(TIMES[None] + normal(8, 1))], -1)


def trajectory_losses(model, orbits):
    found = jax.vmap(model, (0, None))(orbits[:, 0], TIMES)
    return jnp.square(found - orbits).mean((1, 2))


def neural_ode_plain():
    model = NeuralODE(jax.random.key(0))
    adam = optax.adam(3e-2)
    state = adam.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        loss, grads = eqx.filter_value_and_grad(lambda m: trajectory_losses(m, ORBITS).mean())(model)
        updates, state = adam.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    for _ in range(3):
        model, state, loss = step(model, state)
    return jax.tree.leaves(eqx.filter(model, eqx.is_array)), loss


@program(neural_ode_plain)
def neural_ode(strategy):
    with strategy.scope():
        model = replicax.as_variables(NeuralODE(jax.random.key(0)))
        optimizer = replicax.Optimizer(optax.adam(3e-2))

    def loss_fn(model, orbits):
        return replicax.compute_average_loss(trajectory_losses(model, orbits))

    def step(orbits):
        loss, grads = replicax.value_and_grad(loss_fn, model)(model, orbits)
        optimizer.apply_gradients(grads, model)
        return replicax.get_replica_context().all_reduce("sum", loss)

    [(orbits,)] = whole(strategy, ORBITS)
    losses = [strategy.run(step, args=(orbits,)) for _ in range(3)]
    return jax.tree.leaves(eqx.filter(replicax.as_arrays(model), eqx.is_array)), losses[-1]
