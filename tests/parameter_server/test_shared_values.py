"""Large values are read where a server has them, by several at once; whoever reads one sees one version of it."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicax.parameter_server.serving import shared_memory
from replicax.parameter_server.serving.pushes import Ended, OptimizerPart, Pulled, Push
from replicax.parameter_server.serving.servers import Servers
from replicax.parameter_server.serving.shard_server import ShardServer
from replicax.parameter_server.serving.shards import Shards
from replicax.parameter_server.serving.shared_memory import LentBlocks, SharedBlocks
from replicax.parameter_server.serving.ways import Way

WAIT = 30.0
LARGE = 1 << 16  # of float32: 256 KB
V, W = 7, 8
ONES = np.ones(LARGE, np.float32)

pytestmark = pytest.mark.skipif(shared_memory.this_machine() is None, reason="this system has no memory to be shared")


class DirectActor:
    """A server in this process, which it takes for another."""

    def __init__(self, server: ShardServer) -> None:
        self.server = server

    def call(self, method: str, *args: Any) -> Any:
        if method == "meet":
            args = (args[0], os.getpid() + 1, args[2])
        return DirectReply(pickle.loads(pickle.dumps(getattr(self.server, method)(*args))))

    def kill(self) -> None:
        pytest.fail("nobody has a reason to end it")


class DirectReply:
    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self, timeout: float) -> Any:
        return self.value


class Worker:
    """What a worker's process has of its server."""

    numbers = iter(range(10**9))

    def __init__(self, server: ShardServer) -> None:
        self.way = Way(DirectActor(server), shares=True)  # type: ignore[arg-type]

    def pull(self, number: int = V) -> np.ndarray:
        pulled = self.way.read(self.way.call("pull", {number: -1}, Ended(), True).result(WAIT))
        value: np.ndarray = pulled.values[number][1]
        return value

    def push(self, change: Push) -> None:
        self.way.call("push", change).result(WAIT)

    def add(self, value: np.ndarray | tuple[np.ndarray, np.ndarray] = ONES, number: int = V) -> None:
        self.push(Push(next(self.numbers), 0, None, {}, {number: value}, {}))

    def assign(self, value: np.ndarray, number: int = V) -> None:
        from replicax.parameter_server.serving.packed import packed

        self.push(packed(Push(next(self.numbers), 0, None, {}, {}, {number: value}), self.way.lend))

    def leave(self) -> None:
        """As a process that ends: but what it has read is still looked at here."""
        assert self.way._line is not None
        self.way._line._connection.close()


def server_of(value: Any = ONES) -> ShardServer:
    server = ShardServer(0, 1, {})
    server.put(dict.fromkeys((V, W), (value, "none")), Ended())
    return server


def own_blocks(server: ShardServer) -> int:
    return len([*server._shared._own])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_all_workers_read_one_copy_and_none_can_write_to_it(dtype: Any) -> None:
    server = server_of(np.arange(2 * LARGE).astype(dtype).reshape(2, LARGE))
    values = [Worker(server).pull() for _ in range(3)]
    for value in values:
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, np.arange(2 * LARGE).astype(dtype).reshape(2, LARGE))
        assert not value.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            value.flags.writeable = True
    assert own_blocks(server) == 1


def test_what_is_read_stays_as_it_is_while_the_value_changes() -> None:
    server = server_of()
    one, other = Worker(server), Worker(server)
    seen = []
    for number in range(5):
        seen += [(one.pull(), number + 1), (other.pull(), number + 1)]
        one.add()
        other.add((np.array([0]), np.array([0.0], np.float32)))  # and rows
    for value, expected in seen:
        assert (value == expected).all()
    assert own_blocks(server) == 6


def test_memory_is_used_again_when_nobody_reads_it() -> None:
    server = server_of()
    workers = [Worker(server) for _ in range(2)]
    for number in range(20):
        for worker in workers:
            value = worker.pull()
            assert (value == number + 1).all()
            del value
        workers[0].add()
    assert own_blocks(server) == 1  # it has been added to in its place
    held = [worker.pull() for worker in workers]
    workers[0].add()
    del held
    for _ in range(20):
        held = [worker.pull() for worker in workers]
        workers[1].add()
    assert own_blocks(server) == 2
    assert (held[0] == 41).all()


def test_the_result_of_an_optimizer_is_copied_once_and_then_it_is_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = SharedBlocks.take
    monkeypatch.setattr(SharedBlocks, "take", lambda blocks, room: taken.append(room) or take(blocks, room))
    server = server_of()
    tree = jax.tree_util.tree_map(lambda v: v, [V, W])
    server.define(OptimizerPart(0, optax.sgd(1.0), (V, W), tree, (), {}))
    workers = [Worker(server) for _ in range(3)]
    for number in range(4):
        workers[0].push(Push(next(Worker.numbers), 0, None, {0: {V: ONES, W: 2 * ONES}}, {}, {}))
        assert isinstance(server._values[V], jax.Array)
        both = workers[0].way.call("pull", {V: -1, W: -1}, Ended(), True).result(WAIT)
        found = workers[0].way.read(both)
        assert (found.values[V][1] == -number).all()
        assert (found.values[W][1] == -1 - 2 * number).all()
        for worker in workers[1:]:
            assert (worker.pull(W) == -1 - 2 * number).all()
            assert (worker.pull(V) == -number).all()
        assert isinstance(server._values[V], np.ndarray)
    assert len(taken) == 4


def test_a_worker_whose_line_has_ended_keeps_what_it_reads() -> None:
    """It may live: so its memory is not used again, but given back when it ends."""
    server = server_of()
    stays, leaves = Worker(server), Worker(server)
    value = leaves.pull()
    leaves.leave()
    until(lambda: any(block.is_given_up for block in server._shared._own))
    for _ in range(10):
        stays.add()
    assert (value == 1).all()
    assert (stays.pull() == 11).all()
    assert own_blocks(server) == 1
    new = Worker(server)
    assert (new.pull() == 11).all()


def test_a_value_that_was_assigned_is_read_in_the_memory_of_the_worker_that_has_assigned_it() -> None:
    server = server_of()
    one, other = Worker(server), Worker(server)
    one.assign(3 * ONES)
    assert (other.pull() == 3).all()
    assert own_blocks(server) == 0
    held = []
    for number in range(5):
        one.assign(number * ONES)
        held.append((other.pull(), one.pull()))
    for number, values in enumerate(held):
        assert all((value == number).all() for value in values)
    one.add()
    assert (other.pull() == 5).all()
    held.clear()
    for number in range(20):
        one.assign(number * ONES)
        assert (other.pull() == number).all()
    assert one.way._blocks is not None
    assert one.way._blocks.nbytes <= 8 << 20


def test_a_value_of_a_worker_that_is_gone_is_there_for_others() -> None:
    server = server_of()
    gone, reads, late = Worker(server), Worker(server), Worker(server)
    gone.assign(3 * ONES)
    value, _ = reads.pull(), late.pull(W)
    gone.way._blocks = None  # as when its process has ended
    gone.leave()
    gc.collect()
    assert (late.pull() == 3).all()
    assert own_blocks(server) == 2
    late.add()
    assert (value == 3).all()
    assert (late.pull() == 4).all()


def test_who_can_not_have_the_memory_gets_values_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of()
    servers = Servers([DirectActor(server)], shares=True)  # type: ignore[list-item]
    opened = shared_memory._opened
    refused: list[Any] = []

    def refuse(use: Any) -> Any:
        if use.place:
            refused.append(use)
            raise OSError("no more files")
        return opened(use)

    monkeypatch.setattr(shared_memory, "_opened", refuse)
    for number in range(3):
        Worker(server).add()
        values, updates = servers.pull({V: Shards(0, {0: (0, LARGE)})}, lambda number: pytest.fail("it is whole"))
        assert (values[V] == number + 2).all()
        assert updates == {0: number + 1}
    assert len(refused) == 1


def test_values_that_are_being_sent_are_not_written_to() -> None:
    """What the engine sends it pickles when the call has ended."""
    server = server_of()
    worker = Worker(server)
    worker.add()
    pulled = server.pull({V: -1}, Ended())
    assert isinstance(pulled, Pulled)
    state = server.snapshot(Ended())
    worker.add()
    assert (pulled.values[V][1] == 2).all()
    assert (state.values[V] == 2).all()
    server.restore(state, 1)
    worker.pull()
    worker.push(Push(next(Worker.numbers), 0, None, {}, {V: ONES}, {}, Ended(1, 0)))
    assert (state.values[V] == 2).all()
    assert (worker.pull() == 3).all()


def test_uses_are_counted_whichever_thread_ends_them() -> None:
    blocks, there = SharedBlocks(), LentBlocks()
    memory = blocks.take(1000)
    assert memory is not None
    [block] = blocks

    def read() -> None:
        for _ in range(500):
            with giving:
                use = block.lend(3)
            array = there.memory(use)[10:20]
            del array

    giving = threading.Lock()
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not block.is_lent
    assert not block.is_free
    del memory
    assert block.is_free


def test_values_beyond_the_blocks_that_there_can_be_go_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of()
    monkeypatch.setattr(SharedBlocks, "take", lambda blocks, room: None)
    worker = Worker(server)
    value = worker.pull()
    worker.add()
    assert (value == 1).all()
    assert (worker.pull() == 2).all()
