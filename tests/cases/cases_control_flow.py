"""Loops and branches, alone and inside each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

ONE, ZERO = jnp.float32(1), jnp.float32(0)


def _collatz(n):
    return lax.while_loop(
        lambda c: c[0] > 1, lambda c: (jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1), (n, 0)
    )


def _mutable(x, a):
    total, count = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.int32(0))

    def turn(i, _):
        total[...] += x
        count[...] += i

    lax.fori_loop(0, 3, turn, None)
    return total[...], count[...]


CASES = {
    # scan
    "scan without a carry": ("T", lambda x, a: lax.scan(lambda c, r: (c, jnp.sin(r)), None, x)[1]),
    "scan without inputs": ("MM", lambda x, a: lax.scan(lambda c, _: (c * 2, c), ONE, length=3)),
    "scan of mirrored rows with a carry of its own": ("TT", lambda x, a: lax.scan(lambda c, r: (c * r, c), x[0], a)),
    "scan backwards": ("TT", lambda x, a: lax.scan(lambda c, r: (c - r, c), ZERO, x, reverse=True)),
    "scan unrolled": ("TT", lambda x, a: lax.scan(lambda c, r: (c + r, c), ZERO, x, unroll=3)),
    "scan of nothing": ("MT", lambda x, a: lax.scan(lambda c, r: (c, r + c), ONE, x[:0])),
    "scan over a dict with a tuple carried": (
        "TMT",
        lambda x, a: (lambda r: (r[0][0], r[0][1], r[1]["s"]))(
            lax.scan(
                lambda c, r: ((c[0] + r["x"], c[1] + r["a"]), {"s": r["x"] * c[1]}), (ZERO, ZERO), {"x": x, "a": a}
            )
        ),
    ),
    "scan that swaps its carry": (
        "TTM",
        lambda x, a: lax.scan(lambda c, _: ((c[1], c[0], c[2]), None), (x, a, a), length=3)[0],
    ),
    "scan in scan in scan": (
        "T",
        lambda x, a: lax.scan(
            lambda c, r: (
                lax.scan(lambda d, _: (lax.scan(lambda e, _: (e * 0.5 + r, None), d, length=2)[0], None), c, length=2)[
                    0
                ],
                None,
            ),
            ZERO,
            x,
        )[0],
    ),
    "scan of integers and bools": (
        "TTM",
        lambda x, a: lax.scan(
            lambda c, r: ((c[0] + jnp.where(r > 0, 1, 0), c[1] ^ (r > 0), ~c[2]), None), (0, False, True), x
        )[0],
    ),
    "scan of a jitted body": ("T", lambda x, a: lax.scan(jax.jit(lambda c, r: (c + r, c * r)), ZERO, x)[0]),
    "scan whose body closes over both": (
        "TM",
        lambda x, a: lax.scan(lambda c, i: ((c[0] + x[i], c[1] + a[i]), None), (ZERO, ZERO), jnp.arange(4))[0],
    ),
    "scan of random keys": (
        "TT",
        lambda x, a: (
            (*lax.scan(lambda k, r: (jax.random.split(k)[0], r + jax.random.normal(k)), jax.random.key(0), x)[1:], x)
        ),
    ),
    # loops
    "fori of constants": ("M", lambda x, a: lax.fori_loop(0, 5, lambda i, c: c + i, 0)),
    "fori to a bound of each replica": (
        "T",
        lambda x, a: lax.fori_loop(0, jnp.where(x[0] > 0, 3, 2), lambda i, c: c + 1, 0),
    ),
    "fori that writes rows": (
        "TM",
        lambda x, a: lax.fori_loop(
            0, 4, lambda i, c: (c[0].at[i].set(x[3 - i]), c[1].at[i].add(a[i])), (jnp.zeros(4), a)
        ),
    ),
    "fori downwards by a mirrored bound": (
        "TM",
        lambda x, a: lax.fori_loop(0, (jnp.abs(a[0]) * 0).astype(int) + 3, lambda i, c: (c[0] + x, c[1] * 2), (a, a)),
    ),
    "while of each replica": ("TT", lambda x, a: _collatz(jnp.abs(x[0] * 20).astype(int) + 3)),
    "while of all": ("MT", lambda x, a: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))),
    "while that never turns": (
        "MT",
        lambda x, a: lax.while_loop(lambda c: c[0] < 0, lambda c: (c[0] + 1, c[1] + x), (0, a)),
    ),
    "while in while": (
        "T",
        lambda x, a: lax.while_loop(
            lambda c: c < 5, lambda c: lax.while_loop(lambda d: d < c + jnp.abs(x[0]), lambda d: d + 1.0, c) + 0.5, ZERO
        ),
    ),
    "while with a test that computes": (
        "T",
        lambda x, a: lax.while_loop(lambda c: jnp.linalg.norm(c) > jnp.linalg.norm(a) * 0.1, lambda c: c * 0.5, x),
    ),
    "newton's method": (
        "T",
        lambda x, a: lax.while_loop(
            lambda c: (jnp.abs(c[0] ** 2 - 2 - x[0] ** 2) > 1e-4) & (c[1] < 20),
            lambda c: ((c[0] + (2 + x[0] ** 2) / c[0]) / 2, c[1] + 1),
            (ONE, 0),
        )[0],
    ),
    "scan in while": (
        "TT",
        lambda x, a: lax.while_loop(
            lambda c: c[1] < 2,
            lambda c: (lax.scan(lambda d, r: (d + r, None), c[0], x)[0], c[1] + jnp.where(x[0] > 9, 1, 1)),
            (ZERO, 0),
        ),
    ),
    "while in scan": (
        "TT",
        lambda x, a: lax.scan(
            lambda c, r: (lax.while_loop(lambda d: d < jnp.abs(r), lambda d: d + 0.3, c * 0), c + 1), ZERO, x
        ),
    ),
    # branches
    "cond of each replica": ("T", lambda x, a: lax.cond(x[0] > 0, jnp.sin, jnp.cos, a)),
    "cond of all": ("MT", lambda x, a: lax.cond(a[0] > 9, lambda x, a: (a, x), lambda x, a: (a * 2, x * 2), x, a)),
    "cond of a constant": ("MT", lambda x, a: lax.cond(True, lambda: (a, x), lambda: (a + 1, x + 1))),
    "cond with operands in a dict": (
        "T",
        lambda x, a: lax.cond(a[0] > 9, lambda d: d["x"], lambda d: d["x"] + d["a"], {"x": x, "a": a}),
    ),
    "cond without a result": ("M", lambda x, a: (lax.cond(x[0] > 0, lambda: None, lambda: None), a)[1]),
    "cond in cond": (
        "T",
        lambda x, a: lax.cond(a[0] > 9, lambda: a, lambda: lax.cond(x[0] > 0, lambda: a, lambda: -a)),
    ),
    "cond in scan": (
        "TT",
        lambda x, a: lax.scan(
            lambda c, r: (
                (
                    lax.cond(r[0] > 0, lambda: c[0] + 1, lambda: c[0]),
                    lax.cond(r[1] > 0, lambda: c[1] + 1, lambda: c[1]),
                ),
                None,
            ),
            (0, 0),
            jnp.stack([x, a], 1),
        )[0],
    ),
    "cond in while": (
        "T",
        lambda x, a: lax.while_loop(lambda c: c < 4, lambda c: lax.cond(x[0] > 0, lambda: c + 1, lambda: c + 2), 0),
    ),
    "scan in a branch": (
        "TM",
        lambda x, a: (
            lax.cond(x[0] > 0, lambda: lax.scan(lambda c, r: (c + r, None), ZERO, a)[0], lambda: ONE),
            lax.cond(a[0] > 9, lambda: lax.scan(lambda c, r: (c + r, None), ZERO, a)[0], lambda: ONE),
        ),
    ),
    "while in a branch": (
        "T",
        lambda x, a: lax.cond(x[0] > 0, lambda: lax.while_loop(lambda c: c < 5, lambda c: c * 2, ONE), lambda: a[0]),
    ),
    "switch of each replica": (
        "T",
        lambda x, a: lax.switch(jnp.argmax(x), [lambda: a, lambda: a * 2, lambda: -a, lambda: a + 1]),
    ),
    "switch of all": (
        "TM",
        lambda x, a: lax.switch(
            jnp.argmax(a), [lambda x: (x, ONE), lambda x: (x * 2, ZERO), lambda x: (-x, ONE), lambda x: (x, ZERO)], x
        ),
    ),
    "switch out of range": (
        "MT",
        lambda x, a: (
            lax.switch(7, [lambda: a, lambda: -a]),
            lax.switch(jnp.where(x[0] > 9, 1, -3), [lambda: a, lambda: -a]) + x,
        ),
    ),
    "select instead of a branch": (
        "TTM",
        lambda x, a: (lax.select(x > 0, a, -a), jnp.where(a > 0, x, a), lax.select_n(a > 0, a, -a)),
    ),
    # others
    "map": ("TM", lambda x, a: (lax.map(lambda r: r * jnp.sin(r), x), lax.map(jnp.exp, a))),
    "map in batches": ("T", lambda x, a: lax.map(lambda r: lax.cond(r > 0, jnp.sin, jnp.cos, r), x, batch_size=3)),
    "associative scan": (
        "TM",
        lambda x, a: (lax.associative_scan(jnp.add, x), lax.associative_scan(jnp.multiply, a, reverse=True)),
    ),
    "associative scan of pairs": (
        "TT",
        lambda x, a: (*lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a * 0.5, x))[1:], x),
    ),
    "cumulative operations": (
        "TTMM",
        lambda x, a: (jnp.cumsum(x), lax.cummax(x), lax.cumprod(a), lax.cumlogsumexp(a, reverse=True)),
    ),
    "a loop that python unrolls": ("T", lambda x, a: sum((jnp.roll(x, i) * a for i in range(3)), jnp.zeros(4))),
    "mutable arrays in a loop": ("TM", _mutable),
    "a bounded loop with a break by a mask": (
        "TT",
        lambda x, a: lax.scan(
            lambda c, r: ((jnp.where(c[1], c[0], c[0] + r), c[1] | (c[0] > 1)), None), (ZERO, False), jnp.abs(x)
        )[0],
    ),
}
