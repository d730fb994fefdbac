"""What is logged: which numbers, when, and where to; and that nobody waits for the devices because of it."""

from __future__ import annotations

import csv
import functools
import io
import os
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import replicax
from replicax.loop import training_loop
from replicax.loop.logs.progress_bar import Progress, described
from tests.conftest import strategy_of
from tests.loop.models import Line, Recorder

pytestmark = pytest.mark.usefixtures("promotion_of_dtypes")


def run_of(step: Any, steps: int = 6, replicas: int = 2, **kwargs: Any) -> Recorder:
    """What a run over 0, 1, 2, … logs."""
    strategy, recorder = strategy_of(replicas), Recorder()
    dataset = strategy.distribute_dataset([np.arange(4 * i, 4 * i + 4, dtype=np.float32) for i in range(3)])
    replicax.train(step, dataset, steps, callbacks=[recorder], progress=False, **kwargs)
    return recorder


# --- numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_shares_are_added_up_and_what_all_replicas_have_is_itself(replicas: int) -> None:
    def step(x: Any) -> Any:
        everywhere = replicax.get_replica_context().all_reduce("mean", x.mean())
        share = replicax.compute_average_loss(x)
        return {"loss": share, "nested": {"mean": everywhere, "rows": 7}, "rate": 0.5}

    [(_, values)] = run_of(step, 2, replicas).logged
    assert values == {"loss": 5.5, "nested/mean": 5.5, "nested/rows": 7.0, "rate": 0.5}


def test_a_plain_mean_that_is_added_up_is_told_once_by_its_name() -> None:
    def step(x: Any) -> Any:
        return {"loss": replicax.compute_average_loss(x), "accuracy": jnp.mean(x > 1.0)}

    for evaluate in (None, (step, [np.arange(4, dtype=np.float32)] * 2)):
        with pytest.warns(
            replicax.errors.ShareWarning,
            match=r"a mean over one replica's own examples as 'accuracy'.*2 times the mean",
        ) as found:
            run_of(step, log_every=1, evaluate=evaluate)
        [text] = [str(warning.message) for warning in found]
        assert "compute_average_loss(values)" in text
        assert "reduce={'accuracy': 'mean'}" in text
    run_of(step, log_every=1, reduce={"accuracy": "mean"})
    run_of(step, log_every=1, replicas=1)


def test_a_mean_of_an_evaluation_that_is_added_up_is_told() -> None:
    def evaluated(x: Any) -> Any:
        return {"accuracy": jnp.mean(x > 1.0)}

    evaluate = evaluated, [np.arange(4, dtype=np.float32)]
    with pytest.warns(replicax.errors.ShareWarning, match="'accuracy' is 2 times the mean"):
        run_of(replicax.compute_average_loss, 1, evaluate=evaluate)
    reduced = run_of(replicax.compute_average_loss, 1, evaluate=evaluate, reduce={"accuracy": "mean"})
    assert reduced.evaluated == [(1, {"accuracy": 0.5})]
    with pytest.raises(ValueError, match="'acc'; the step returns 'loss', the evaluation returns 'accuracy'"):
        run_of(replicax.compute_average_loss, 1, evaluate=evaluate, reduce={"acc": "mean"})


def test_a_share_that_is_averaged_is_told() -> None:
    with pytest.warns(replicax.errors.ShareWarning, match="1/2 of that mean"):
        run_of(replicax.compute_average_loss, 1, reduce="mean")


@pytest.mark.parametrize(
    ("step", "message"),
    [(replicax.compute_average_loss, "1/2 of that mean"), (jnp.mean, "it is NaN if a replica has none")],
)
def test_numbers_of_an_evaluation_that_must_not_be_averaged_are_told(step: Any, message: str) -> None:
    evaluate = step, [np.ones(rows, np.float32) for rows in (4, 4, 3)]
    with pytest.warns(replicax.errors.ShareWarning, match=message):
        run_of(lambda x: None, 1, evaluate=evaluate, reduce="mean")


def test_reduce_says_how_replicas_are_combined() -> None:
    def step(x: Any) -> Any:
        return {"mean": x.mean(), "sum": x.sum()}

    assert run_of(step, 1, reduce="mean").logged == [(1, {"mean": 1.5, "sum": 3.0})]
    assert run_of(step, 1, reduce={"mean": "mean"}).logged == [(1, {"mean": 1.5, "sum": 6.0})]
    with pytest.raises(ValueError, match=r"no number is called 'man'; the step returns 'mean', 'sum'$"):
        run_of(step, 1, reduce={"man": "mean"})
    with pytest.raises(ValueError, match="max"):
        run_of(step, 1, reduce="max")


def test_metrics_are_those_of_the_interval() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        mean = replicax.Mean("mean")
    dataset = strategy.distribute_dataset([np.full(4, float(i), np.float32) for i in range(6)])
    for metrics, name in (([mean], "mean"), ({"other": mean}, "other")):
        recorder = Recorder()
        replicax.train(mean.update, dataset, 6, log_every=2, metrics=metrics, callbacks=[recorder], progress=False)
        assert recorder.logged == [(2, {name: 0.5}), (4, {name: 2.5}), (6, {name: 4.5})]


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        (lambda x: x, ValueError, r"an array of shape \(2,\) as 'loss'.*replicax.as_variables\(state\)"),
        (lambda x: {"loss": x.sum(), "name": "adam"}, TypeError, "'adam' as 'name'"),
        (lambda x: {"a": {"b": x.sum()}, "a/b": 1.0}, ValueError, "called 'a/b': another one has that name"),
        (lambda x: {"phase": x.sum() * 1j}, TypeError, "returned a complex number as 'phase'"),
        (lambda x: {"key": jax.random.key(0)}, TypeError, "the random key 'key'"),
        (lambda x: {"loss": x.sum(), "step": x.sum()}, ValueError, "returned a number called 'step': .* another name"),
    ],
)
def test_a_step_returns_numbers(returned: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        run_of(returned)


@pytest.mark.parametrize(
    ("name", "kwargs"), [("examples_per_second", {}), ("tokens_per_second", {"tokens_per_example": 2})]
)
def test_a_number_that_the_loop_adds_has_its_name_to_itself(name: str, kwargs: Any) -> None:
    with pytest.raises(ValueError, match=f"returned a number called '{name}': replicax.train logs .* another name"):
        run_of(lambda x: {name: x.sum()}, **kwargs)
    with pytest.raises(ValueError, match=f"got a number called '{name}': replicax.train logs .* another name"):
        run_of(lambda x: None, metrics={name: replicax.Mean("mean")}, **kwargs)


def test_a_number_of_the_step_and_a_metric_have_names_of_their_own() -> None:
    strategy, recorder = strategy_of(2), Recorder()
    with strategy.scope():
        mean = replicax.Mean("loss")

    def step(x: Any) -> Any:
        mean.update(x)
        return replicax.compute_average_loss(x)

    dataset = strategy.distribute_dataset([np.arange(4, dtype=np.float32)])
    with pytest.raises(ValueError, match="step returned a number called 'loss': a metric of the run has that name"):
        replicax.train(step, dataset, 2, metrics=[mean], callbacks=[recorder], progress=False)
    assert recorder.calls == [("start", 0), ("end", 0)]


def test_a_metric_is_one_number() -> None:
    with strategy_of(2).scope():
        mean = replicax.Mean("mean")
    for result, error, match in (
        (np.zeros(3), ValueError, r"Mean.result\(\) returned an array of shape \(3,\) as 'mean'"),
        (1j, TypeError, r"Mean.result\(\) returned a complex number as 'mean'"),
        (None, TypeError, r"what Mean.result\(\) returned as 'mean' is None, and not"),
    ):
        mean.result = lambda result=result: result
        with pytest.raises(error, match=match):
            run_of(lambda x: None, metrics=[mean])
    mean.result = lambda: 0.5  # of Python
    assert run_of(lambda x: None, 2, metrics=[mean]).logged == [(2, {"mean": 0.5})]


# --- when -----------------------------------------------------------------------------------------------


def test_nothing_else_of_a_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    block = jax.block_until_ready

    def counting(x: Any) -> Any:
        waits.append(x)
        return block(x)

    monkeypatch.setattr(training_loop.jax, "block_until_ready", counting)
    run_of(lambda x: x.sum(), 50, log_every=5, steps_per_call=1)
    assert len(waits) == 1  # for the program of the first call


def test_the_order_of_what_happens() -> None:
    recorder = run_of(lambda x: x.sum(), 7, log_every=2, evaluate=lambda: {"a": 1.0}, evaluate_every=4)
    assert recorder.calls == [
        ("start", 0),
        ("log", 2, 4),
        ("log", 4, 4),  # before the evaluation, which waits anyhow
        ("evaluation", 4, 4),
        ("log", 6, 7),
        ("log", 7, 7),
        ("evaluation", 7, 7),
        ("end", 7),
    ]


# --- evaluation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", ["exact", "pad"])
def test_an_evaluation_counts_each_example_once(partial: str) -> None:
    line, recorder = Line(strategy_of(4)), Recorder()
    test = line.strategy.distribute_dataset(line.batches((8, 8, 3)), replicax.InputOptions(partial_batch=partial))
    run = replicax.train(
        line.step,
        line.dataset(),
        6,
        evaluate=(line.evaluate, test),
        evaluate_every=3,
        callbacks=[recorder],
        progress=False,
    )
    batches = line.batches((8, 8, 3))
    x, y = (np.concatenate([b[k] for b in batches]) for k in "xy")
    assert [step for step, _ in recorder.evaluated] == [3, 6]
    expected = np.mean(np.square(x @ line.w.numpy() - y))
    assert run.evaluation == {"loss": pytest.approx(float(expected), rel=1e-5)}


ENDLESS: dict[str, Any] = {
    "batches of examples": lambda examples: examples.shuffle(seed=0).repeat().batch(4),
    "batches one by one": lambda examples: examples.repeat().batch(4).to_iter_dataset().filter(lambda batch: True),
    "repeated batches": lambda examples: grain.experimental.RepeatIterDataset(examples.batch(4).to_iter_dataset()),
}


@pytest.mark.parametrize("make", ENDLESS.values(), ids=ENDLESS)
def test_an_evaluation_is_one_pass_that_ends(make: Any) -> None:
    examples, share = grain.MapDataset.source(np.arange(6, dtype=np.float32)), replicax.compute_average_loss
    with pytest.raises(ValueError, match="an evaluation is one pass over its dataset, and this one repeats without"):
        run_of(lambda x: None, 1, evaluate=(share, make(examples)))
    first = grain.experimental.LimitIterDataset(iterated(make(examples.slice(slice(4)))), 3)
    [(_, values)] = run_of(lambda x: None, 1, evaluate=(share, first)).evaluated
    assert values == {"loss": 1.5}


def test_an_evaluation_without_examples_is_told() -> None:
    with pytest.raises(ValueError, match="the dataset has no examples"):
        run_of(lambda x: None, 1, evaluate=(replicax.compute_average_loss, [np.zeros(0, np.float32)]))


def iterated(dataset: Any) -> Any:
    return dataset.to_iter_dataset() if isinstance(dataset, grain.MapDataset) else dataset


def test_an_evaluation_that_returns_a_value_of_each_replica_is_told_to_reduce_it() -> None:
    strategy = strategy_of(2)
    values = strategy.experimental_distribute_values_from_function(lambda ctx: np.float32(1))
    with pytest.raises(TypeError, match=r"as 'accuracy', a value of each replica.*strategy.reduce\('sum', …\)"):
        run_of(lambda x: None, 1, evaluate=lambda: {"accuracy": values})


def test_an_evaluation_that_takes_other_arguments_is_told_before_the_first_step() -> None:
    ran: list[str] = []

    def step(x: Any) -> None:
        ran.append("a step")

    def measured(batch: Any, scale: float) -> Any:
        return replicax.compute_average_loss(batch * scale)

    examples = [np.ones(4, np.float32)]
    with pytest.raises(TypeError, match=r"evaluate=measured calls measured\(\), but .* evaluate=\(step, dataset\)"):
        run_of(step, 1, evaluate=measured)
    with pytest.raises(TypeError, match=r"calls measured\(batch\), but .*'scale'; bind other .* functools.partial"):
        run_of(step, 1, evaluate=(measured, examples))
    assert not ran

    @functools.wraps(measured)
    def doubled(batch: Any) -> Any:
        return measured(batch, 2)

    for evaluation in (functools.partial(measured, scale=2), doubled):
        [(_, values)] = run_of(step, 1, evaluate=(evaluation, examples)).evaluated
        assert values == {"loss": 2}


def test_the_numbers_of_an_evaluation_by_a_function_are_not_rounded() -> None:
    numbers = {"share": 0.1, "scale": 1e300, "tokens": 3_000_000_000}
    [(_, values)] = run_of(lambda x: None, 1, evaluate=lambda: numbers).evaluated
    assert values == numbers


def test_an_evaluation_adds_up_in_double_precision_where_jax_has_it() -> None:
    def evaluated(x: Any) -> Any:
        return {"mean": replicax.compute_average_loss(x), "tokens": 16_777_217}

    with jax.enable_x64(True):
        [(_, values)] = run_of(lambda x: None, 1, evaluate=(evaluated, [np.full(4, 0.1)] * 3)).evaluated
    assert values == {"mean": pytest.approx(0.1, rel=1e-15), "tokens": 16_777_217.0}


def test_an_evaluation_has_no_implicit_transfer() -> None:
    with jax.transfer_guard("disallow"):
        recorder = run_of(lambda x: None, 1, evaluate=(lambda x: x.sum(), [np.ones(4, np.float32)] * 3))
    assert recorder.evaluated == [(1, {"loss": 4.0})]


# --- not finite -----------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_stop_at_nan_names_the_step(steps_per_call: int, replicas: int) -> None:
    strategy, recorder = strategy_of(replicas), Recorder()
    batches = [np.full(4, 1.0, np.float32) for _ in range(20)]
    batches[12][-1] = np.inf  # of the last replica alone
    batches[14][0] = np.nan  # before anybody looks; the first is named

    def step(x: Any) -> Any:
        return {"loss": replicax.compute_average_loss(x), "count": jnp.int32(1)}

    with pytest.raises(FloatingPointError, match="step 13 returned a number that is NaN or infinite"):
        replicax.train(
            step,
            strategy.distribute_dataset(batches),
            40,
            log_every=4,
            stop_at_nan=True,
            steps_per_call=steps_per_call,
            callbacks=[recorder],
            progress=False,
        )
    assert [step for step, _ in recorder.logged] == [4, 8, 12]
    assert replicax.train(step, strategy.distribute_dataset(batches), 40, progress=False).step == 40


def test_runs_of_one_step_with_and_without_a_watch_for_nan() -> None:
    """Each is told of its own steps; the step is traced once for those with a watch, and once for those without."""
    strategy = strategy_of(2)
    good = [np.ones(4, np.float32)] * 3
    bad = [*good, np.full(4, np.nan, np.float32)]

    def step(x: Any) -> Any:
        return replicax.compute_average_loss(x)

    def train(batches: Any, **options: Any) -> replicax.TrainingRun:
        dataset = strategy.distribute_dataset(batches)
        return replicax.train(step, dataset, len(batches), steps_per_call=1, progress=False, **options)

    runs = [train(good), train(good, stop_at_nan=True)]
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="step 4 returned"):
            train(bad, stop_at_nan=True)
    runs += [train(good, stop_at_nan=True), train(bad)]
    assert [run.step for run in runs] == [3, 3, 3, 4]
    assert strategy.extended.trace_count(step) == 2


# --- files ----------------------------------------------------------------------------------------------


def test_csv_files(tmp_path: pathlib.Path) -> None:
    recorder = run_of(
        lambda x: x.sum(), 6, log_every=2, logs=tmp_path / "new" / "logs", evaluate=lambda: {"accuracy": 0.25}
    )
    text = (tmp_path / "new" / "logs" / "train.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert [(int(r["step"]), float(r["loss"])) for r in rows] == [(s, v["loss"]) for s, v in recorder.logged]
    assert (tmp_path / "new" / "logs" / "evaluation.csv").read_bytes() == b"step,accuracy\n6,0.25\n"


def test_logs_that_are_in_a_file_are_told_before_anything_runs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "log").touch()
    ran: list[Any] = []
    for kwargs in ({"logs": tmp_path / "log"}, {"logs": tmp_path / "log" / "run"}):
        with pytest.raises(
            NotADirectoryError, match=f"there can be no folder {tmp_path}/log.*{tmp_path}/log is a file"
        ):
            run_of(ran.append, **kwargs)
    assert ran == []
    for kind in (replicax.CSVLog, replicax.TensorBoardLog):
        with pytest.raises(NotADirectoryError, match="log is a file"):
            replicax.train(ran.append, [np.ones(2)], 1, callbacks=kind(tmp_path / "log"), progress=False)


@pytest.mark.parametrize("name", ["train.part", "train.csv", "attempts.jsonl"])
def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: pathlib.Path, name: str) -> None:
    class Fills(replicax.Callback):
        def on_start(self, run: replicax.TrainingRun) -> None:
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).symlink_to("/dev/full")

        def on_log(self, run: replicax.TrainingRun, step: int, values: Any) -> None:
            self.on_start(run)  # the first row has replaced train.csv

    dataset = strategy_of(1).distribute_dataset([np.ones(2)])
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/{name}'"):
        replicax.train(sum, dataset, 3, log_every=1, logs=tmp_path, callbacks=Fills(), progress=False)


def test_csv_columns_may_come_later_and_rows_of_steps_that_come_again_go(tmp_path: pathlib.Path) -> None:
    strategy = strategy_of(1)
    run = replicax.train(lambda x: None, strategy.distribute_dataset([np.zeros(1)]), 1, progress=False)
    log = replicax.CSVLog(tmp_path)
    run.resumed_at = None
    log.on_start(run)
    log.on_log(run, 1, {"a": 1.0})
    log.on_log(run, 2, {"a": 2.0, "b": 3.0})
    log.on_log(run, 3, {"b": 4.0})
    assert (tmp_path / "train.csv").read_text() == "step,a,b\n1,1.0,\n2,2.0,3.0\n3,,4.0\n"
    with (tmp_path / "train.csv").open("a") as file:
        file.write("4,5")  # the process was killed
    run.resumed_at = 2
    log.on_start(run)
    log.on_log(run, 3, {"a": 7.0, "b": 8.0})
    assert (tmp_path / "train.csv").read_text() == "step,a,b\n1,1.0,\n2,2.0,3.0\n3,7.0,8.0\n"
    with (tmp_path / "train.csv").open("ab") as file:
        file.write(b'\xff\n4,"' + b"x" * 200_000)  # no text; and more than a field may have
    run.resumed_at = 3
    log.on_start(run)
    assert (tmp_path / "train.csv").read_text() == "step,a,b\n1,1.0,\n2,2.0,3.0\n3,7.0,8.0\n"
    run.resumed_at = None
    log.on_start(run)
    assert not (tmp_path / "train.csv").exists()


def events_in(folder: pathlib.Path) -> Iterator[Any]:
    from tensorboardX import record_writer
    from tensorboardX.proto.event_pb2 import Event

    [path] = folder.glob("events.out.tfevents.*")
    data = path.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        assert data[8:12] == record_writer.masked_crc32c(data[:8]).to_bytes(4, "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


@pytest.mark.parametrize(("resumed_at", "later"), [(None, []), (3, [4])])
def test_events_of_steps_that_come_again_are_left_out(tmp_path: pathlib.Path, resumed_at: Any, later: Any) -> None:
    log, run = replicax.TensorBoardLog(tmp_path), types.SimpleNamespace(is_chief=True, resumed_at=resumed_at)
    log.on_start(run)  # type: ignore[arg-type]
    log.on_end(run)  # type: ignore[arg-type]
    # TensorBoard forgets what an earlier file has of the step of a start, and of later ones.
    assert [e.step for e in events_in(tmp_path) if e.session_log.status == e.session_log.START] == later


def test_event_files(tmp_path: pathlib.Path) -> None:
    recorder = run_of(lambda x: x.sum(), 4, log_every=2, logs=tmp_path, evaluate=lambda: {"accuracy": 0.25})
    found = [(event.step, v.tag, v.simple_value) for event in events_in(tmp_path) for v in event.summary.value]
    losses = [(step, "train/loss", values["loss"]) for step, values in recorder.logged]
    assert [f for f in found if f[1] == "train/loss"] == losses
    assert (4, "evaluation/accuracy", 0.25) in found


def test_a_run_that_goes_on_within_a_second_leaves_earlier_event_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 1e9)
    run_of(lambda x: x.sum(), 1, logs=tmp_path)
    [first] = tmp_path.glob("events.*")
    data = first.read_bytes()
    run_of(lambda x: x.sum(), 2, logs=tmp_path)
    before, _ = sorted(tmp_path.glob("events.*"))  # TensorBoard reads them in this order
    assert (before, before.read_bytes()) == (first, data)


def test_without_the_package_there_are_no_event_files_and_a_log_of_ones_own_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("replicax.system.packages", "replicax.loop.training_loop"):
        monkeypatch.setattr(f"{module}.is_installed", lambda package: False)
    run_of(lambda x: x.sum(), 1, logs=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"train.csv", "attempts.jsonl"}
    with pytest.raises(ImportError, match=r"pip install 'replicax\[tensorboard\]'"):
        replicax.TensorBoardLog("logs")


def test_a_profile_of_some_steps(tmp_path: pathlib.Path) -> None:
    run_of(lambda x: x.sum(), 12, profile=(3, 5), logs=tmp_path, steps_per_call=4)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize(("profile", "steps"), [((3, 5), 12), ((2, 9), 6)])
def test_a_profile_has_its_steps_and_ends_with_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, profile: tuple[int, int], steps: int
) -> None:
    class Profiler(replicax.Callback):
        def on_start(self, run: replicax.TrainingRun) -> None:
            monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", run.step)))
            monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", run.step)))

    calls: list[tuple[str, int]] = []
    dataset = strategy_of(2).distribute_dataset([np.ones(4, np.float32)] * 4)
    replicax.train(
        lambda x: x.sum(), dataset, steps, profile=profile, logs=tmp_path, steps_per_call=4, callbacks=Profiler()
    )
    assert calls == [("start", profile[0]), ("stop", min(profile[1], steps))]


# --- the terminal ---------------------------------------------------------------------------------------


def ticking(step: float = 1.0) -> Any:
    times: Iterator[float] = iter(np.arange(0.0, 1e6, step))
    return lambda: float(next(times))


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    show = Progress(Console(file=out, soft_wrap=True), clock=ticking())
    run = replicax.train(
        lambda x: x.sum(),
        strategy_of(1).distribute_dataset([np.ones(2)]),
        100,
        log_every=2,
        callbacks=[show],
        progress=False,
    )
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 2 of 100   loss 2 ")
    assert lines[0].endswith(" left")
    assert [int(line.split()[1]) for line in lines] == [2, 22, 42, 62, 82, 100]
    assert run.step == 100


def test_without_a_terminal_there_is_a_line_although_nothing_is_logged() -> None:
    out, now = io.StringIO(), [0.0]
    show = Progress(Console(file=out, soft_wrap=True), clock=lambda: now[0], lines=10.0)
    run = types.SimpleNamespace(step=0, steps=100)
    show.on_start(run)
    show.on_evaluation(run, 0, {"loss": 3.0})
    for run.step in range(1, 101):
        now[0] += 4.0
        if run.step == 51:
            show.on_log(run, 25, {"loss": 2.0})
        show.advanced(run.step)
    show.on_log(run, 100, {"loss": 1.0})
    show.on_end(run)
    first, *lines = out.getvalue().splitlines()
    assert first == "step 0 of 100   evaluation: loss 3"
    assert lines[0] == "step 3 of 100   0:06:28 left"
    assert [int(line.split()[1]) for line in lines] == [*range(3, 100, 3), 100]
    assert [" loss 2 " in line for line in lines] == [50 < step < 100 for step in [*range(3, 100, 3), 100]]
    assert lines[-1] == "step 100 of 100   loss 1"


def test_what_was_logged_last_comes_before_an_evaluation() -> None:
    out = io.StringIO()
    show = Progress(Console(file=out, soft_wrap=True), clock=lambda: 0.0, lines=10.0)
    run = types.SimpleNamespace(step=0, steps=10)
    show.on_start(run)
    for step in (5, 7):
        show.on_log(run, step, {"loss": 10.0 - step})
    show.on_evaluation(run, 7, {"loss": 4.0})
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["5", "7", "7"]


def test_on_a_terminal_there_is_a_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    replicax.train(
        lambda x: x.sum(),
        strategy_of(1).distribute_dataset([np.ones(2)]),
        100,
        log_every=2,
        callbacks=[Progress(console)],
        evaluate=lambda: {"accuracy": 0.5},
        progress=False,
    )
    assert re.search("step 100 of 100 *━", out.getvalue())
    assert "loss 2" in out.getvalue()
    assert "evaluation: accuracy 0.5" in out.getvalue()


@pytest.mark.parametrize("width", [40, 80])
def test_a_bar_with_many_numbers_is_whole_on_a_narrow_terminal(width: int) -> None:
    out = io.StringIO()
    bar = Progress(Console(file=out, force_terminal=True, width=width, color_system=None))
    run = types.SimpleNamespace(step=12_345, steps=50_000)
    numbers = {"loss": 0.5, "accuracy": 0.25, "learning_rate": 1e-4, "grad_norm": 1.5, "examples_per_second": 12345.6}
    bar.on_start(run)
    bar.on_log(run, run.step, numbers)
    bar.on_end(run)
    shown = out.getvalue()
    assert "step 12,345 of 50,000 ━━" in shown
    assert all(part in shown for part in described(numbers).split("   "))


def test_a_bar_is_not_drawn_for_each_of_many_logs() -> None:
    out, now = io.StringIO(), [0.0]
    show = Progress(Console(file=out, force_terminal=True, width=80, color_system=None), clock=lambda: now[0])
    run = types.SimpleNamespace(step=0, steps=100)
    show.on_start(run)
    for loss in (7.0, 8.0, 9.0):
        show.on_log(run, 0, {"loss": loss})
        now[0] += 0.06
    assert [f"loss {loss}" in out.getvalue() for loss in (7, 8, 9)] == [True, False, True]
    show.on_end(run)


def test_a_bar_moves_between_two_logs_but_not_at_every_step() -> None:
    out, now = io.StringIO(), [0.0]
    show = Progress(Console(file=out, force_terminal=True, width=80, color_system=None), clock=lambda: now[0])
    run = types.SimpleNamespace(step=0, steps=100)
    show.on_start(run)
    for run.step in (40, 41):
        now[0] += 0.2 if run.step == 40 else 0.05
        show.advanced(run.step)
    assert ("step 40 of 100" in out.getvalue(), "step 41 of 100" in out.getvalue()) == (True, False)
    show.on_end(run)
    assert "step 41 of 100" in out.getvalue()


@pytest.mark.parametrize("name", ["loss[val]", "recall[/INST]", "top:100:"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_are_shown_as_they_are(name: str, is_terminal: bool) -> None:
    out = io.StringIO()
    show = Progress(Console(file=out, force_terminal=is_terminal, width=80, color_system=None))
    run = types.SimpleNamespace(step=1, steps=5)
    show.on_start(run)
    show.on_log(run, run.step, {name: 0.5})
    show.on_end(run)
    assert f"{name} 0.5" in out.getvalue()


@pytest.mark.parametrize("kind", ["line", "terminal", "notebook"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe"), ValueError("closed file")]
)
def test_a_run_goes_on_whose_progress_cant_be_written(
    kind: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writes = []

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            if len(writes) < 3:
                return len(text)
            raise error

    monkeypatch.setattr(os, "dup2", lambda *args: None)  # by which Rich would close this process' output
    console = Console(file=Broken(), force_terminal=kind == "terminal", force_jupyter=kind == "notebook", width=80)
    console.is_jupyter = kind == "notebook"
    run = replicax.train(
        lambda x: x.sum(),
        strategy_of(1).distribute_dataset([np.ones(2)]),
        40,
        log_every=2,
        callbacks=[Progress(console, clock=ticking())],
        evaluate=lambda: {"accuracy": 0.5},
        evaluate_every=10,
        progress=False,
    )
    assert run.step == 40
    [told] = [record.getMessage() for record in caplog.records if "progress" in record.getMessage()]
    assert told == f"the progress of the run can't be shown any more, and the run goes on: {error}"
    assert len(writes) < 20


def test_what_ends_the_program_while_progress_is_written_ends_it() -> None:
    class Ended(io.StringIO):
        def write(self, text: str) -> int:
            raise SystemExit(3)  # as a handler of SIGTERM may do

    dataset = strategy_of(1).distribute_dataset([np.ones(2)])
    progress = Progress(Console(file=Ended(), width=80), clock=ticking())
    try:
        raise FileNotFoundError("no checkpoint yet")
    except FileNotFoundError:  # which is the context of all that is raised here
        with pytest.raises(SystemExit, match="3"):
            replicax.train(lambda x: x.sum(), dataset, 4, log_every=2, callbacks=[progress], progress=False)


def test_the_chief_says_where_the_time_went(capsys: Any) -> None:
    run = replicax.train(lambda x: x.sum(), strategy_of(1).distribute_dataset([np.ones(2)]), 10)
    out = capsys.readouterr().out
    assert "step 10 of 10" in out
    assert "wall time" in out
    assert run.time_table() in out
