"""Loops and branches, whose carries and branches have different localities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.programs import integers, normal, program, together, weights

Array = jax.Array


@program("TT", normal(5, 4))
def scan_from_a_constant(x: Array) -> Any:
    return lax.scan(lambda carry, row: (carry + row, carry * row.sum()), jnp.zeros(4), x)


@program("MT", normal(5, 4))
def scan_with_a_mirrored_carry(x: Array) -> Any:
    return lax.scan(lambda carry, row: (carry * 0.5 + 1.0, row * carry), jnp.float32(1), x)


@program("TTTMM", normal(5, 2))
def scan_hands_on_through_its_carry(x: Array) -> Any:
    # The data reaches the third value in the third iteration of the search for a fixpoint.
    def body(carry: Any, row: Array) -> Any:
        first, second, _, count = carry
        return (row, first, second * 2, count + 1), count

    zero = jnp.zeros(2)
    carry, counts = lax.scan(body, (zero, zero, zero, 0), x)
    return carry, counts


@program("TMTM", normal(3, 4, 2))
def scan_in_scan(x: Array) -> Any:
    def outer(carry: Any, rows: Array) -> Any:
        total, count = carry

        def inner(carry: Any, row: Array) -> Any:
            return (carry[0] + row, carry[1] * 2 - 1), carry[1]

        (part, count), counts = lax.scan(inner, (jnp.zeros(2), count), rows)
        return (total + part, count), (part, counts)

    return lax.scan(outer, (jnp.ones(2), 3), x)


@program("TT", normal(3))
def scan_backwards_without_inputs(x: Array) -> Any:
    return lax.scan(lambda c, _: (jnp.cos(c) * x, c.sum()), jnp.ones(3), length=5, reverse=True, unroll=2)


@program("TM", normal(4))
def fori_loop_from_a_constant(x: Array) -> Any:
    def body(i: Array, carry: Any) -> Any:
        return carry[0] + x * i.astype(jnp.float32), carry[1] + i

    return lax.fori_loop(0, 5, body, (jnp.zeros(4), 0))


@program("TMT", normal(4), shared=lambda: (6,))
def fori_loop_with_a_mirrored_bound(x: Array, bound: Array) -> Any:
    def body(i: Array, carry: Any) -> Any:
        return jnp.sin(carry[0] + x), carry[1] + i, carry[2].at[i % 4].set(x[0])

    return lax.fori_loop(1, bound, body, (jnp.zeros(4), jnp.int32(0), jnp.zeros(4)))


@program("TTT", integers(3, 90))
def while_with_a_bound_of_each_replica(x: Array) -> Any:
    # Collatz: how often it turns is up to the data, so even what starts and grows as a constant differs.
    def body(carry: Any) -> Any:
        value, steps, doubled = carry
        return jnp.where(value % 2 == 0, value // 2, 3 * value + 1), steps + 1, doubled * 1.5

    start = (x, jnp.int32(0), jnp.float32(1))
    value, steps, doubled = lax.while_loop(lambda carry: carry[0] > 1, body, start)
    return value + x, steps, doubled


@program("TM", normal(3), shared=lambda: (0.01,))
def while_with_a_mirrored_bound(x: Array, tolerance: Array) -> Any:
    def body(carry: Any) -> Any:
        return carry[0] * 0.5 + x, carry[1] * 0.5

    return lax.while_loop(lambda carry: carry[1] > tolerance, body, (jnp.zeros(3), jnp.float32(1)))


@program("TT", integers(0, 6, 5))
def greedy_decoding_until_the_end(x: Array) -> Any:
    def going(state: Any) -> Array:
        position, done, _ = state
        return (position < 8) & ~done

    def body(state: Any) -> Any:
        position, _, tokens = state
        last = tokens[position - 1]
        token = (last * 5 + x[last % 5] + 1) % 7
        return position + 1, token == 0, lax.dynamic_update_index_in_dim(tokens, token, position, 0)

    tokens = jnp.zeros(8, jnp.int32).at[0].set(x[0])
    length, _, tokens = lax.while_loop(going, body, (jnp.int32(1), jnp.bool_(False), tokens))
    return length, tokens


@program("TT", normal(4))
def cond_with_constant_branches(x: Array) -> Any:
    one = lax.cond(x[0] > 0, lambda: x * 2, lambda: jnp.full(4, 0.5))
    return one, lax.cond(x[1] > 0, lambda: jnp.ones(4), lambda: jnp.zeros(4))


@program("TMM", normal(4), shared=lambda: (3,))
def cond_with_a_mirrored_predicate(x: Array, step: Array) -> Any:
    def often(x: Array) -> Any:
        return x * 2, jnp.ones(4), jnp.int32(1)

    def seldom(x: Array) -> Any:
        return jnp.zeros(4), jnp.arange(4.0), jnp.int32(2)

    return lax.cond(step % 2 == 1, often, seldom, x)


@program("TTMT", normal(4), shared=lambda: (1,))
def switch_by_each_replica_and_by_all(x: Array, which: Array) -> Any:
    constants = [lambda: jnp.float32(1), lambda: jnp.float32(2), lambda: jnp.float32(4)]
    mine = jnp.argmax(x[:3])
    branches = [lambda v: v, lambda v: jnp.ones(4), lambda v: v.sum() + jnp.zeros(4)]
    return (
        lax.switch(mine, constants),
        lax.switch(mine, branches, x),
        lax.switch(which, constants),
        lax.switch(which, [branches[1], branches[0], branches[2]], x),
    )


@program("TTTM", normal(4), shared=weights((4,), (4,)))
def select_by_data_and_from_data(x: Array, a: Array, b: Array) -> Any:
    chosen = jnp.select([x > 0.5, x > 0], [a, b], default=-1.0)
    return jnp.where(x > 0, a, b), jnp.where(a > 0, x, b), chosen, lax.select(a > b, a, b)


@program("TTM", normal(6, 2), shared=weights((6, 2)))
def associative_scan_and_cumulative_sums(x: Array, a: Array) -> Any:
    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    decayed, states = lax.associative_scan(combine, (jnp.full((6, 2), 0.5) * x, x))
    return decayed + jnp.cumsum(x, 0), states, lax.associative_scan(jnp.maximum, a, reverse=True)


@program("TM", normal(4, 3), shared=weights((5,)))
def map_row_by_row(x: Array, a: Array) -> Any:
    def row(r: Array) -> Array:
        return lax.cond(r[0] > 0, lambda: r.sum(), lambda: jnp.float32(0))

    return lax.map(row, x), lax.map(jnp.sin, a, batch_size=2)


@program("TMT", normal(3, 4))
def while_in_cond_in_scan(x: Array) -> Any:
    def body(carry: Any, row: Array) -> Any:
        total, count = carry

        def shrink() -> Array:
            return lax.while_loop(lambda v: jnp.abs(v).max() > 0.3, lambda v: v * 0.7, row)

        part = lax.cond(count % 2 == 0, shrink, lambda: jnp.ones(4))
        return (total + part, count + 1), part

    (total, count), parts = lax.scan(body, (jnp.zeros(4), 0), x)
    return total, count, parts


@program("TTM", normal(5, 3))
def vmap_of_branches_and_loops(x: Array) -> Any:
    def branch(row: Array) -> Array:
        return lax.cond(row[0] > 0, lambda: row, lambda: jnp.zeros(3))

    def loop(row: Array) -> Array:
        return lax.while_loop(lambda c: c[1] < row[1] * 3, lambda c: (c[0] * 2, c[1] + 1), (1.0, 0.0))[0]

    counted = jax.vmap(lambda n: lax.while_loop(lambda c: c < n, lambda c: c + 2, 0))(jnp.arange(4))
    return jax.vmap(branch)(x), jax.vmap(loop)(x), counted


@program("TTM", normal(4, 3), shared=weights((4, 3)))
def vmap_in_scan_and_scan_in_vmap(x: Array, a: Array) -> Any:
    def total(rows: Array) -> Array:
        return lax.scan(lambda c, r: (c * 0.9 + r, None), jnp.zeros(()), rows)[0]

    def body(carry: Array, row: Array) -> Any:
        return carry + jax.vmap(lambda v: jnp.tanh(v * 2))(row), None

    return lax.scan(body, jnp.zeros(3), x)[0], jax.vmap(total)(x), jax.vmap(total, in_axes=1)(a)


@program("TMMTMM", normal(4), shared=weights((4,)))
def a_jitted_helper_for_data_and_for_constants(x: Array, a: Array) -> Any:
    @jax.jit
    def helper(v: Array, w: Array) -> Any:
        return jnp.tanh(v) * 2, w.sum()

    return helper(x, a), helper(a, x), helper(a, a)


@program("TTM", together(rows=normal(6, 3), length=integers(2, 6)))
def recurrence_over_sequences_of_some_length(x: Any) -> Any:
    def body(carry: Array, step: Any) -> Any:
        row, position = step
        new = jnp.tanh(0.5 * carry + row)
        return jnp.where(position < x["length"], new, carry), position * 2

    positions = jnp.arange(6)
    last, doubled = lax.scan(body, jnp.zeros(3), (x["rows"], positions))
    return last, lax.fori_loop(0, x["length"], lambda i, c: c + x["rows"][i], jnp.zeros(3)), doubled


@program("TMTM", normal(3))
def mutable_arrays_written_in_loops_and_branches(x: Array) -> Any:
    total, count, flag = (jax.new_ref(jnp.zeros(3)) for _ in range(3))
    constant = jax.new_ref(jnp.ones(2))

    def body(i: Array, carry: int) -> int:
        total[...] += x * i.astype(jnp.float32)
        count[i] = i.astype(jnp.float32) * 2
        return carry

    @jax.jit
    def write_both() -> None:
        lax.cond(x[0] > 0, lambda: flag.__setitem__(..., jnp.ones(3)), lambda: None)
        constant[0] = count[1]

    lax.fori_loop(0, 3, body, 0)
    write_both()
    return total[...], jax.ref.freeze(count), flag[...], constant[...]
