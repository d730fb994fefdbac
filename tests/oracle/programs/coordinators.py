"""Parameter servers: what is scheduled, what comes of it, and what the servers have afterwards.

What runs on a worker gets at the library by ``d.on_workers``, a module, as functions go to other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.oracle.library import Library
from tests.oracle.program import Topic

topic = Topic("coordinator", servers=True)

KIND = (
    "What a worker's function has raised is a WorkerError, which is a RuntimeError, names the function, the worker and "
    "the line, and has the original as its cause. TensorFlow raises the original alone."
)


def _adding(d: Library, variable: Any) -> Callable[..., Any]:
    """A function that adds 1 to a variable."""

    def add() -> None:
        variable.assign_add(1.0)

    return d.on_workers.function(add)


def _failing(d: Library) -> Callable[..., Any]:
    """A function that fails for numbers below 0."""
    require = d.on_workers.require

    def root(x: Any) -> Any:
        require(x >= 0.0)
        return x**0.5

    return d.on_workers.function(root)


def _run(coordinator: Any, fn: Callable[..., Any], times: int, *args: Any) -> None:
    """Schedule a function so many times, and wait."""
    for _ in range(times):
        coordinator.schedule(fn, args=args)
    coordinator.join()


def _is_raised(fn: Callable[[], Any]) -> bool:
    try:
        fn()
    except Exception:
        return True
    return False


@topic.program("a result is fetched")
def fetched(d: Library) -> Any:
    coordinator = d.coordinator()
    fn = d.on_workers.function(lambda x: x * 2.0)
    result = coordinator.schedule(fn, args=(d.array(3.0),))
    return [result.fetch(), result.fetch(), coordinator.fetch(result)]


@topic.program("arguments by name")
def by_name(d: Library) -> Any:
    coordinator = d.coordinator()
    fn = d.on_workers.function(lambda x, y: x - y)
    return coordinator.schedule(fn, args=(d.array(5.0),), kwargs={"y": d.array(3.0)}).fetch()


@topic.program("results in a nest are fetched")
def fetched_nest(d: Library) -> Any:
    coordinator = d.coordinator()
    fn = d.on_workers.function(lambda x: x + 1.0)
    values = [coordinator.schedule(fn, args=(d.array(float(i)),)) for i in range(3)]
    return coordinator.fetch({"a": values[0], "b": (values[1], [values[2], 7])})


@topic.program("a function returns a nest")
def returns_nest(d: Library) -> Any:
    coordinator = d.coordinator()
    fn = d.on_workers.function(lambda x: {"a": x, "b": (x + 1.0, [x + 2.0])})
    return coordinator.schedule(fn, args=(d.array(1.0),)).fetch()


@topic.program("a function returns nothing")
def returns_nothing(d: Library) -> Any:
    coordinator = d.coordinator()
    return coordinator.schedule(d.on_workers.function(lambda: None)).fetch()


@topic.program("nothing is scheduled")
def nothing(d: Library) -> Any:
    coordinator = d.coordinator()
    before = coordinator.done()
    coordinator.join()
    return [before, coordinator.done()]


@topic.program("done after join")
def done(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        v = d.variable(0.0)
    _run(coordinator, _adding(d, v), 8)
    return [coordinator.done(), v]


@topic.program("as many functions count as are scheduled")
def iterations(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        v = d.variable(0.0)
        whole = d.variable(0)
    on_workers = d.on_workers

    def step() -> None:
        v.assign_add(1.0)
        whole.assign_add(1)

    _run(coordinator, on_workers.function(lambda: on_workers.strategy().run(step)), 20)
    return [v, whole]


@topic.program(
    "a result is an argument of the next function",
    differs="A result that is still to come may be an argument of another function, and goes to its worker without a "
    "detour through the program. TensorFlow can't trace a function of it.",
)
def remote_argument(d: Library) -> Any:
    coordinator = d.coordinator()
    fn = d.on_workers.function(lambda x: x * 2.0)
    first = coordinator.schedule(fn, args=(d.array(3.0),))
    return d.attempt(lambda: coordinator.schedule(fn, args=(first,)).fetch())


# --- errors ------------------------------------------------------------------------------------------------


@topic.program("the error of a function is raised at join, once")
def raised_at_join(d: Library) -> Any:
    coordinator = d.coordinator()
    coordinator.schedule(_failing(d), args=(d.array(-1.0),))
    return [_is_raised(coordinator.join), _is_raised(coordinator.join), coordinator.done()]


@topic.program("the error of a function is raised at the next schedule, once")
def raised_at_schedule(d: Library) -> Any:
    coordinator = d.coordinator()
    failing = _failing(d)
    failed = coordinator.schedule(failing, args=(d.array(-1.0),))
    _is_raised(failed.fetch)
    at_schedule = _is_raised(lambda: coordinator.schedule(failing, args=(d.array(4.0),)))
    return [at_schedule, coordinator.schedule(failing, args=(d.array(4.0),)).fetch(), _is_raised(coordinator.join)]


@topic.program("the kind of a function's error", differs=KIND)
def kind_at_join(d: Library) -> Any:
    coordinator = d.coordinator()
    coordinator.schedule(_failing(d), args=(d.array(-1.0),))
    return d.attempt(coordinator.join)


@topic.program("the result of a function that has failed is fetched, again and again")
def fetch_failed(d: Library) -> Any:
    coordinator = d.coordinator()
    failed = coordinator.schedule(_failing(d), args=(d.array(-1.0),))
    return [_is_raised(failed.fetch), _is_raised(failed.fetch), _is_raised(coordinator.join)]


@topic.program("functions that wait behind one that fails are called off")
def is_cancelled(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        v = d.variable(0.0)
    failing, add = _failing(d), _adding(d, v)
    results: list[Any] = []

    def schedule() -> None:
        coordinator.schedule(failing, args=(d.array(-1.0),))
        for _ in range(30):
            results.append(coordinator.schedule(add))

    for _ in range(3):
        _is_raised(schedule)
        while _is_raised(coordinator.join):
            pass
    ran = sum(not _is_raised(result.fetch) for result in results)
    return bool(ran <= v.numpy())  # TensorFlow may have run some more, which it says were called off


@topic.program("work goes on after an error")
def goes_on(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        v = d.variable(0.0)
    coordinator.schedule(_failing(d), args=(d.array(-1.0),))
    raised = _is_raised(coordinator.join)
    _run(coordinator, _adding(d, v), 5)
    return [raised, v]


@topic.program("what is no function is scheduled")
def not_a_function(d: Library) -> Any:
    return d.attempt(lambda: d.coordinator().schedule(3))


# --- datasets ----------------------------------------------------------------------------------------------


def _numbers(d: Library) -> Callable[[], Any]:
    on_workers = d.on_workers
    return lambda: on_workers.dataset([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])


@topic.program("a dataset on each worker")
def per_worker(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        v = d.variable(0.0)
    numbers = iter(coordinator.create_per_worker_dataset(_numbers(d)))

    def step(x: Any) -> None:
        v.assign_add(x)

    on_workers = d.on_workers
    fn = on_workers.function(lambda iterator: on_workers.strategy().run(step, args=(next(iterator),)))
    _run(coordinator, fn, 6, numbers)
    return v


@topic.program("a worker's dataset ends")
def end_of_dataset(d: Library) -> Any:
    coordinator = d.coordinator()
    numbers = iter(coordinator.create_per_worker_dataset(_numbers(d)))
    fn = d.on_workers.function(lambda iterator: next(iterator))
    for _ in range(20):
        if _is_raised(lambda: coordinator.schedule(fn, args=(numbers,))):
            return True
    raised = _is_raised(coordinator.join)
    while _is_raised(coordinator.join):
        pass
    return raised


@topic.program(
    "a dataset is made from a function of the input context",
    differs="Each worker is told how many there are, and which it is, so that it can take its part of the data. "
    "TensorFlow tells each of them that it is the only one.",
)
def from_function(d: Library) -> Any:
    coordinator = d.coordinator()
    on_workers = d.on_workers

    def dataset_of(context: Any) -> Any:
        return on_workers.dataset_of(
            [[float(context.num_input_pipelines), float(context.num_replicas_in_sync)]] * 3, context
        )

    def make() -> Any:
        return on_workers.strategy().distribute_datasets_from_function(dataset_of)

    iterator = iter(coordinator.create_per_worker_dataset(make))
    return coordinator.schedule(on_workers.function(lambda iterator: next(iterator)), args=(iterator,)).fetch()


@topic.program("the next element, taken by the coordinator's program")
def next_outside(d: Library) -> Any:
    coordinator = d.coordinator()
    return _is_raised(lambda: next(iter(coordinator.create_per_worker_dataset(_numbers(d)))))


@topic.program(
    "a dataset is distributed by the coordinator's program",
    differs="Elements are wanted on workers, so a dataset is made there: an error that says how. TensorFlow makes one "
    "in the coordinator's process, whose elements no worker can have.",
)
def distributed_outside(d: Library) -> Any:
    coordinator = d.coordinator()
    return d.attempt(lambda: coordinator.strategy.experimental_distribute_dataset(_numbers(d)()) and None)


# --- variables ---------------------------------------------------------------------------------------------


@topic.program("variables of one size go to one server after the other")
def round_robin(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        variables = [d.variable([0.0, 0.0]) for _ in range(4)]
    places = [d.servers_of(v) for v in variables]
    return [places[0] == places[2], places[1] == places[3], places[0] != places[1]]


@topic.program(
    "a large variable, and small ones",
    differs="Each variable goes to the server that has the fewest bytes so far, so that servers have about as much to "
    "send: here the large one has a server for itself. TensorFlow takes one server after the other, whatever the size.",
)
def by_load(d: Library) -> Any:
    coordinator = d.coordinator("loads")
    with coordinator.strategy.scope():
        large = d.variable([0.0] * 1000)
        small = [d.variable([0.0]) for _ in range(3)]
    return [d.servers_of(v) == d.servers_of(large) for v in small]


def _shapes(d: Library, partitioner: str, *shapes: tuple[int, int]) -> Any:
    coordinator = d.coordinator(partitioner)
    with coordinator.strategy.scope():
        return [d.shapes_of_parts(d.variable([[0.0] * columns] * rows)) for rows, columns in shapes]


@topic.program("two parts")
def two_parts(d: Library) -> Any:
    return _shapes(d, "fixed", (4, 2), (5, 2), (2, 1))


@topic.program("parts of a least size")
def least_size(d: Library) -> Any:
    return _shapes(d, "least", (2, 2), (8, 2), (9, 2))


@topic.program("parts of a largest size")
def largest_size(d: Library) -> Any:
    return _shapes(d, "largest", (2, 2), (8, 2), (6, 2))


@topic.program("a scalar is not partitioned")
def scalar(d: Library) -> Any:
    coordinator = d.coordinator("fixed")
    with coordinator.strategy.scope():
        v = d.variable(3.0)
    return [len(d.shapes_of_parts(v)), v]


ROWS = [[float(10 * row), float(10 * row + 1)] for row in range(5)]


def _table(d: Library) -> tuple[Any, Any]:
    coordinator = d.coordinator("fixed")
    with coordinator.strategy.scope():
        return coordinator, d.variable(ROWS)


@topic.program("a variable in parts is read")
def read_parts(d: Library) -> Any:
    coordinator, table = _table(d)
    whole = d.on_workers.whole
    return [d.on_workers.whole(table), coordinator.schedule(d.on_workers.function(lambda: whole(table))).fetch()]


@topic.program("rows of a variable in parts are looked up")
def look_up(d: Library) -> Any:
    coordinator, table = _table(d)
    rows = d.on_workers.rows
    fn = d.on_workers.function(lambda ids: rows(table, ids))
    return coordinator.schedule(fn, args=(d.array([4, 0, 4, 2]),)).fetch()


@topic.program("a variable in parts is assigned, and added to")
def assign_parts(d: Library) -> Any:
    coordinator, table = _table(d)
    whole = d.on_workers.whole

    def change() -> None:
        table.assign(whole(table) * 2.0)
        table.assign_add(whole(table) * 0.0 + 1.0)
        table.assign_sub(whole(table) * 0.0 + 3.0)

    coordinator.schedule(d.on_workers.function(change)).fetch()
    coordinator.join()
    return d.on_workers.whole(table)


@topic.program("rows are added to a variable in parts")
def add_rows(d: Library) -> Any:
    coordinator, table = _table(d)
    on_workers = d.on_workers

    def step() -> None:
        on_workers.add_rows(table, [0, 4, 0], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])

    coordinator.schedule(on_workers.function(lambda: on_workers.strategy().run(step)))
    coordinator.join()
    return d.on_workers.whole(table)


@topic.program("a variable in parts is sliced")
def sliced(d: Library) -> Any:
    _, table = _table(d)
    return [table[1:4], table[0], table[2, 1], table[-1]]


@topic.program("the program assigns what workers read")
def assign_outside(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        v = d.variable(1.0)
    fn = d.on_workers.function(lambda: v * 2.0)
    first = coordinator.schedule(fn).fetch()
    v.assign(5.0)
    return [first, coordinator.schedule(fn).fetch()]


@topic.program("a variable that is made after the first functions")
def late_variable(d: Library) -> Any:
    coordinator = d.coordinator()
    coordinator.schedule(d.on_workers.function(lambda: None)).fetch()
    with coordinator.strategy.scope():
        v = d.variable(4.0)
    return coordinator.schedule(d.on_workers.function(lambda: v + 1.0)).fetch()


@topic.program(
    "an on-read variable",
    differs="On servers a variable has one value, which all workers change, so there are no copies to keep apart: an "
    "error that says to use an aggregation. TensorFlow makes an ordinary variable of it, and says nothing.",
)
def on_read(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        return d.variable(1.0, synchronization="on_read", aggregation="sum")


# --- steps -------------------------------------------------------------------------------------------------


@topic.program("a step on a worker has one replica")
def replicas(d: Library) -> Any:
    coordinator = d.coordinator()
    on_workers = d.on_workers

    def step() -> Any:
        context = on_workers.replica_context()
        return on_workers.array([context.num_replicas_in_sync, context.replica_id_in_sync_group])

    return coordinator.schedule(on_workers.function(lambda: on_workers.strategy().run(step))).fetch()


@topic.program("the number of replicas, in the coordinator's program")
def replicas_outside(d: Library) -> Any:
    return d.coordinator().strategy.num_replicas_in_sync


@topic.program("a step on a worker, reduced")
def reduced(d: Library) -> Any:
    coordinator = d.coordinator()
    on_workers = d.on_workers

    def fn(x: Any) -> Any:
        y = on_workers.strategy().run(lambda x: x * 3.0, args=(x,))
        return on_workers.strategy().reduce("SUM", y, axis=None)

    return coordinator.schedule(on_workers.function(fn), args=(d.array(2.0),)).fetch()


@topic.program("steps of gradient descent, one after the other")
def descent(d: Library) -> Any:
    coordinator = d.coordinator()
    with coordinator.strategy.scope():
        w = d.variable([0.5, -1.0])
    on_workers = d.on_workers

    def step(x: Any) -> Any:
        def loss() -> Any:
            return on_workers.total((x * w - 1.0) ** 2)

        value, [gradient] = on_workers.value_and_grad(loss, [w])
        w.assign_sub(0.1 * gradient)
        return value

    fn = on_workers.function(lambda x: on_workers.strategy().run(step, args=(x,)))
    losses = [coordinator.schedule(fn, args=(d.array([1.0, float(i)]),)).fetch() for i in range(4)]
    return [losses, w]


@topic.program(
    "a step on the coordinator",
    differs="Steps run on workers: an error that says to schedule a function. TensorFlow runs the step in the "
    "coordinator's own process, while workers wait.",
)
def run_outside(d: Library) -> Any:
    return d.attempt(lambda: d.coordinator().strategy.run(d.on_workers.function(lambda: d.array(1.0))))


@topic.program(
    "a function makes a variable",
    differs="Both refuse it; what is done in the wrong place is a ContextError, which is a RuntimeError.",
)
def makes_variable(d: Library) -> Any:
    coordinator = d.coordinator()
    variable = d.on_workers.variable
    fn = d.on_workers.function(lambda: variable(1.0) + 1.0)
    return d.attempt(lambda: coordinator.schedule(fn).fetch())
