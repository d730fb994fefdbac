"""Reducing, gathering, updating."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import replicax
from tests.misuses.world import ContextError, LocalityError, here, inside, merged, right_step, scoped

COMBINING = [
    ("an unknown op", lambda w: w.s.reduce("max", w.x), ValueError, "'sum', 'mean' or a ReduceOp, got 'max'"),
    ("op and value swapped", lambda w: w.s.reduce(w.x, "sum"), ValueError, "reduce_op must be"),
    (
        "the first replica's, by reduce",
        lambda w: w.s.reduce("only_first_replica", w.x),
        ValueError,
        "extended.reduce_to",
    ),
    ("the sum of what all share", lambda w: w.s.reduce("sum", 3.0), ValueError, "all 2 replicas share.*'mean'"),
    ("no such axis", lambda w: w.s.reduce("sum", w.x, axis=1), ValueError, "axis 1 is out of range"),
    ("an axis in words", lambda w: w.s.reduce("sum", w.x, axis="batch"), ValueError, "an int, a tuple of ints or None"),
    ("an axis twice", lambda w: w.s.reduce("sum", w.x, axis=(0, -1)), ValueError, "twice"),
    ("sizes that differ", lambda w: w.s.reduce("sum", w.uneven), ValueError, "pass axis=0"),
    ("the sum of texts", lambda w: w.s.reduce("sum", w.texts), TypeError, "replica 0 is not an array: '0'"),
    ("reduce in a step", lambda w: inside(w, lambda x: w.s.reduce("sum", x), w.x), ContextError, "merge_call"),
    ("gather of scalars", lambda w: w.s.gather(w.number, 0), ValueError, "a scalar has no axis"),
    ("gather of what all share", lambda w: w.s.gather(np.ones(2), 0), ValueError, "nothing to gather"),
    ("gather without an axis", lambda w: w.s.gather(w.x, None), ValueError, "axis must be an int, got None"),
    ("gather in a step", lambda w: inside(w, lambda x: w.s.gather(x, 0), w.x), ContextError, "all_gather"),
    ("local_results in a step", lambda w: inside(w, lambda x: w.s.local_results(x), w.x), ContextError, "merge_call"),
    ("an unknown op in a step", lambda w: inside(w, lambda x: here().all_reduce("max", x), w.x), ValueError, "'mean'"),
    ("a text summed in a step", lambda w: inside(w, lambda: here().all_reduce("sum", "x")), TypeError, "numbers"),
    (
        "options of a collective in a dict",
        lambda w: inside(w, lambda x: here().all_reduce("sum", x, {}), w.x),
        TypeError,
        "CommunicationOptions or None",
    ),
    (
        "all_gather along no axis",
        lambda w: inside(w, lambda x: here().all_gather(x, 5), w.x),
        ValueError,
        "out of range",
    ),
    (
        "all_gather without an axis",
        lambda w: inside(w, lambda x: here().all_gather(x, None), w.x),
        ValueError,
        "ReplicaContext.all_gather: axis must be an int, got None",
    ),
    ("all_gather of scalars", lambda w: inside(w, lambda x: here().all_gather(x, 0), w.number), ValueError, "no axis"),
    ("a context that was kept", lambda w: w.kept[0].all_reduce("sum", 1.0), ContextError, "no longer current"),
    ("a context in merge_fn", lambda w: merged(w, lambda s: w.kept[0].all_reduce("sum", 1.0)), ContextError, "cross"),
    (
        "merge_call of no function",
        lambda w: inside(w, lambda: here().merge_call(3)),
        TypeError,
        "merge_fn must be callable",
    ),
    (
        "merge_call of an array",
        lambda w: inside(w, lambda x: here().merge_call(lambda s, x: x, x), w.x),
        TypeError,
        "args",
    ),
    ("a value of each replica used as an array", lambda w: jnp.sum(w.x), LocalityError, "strategy.local_results"),
    ("arithmetic across replicas", lambda w: w.x + 1, TypeError, "holds one value for each replica"),
    ("a method of arrays across replicas", lambda w: w.x.mean(), AttributeError, "holds one value for each replica"),
    ("packs of less than nothing", lambda w: replicax.CommunicationOptions(-1), ValueError, "bytes_per_pack"),
    ("no time", lambda w: replicax.CommunicationOptions(timeout_seconds=0), ValueError, "a positive number or None"),
    ("an unknown implementation", lambda w: replicax.CommunicationOptions(implementation="x"), ValueError, "'ring'"),
    (
        "NCCL without GPUs",
        lambda w: w.s.extended.reduce_to("sum", w.x, None, replicax.CommunicationOptions(implementation="nccl")),
        ValueError,
        "use 'auto'",
    ),
    ("reduce_to somewhere else", lambda w: w.s.extended.reduce_to("sum", w.x, 3), TypeError, "destinations must be"),
    ("reduce_to no device", lambda w: w.s.extended.reduce_to("sum", w.x, "cpu:99"), ValueError, "no device 'cpu:99'"),
    (
        "reduce_to one device in a step",
        lambda w: merged(w, lambda s, x: s.extended.reduce_to("sum", x, "cpu:3"), w.x),
        ValueError,
        "inside a step a result is on all",
    ),
    ("no pairs", lambda w: w.s.extended.batch_reduce_to("sum", [w.x]), TypeError, r"\[0\] must be a pair"),
    ("broadcast of replicas' values", lambda w: w.s.extended.broadcast_to(w.x), TypeError, "reduce it first"),
    (
        "an update of no variable",
        lambda w: w.s.extended.update(3, lambda v: v),
        TypeError,
        "expected a Variable, got 3",
    ),
    ("an update by no function", lambda w: w.s.extended.update(w.v, 3), TypeError, "fn must be callable, got 3"),
    ("an update with an array for args", lambda w: w.s.extended.update(w.v, w.v.assign, np.ones(3)), TypeError, "args"),
    (
        "an update with replicas' values",
        lambda w: w.s.extended.update(w.v, lambda v, x: v.assign(x), (w.x,)),
        TypeError,
        r"args\[0\] is PerReplica.*reduce it first",
    ),
    (
        "another strategy's update",
        lambda w: w.s.extended.update(w.theirs, lambda v: v),
        ContextError,
        "'theirs'.*belongs",
    ),
    (
        "an update of nothing somewhere",
        lambda w: w.s.extended.update_non_slot(["cpu:6"], print),
        ValueError,
        "non_slot_dev",
    ),
    ("a variable for a list", lambda w: w.s.extended.non_slot_devices(w.v), TypeError, r"of one: \[v\]"),
    ("reading no variable", lambda w: w.s.extended.read_var(3.0), TypeError, "expected a Variable, got 3.0"),
    ("colocating outside", lambda w: w.s.extended.colocate_vars_with(w.v), ContextError, "outside its scope"),
    (
        "colocating elsewhere",
        lambda w: scoped(w, lambda: w.s.extended.colocate_vars_with("cpu:7")),
        ValueError,
        "variables are not on",
    ),
    (
        "the placement of no pipeline",
        lambda w: w.s.extended.trace(right_step, (w.v, w.x)).placement(),
        ValueError,
        "assign_to_logical_device",
    ),
    ("no path for a picture", lambda w: w.s.extended.plot(None), TypeError, r"plot\(path\) must be a path.*got None"),
    (
        "a step for a picture",
        lambda w: w.s.extended.plot("x.svg", program=right_step),
        TypeError,
        r"program must be what extended.trace\(step, args\) returns, got <function",
    ),
    ("nothing to put together", lambda w: replicax.values.regroup([]), ValueError, "trees is empty"),
    ("a trace of no function", lambda w: w.s.extended.trace(3), TypeError, "extended.trace.*fn must be callable"),
]
