"""The program that the launcher starts: it trains the digits, and notes which examples each step has really used.

Nothing here handles a fault; that is what Replicax is for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.chaos.faults import EVALUATION, JOINED, PERIOD, Fault, read_faults
from tests.chaos.records import Records
from tests.chaos.strikes import Strikes

FOLDER, STEPS, CHECKPOINTS, DISK = "CHAOS_FOLDER", "CHAOS_STEPS", "CHAOS_CHECKPOINTS", "CHAOS_DISK_IS_REAL"
DATA, FAULTS = "digits.npz", "faults.json"
EXAMPLES, BATCH, WIDTH = 1440, 96, 64
STEPS_PER_EPOCH = EXAMPLES // BATCH


def write_data(path: Path) -> None:
    """The digits in a file, which is read much quicker than scikit-learn is imported."""
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    np.savez(path, images=(images / 16).astype(np.float32), labels=labels.astype(np.int32))


def main() -> None:
    """One worker of one attempt."""
    folder, worker = Path(os.environ[FOLDER]), int(os.environ["JAX_PROCESS_ID"])
    attempt = int(os.environ["REPLICAX_ATTEMPT"])
    records = Records(folder, attempt, worker)
    faults = read_faults(folder / FAULTS)
    fault = faults[attempt] if attempt < len(faults) else Fault(attempt)
    checkpoints = Path(os.environ[CHECKPOINTS])
    strikes = Strikes(fault, worker, checkpoints, records, os.environ[DISK] == "1")
    strikes.prepare(folder)
    strikes.reach("start", "before imports")
    try:
        train(folder, checkpoints, int(os.environ[STEPS]), strikes, records)
    except SystemExit as error:
        records.note("left", code=error.code)
        raise
    except Exception as error:
        records.note("failed", error=f"{type(error).__name__}: {error}")
        raise


def train(folder: Path, checkpoints: Path, steps: int, strikes: Strikes, records: Records) -> None:
    """The training, with the places where something may happen."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import replicax

    strikes.install()
    strikes.reach("start", "before connecting")
    strategy = replicax.MultiWorkerMirroredStrategy()
    strikes.reach("start", "connected")

    data = np.load(folder / DATA)
    numbers = np.arange(EXAMPLES, dtype=np.int32)
    examples = data["images"][:EXAMPLES], data["labels"][:EXAMPLES], numbers
    rest = len(data["labels"]) - EXAMPLES
    test = [x[EXAMPLES:][: rest - rest % 12] for x in (data["images"], data["labels"])]

    key1, key2 = jax.random.split(jax.random.key(0))
    he_normal = jax.nn.initializers.he_normal()
    with strategy.scope():
        variables = {
            "hidden": replicax.Variable(lambda: he_normal(key1, (64, WIDTH)), name="hidden"),
            "bias": replicax.Variable(lambda: jnp.zeros(WIDTH), name="bias"),
            "output": replicax.Variable(lambda: he_normal(key2, (WIDTH, 10)), name="output"),
        }
        count = replicax.Variable(np.int32(0), name="count")
        optimizer = replicax.Optimizer(optax.adam(0.002))

    def model(images: Any) -> Any:
        return jax.nn.gelu(images @ variables["hidden"] + variables["bias"]) @ variables["output"]

    def used(step: Any, replica: Any, numbers: Any) -> None:
        records.note_used(int(step), int(replica), numbers.tolist())
        strikes.in_step(int(step))

    def train_step(batch: Any) -> dict[str, Any]:
        images, labels, numbers = batch
        strikes.traced()
        count.assign_add(1)
        jax.debug.callback(used, count.value, replicax.get_replica_context().replica_id_in_sync_group, numbers)

        def loss_of() -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
            return replicax.compute_average_loss(losses)

        parameters = list(variables.values())
        loss, gradients = replicax.value_and_grad(loss_of, parameters)()
        optimizer.apply_gradients(zip(gradients, parameters, strict=True))
        return {"loss": loss}

    def evaluation_step(batch: Any) -> dict[str, Any]:
        images, labels = batch
        is_right = jnp.argmax(model(images), axis=-1) == labels
        jax.debug.callback(lambda: strikes.reach("evaluation", "in the program"))
        return {"accuracy": replicax.compute_average_loss(is_right.astype(jnp.float32))}

    class Notes(replicax.Callback):
        def on_start(self, run: replicax.TrainingRun) -> None:
            records.note("resumed", step=run.resumed_at)

        def on_save(self, run: replicax.TrainingRun, step: int) -> None:
            records.note("saved", step=step)

        def on_end(self, run: replicax.TrainingRun) -> None:
            records.note("ended", step=run.step)

    dataset = strategy.make_numpy_dataset(examples).seed(1).shuffle().batch(BATCH).repeat()
    manager = replicax.CheckpointManager(
        replicax.Checkpoint(variables=variables, optimizer=optimizer, count=count),
        checkpoints,
        max_to_keep=4,
        every_steps=PERIOD,
    )
    with manager:
        replicax.train(
            train_step,
            strategy.distribute_dataset(dataset),
            steps,
            checkpoints=manager,
            evaluate=(evaluation_step, [test]),
            evaluate_every=EVALUATION,
            log_every=PERIOD,
            logs=folder / "logs",
            callbacks=[Notes()],
            steps_per_call=JOINED,
            progress=False,
        )
    everything = [count, *variables.values(), *optimizer.variables]
    np.savez(folder / f"result-{records.worker}.npz", *(variable.numpy() for variable in everything))


if __name__ == "__main__":
    sys.exit(main())
