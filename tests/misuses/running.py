"""Steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicax
from tests.misuses.world import ContextError, branch, here, inside, many, merged, right_step, scoped


@dataclasses.dataclass
class Plain:  # which JAX does not know
    x: Any


def kept_from_merge(w: Any) -> Any:
    found: list[Any] = []

    def step(x: Any) -> Any:
        here().merge_call(lambda s, x: found.append(x), (x,))
        return found[0]

    return inside(w, step, w.x)


def leaked(w: Any) -> Any:
    found: list[Any] = []
    inside(w, lambda x: found.append(x * 2), w.x)
    return inside(w, lambda x: x + found[0], w.x)


def read_in_custom_vjp(w: Any) -> Any:
    rounded = jax.custom_vjp(lambda x: jnp.round(x * w.v))
    rounded.defvjp(lambda x: (jnp.round(x * w.v), None), lambda _, back: (back,))
    loss = lambda: replicax.compute_average_loss(rounded(jnp.ones(3)))  # noqa: E731
    return inside(w, lambda: replicax.value_and_grad(loss, [w.v])())


async def coroutine(x: Any) -> Any:
    return x


def generator(x: Any) -> Any:
    yield x


def mapped(kind: str) -> Any:
    """A step that does over devices itself what Replicax does."""
    mesh = jax.make_mesh((2,), ("i",))
    if kind == "pmap":
        return jax.pmap(lambda y: y + 1)
    spec = jax.sharding.PartitionSpec("i")
    if kind == "device_put":
        return lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    if kind == "constraint":
        return lambda y: jax.lax.with_sharding_constraint(y, spec)
    if kind == "in_shardings":
        return jax.jit(lambda y: y + 1, in_shardings=jax.sharding.NamedSharding(mesh, spec))
    return jax.shard_map(lambda y: y + 1, mesh=mesh, in_specs=spec, out_specs=spec)


def mean_by_its_axis(x: Any) -> Any:
    return jax.lax.pmean(x, "batch")


RUNNING = [
    ("five arguments side by side", lambda w: w.s.run(right_step, w.v, w.x, 1, 2, 3), TypeError, r"args=\(x, y\)"),
    (
        "a step's argument by its name",
        lambda w: w.s.run(right_step, (w.v,), x=w.x),
        TypeError,
        r"no argument 'x': .* kwargs=\{'x': …\}",
    ),
    (
        "the axis of a pmap",
        lambda w: inside(w, mean_by_its_axis, w.x),
        NameError,
        r"'mean_by_its_axis' at .*the axis 'batch', .*\(x, replicax.REPLICA_AXIS\).*all_reduce",
    ),
    (
        "the axis of a pmap, as plain Python",
        lambda w: w.s.run(mean_by_its_axis, (w.x,), options=replicax.RunOptions("per_replica")),
        NameError,
        "the axis 'batch', .*all_reduce",
    ),
    *[
        (
            f"{kind} of {rows} rows in a step, {executor}",
            lambda w, kind=kind, rows=rows, executor=executor: w.s.run(
                lambda x: mapped(kind)(x), (np.ones(rows, np.float32),), options=replicax.RunOptions(executor)
            ),
            RuntimeError if kind == "constraint" else ValueError,  # JAX's own
            "maps over devices itself.*Call the mapped function directly, without pmap, shard_map",
        )
        for kind, rows, executor in [
            ("pmap", 2, "compiled"),
            ("pmap", 2, "per_replica"),
            ("pmap", 32, "compiled"),
            ("shard_map", 2, "compiled"),
            ("shard_map", 2, "per_replica"),
            ("device_put", 2, "compiled"),
            ("in_shardings", 2, "compiled"),
            ("constraint", 2, "compiled"),
            ("constraint", 2, "per_replica"),
        ]
    ],
    ("an async step", lambda w: inside(w, coroutine, w.x), TypeError, "coroutine is an async function"),
    ("a step that yields", lambda w: inside(w, generator, w.x), TypeError, "yielded instead of returning"),
    (
        "a mutable array for an argument",
        lambda w: inside(w, lambda r: r[...], jax.new_ref(jnp.ones(2))),
        TypeError,
        "args.0. is a mutable array",
    ),
    (
        "a mutable array returned",
        lambda w: inside(w, lambda: jax.new_ref(jnp.ones(2))),
        TypeError,
        "a mutable array.*its value",
    ),
    *[
        (
            f"{key!r} for a random key",
            lambda w, key=key: inside(w, lambda: here().random_key(key)),
            TypeError,
            r"random_key: key must be a key, such as jax.random.key\(0\), got",
        )
        for key in (0, None, np.float32([1, 2]))
    ],
    (
        "a description of an array for an argument",
        lambda w: w.s.run(lambda x, y: y["a"], (1.0, {"a": jax.ShapeDtypeStruct((2,), np.float32)})),
        TypeError,
        r"args\[1\]\['a'\] is a jax.ShapeDtypeStruct, which only strategy.extended.trace takes",
    ),
    (
        "an integer too large",
        lambda w: inside(w, lambda x: x, {"id": 2**40}),
        ValueError,
        r"args\[0\]\['id'\].*1099511",
    ),
    ("an array of such", lambda w: inside(w, lambda x: x, np.array([2**40])), ValueError, r"args\[0\] has.*at \[0\]"),
    (
        "an old option",
        lambda w: replicax.RunOptions(executor=None),
        ValueError,
        "'compiled' or 'per_replica', got None",
    ),
    ("no function", lambda w: w.s.run(3), TypeError, "strategy.run.*fn must be callable, got 3"),
    ("an array for args", lambda w: w.s.run(lambda x: x, np.ones(1)), TypeError, r"args must be a tuple.*args=\(x,\)"),
    ("a dict for args", lambda w: w.s.run(lambda x: x, {"x": 1}), TypeError, "args must be a tuple"),
    ("args one by one", lambda w: w.s.run(lambda x, y: x, 1.0, 2.0), TypeError, "args must be a tuple"),
    ("a second argument for kwargs", lambda w: w.s.run(lambda x, y: x, (1,), 2), TypeError, r"args=\(x, y\)"),
    ("kwargs without names", lambda w: w.s.run(lambda **k: k, kwargs={1: 2}), TypeError, "a dict from names"),
    ("too few arguments", lambda w: w.s.run(right_step, (1.0,)), TypeError, r"right_step\(\) missing 1 required"),
    ("options that are none", lambda w: w.s.run(lambda: 1, options="per_replica"), TypeError, "must be RunOptions"),
    ("an unknown executor", lambda w: replicax.RunOptions("fast"), ValueError, "'compiled' or 'per_replica'"),
    ("an array of strings", lambda w: w.s.run(lambda x: x, (np.array(["a"]),)), TypeError, r"args\[0\].*numbers"),
    ("an array of objects", lambda w: w.s.run(lambda x: x, ({"y": np.array([{}])},)), TypeError, r"args\[0\]\['y'\]"),
    ("another strategy's value", lambda w: w.s.run(lambda x: x, (w.four,)), ValueError, "4 components; this one has 2"),
    ("another strategy's variable", lambda w: w.s.run(lambda: w.theirs + 1), ContextError, "'theirs'.*belongs to"),
    *[
        (
            f"run inside {name}",
            lambda w, transformed=transformed: transformed(lambda x: w.s.run(right_step, (w.v, x)))(jnp.ones(3)),
            ContextError,
            f"strategy.run was called inside {name}.*outside jax.*{cure}",
        )
        for name, transformed, cure in [
            ("jax.jit", jax.jit, "leave the transformation out"),
            ("jax.grad", jax.grad, "where step calls jax.grad or replicax.value_and_grad"),
            ("jax.jvp", lambda fn: lambda x: jax.jvp(fn, (x,), (x,)), "Differentiate inside the step"),
            ("jax.vmap", jax.vmap, "where step calls jax.vmap"),
            ("jax.lax.scan", lambda fn: lambda x: jax.lax.scan(lambda c, _: (c, fn(c)), x, None, 2), "run_steps"),
            ("jax.lax.fori_loop", lambda fn: lambda x: jax.lax.fori_loop(0, 2, lambda i, c: fn(c), x), "run_steps"),
            ("a transformation of JAX", jax.checkpoint, "use it inside the step"),
        ]
    ],
    (
        "many steps inside jax.vmap",
        lambda w: jax.vmap(lambda x: many(w, lambda ctx, y: x))(jnp.ones(3)),
        ContextError,
        "strategy.run_steps was called inside jax.vmap",
    ),
    ("a step in a step", lambda w: inside(w, lambda: w.s.run(lambda: 1)), ContextError, "can't run another"),
    ("a step in a merge_fn", lambda w: merged(w, lambda s: s.run(lambda: 1)), ContextError, "in a merge_fn"),
    ("a step in another's scope", lambda w: scoped(w, lambda: w.other.run(lambda: 1)), ContextError, "mixing"),
    ("if on a value", lambda w: inside(w, branch, w.x), TypeError, r"(?s)argument x\..*jnp.where.*jax.lax.cond"),
    ("float of a value", lambda w: inside(w, lambda x: float(x.sum()), w.x), TypeError, r"argument x\.* .*Keep it"),
    ("numpy on a value", lambda w: inside(w, lambda x: np.sin(x), w.x), TypeError, "jax.numpy in place of numpy"),
    ("range of a value", lambda w: inside(w, lambda n: list(range(n)), 3), TypeError, "argument n.*fori_loop"),
    ("rows left out by a mask", lambda w: inside(w, lambda x: x[x > 0], w.x), IndexError, "jnp.where"),
    (
        "a variable for jax.lax",
        lambda w: inside(w, lambda: jax.lax.sin(w.v)),
        (TypeError, ValueError),
        r"variable\.value",
    ),
    ("a plain dataclass returned", lambda w: inside(w, Plain, w.x), TypeError, "register_dataclass"),
    ("a value from merge_fn kept", lambda w: kept_from_merge(w), ValueError, "return it from the merge_fn"),
    (
        "a value that a step leaves behind",
        lambda w: leaked(w),
        replicax.errors.TraceError,
        "left behind.*pass it on in args",
    ),
    (
        "a variable read in a custom_vjp",
        lambda w: read_in_custom_vjp(w),
        replicax.errors.TraceError,
        r"In jax\.custom_vjp and custom_jvp, pass what is differentiated as an argument",
    ),
    (
        "a jitted step that assigns",
        lambda w: inside(w, jax.jit(lambda: w.v.assign(w.v * 2).value)),
        replicax.errors.TraceError,
        "leave jax.jit out",
    ),
    (
        "an assignment in jax.grad",
        lambda w: inside(w, jax.grad(lambda x: w.total.assign(x).value), 1.0),
        replicax.errors.TraceError,
        "replicax.value_and_grad",
    ),
    (
        "an assignment in a scan",
        lambda w: inside(
            w, lambda: jax.lax.scan(lambda c, _: (w.v.assign(c).value, None), jnp.zeros(3), None, length=2)
        ),
        replicax.errors.TraceError,
        "assign it after",
    ),
    (
        "a collective in a branch",
        lambda w: inside(w, lambda x: jax.lax.cond(x.sum() > 3, lambda: here().all_reduce("sum", x), lambda: x), w.x),
        replicax.errors.DeadlockError,
        "all_reduce at",
    ),
    ("no steps", lambda w: many(w, lambda ctx, x: None, steps=0), ValueError, "an int of at least 1, got 0"),
    ("steps in words", lambda w: many(w, lambda ctx, x: None, steps="3"), ValueError, "an int of at least 1, got '3'"),
    ("no function of many steps", lambda w: many(w, 3), TypeError, "strategy.run_steps.*fn must be callable"),
    (
        "a dataset for an iterator",
        lambda w: w.s.run_steps(right_step, w.s.distribute_dataset([np.ones(2)]), 1),
        TypeError,
        r"iter\(",
    ),
    (
        "a step of run among several",
        lambda w: many(w, lambda x: x),
        TypeError,
        r"strategy.run_steps calls the step as (\S+)\(ctx, \*inputs\), with a MultiStepContext and the element, but it "
        r"is \1\(x\): too many positional arguments. Write def \1\(ctx, batch\)",
    ),
    ("a list for an iterator", lambda w: w.s.run_steps(right_step, [1, 2], 1), TypeError, r"iter\(strategy.distribute"),
    (
        "an output without a way to combine",
        lambda w: many(w, lambda ctx, x: ctx.set_last_step_output("x", x)),
        ValueError,
        "must say how to combine",
    ),
    (
        "an output combined by 'max'",
        lambda w: many(w, lambda ctx, x: ctx.set_last_step_output("x", x, "max")),
        ValueError,
        "'sum', 'mean', 'only_first_replica'",
    ),
    (
        "a number for an output's name",
        lambda w: many(w, lambda ctx, x: ctx.set_last_step_output(3, x, "sum")),
        TypeError,
        "name must be a string, got 3",
    ),
    (
        "a text for an output",
        lambda w: many(w, lambda ctx, x: ctx.set_last_step_output("x", "text", "sum")),
        TypeError,
        "set_non_tensor_output",
    ),
    (
        "an array for an object",
        lambda w: many(w, lambda ctx, x: ctx.set_non_tensor_output("x", x)),
        TypeError,
        "set_last_step_output",
    ),
    ("initial values in a list", lambda w: many(w, lambda ctx, x: None, initial_loop_values=[1]), ValueError, "dict"),
]
