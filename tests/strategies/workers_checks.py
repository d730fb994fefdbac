"""What the workers of ``test_multi_worker.py`` do; each function runs in every one of several processes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import replicax
EXACT = replicax.RunOptions(executor="per_replica")

def exact():
    s = replicax.MultiWorkerMirroredStrategy()
    n = s.num_replicas_in_sync
    sizes = [2, 2, 1, 0][:n]
    x = s.distribute_values_from_function(lambda c: np.ones((sizes[c.replica_id_in_sync_group], 3), np.float32)*(1+c.replica_id_in_sync_group))
    with s.scope():
        w = replicax.Variable(np.ones(3, np.float32), name="w")
        seen = replicax.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
    const = jnp.ones(2)
    def step(x, lr):
        ctx = replicax.get_replica_context()
        seen.assign_add(x.shape[0])
        loss, g = replicax.value_and_grad(lambda: replicax.compute_average_loss(((x * w)**2).sum(-1)), [w])()
        g = ctx.all_reduce("sum", g)
        w.assign(w - lr * g[0])
        def merge(s, loss, c):
            assert not isinstance(c, replicax.PerReplica)
            assert isinstance(loss, replicax.PerReplica)
            return s.reduce("sum", loss), [v*1 for v in s.local_results(loss)], c
        return loss, ctx.merge_call(merge, args=(loss, const)), "text", ctx.all_gather(x, 0), w
    out = s.run(step, args=(x, 0.1), options=EXACT)
    print(out)
    a = w.numpy()
    print(s.reduce("sum", x, axis=0), s.gather(x, 0))
    y = s.distribute_values_from_function(lambda c: np.ones((2, 3), np.float32)*(1+c.replica_id_in_sync_group))
    w.assign(np.ones(3, np.float32))
    o1 = s.run(step, args=(y, 0.1), options=EXACT); w1 = w.numpy()
    w.assign(np.ones(3, np.float32))
    o2 = s.run(step, args=(y, 0.1)); w2 = w.numpy()
    print(o1, o2, w1, w2, seen)
    for options in (None, EXACT):
        def bad(x):
            ctx = replicax.get_replica_context()
            if jax.process_index() == 1:
                raise KeyError("no")
            return ctx.all_reduce("sum", x)
        try: s.run(bad, args=(y,), options=options)
        except KeyError as e: print("GOT", repr(e), e.__notes__)
    def differ(x):
        ctx = replicax.get_replica_context()
        if ctx.replica_id_in_sync_group == 3:
            return ctx.all_gather(x, 0)
        return ctx.all_reduce("sum", x)
    try: s.run(differ, args=(y,), options=EXACT)
    except Exception as e: print("GOT", repr(e))
    def returned(x):
        ctx = replicax.get_replica_context()
        if ctx.replica_id_in_sync_group == 2: return x
        return ctx.all_reduce("sum", x)
    try: s.run(returned, args=(y,), options=EXACT)
    except Exception as e: print("GOT", repr(e))
    def wr(x): w.assign(x[0])
    for options in (None, EXACT):
        try: s.run(wr, args=(y,), options=options)
        except Exception as e: print("GOT", repr(e))
    try: w.assign(np.full(3, jax.process_index(), np.float32))
    except Exception as e: print("GOT", repr(e))
    try: s.run(lambda z: z, args=(np.full(3, jax.process_index(), np.float32),))
    except Exception as e: print("GOT", repr(e))
    f = (lambda z: z+1) if jax.process_index() else (lambda z: z)
    def g(z): return z
    def h(z): return z
    try: s.run(g if jax.process_index() else h, args=(1.0,))
    except Exception as e: print("GOT", repr(e))
    print(float(s.run(g, args=(1.0,))))
    print(s.run(lambda: jax.random.key(3), options=EXACT))
    print(s.run(lambda: replicax.get_replica_context().replica_id_in_sync_group, options=EXACT))
    raise SystemExit
