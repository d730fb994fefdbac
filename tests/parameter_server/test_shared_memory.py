"""Large arrays go to servers and back through memory that both share; whoever has them sees nobody else's."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax
from replicax.parameter_server.serving import shared_memory
from replicax.parameter_server.serving.packed import Packed, packed
from replicax.parameter_server.serving.pushes import Ended, Pulled, Push
from replicax.parameter_server.serving.shard_server import ShardServer
from replicax.parameter_server.serving.shared_memory import LentBlocks, SharedBlocks
from tests.parameter_server.thread_actors import coordinator_of

WAIT = 100.0
LARGE = 1 << 16  # of float32: 256 KB

can_share = shared_memory.this_machine() is not None
needs_sharing = pytest.mark.skipif(not can_share, reason="this system has no memory that processes can share")


@pytest.fixture(params=[pytest.param(True, marks=needs_sharing), False], ids=["shared", "sent"])
def lendings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes each time that memory is lent; without sharing it never is."""
    found: list[int] = []
    lend = SharedBlocks.lend

    def noted(blocks: SharedBlocks, room: int) -> Any:
        lent = lend(blocks, room)
        found.extend([room] * (lent is not None))
        return lent

    monkeypatch.setattr(SharedBlocks, "lend", noted)
    if not request.param:
        monkeypatch.setattr(shared_memory, "this_machine", lambda: None)
    yield found  # type: ignore[misc]
    assert bool(found) is request.param


# --- blocks ---------------------------------------------------------------------------------------------


@needs_sharing
def test_what_one_process_writes_the_other_reads() -> None:
    use, memory = SharedBlocks().lend(1000) or pytest.fail("no memory")
    there = LentBlocks().memory(use)
    memory[:1000] = np.arange(1000) % 256
    assert (there[:1000] == np.arange(1000) % 256).all()


@needs_sharing
def test_memory_that_is_lent_on_while_its_owner_looks_is_in_use() -> None:
    """Also if who has it ends its own use at once."""
    blocks = SharedBlocks()
    blocks.lend(1000)
    [block] = blocks
    words = block._words

    class Moving:
        """Words that change after the first look at several of them."""

        looks = 0

        def __getitem__(self, which: Any) -> Any:
            found = words[which].copy()
            if isinstance(which, slice) and not self.looks:
                self.looks += 1
                block._words = words
                block.lend(1)
                block.end(0)
            return found

    assert block.is_lent
    block._words = Moving()  # type: ignore[assignment]
    assert block.is_lent
    block.end(1)
    assert not block.is_lent


@needs_sharing
def test_memory_is_lent_again_when_nobody_has_it_any_more() -> None:
    mine, theirs = SharedBlocks(), LentBlocks()

    def lend() -> tuple[Any, Any]:
        return mine.lend(1000) or pytest.fail("no memory")

    use, memory = lend()
    assert lend()[0].token != use.token  # it may be about to be opened
    part = theirs.memory(use)[10:20].view(np.int16)
    del memory
    assert lend()[0].token != use.token  # a part of it is in use there
    del part
    again, memory = lend()
    assert again.token == use.token
    theirs.memory(again)
    assert lend()[0].token != use.token  # it has been looked at there, and is still looked at here
    assert memory.nbytes >= 1000


@needs_sharing
def test_there_are_no_more_blocks_than_a_few() -> None:
    mine = SharedBlocks()
    held = [mine.lend(1000) for _ in range(40)]
    assert None in held
    files = len(os.listdir("/proc/self/fd"))
    del held, mine
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < files


@needs_sharing
def test_only_the_block_that_is_meant_can_be_opened() -> None:
    mine, theirs = SharedBlocks(), LentBlocks()
    use, memory = mine.lend(1000) or pytest.fail("no memory")
    assert theirs.can_open(use)
    other = LentBlocks()
    assert not other.can_open(dataclasses.replace(use, machine="another"))
    assert not other.can_open(dataclasses.replace(use, token=b"another"))
    assert not other.can_open(dataclasses.replace(use, process=2**22 + 1))
    assert not other.can_open(dataclasses.replace(use, size=use.size * 4))
    with open("/proc/self/status") as text:
        assert not other.can_open(dataclasses.replace(use, file=text.fileno()))
    assert memory.nbytes


@needs_sharing
def test_blocks_that_their_owner_has_no_more_are_forgotten() -> None:
    mine, theirs = SharedBlocks(), LentBlocks()
    use, memory = mine.lend(1000) or pytest.fail("no memory")
    assert theirs.can_open(use)
    del mine, memory
    gc.collect()
    others = SharedBlocks()
    use, _ = others.lend(1000) or pytest.fail("no memory")
    assert theirs.can_open(use)
    assert [block.token for block in theirs] == [use.token]


# --- messages -------------------------------------------------------------------------------------------


@needs_sharing
def test_a_message_comes_as_it_was_sent_and_can_not_be_written_to() -> None:
    mine, theirs = SharedBlocks(), LentBlocks()
    arrays = [np.arange(LARGE, dtype=np.float32), np.ones((300, 400)).T, np.arange(LARGE).astype(jnp.bfloat16)]
    message = {"small": np.arange(3), "large": arrays, "strided": np.arange(2 * LARGE)[::2], "text": "text"}
    sent = packed(message, mine.lend)
    assert isinstance(sent, Packed)
    assert sent.nbytes == sum(array.nbytes for array in arrays)
    come = sent.unpacked(theirs.memory(sent.use))
    assert come["text"] == "text"
    came, sent_ones = [*come["large"], come["strided"], come["small"]], [*arrays, message["strided"], message["small"]]
    for a, b in zip(came, sent_ones, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    for array in come["large"]:
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


def test_a_message_without_large_arrays_or_without_memory_is_sent_as_it_is() -> None:
    small, large = {"a": np.arange(3)}, {"a": np.arange(LARGE)}
    assert packed(small, lambda room: pytest.fail("no memory is needed")) is small
    assert packed(large, lambda room: None) is large


# --- functions ------------------------------------------------------------------------------------------


def test_functions_read_and_change_as_without_it(lendings: list[int]) -> None:
    """Each kind of change, with values that the server holds, against the same in NumPy."""
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=2, max_staleness=0)
    with strategy.scope():
        v = replicax.Variable(np.zeros(LARGE, np.float32), name="v")
        w = replicax.Variable(np.zeros(LARGE, np.float32), name="w")
        small = replicax.Variable(np.zeros(2, np.float32), name="small")
    step_of = np.arange(LARGE, dtype=np.float32)

    def fn(number: int) -> Any:
        if number % 3 == 0:
            strategy.run(lambda: v.assign(w + number))
        elif number % 3 == 1:
            strategy.run(lambda: w.assign_add(step_of * number))
        else:
            v.assign_add(step_of)
            w.assign(v.read_value() * 0.5)
        strategy.run(lambda: small.assign_add(jnp.ones(2)))
        return v.numpy().copy(), w.numpy().copy()

    expected_v = expected_w = np.zeros(LARGE, np.float32)
    with coordinator_of(strategy) as (coordinator, _):
        values = [coordinator.schedule(fn, args=(number,)) for number in range(12)]
        for number, value in enumerate(values):
            if number % 3 == 0:
                expected_v = expected_w + number
            elif number % 3 == 1:
                expected_w = expected_w + step_of * number
            else:
                expected_v = expected_v + step_of
                expected_w = expected_v * np.float32(0.5)
            got_v, got_w = value.fetch(WAIT)
            np.testing.assert_allclose(got_v, expected_v)
            np.testing.assert_allclose(got_w, expected_w)
        coordinator.join(WAIT)
        np.testing.assert_allclose(v.numpy(), expected_v)
        assert small.numpy().tolist() == [12, 12]


def test_an_optimizer_gets_gradients_of_all_workers_of_a_step(lendings: list[int]) -> None:
    import optax

    strategy = replicax.ParameterServerStrategy(
        num_workers=2, mode="sync", num_servers=2, variable_partitioner=replicax.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        v = replicax.Variable(np.zeros((2, LARGE), np.float32), name="v")
        optimizer = replicax.Optimizer(optax.sgd(0.5, momentum=0.5))

    def step() -> None:
        replica = replicax.get_replica_context().replica_id_in_sync_group
        optimizer.apply_gradients([(jnp.ones((2, LARGE)) * (1 + replica).astype(np.float32), v)])

    expected, momentum = 0.0, 0.0
    with coordinator_of(strategy) as (coordinator, _):
        for _ in range(5):
            for _ in range(2):
                coordinator.schedule(lambda: strategy.run(step))
            momentum = 3.0 + 0.5 * momentum
            expected -= 0.5 * momentum
        coordinator.join(WAIT)
        np.testing.assert_allclose(v.numpy(), np.full((2, LARGE), expected))


@needs_sharing
def test_a_value_that_a_server_holds_stays_when_its_worker_is_gone() -> None:
    strategy = replicax.ParameterServerStrategy(num_workers=1, num_servers=1)
    with strategy.scope():
        v = replicax.Variable(np.zeros(LARGE, np.float32), name="v")

    def fn(value: float) -> None:
        strategy.run(lambda: v.assign(jnp.full(LARGE, value)))

    def die(method: str, args: Any) -> None:
        worker.after = lambda method, args: None
        worker.kill()

    with coordinator_of(strategy) as (coordinator, actors):
        coordinator.schedule(fn, args=(1.0,)).fetch(WAIT)
        coordinator.join(WAIT)
        [worker] = actors.of("StepWorker")
        worker.after = die
        coordinator.schedule(fn, args=(2.0,)).fetch(WAIT)
        worker.object = None
        gc.collect()
        assert v.numpy().tolist() == [2.0] * LARGE
        for value in (3.0, 4.0, 5.0):
            coordinator.schedule(fn, args=(value,)).fetch(WAIT)
            assert v.numpy().tolist() == [value] * LARGE


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_variables_that_were_assigned_one_array_change_each_for_itself(dtype: Any) -> None:
    server = ShardServer(0, 1, {})
    server.put({number: (np.zeros(3, dtype), "none") for number in (1, 2)}, Ended())
    one = np.ones(3, dtype)
    server.push(pickle.loads(pickle.dumps(Push(0, 0, None, {}, {}, {1: one, 2: one}), protocol=5)))
    server.push(Push(1, 0, None, {}, {1: one}, {}))
    pulled = server.pull({1: -1, 2: -1}, Ended())
    assert isinstance(pulled, Pulled)
    assert [pulled.values[number][1].tolist() for number in (1, 2)] == [[2] * 3, [1] * 3]


@needs_sharing
def test_values_that_servers_keep_leave_blocks_for_the_traffic() -> None:
    server, blocks, variables = ShardServer(0, 1, {}), SharedBlocks(), range(100)
    server.put({number: (np.zeros(1), "none") for number in variables}, Ended())
    for number in variables:
        push = packed(Push(number, 0, None, {}, {}, {number: np.full(LARGE, number)}), blocks.lend)
        assert isinstance(push, Packed)
        server.push(push)
    pulled = server.pull(dict.fromkeys(variables, -1), Ended())
    assert isinstance(pulled, Pulled)
    assert all((pulled.values[number][1] == number).all() for number in variables)
