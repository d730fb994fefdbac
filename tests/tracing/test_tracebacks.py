"""What a user sees of an error: the lines of their own program, the last of which is where it happened."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax

BATCH = np.ones((4, 3), np.float32)


def loss_of(w: Any, x: Any) -> Any:
    return jnp.square(x @ w - jnp.zeros((1, 5))).mean()  # shapes differ


def wrong_shapes(w: Any) -> Any:
    return lambda x: replicax.value_and_grad(lambda: loss_of(w, x), [w])()


@pytest.fixture(autouse=True)
def _jax_hides_its_frames() -> Iterator[None]:
    """As it does for users; the checks have JAX show them."""
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.fixture
def w(pair: replicax.Strategy) -> replicax.Variable:
    with pair.scope():
        return replicax.Variable(np.zeros((3, 2), np.float32), name="w")


def error_of(call: Any) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def lines(error: BaseException) -> list[tuple[str, str]]:
    """File and function of each frame, of the causes first."""
    frames = traceback.TracebackException.from_exception(error)
    found: list[tuple[str, str]] = []
    current: Any = frames
    while current is not None:
        found = [(frame.filename, frame.name) for frame in current.stack] + found
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found


def is_own(error: BaseException) -> bool:
    return {file for file, _ in lines(error)} == {__file__}


CALLS = {
    "run": lambda s, w: s.run(wrong_shapes(w), args=(BATCH,)),
    "run_steps": lambda s, w: s.run_steps(lambda ctx, x: wrong_shapes(w)(x), iter(s.distribute_dataset([BATCH])), 1),
    "train": lambda s, w: replicax.train(wrong_shapes(w), s.distribute_dataset([BATCH]), 1, progress=False),
    "plan": lambda s, w: replicax.plan(s, wrong_shapes(w), BATCH),
    "trace": lambda s, w: s.extended.trace(wrong_shapes(w), args=(BATCH,)),
    "a variable": lambda s, w: replicax.Variable(lambda: loss_of(w.value, BATCH)),
    "the per-replica executor": lambda s, w: s.run(
        wrong_shapes(w), args=(BATCH,), options=replicax.RunOptions("per_replica")
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_last_line_is_the_users(pair, w, call) -> None:
    error = error_of(lambda: call(pair, w))
    assert "incompatible shapes for broadcasting" in str(error)
    assert is_own(error)
    assert lines(error)[-1] == (__file__, "loss_of")


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.run(lambda x: x, BATCH),
        lambda s: s.reduce("max", 1.0),
        lambda s: s.gather(1.0, axis="rows"),
        lambda s: next(iter(s.distribute_dataset([1.0]))),
        lambda s: s.distribute_dataset(3),
        lambda s: replicax.train(lambda x: None, [BATCH], -1),
        lambda s: s.run_steps(lambda ctx, x: None, [BATCH], 1),
        lambda s: replicax.MirroredStrategy(["gpu:0"]),
        lambda s: replicax.MirroredStrategy(8),
        lambda s: replicax.GPUClusterResolver(topology="h100"),
        lambda s: replicax.use_cpu_devices(0),
        lambda s: replicax.CheckpointManager(replicax.Checkpoint(x=1), "nowhere").save(),
        lambda s: replicax.Checkpoint(x=1).restore("nowhere"),
        lambda s: replicax.Checkpoint(x=print).save("nowhere"),
        lambda s: s.make_numpy_dataset((np.ones(3), np.ones(4))),
        lambda s: replicax.data.text_lines("nowhere/*.txt"),
        lambda s: replicax.Optimizer("adam"),
        lambda s: f"{next(iter(s.distribute_dataset([BATCH]))):.2f}",
        lambda s: next(iter(s.distribute_dataset([BATCH]))) + 1,
    ],
)
def test_of_an_error_of_replicax_the_last_line_is_the_call(pair, call, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # some calls fail after they have made a folder
    error = error_of(lambda: call(pair))
    assert is_own(error)
    assert lines(error)[-1][1] == "<lambda>"


def test_of_an_interrupt_the_last_line_is_the_users(pair) -> None:
    """Also of one that comes while Replicax waits in a module of Python, as for the next batch."""

    def interrupted(x: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return x

    def late() -> Iterator[Any]:  # in a thread of its own
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        is_over.wait(10.0)
        yield BATCH

    is_over = threading.Event()
    with pytest.raises(KeyboardInterrupt) as caught:
        pair.run(interrupted, args=(BATCH,))
    assert lines(caught.value)[-1] == (__file__, "interrupted")
    with pytest.raises(KeyboardInterrupt) as caught:
        next(iter(pair.distribute_dataset(late)))
    is_over.set()
    assert is_own(caught.value)


def test_a_simple_error_is_short(pair) -> None:
    error = error_of(lambda: pair.run(lambda x: 1 if x.sum() > 0 else 2, args=(BATCH,)))
    assert len("".join(traceback.format_exception(error)).splitlines()) <= 18  # three lines for each of four frames
    assert [name for _, name in lines(error)] == ["error_of", "<lambda>", "<lambda>"]


def test_causes_that_replicax_or_the_user_name_stay(pair) -> None:
    def step(x: Any) -> Any:
        try:
            return loss_of(jnp.ones((3, 2)), x)
        except Exception as error:
            raise RuntimeError("mine") from error

    error = error_of(lambda: pair.run(step, args=(BATCH,)))
    assert (str(error), is_own(error)) == ("mine", True)
    assert "shapes" in str(error.__cause__)
    assert [name for _, name in lines(error)].count("loss_of") == 1


def test_all_frames_are_there_if_they_are_asked_for(pair, w, monkeypatch) -> None:
    with replicax.debug():
        assert not is_own(error_of(lambda: CALLS["run"](pair, w)))
    monkeypatch.setenv("REPLICAX_TRACEBACK", "full")
    files = {file.rpartition("replicax/")[2] for file, _ in lines(error_of(lambda: CALLS["run"](pair, w)))}
    assert {"strategy.py", "execution/run.py"} <= files
    monkeypatch.delenv("REPLICAX_TRACEBACK")
    assert is_own(error_of(lambda: CALLS["run"](pair, w)))


def test_frames_of_jax_follow_its_own_setting(pair, w) -> None:
    jax.config.update("jax_traceback_filtering", "off")
    files = [file for file, _ in lines(error_of(lambda: CALLS["run"](pair, w)))]
    assert any("/jax/_src/" in file for file in files)
    assert not any("/replicax/" in file for file in files if file != __file__ and "site-packages" not in file)
