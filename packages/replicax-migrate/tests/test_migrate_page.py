"""``docs/migrate.md`` has every name, every difference, and says what is true of its scripts and figures."""

from __future__ import annotations

import difflib
import json
import pathlib
import re
import runpy

import pytest

from replicax_migrate.counterparts import of_member
from tensorflow_programs import PAGE, ROOT, written_into


@pytest.mark.parametrize("is_tower", [False, True])
def test_all_that_the_checklist_names_is_in_the_page(is_tower: bool) -> None:
    """The checklist is what the tests of the tower API have made of the four documents."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "migrate.md").read_text(), re.M)
    told = {name for row in rows for name in re.findall(r"[`.](\w+)`", row)}
    listed = runpy.run_path(PAGE)["checklist"](is_tower)
    assert len(listed) > 7
    assert listed[""] - told == set()
    for kind, names in listed.items():
        for name in names - told if kind else ():  # it keeps its name, or has the answer of its class, as the page says
            answer = of_member(kind, name, is_tower)
            of_class = runpy.run_path(PAGE)["_of_class"](kind)
            assert answer.today in (name, "the same", of_class and of_class.today), (kind, name)
            assert answer.differs in (None, of_class and of_class.differs), (kind, name)


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ({"names": ["get_levitator"]}, "get_levitator"),
        ({"methods": {"levitate": {}}}, "levitate of Strategy"),
        ({"members": {"TowerContext": ["levitate"]}}, "levitate of ReplicaContext"),
        ({"aggregations": ["PRODUCT"]}, "PRODUCT of Aggregation"),
    ],
)
@pytest.mark.parametrize("path", ["tf.contrib.distribute.DistributionStrategy", "tf.distribute.Strategy"])
def test_a_name_without_a_counterpart_is_an_error(tmp_path: pathlib.Path, more, missing: str, path: str) -> None:
    nothing = {"inherits": None, "properties": [], "methods": {}, "names": [], "members": {}, "aggregations": []}
    table = tmp_path / "documents.json"
    table.write_text(json.dumps({"0": {"path": path, **nothing, **more}}))
    of_page = runpy.run_path(PAGE)
    of_page["checklist"].__globals__["DOCUMENTS"] = table
    with pytest.raises(LookupError, match=f"no counterpart is told of {missing}"):
        of_page["towers" if "contrib" in path else "modern"]()


# What the page says of each of the oracle's differences, and at which name; after "page:", elsewhere on the page.
TOLD = {
    "variables: on_write, none": "VariableAggregation: with NONE",
    "variables: on_write, sum": "VariableAggregation: with SUM each replica contributes what it assigns",
    "variables: on_read, none": "VariableSynchronization: assigned outside a step, but not read",
    "variables in detail: a trainable on-read": "VariableSynchronization: can't be trainable",
    "variables in detail: an integer on-read sum": "page: replica 0 gets the remainder",
    "variables in detail: an on-write variable is assigned a per-replica": "page: a `PerReplica` to any variable",
    "variables in detail: an on-write sum variable is assigned a per-replica": "page: a `PerReplica` to any variable",
    "variables in detail: a float is assigned": "page: a wrong dtype is a `TypeError`",
    "variables in detail: made anew": "Strategy.run: a variable created in a step is created once",
    "variables in detail: one replica": "page: With one replica an `on_read` variable is a single copy",
    "reducing: the sum of bools": "Strategy.reduce: bools are counted",
    "reducing: the sum of ": "Strategy.reduce: summing what all replicas share is an error",
    "reducing: the mean of ": "Strategy.reduce: its mean is itself",
    "reducing: a nest along an axis": "Strategy.reduce: pytrees go leaf by leaf, along an axis too",
    "gathering: a gather after one that failed": "Strategy.gather: a failed call leaves nothing behind",
    "gathering: gather along axis": "Strategy.gather: a negative axis counts from the end",
    "gathering: gather a nest": "Strategy.gather: pytrees go leaf by leaf",
    "gathering: gather a plain array": "Strategy.gather: a plain array is an error",
    "collectives: all_reduce: one array": "ReplicaContext.all_reduce: an array that n replicas share is summed n times",
    "collectives: all_reduce: a Python number": "ReplicaContext.all_reduce: numbers are arrays",
    "collectives: all_gather": "ReplicaContext.all_gather: a negative axis counts from the end",
    "collectives: a collective on one replica": "ReplicaContext.all_reduce: can't be under a Python branch",
    "merge_call: in it": "ReplicaContext.merge_call: no other step can run in it",
    "merge_call: on one replica": "ReplicaContext.merge_call: can't be under a Python branch",
    "contexts: scopes left": "Strategy.scope: in the wrong order is an error",
    "contexts: an error on one replica": "Strategy.run: branching on a value is an error",
    "contexts: local_results": "Strategy.experimental_local_results: an error inside a step",
    "contexts: distribute_values": "Strategy.experimental_distribute_values_from_function: an error inside a step",
    "contexts: apply_gradients": "page: Inside a step `apply_gradients` sums",
    "contexts: a variable made outside": "get_strategy: a variable made outside every scope belongs to no strategy",
    "run: what is the same": "Strategy.run: a result that is the same on all replicas is one array",
    "run: a value of a strategy with more": "Strategy.run: as many components as there are replicas",
    "run: replicas ": "Strategy.run: branching on a value is an error",
    "values and nests: distribute_values": "Strategy.experimental_distribute_values_from_function: a ValueError",
    "values and nests: a per-replica value has no truth": "DistributedValues.values: has no truth value",
    "extended: reduce_to": "StrategyExtended.reduce_to: summing what all replicas share is an error",
    "extended: batch_reduce_to": "StrategyExtended.batch_reduce_to: no pairs give no results",
    "extended: update: the argument": "StrategyExtended.update: the same for all copies",
    "extended: update inside": "StrategyExtended.update: only outside a step",
    "extended: update of what is no": "StrategyExtended.update: for variables",
    "extended: colocate": "StrategyExtended.colocate_vars_with: is a ContextError",
    "extended: value_container of a component": "StrategyExtended.value_container: works for components of a value",
    "extended: value_container of a variable": "StrategyExtended.value_container: the copies of a variable are arrays",
    "training: compute_average_loss: a batch": "compute_average_loss: also in uneven and partial batches",
    "training: compute_average_loss: a global batch of 0": "compute_average_loss: a global batch of 0 is an error",
    "training: the gradient": "page: a gradient of a loss that is already reduced",
    "training: apply_gradients": "page: gradients that are already reduced need `aggregate=False`",
    "input: the next element": "DistributedIterator.get_next: inside a step a ContextError",
    "input: distributed inside": "Strategy.experimental_distribute_dataset: an error inside a step",
    "clusters: one address": "SimpleClusterResolver: two tasks with one address",
    "clusters: TF_CONFIG": "TFConfigClusterResolver: an error when it is read",
    "clusters: the layer before": "ClusterResolver.master: also that of a named task",
    "clusters: resolvers with the same tasks": "UnionResolver: equal lists of a job are one",
    "clusters: the first resolver": "UnionResolver: the first resolver that knows its own",
    "clusters: a Slurm step": "SlurmClusterResolver: tasks are in Slurm's order",
    "clusters: pods with numbers": "KubernetesClusterResolver: in the order of their completion indices",
    "coordinator: a result is an argument": "ClusterCoordinator.schedule: may be an argument of another function",
    "coordinator: the kind of a function's error": "ClusterCoordinator.schedule: an error is a WorkerError",
    "coordinator: a dataset is made from": "ClusterCoordinator.create_per_worker_dataset: told how many there are",
    "coordinator: a dataset is distributed": "ClusterCoordinator.create_per_worker_dataset: distributed on workers",
    "coordinator: a large variable": "ParameterServerStrategy: the server that has the fewest bytes",
    "coordinator: an on-read variable": "ParameterServerStrategy: an on-read variable is an error",
    "coordinator: a step on the coordinator": "ParameterServerStrategy: steps run on workers only",
    "coordinator: a function makes a variable": "ClusterCoordinator.schedule: that creates variables is a ContextError",
}


def test_all_that_the_oracle_has_found_is_told_at_its_name() -> None:
    text = (ROOT / "tests" / "oracle" / "differences.md").read_text().partition("\n## Where Replicax's exact")[0]
    programs = [row.split(" | ")[0].removeprefix("| ") for row in text.splitlines() if re.match(r"\| \w[^|]*: ", row)]
    assert len(programs) > 50
    page = (ROOT / "docs" / "migrate.md").read_text().partition("\n## From 1.x, name by name")[0]
    used = set()
    for program in programs:
        title = next((title for title in TOLD if program.startswith(title)), None)
        assert title is not None, program
        used.add(title)
        name, _, said = TOLD[title].partition(": ")
        if name == "page":
            assert said in " ".join(page.split()), program
            continue
        kind, _, member = name.rpartition(".")
        table = page.partition(f"\n### Of {SECTIONS[kind]}\n")[2].partition("\n### ")[0] if kind in SECTIONS else page
        row = re.search(rf"^\|[^|]*`{member if kind in SECTIONS else name}`[^|]*\|([^|]*)\|$", table, re.MULTILINE)
        assert said in row[1].replace("`", ""), (program, name)
    assert used == set(TOLD)


SECTIONS = {
    "Strategy": "a strategy",
    "StrategyExtended": "`strategy.extended`",
    "ReplicaContext": "the replica context",
}
"""Headings of the page; members of other classes have the class before them."""


def test_the_page_is_what_the_table_says() -> None:
    """If this fails: python tools/docs/migrate_page.py."""
    page = runpy.run_path(PAGE)["page"]
    text = (ROOT / "docs" / "migrate.md").read_text()
    assert page(text) == text


LOOP = pathlib.Path(__file__).with_name("training_loop.diff").read_text()
[TOWERS] = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs" / "towers.md").read_text(), re.M | re.DOTALL)
"""A program of each generation, and what becomes of it."""


def scripts(diff: str) -> list[str]:
    """What a difference leads from, and what it leads to."""
    lines = diff.splitlines(keepends=True)
    return ["".join(line[1:] or "\n" for line in lines if not line.startswith(sign)) for sign in "+-"]


@pytest.mark.parametrize(
    ("diff", "printed"), [(LOOP, "loss 0.0654 after 128 examples"), (TOWERS, "w 3.000, 20 steps of towers")]
)
def test_what_the_scripts_print(diff: str, printed: str, capsys) -> None:
    """TensorFlow 2.21, on two logical CPU devices, prints the same for the first."""
    exec(compile(scripts(diff)[1], "script.py", "exec"), {})
    assert capsys.readouterr().out == f"{printed}\n"


@pytest.mark.parametrize(
    ("diff", "by_hand"),
    [
        (
            LOOP,
            [
                "import tensorflow as tf",
                "dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(GLOBAL_BATCH)",
                'w = tf.Variable(tf.zeros(3), name="w")',
                "optimizer = tf.keras.optimizers.SGD(0.1)",
                "examples = tf.Variable(",
                "with tf.GradientTape() as tape:",
                "losses = (tf.linalg.matvec(x, w) - y) ** 2",
                "loss = replicax.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)",
                "optimizer.apply_gradients(zip(tape.gradient(loss, [w]), [w]))",
                "examples.assign_add(tf.shape(x)[0])",
                "@tf.function",
            ],
        ),
        (
            TOWERS,
            [
                "import replicax.compat.v1",
                "import tensorflow as tf",
                "tf.enable_eager_execution()",
                'distribution = tf.MirroredStrategy(["/device:GPU:0", "/device:GPU:1"])',
                "xs = np.stack([x, x + 1.0] * 10)",
                "return tf.data.Dataset.from_tensor_slices((xs, 3.0 * xs))",
                "with tf.GradientTape() as tape:",
                "error = tf.reduce_mean((x * w - y) ** 2)",
                "gradient = tape.gradient(error, w)",
            ],
        ),
    ],
)
def test_what_is_changed_by_hand_in_the_scripts(diff: str, by_hand: list[str]) -> None:
    """All that ``--write`` leaves to do."""
    before, after = scripts(diff)
    written = written_into(before).replace("replicax.compat.v1.", "tf.").splitlines()
    diff = difflib.ndiff([line.strip() for line in written], [line.strip() for line in after.splitlines()])
    assert [line[2:] for line in diff if line.startswith("- ")] == by_hand


def test_the_figures_are_those_of_the_list_of_real_programs() -> None:
    """How many programs and uses there are; what the command finds of them needs the programs themselves."""
    page = (ROOT / "docs" / "migrate.md").read_text()
    programs = list(runpy.run_path(str(ROOT / "tools" / "docs" / "migrate_count.py"))["real_programs"]())
    assert len({(program.repository, program.path) for program in programs}) == len(programs)
    for group in {program.group for program in programs}:
        members = [program for program in programs if program.group == group]
        uses = sum(len(program.uses) for program in members)
        assert re.search(rf"^\| {len(members)} {group} \| {uses} \| \d+ \(\d+%\) \|", page, re.MULTILINE)
        assert all(re.fullmatch(r"(\[cell \d+\]:)?\d+ \S.*", use) for program in members for use in program.uses)
    repositories = {program.repository for program in programs}
    assert f"{len(programs)} programs of {len(repositories)} public repositories" in page
