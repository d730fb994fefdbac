"""A worker for which all others wait is named by the launcher, with what makes it slow, and so is its end."""

from __future__ import annotations

import re

import pytest

from tests.compiler import HURRIED
from tests.launcher.launches import Launch, said

TRAIN = """
    import os, time
    import grain
    import jax
    import jax.numpy as jnp
    import numpy as np
    import replicax

    strategy = replicax.MultiWorkerMirroredStrategy()
    slow = strategy.extended.workers.index == 1

    def train_step(x, there):
        context = replicax.get_replica_context()
        mine = jnp.where(context.replica_id_in_sync_group == 1, x[0, 0].astype(jnp.int32), 4)
        y = jax.lax.fori_loop(0, mine, lambda i, y: jnp.tanh(y @ y), jnp.eye(400))
        return context.all_reduce("sum", y.sum() * 0 + there)

    class Rows:
        def __init__(self, kind):
            self.kind = kind
        def __len__(self):
            return 10**6
        def __getitem__(self, i):
            return np.full(2, 400 if self.kind == "computing" else 4, np.float32)

    def phase(kind):
        data = grain.MapDataset.source(Rows(kind)).batch(2)
        with iter(strategy.distribute_dataset(data)) as batches:
            steps = 0
            # All end at the same step: the one at which both have seen a file.
            for batch in batches:
                there = strategy.distribute_values_from_function(lambda _: np.float32(os.path.exists(kind)))
                steps += 1
                if float(strategy.run(train_step, args=(batch, there))) == 2.0:
                    break
                time.sleep(0.4 if kind == "host" and slow else 0.1)
        print(f"{kind}: {steps} steps", flush=True)

    for kind in ("host", "as the others", "computing"):
        phase(kind)
"""


@pytest.mark.soak
def test_a_slow_worker_is_named_with_what_makes_it_slow(tmp_path) -> None:
    """It is slow until it has been named, however long that takes."""
    with Launch(tmp_path, "--workers", "2", "--max-restarts", "0", "train.py", script=TRAIN, **HURRIED) as launch:
        for kind, message in (
            ("host", r"worker 1 takes [\d.]+ times as long as the others for a step: [\d.e-]+ s more on its host"),
            ("as the others", "worker 1 keeps up with the others again"),
            ("computing", r"worker 1 takes [\d.]+ times as long as the others for a step: [\d.e-]+ s more computing"),
        ):
            heard = len(said(launch))
            launch.wait_until(lambda m=message, n=heard: any(re.match(m, line) for line in said(launch)[n:]))
            (tmp_path / kind).touch()
            launch.wait_for(f"{kind}: ", 2)
        assert launch.wait() == 0, launch.stderr
    assert not any("worker 0 takes" in line for line in said(launch))
