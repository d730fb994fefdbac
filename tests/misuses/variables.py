"""Variables."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

import replicax
from tests.misuses.world import LocalityError, inside, scoped


def variable(w: Any, *args: Any, **options: Any) -> Any:
    return scoped(w, lambda: replicax.Variable(*args, name=options.pop("name", "u"), **options))


def item(w: Any) -> None:
    w.v[0] = 1.0


def in_place(w: Any) -> None:
    w.v += 1.0


def set_value(w: Any) -> None:
    w.v.value = 1.0


ROWS = replicax.IndexedSlices(np.ones((1, 2), np.float32), np.array([0]), (3, 2))

VARIABLES = [
    (
        "a variable of an integer too large",
        lambda w: variable(w, 2**40),
        ValueError,
        "'u': the initial value has the integer 1099511",
    ),
    ("such an integer assigned", lambda w: w.n.assign(2**40), ValueError, "'n'.*1099511.*int32"),
    ("a row that is not there", lambda w: replicax.IndexedSlices([[1.0]], [3], (3, 1)), ValueError, "out of range"),
    ("a row before the first", lambda w: replicax.IndexedSlices([[1.0]], [-4], (3, 1)), ValueError, "-4.*out of range"),
    ("nothing for a value", lambda w: variable(w, None), TypeError, "'u': the initial value.* None"),
    ("a text for a value", lambda w: variable(w, "abc"), TypeError, "'u': the initial value.* 'abc'.*numbers"),
    (
        "rows of several lengths",
        lambda w: variable(w, [[1.0], [1.0, 2.0]]),
        TypeError,
        "'u': the initial value.*numbers",
    ),
    ("objects for a value", lambda w: variable(w, np.array([{}])), TypeError, "'u': the initial value.*numbers"),
    ("a number for names", lambda w: replicax.as_variables({"u": np.ones(2)}, name=5), TypeError, "as_variables: name"),
    ("a number for a name", lambda w: variable(w, 1.0, name=5), TypeError, "name must be a string or None, got 5"),
    ("an unknown dtype", lambda w: variable(w, 1.0, dtype="float33"), TypeError, "'u'.*dtype.*float33"),
    ("a text for trainable", lambda w: variable(w, 1.0, trainable="yes"), TypeError, "'u'.*trainable must be .*'yes'"),
    (
        "an unknown synchronization",
        lambda w: variable(w, 1.0, synchronization="often"),
        ValueError,
        "'on_read'.*'often'",
    ),
    (
        "an unknown aggregation",
        lambda w: variable(w, 1.0, aggregation="max"),
        ValueError,
        "'only_first_replica'.*'max'",
    ),
    ("trainable copies", lambda w: variable(w, 1.0, synchronization="on_read", trainable=True), ValueError, "on_write"),
    ("the mean of integers", lambda w: variable(w, 1, aggregation="mean"), ValueError, "use a float dtype"),
    ("a number for a partitioner", lambda w: variable(w, [1.0], partitioner=3), TypeError, "FixedShardsPartitioner"),
    ("a partitioner of nothing", lambda w: variable(w, [1.0], partitioner=lambda shape, dtype: []), ValueError, "'u'"),
    ("a partitioner that returns no list", lambda w: variable(w, [1.0], partitioner=lambda *_: 2), ValueError, "got 2"),
    (
        "parts that don't fit",
        lambda w: variable(w, [1.0], partition_dimensions=[2]),
        ValueError,
        "'u'.*product must be 1",
    ),
    ("no such logical device", lambda w: variable(w, 1.0, logical_device=1), ValueError, "'u'.*no logical device 1"),
    ("a value of each replica", lambda w: variable(w, w.x), LocalityError, "same on every replica"),
    (
        "a value of the step",
        lambda w: inside(w, lambda x: replicax.Variable(x), w.x),
        TypeError,
        "computed by the step",
    ),
    ("another shape", lambda w: w.v.assign([1.0, 2.0]), ValueError, r"'v'.*shape \(2,\); expected \(3,\)"),
    ("a float for an integer", lambda w: w.n.assign(1.5), TypeError, "'n'.*float32.*convert it with .astype"),
    ("a text assigned", lambda w: w.v.assign("abc"), TypeError, "'v'.*to assign is 'abc'.*numbers"),
    ("nothing assigned", lambda w: w.v.assign(None), TypeError, "'v'.*to assign is None"),
    ("a text added", lambda w: w.v.assign_add("abc"), TypeError, "'v'.*'abc'"),
    ("replicas' values from across", lambda w: w.v.assign(w.x), LocalityError, "'v'.*strategy.reduce"),
    ("replicas' values without aggregation", lambda w: inside(w, lambda x: w.v.assign(x), w.x), LocalityError, "'v'"),
    ("adding to copies from across", lambda w: w.total.assign_add(1.0), ValueError, "'total'.*inside a step"),
    ("reading copies from across", lambda w: w.own.value, LocalityError, "'own'.*strategy.local_results"),
    ("an element assigned", item, TypeError, r"'v'.*assign.*\.at\["),
    ("an operator in place", in_place, TypeError, "'v'.*assign_add"),
    ("value set", set_value, AttributeError, r"'v'.*variable\.assign\("),
    ("a copy", lambda w: copy.copy(w.v), TypeError, "'v'.*make another Variable"),
    ("rows that are none", lambda w: w.summed.scatter_add(np.ones((1, 2))), TypeError, "'summed'.*IndexedSlices"),
    ("rows of another array", lambda w: w.v.scatter_add(ROWS), ValueError, r"'v'.*shape \(3, 2\)"),
    ("rows set by sum", lambda w: w.summed.scatter_update(ROWS), ValueError, "'summed'.*scatter_add"),
    ("rows that don't fit", lambda w: replicax.IndexedSlices([[1.0]], [0, 1], (3, 1)), ValueError, "indices"),
    ("rows without numbers", lambda w: replicax.IndexedSlices([[1.0]], [0.0], (3, 1)), ValueError, "integers"),
    ("no whole shape of rows", lambda w: replicax.IndexedSlices([[1.0]], [0], 3), (TypeError, ValueError), "shape"),
    (
        "no pieces",
        lambda w: replicax.variables.FixedShardsPartitioner(0),
        ValueError,
        "num_shards must be an int of at least 1",
    ),
    *[
        (
            f"{kind} along the dim {dim}",
            lambda w, kind=kind, dim=dim: getattr(replicax.variables, kind)(2, dim=dim),
            ValueError,
            f"{kind}: dim must be an int, got {dim}",
        )
        for kind in ("FixedShardsPartitioner", "MinSizePartitioner", "MaxSizePartitioner")
        for dim in (1.5, None)
    ],
    (
        "a dim that is not there",
        lambda w: variable(w, [1.0], partitioner=replicax.variables.FixedShardsPartitioner(2, dim=1)),
        ValueError,
        "dim 1 is out of range",
    ),
]
