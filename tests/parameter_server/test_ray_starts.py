"""Starting Ray: what a start in vain has begun is ended, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from replicax.parameter_server import actors

exceptions = pytest.importorskip("ray.exceptions")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (exceptions.ObjectStoreFullError("it is full\nso"), actors.NoRoomError, "result: it is full. Keep"),
        (exceptions.RayTaskError("put", "traceback", exceptions.OutOfDiskError("")), actors.NoRoomError, "ray.init"),
        (exceptions.ObjectLostError("ab", None, ""), actors.ReplyLostError, "ab"),
        (exceptions.RayActorError(), actors.ActorDiedError, "before finishing"),
        (exceptions.RayTaskError("put", "", exceptions.RayActorError()), actors.ActorDiedError, "before finishing"),
        (exceptions.RaySystemError("gone"), actors.ActorDiedError, "gone"),
        (exceptions.RayTaskError("put", "traceback", KeyError("wrong")), KeyError, "wrong"),
    ],
)
def test_errors_of_ray_are_those_of_calls(error: Any, kind: type[Exception], message: str) -> None:
    found = actors._as_ours(error)
    assert type(found) is kind
    assert message in str(found)
    assert kind is not KeyError or "traceback" in found.__notes__[0]


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'replicax\[ray\]'"):
        actors.Actors()


def test_a_start_in_vain_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", name]))

    def init(**_: Any) -> None:
        begin("ray::Agent")
        begin("another")
        raise ValueError("it took too long")

    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", None)  # restored afterwards
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        with pytest.raises(RuntimeError, match="in 3 attempts: it took too long"):
            actors._start(types.SimpleNamespace(init=init, shutdown=lambda: None))
        assert [process.wait(100) for process in started[::2]] == [-9] * 3
        assert [process.poll() for process in started[1::2]] == [None] * 3
    finally:
        for process in started:
            process.kill()
            process.wait()
