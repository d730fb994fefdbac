"""Programs with libraries that compare the types of what they compute with those of constants and arguments.

In a mesh, JAX gives these different types; see ``traced_inside`` of ``replicax.execution.tracing.capture``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import optimistix
from jax import lax

import replicax
from tests.programs.programs import AXIS, normal, program, together

Array = jax.Array


@program("TTM", together(a=normal(3, 3), b=normal(3)))
def linear_systems(data: Any) -> Any:
    constant = jnp.array([[3.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 1.0]])

    def solved(a: Any, b: Any, solver: Any) -> Any:
        operator = lineax.MatrixLinearOperator(a @ a.T + constant, lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, b, solver).value

    gradient = jax.grad(lambda a: solved(a, data["b"], lineax.LU()).sum())(data["a"])
    by_steps = solved(data["a"], jnp.ones(3), lineax.CG(rtol=1e-6, atol=1e-6))
    return gradient, by_steps, solved(jnp.zeros((3, 3)), jnp.ones(3), lineax.Cholesky())


@program("TTT", normal(3))
def roots_and_minima(x: Array) -> Any:
    def root(x: Array) -> Array:
        return optimistix.root_find(lambda y, x: y**3 + y - x, optimistix.Newton(1e-6, 1e-6), jnp.zeros(3), x).value

    def distance(y: Array, _: Any) -> Array:
        return jnp.square(y - x).sum() + jnp.square(y).sum()

    lowest = optimistix.minimise(distance, optimistix.BFGS(1e-6, 1e-6), jnp.ones(3)).value
    nearest = optimistix.least_squares(lambda y, _: y - x, optimistix.LevenbergMarquardt(1e-6, 1e-6), jnp.zeros(3))
    return jax.grad(lambda x: root(x).sum())(x), lowest, nearest.value


@program("TT", normal(2))
def differential_equations(y: Array) -> Any:
    turn = jnp.array([[0.0, 1.0], [-1.0, 0.0]])

    def end(turn: Array, y: Array) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, turn: jnp.tanh(turn @ y) - 0.1 * t * y),
            diffrax.Heun(),
            0.0,
            1.0,
            0.25,
            y,
            args=turn,
            max_steps=8,
        ).ys

    return jax.grad(lambda turn, y: end(turn, y).sum(), argnums=(0, 1))(turn, y)


def _normalised_apart(xs: list[Any]) -> list[Any]:
    """One device has the batch of all replicas, and no replicas."""
    out, moments = jax.jit(functools.partial(_normalised, axes="batch"))(jnp.concatenate(xs))
    return [(part, moments) for part in jnp.split(out, len(xs))]


def _normalised(x: Array, axes: Any) -> Any:
    results, moments = [], []
    for mode in ("ema", "batch"):
        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name=axes, mode=mode)
        state = jax.tree.map(lambda leaf: jnp.full_like(leaf, leaf.dtype == bool), state)  # some of it is "empty"
        out, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        out, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(out, state)
        results.append(out)
        moments += [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    return jnp.concatenate(results, axis=1), jnp.stack(moments)


@program("TM", normal(4, 3), across=_normalised_apart)
def batch_normalisation_of_equinox_in_both_modes(x: Array) -> Any:
    return _normalised(x, ("batch", AXIS))


@program("MMT", normal(4, 3), across=lambda xs: _newton_apart(jnp.stack(xs)))
def solutions_for_all_replicas(x: Array) -> Any:
    context = replicax.get_replica_context()
    assert context is not None
    gradient = context.all_reduce("mean", jax.grad(_convex)(jnp.zeros(3), x))

    def curvature(v: Array) -> Any:
        return context.all_reduce("mean", jax.jvp(lambda w: jax.grad(_convex)(w, x), (jnp.zeros(3),), (v,))[1])

    step, _ = jax.scipy.sparse.linalg.cg(curvature, gradient, maxiter=8)
    twice = lax.scan(lambda w, _: (jax.scipy.sparse.linalg.gmres(curvature, w, maxiter=3)[0], None), step, length=1)
    return step, twice[0], jax.scipy.sparse.linalg.bicgstab(lambda v: x.T @ (x @ v) + v, x[0], maxiter=8)[0]


def _convex(w: Array, x: Array) -> Array:
    return jnp.logaddexp(0.0, x @ w).mean() + jnp.square(w).sum()


def _newton_apart(x: Array) -> list[Any]:
    def loss(w: Array) -> Array:
        return jnp.mean(jax.vmap(_convex, in_axes=(None, 0))(w, x))

    hessian = jax.hessian(loss)(jnp.zeros(3))
    step = jnp.linalg.solve(hessian, jax.grad(loss)(jnp.zeros(3)))
    twice = jnp.linalg.solve(hessian, step)
    return [(step, twice, jnp.linalg.solve(own.T @ own + jnp.eye(3), own[0])) for own in x]


@program("MMMM", normal(4, 3), across=lambda xs: [_solved(jnp.concatenate(xs), lambda v: v)] * len(xs))
def solvers_of_lineax_and_optimistix_over_all_replicas(x: Array) -> Any:
    context = replicax.get_replica_context()
    assert context is not None
    return _solved(x, lambda value: context.all_reduce("sum", value))


def _solved(x: Array, total: Callable[[Array], Array]) -> Any:
    """Solutions of systems whose matrix is a sum over all rows, of which ``x`` may have a part."""

    def product(v: Array) -> Array:
        return total(x.T @ (x @ v)) + v

    operator = lineax.FunctionLinearOperator(
        product, jax.ShapeDtypeStruct((3,), x.dtype), lineax.positive_semidefinite_tag
    )

    def solved(b: Array, solver: Any) -> Array:
        return lineax.linear_solve(operator, b, solver).value

    by_steps, at_once = lineax.CG(rtol=1e-6, atol=1e-6), lineax.AutoLinearSolver(well_posed=True)
    root = optimistix.root_find(
        lambda y, _: product(y) + y**3 - 1.0, optimistix.Newton(1e-6, 1e-6), jnp.zeros(3), max_steps=16
    ).value
    several = jax.vmap(lambda b: solved(b, by_steps))(jnp.eye(3))
    gradient = jax.grad(lambda b: jnp.sum(jnp.sin(lax.stop_gradient(solved(b, by_steps)) * b)))(jnp.ones(3))
    return solved(jnp.ones(3), at_once), several, gradient, root
