"""``replicax migrate``: the table of names, what is found in programs, and what is written into them."""

from __future__ import annotations

import ast
import difflib
import inspect
import io
import json
import os
import pathlib
import re
import runpy
import stat
import subprocess
import sys
import sysconfig
import textwrap

import pytest

import replicax
from replicax.cli import main
from replicax.cli.migration import rewriting
from replicax.cli.migration.counterparts import (
    TF_CONFIG,
    TOWER_CLASSES,
    Counterpart,
    has,
    of_member,
    of_path,
    of_tower_name,
    paths,
)
from replicax.cli.migration.differences import DIFFERENCES
from replicax.cli.migration.original_names import AROUND_TOWERS, KINDS, MEMBERS, MODERN, TOWER, TOWER_MEMBERS
from replicax.cli.migration.rewriting import rewritten
from replicax.cli.migration.source_files import UnreadableError, parse, read_program
from replicax.cli.migration.uses import NameUse, find_uses
from replicax.compat import v1
from replicax.old_names import NAMES

ROOT = pathlib.Path(__file__).parents[2]
PAGE = str(ROOT / "docs" / "migrate_page.py")
RELEASED = {
    name.partition(" ")[0]: (name.partition(" ")[2], members.split())
    for line in (ROOT / "tests" / "cli" / "tensorflow_names.txt").read_text().splitlines()
    if not line.startswith("#")
    for name, _, members in (line.partition(":"),)
}
"""The public names of TensorFlow: their releases, and members."""


TF = "import tensorflow as tf\n"


def uses_of(text: str) -> list[NameUse]:
    text = textwrap.dedent(text)
    return find_uses(ast.parse(text), text.split("\n"))


def found_in(text: str) -> dict[str, str]:
    """What takes the place of each name, by the name as it is written."""
    return {use.name: use.counterpart.modern or use.counterpart.today for use in uses_of(text)}


def written_into(text: str) -> str:
    tree = parse(text)
    from replicax.cli.migration.source_files import SourceProgram

    program = SourceProgram(pathlib.Path("p.py"), text, tree)
    return rewritten(program, find_uses(tree, program.lines))


# --- the table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELEASED)
def test_every_public_name_has_an_answer(name: str) -> None:
    releases, members = RELEASED[name]
    path = name.removeprefix("tf.")
    is_tower = releases.startswith(("1.9", "1.10", "1.11", "1.12"))
    whole = of_path(path, is_tower)
    assert whole is not None
    kind = KINDS.get(name.rpartition(".")[2])
    for member in members:
        assert of_member(kind or "", member, is_tower) is not None or not whole.is_renaming, member


@pytest.mark.parametrize("is_tower", [False, True])
def test_all_that_the_checklist_names_is_in_the_page(is_tower: bool) -> None:
    """The checklist is what the tests of the tower API have made of the four documents."""
    page = (ROOT / "docs" / "migrate.md").read_text()
    first = page.partition("\n## From 1.x, name by name")[2]  # which has contrib.distribute of later releases, too
    rows = re.findall(r"^\| (`.*?) \|", first if is_tower else page, re.M)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    listed = runpy.run_path(PAGE)["checklist"](is_tower)
    assert len(listed) > 7
    assert {name for names in listed.values() for name in names} - told == set()


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


@pytest.mark.parametrize("kind", sorted({*MEMBERS, *TOWER_MEMBERS}))
def test_no_member_is_invented(kind: str) -> None:
    released = {m for n, (_, members) in RELEASED.items() if KINDS.get(n.rpartition(".")[2]) == kind for m in members}
    ours = {*MEMBERS.get(kind, "").split(), *TOWER_MEMBERS.get(kind, "").split()}
    private = {  # what methods return, and members of values, have no pages of their own
        "DistributedDataset": {"make_one_shot_iterator", "make_initializable_iterator"},
        "DistributedIterator": {"initialize", "initializer"},
        "StrategyExtended": {"experimental_enable_get_next_as_optional", "steps_per_run", "tpu_hardware_feature"},
        "ValueContext": {"replica_id"},
    }
    if released:
        assert ours - released - private.get(kind, set()) == set()


HOLDERS = {
    "strategy": (replicax.Strategy, replicax.TPUStrategy),
    "extended": (replicax.StrategyExtended,),
    "context": (replicax.ReplicaContext, replicax.MultiStepContext),
    "optimizer": (replicax.Optimizer,),
    "iterator": (replicax.DistributedIterator,),
}
"""What has a name after a word such as ``strategy.``."""


def words(answer: Counterpart) -> str:
    return f"{answer.today} {answer.modern} {answer.differs}"


def test_what_takes_their_place_is_there() -> None:
    """Names of today in the answers exist; those of ``compat.v1`` are those that it promises."""
    answers = [of_path(path) for path in paths(MODERN)] + [
        of_path(path, True) for path in paths({**TOWER, **AROUND_TOWERS})
    ]
    answers += [of_tower_name(name) for name in v1.__all__] + [TF_CONFIG]
    answers += [of_member(kind, name) for kind, names in MEMBERS.items() for name in names.split()]
    answers += [of_member(kind, name, True) for kind, names in TOWER_MEMBERS.items() for name in names.split()]
    for answer in answers:
        assert isinstance(answer, Counterpart)
        for dotted in re.findall(r"\breplicax\.(?!compat)(\w+(?:\.[A-Z]\w+)?)", words(answer)):
            owner = replicax
            for part in dotted.split("."):
                owner = getattr(owner, part)
        for name in re.findall(r"\breplicax\.compat\.v1\.(\w+)", answer.today):
            assert name in v1.__all__
        for kind, member in re.findall(r"\b(strategy|extended|context|optimizer|iterator)\.(\w+)", words(answer)):
            assert member == "extended" or any(has(each, member) for each in HOLDERS[kind]), (answer, member)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in TOWER_CLASSES for name in TOWER_MEMBERS[kind].split() if kind != "Aggregation"],
)
def test_tower_names_are_today_what_their_own_documentation_says(kind: str, name: str) -> None:
    answer = of_member(kind, name, is_tower=True)
    assert answer is not None
    said = [inspect.getdoc(inspect.getattr_static(each, name)) for each in TOWER_CLASSES[kind] if hasattr(each, name)]
    assert bool(said) == (answer.modern is not None)
    dotted = re.search(r"\w+(?:(?:\(\))?\.\w+)+", answer.modern or "")
    if dotted is not None and not name.startswith("_"):
        assert re.search(rf"\b{dotted[0].rpartition('.')[2]}\b", said[0].partition("\n")[0]), (said[0], answer.modern)


def test_differences_of_tower_names_are_those_of_their_own() -> None:
    assert of_member("Strategy", "unwrap", is_tower=True).differs is None  # a list, and it may be used in a merge_fn
    assert "tuple" in of_member("Strategy", "unwrap").differs
    assert "axis" not in of_member("Strategy", "reduce", is_tower=True).differs
    assert of_path("contrib.distribute.TPUStrategy", is_tower=True).differs is None


def test_renamings_are_dotted_names_and_the_rest_are_words() -> None:
    for kind, names in MEMBERS.items():
        for name in names.split():
            answer = of_member(kind, name)
            assert answer is not None
            assert answer.is_renaming == bool(re.fullmatch(r"(?!strategy\.)[\w.]+", answer.today)), (kind, name)


def test_nothing_is_said_twice() -> None:
    """What is called the same today is not in the table of old names, and the other way round."""
    for kind, names in MEMBERS.items():
        owner = getattr(replicax, kind, None)
        for name in names.split():
            if owner is not None and hasattr(owner, name):
                assert name not in NAMES.get(kind, {})


def test_differences_belong_to_names() -> None:
    for name in DIFFERENCES:
        kind, _, member = name.rpartition(".")
        if kind:
            assert of_member(kind, member) is not None or hasattr(getattr(replicax, kind), member)
        else:
            assert name in {*paths(MODERN).values(), *paths(TOWER).values()}


# What the page says of each of the oracle's differences, and at which name; after "page:", elsewhere on the page.
TOLD = {
    "variables: on_write, none": "VariableAggregation: with NONE",
    "variables: on_write, sum": "VariableAggregation: with SUM each replica contributes what it assigns",
    "variables: on_read, none": "VariableSynchronization: assigned from across, and not read",
    "variables in detail: a trainable on-read": "VariableSynchronization: can't be trainable",
    "variables in detail: an integer on-read sum": "page: gives replica 0 the remainder",
    "variables in detail: an on-write variable is assigned a per-replica": "page: a `PerReplica` to any variable",
    "variables in detail: an on-write sum variable is assigned a per-replica": "page: a `PerReplica` to any variable",
    "variables in detail: a float is assigned": "page: a wrong dtype is a `TypeError`",
    "variables in detail: made anew": "Strategy.run: variables that a step makes are made once",
    "variables in detail: one replica": "page: with one replica an `on_read` variable is a single copy",
    "reducing: the sum of bools": "Strategy.reduce: bools are counted",
    "reducing: the sum of ": "Strategy.reduce: can't be summed across them",
    "reducing: the mean of ": "Strategy.reduce: its mean is itself",
    "reducing: a nest along an axis": "Strategy.reduce: nests go leaf by leaf, along an axis too",
    "gathering: a gather after one that failed": "Strategy.gather: a failed one leaves nothing behind",
    "gathering: gather along axis": "Strategy.gather: a negative axis counts from the end",
    "gathering: gather a nest": "Strategy.gather: nests go leaf by leaf",
    "gathering: gather a plain array": "Strategy.gather: a plain array is an error",
    "collectives: all_reduce: one array": "ReplicaContext.all_reduce: n replicas that share an array sum it n times",
    "collectives: all_reduce: a Python number": "ReplicaContext.all_reduce: numbers are arrays",
    "collectives: all_gather": "ReplicaContext.all_gather: a negative axis counts from the end",
    "collectives: a collective on one replica": "ReplicaContext.all_reduce: can't stand under a Python branch",
    "merge_call: in it": "ReplicaContext.merge_call: no other step can be run in it",
    "merge_call: on one replica": "ReplicaContext.merge_call: can't stand under a Python branch",
    "contexts: scopes left": "Strategy.scope: in the wrong order is always an error",
    "contexts: an error on one replica": "Strategy.run: branching on a value is an error",
    "contexts: local_results": "Strategy.experimental_local_results: inside a step it is an error",
    "contexts: distribute_values": "Strategy.experimental_distribute_values_from_function: it is an error",
    "contexts: apply_gradients": "page: `apply_gradients` is called in a step",
    "contexts: a variable made outside": "get_strategy: a variable made outside every scope belongs to no strategy",
    "run: what is the same": "Strategy.run: what is the same on all comes back as one array",
    "run: a value of a strategy with more": "Strategy.run: as many components as there are replicas",
    "run: replicas ": "Strategy.run: branching on a value is an error",
    "values and nests: distribute_values": "Strategy.experimental_distribute_values_from_function: a ValueError",
    "values and nests: a per-replica value has no truth": "PerReplica.values: has no truth",
    "extended: reduce_to": "StrategyExtended.reduce_to: can't be summed across them",
    "extended: batch_reduce_to": "StrategyExtended.batch_reduce_to: of nothing there are no results",
    "extended: update: the argument": "StrategyExtended.update: the same for all copies",
    "extended: update inside": "StrategyExtended.update: only across replicas",
    "extended: update of what is no": "StrategyExtended.update: for variables",
    "extended: colocate": "StrategyExtended.colocate_vars_with: is a ContextError",
    "extended: value_container of a component": "StrategyExtended.value_container: a component knows its value",
    "extended: value_container of a variable": "StrategyExtended.value_container: the copies of a variable are arrays",
    "training: compute_average_loss: a batch": "compute_average_loss: also of uneven batches",
    "training: compute_average_loss: a global batch of 0": "compute_average_loss: a global batch of 0 is an error",
    "training: the gradient": "page: a gradient of a loss that has been reduced",
    "training: apply_gradients": "page: gradients that have been reduced need `aggregate=False`",
    "input: the next element": "DistributedIterator.get_next: inside a step a ContextError",
    "input: distributed inside": "Strategy.experimental_distribute_dataset: an error inside a step",
}


def test_all_that_the_oracle_has_found_is_told_at_its_name() -> None:
    text = (ROOT / "oracle" / "differences.md").read_text().partition("\n## Where Replicax's exact")[0]
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
        table = page.partition(f"\n#### Of {SECTIONS.get(kind, kind)}\n")[2].partition("\n#### ")[0] if kind else page
        row = re.search(rf"^\|(?: `\w+`,)* `{member}`[^|]*\|[^|]*\|([^|]*)\|$", table, re.MULTILINE)
        assert said in row[1], (program, name)
    assert used == set(TOLD)


SECTIONS = {
    "Strategy": "a strategy",
    "StrategyExtended": "`strategy.extended`",
    "ReplicaContext": "the replica context",
    "PerReplica": "a distributed value",
    "DistributedIterator": "`DistributedIterator`",
}
"""Headings of the page."""


# --- what is found in programs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "name", "today"),
    [
        (f"{TF}tf.distribute.MirroredStrategy()", "tf.distribute.MirroredStrategy", "MirroredS"),
        ("import tensorflow\ntensorflow.distribute.get_strategy()", "tensorflow.distribute.get_strategy", "get_strat"),
        ("import tensorflow.compat.v1 as t\nt.distribute.ReduceOp.SUM", "t.distribute.ReduceOp.SUM", "ReduceOp.SUM"),
        ("import tensorflow.compat.v2 as t\nt.distribute.Server()", "t.distribute.Server", "nothing: "),
        ("from tensorflow import distribute as d\nd.has_strategy()", "d.has_strategy", "replicax.has_strategy"),
        ("from tensorflow.distribute import Strategy as S\nx: S", "S", "replicax.Strategy"),
        ("from tensorflow.compat.v1 import distribute\ndistribute.RunOptions()", "distribute.RunOptions", "RunOptions"),
        ("from tensorflow.contrib import distribute as c\nc.Monitor()", "c.Monitor", "run_steps"),
        ("import tensorflow.contrib.distribute as c\nc.TowerContext", "c.TowerContext", "replicax.ReplicaContext"),
        ("from tensorflow.python.distribute import distribute_lib as l\nl.Strategy", "l.Strategy", "replicax.Strategy"),
        ("from mine import tf\ntf.distribute.get_replica_context()", "tf.distribute.get_replica_context", "get_repl"),
        (f"{TF}t = tf.distribute\nt.get_strategy()", "t.get_strategy", "replicax.get_strategy"),
        (f"{TF}tf.distribute.nonsense()", "tf.distribute.nonsense", "nothing: no public name"),
        (f"{TF}tf.VariableAggregation.MEAN", "tf.VariableAggregation.MEAN", "Aggregation.MEAN"),
        (
            f"{TF}tf.tpu.experimental.embedding.SGD()",
            "tf.tpu.experimental.embedding.SGD",
            "nothing y",
        ),
        (
            f"{TF}tf.nn.compute_average_loss(x)",
            "tf.nn.compute_average_loss",
            "compute_average_loss",
        ),
        (
            "o.experimental_distribute.auto_shard_policy = 1",
            "….experimental_distribute.auto_shard_policy",
            "InputOptions",
        ),
        ("RunConfig(train_distribute=d)", "RunConfig(train_distribute=)", "nothing: there are no estimators"),
        (
            "o.apply_gradients(g, skip_gradients_aggregation=True)",
            "apply_gradients(skip_gradients_aggregation=)",
            "aggr",
        ),
        ("from tensorflow.contrib import cluster_resolver", "import cluster_resolver", "import replicax"),
        ("from tensorflow.python.distribute import values", "import values", "nothing: TensorFlow's own internals"),
        (
            "self.distribution_strategy.extended.should_checkpoint",
            "self.distribution_strategy.extended.should_checkpoint",
            "extended.should_checkpoint",
        ),
        ("anything.experimental_run_v2(f)", "anything.experimental_run_v2", "anything.run"),
        (f"{TF}tf.keras.utils.multi_gpu_model(m)", "tf.keras.utils.multi_gpu_model", "MirroredStrategy, whose"),
        ("import keras\nkeras.utils.multi_gpu_model(m)", "keras.utils.multi_gpu_model", "MirroredStrategy, whose"),
        ("from keras.utils import multi_gpu_model as m\nm(n)", "m", "MirroredStrategy, whose"),
        ("import os\nos.environ['TF_CONFIG'] = '{}'", "'TF_CONFIG'", "jax.distributed.initialize"),
        (
            f"{TF}tf.__internal__.distribute.interim.maybe_merge_call(f)",
            "tf.__internal__.distribute.interim.maybe_merge_call",
            "nothing: TensorFlow's own internals",
        ),
        (
            "from tensorflow.python.distribute import tpu_strategy as t\nt._TPUReplicaContext(s)",
            "t._TPUReplicaContext",
            "nothing: TensorFlow's own internals",
        ),
        (
            "from tensorflow.python.tpu import device_assignment as d\nd.device_assignment(t).num_replicas",
            "d.device_assignment",
            "replicax.DeviceAssignment.build",
        ),
        (
            "from tensorflow.python.tpu import device_assignment as d\na = d.device_assignment(t)\na.num_replicas",
            "a.num_replicas",
            "a.num_replicas",
        ),
        (f"{TF}lazy.distribute().MirroredStrategy()", "….MirroredStrategy", "replicax.MirroredStrategy"),
        (f"{TF}s = lazy.distribute().MirroredStrategy()\ns.scope()", "s.scope", "s.scope"),
        ("from tensorflow.contrib.distribute import *\nMonitor()", "Monitor", "a loop that calls strategy.run_steps"),
        (
            "from tensorflow.distribute import *\nwith MirroredStrategy().scope(): pass",
            "MirroredStrategy",
            "replicax.M",
        ),
        ("from tensorflow.distribute import *\nget_strategy()", "import *", "import replicax"),
        ("from tensorflow import *\ns = distribute.get_strategy()", "distribute.get_strategy", "replicax.get_strategy"),
        ("from tensorflow.compat.v1 import *\nVariableAggregation.SUM", "VariableAggregation.SUM", "Aggregation.SUM"),
        (
            f"{TF}tf.contrib.distribute.get_tower_context()\ntf.get_variable('v')",
            "tf.get_variable",
            "replicax.Variable(initial_value, name=name)",
        ),
        (
            f"{TF}tf.contrib.distribute.get_tower_context()\nclass O(tf.train.Optimizer): ...",
            "tf.train.Optimizer",
            "replicax.Optimizer",
        ),
    ],
)
def test_names_of_modules(lines: str, name: str, today: str) -> None:
    assert today in found_in(lines)[name]


STRATEGY = f"{TF}s = tf.distribute.MirroredStrategy()\n"


@pytest.mark.parametrize(
    ("lines", "name", "today"),
    [
        ("s.run(f)", "s.run", "s.run"),
        ("s.experimental_local_results(x)", "s.experimental_local_results", "s.local_results"),
        ("s.make_dataset_iterator(d)", "s.make_dataset_iterator", "iter(strategy.distribute_dataset(dataset))"),
        ("s.worker_devices", "s.worker_devices", "extended.worker_devices"),
        ("s.extended.update(v, f)", "s.extended.update", "s.extended.update"),
        ("t = s\nt.scope()", "t.scope", "t.scope"),
        ("t = s if x else None\nt.scope()", "t.scope", "t.scope"),
        ("t = x or s\nt.scope()", "t.scope", "t.scope"),
        ("if (t := s): t.scope()", "t.scope", "t.scope"),
        ("t, u = s, 1\nt.scope()", "t.scope", "t.scope"),
        ("def f():\n    return s\nf().scope()", "f().scope", "f().scope"),
        ("def f():\n    return 1, s\na, b = f()\nb.scope()", "b.scope", "b.scope"),
        ("def f(q):\n    q.scope()\nf(s)", "q.scope", "q.scope"),
        ("def f(a, *, q=None):\n    q.scope()\nf(1, q=s)", "q.scope", "q.scope"),
        ("class A:\n    def __init__(self, q):\n        self.q = q\n    def f(self):\n        self.q.scope()\nA(s)",
         "self.q.scope", "self.q.scope"),
        ("class A:\n    x: tf.distribute.Strategy\n    def f(self, q: 'tf.distribute.Strategy'):\n        q.scope()",
         "q.scope", "q.scope"),
        ("from typing import Optional\ndef f(q: Optional[tf.distribute.Strategy]): q.scope()", "q.scope", "q.scope"),
        ("def f(q: tf.distribute.Strategy | None): q.scope()", "q.scope", "q.scope"),
        ("def f():\n    global g\n    g = s\ndef h():\n    g.scope()", "g.scope", "g.scope"),
        ("with s.scope() as q:\n    q.reduce('sum', x)", "q.reduce", "q.reduce"),
        ("class B(tf.distribute.Strategy):\n    def f(self):\n        self.extended.update(v, f)",
         "self.extended.update", "self.extended.update"),
        ("class B(tf.distribute.Strategy): pass\nB().scope()", "B().scope", "B().scope"),
        ("c = tf.distribute.get_replica_context()\nc.all_reduce('sum', x)", "c.all_reduce", "c.all_reduce"),
        ("tf.distribute.get_replica_context().strategy.extended",
         "tf.distribute.get_replica_context().strategy.extended",
         "tf.distribute.get_replica_context().strategy.extended"),
        ("d = s.experimental_distribute_dataset(x)\ni = iter(d)\ni.get_next_as_optional()", "i.get_next_as_optional",
         "next(iterator), which ends with StopIteration"),
        ("s.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)",
         "c.replica_id_in_sync_group", "c.replica_id_in_sync_group"),
        ("def f(c): c.get_per_replica_batch_size(8)\ns.distribute_datasets_from_function(f)",
         "c.get_per_replica_batch_size", "c.get_per_replica_batch_size"),
        ("def m(t, x): t.reduce('sum', x)\ntf.distribute.get_replica_context().merge_call(m, args=(x,))",
         "t.reduce", "t.reduce"),
        ("r = tf.distribute.cluster_resolver.SimpleClusterResolver(x)\nr.task_type", "r.task_type", "nothing: jax"),
        ("r = tf.distribute.cluster_resolver.TPUClusterResolver.connect()\nr.master()", "r.master", "r.master"),
        ("c = tf.distribute.coordinator.ClusterCoordinator(s)\nc.schedule(f).fetch()", "c.schedule(f).fetch", "noth"),
        ("s.cluster_resolver.task_id", "s.cluster_resolver.task_id", "nothing: jax.distributed"),
        ("s.run(f).values", "s.run(f).values", "s.run(f).values"),
        ("s.extended._in_multi_worker_mode()", "s.extended._in_multi_worker_mode", "nothing: TensorFlow's own"),
        ("s.reduce(aggregation=1, value=x)", "reduce(aggregation=)", "reduce_op"),
        ("tf.distribute.MirroredStrategy(cross_device_ops=1)", "MirroredStrategy(cross_device_ops=)", "Communication"),
        ("tf.distribute.InputOptions(experimental_fetch_to_device=0)", "InputOptions(experimental_fetch_to_device=)",
         "nothing: elements are put"),
        ("for x, y in s.experimental_distribute_dataset(d):\n    y.values[0]; x.values()", "y.values", "y.values"),
        ("x = next(iter(s.experimental_distribute_dataset(d)))\nx.values", "x.values", "x.values"),
        ("getattr(s, 'num_towers', 1)", "s.num_towers", "s.num_replicas_in_sync"),
        ("class A:\n    def f(self): return 1, s\n    def g(self):\n        _, q = self.f()\n        q.scope()",
         "q.scope", "q.scope"),
        ("class B(tf.distribute.Strategy):\n    def f(self): super().scope()", "super().scope", "super().scope"),
        ("def f(strategy_fn):\n    strategy_fn().scope()", "strategy_fn().scope", "strategy_fn().scope"),
        ("from utils import get_strategy\nq = get_strategy()\nq.scope()", "q.scope", "q.scope"),
        ("print(f'{s.num_replicas_in_sync}')", "s.num_replicas_in_sync", "s.num_replicas_in_sync"),
        ("class A:\n    @property\n    def q(self): return self._q\n    def f(self):\n        self._q = s\n"
         "    def g(self):\n        self.q.scope()", "self.q.scope", "self.q.scope"),
        ("def f() -> tf.distribute.Strategy: return load()\nf().scope()", "f().scope", "f().scope"),
        ("s.extended.experimental_enable_get_next_as_optional = True",
         "s.extended.experimental_enable_get_next_as_optional", "nothing to do: the last, partial batch"),
    ],
)  # fmt: skip
def test_members_of_what_variables_hold(lines: str, name: str, today: str) -> None:
    found = found_in(STRATEGY + lines)
    assert today in found[name]


@pytest.mark.parametrize(
    "lines",
    [
        f"{TF}class T:\n    def run(self): pass\nT().run()",
        f"{TF}x.run(); x.reduce(1); x.values; thread.join(); d.update(y); tf.group(z)",
        "strategy.run()  # no TensorFlow: some other strategy",
        f"{TF}strategy = 'buy'\nstrategy.upper()",
        f"{TF}# tf.distribute.MirroredStrategy\n'tf.distribute.MirroredStrategy'",
        f"{TF}tf.data.Dataset; tf.config.list_physical_devices(); tf.nn.relu; tf.tpu",
        "import replicax\ns = replicax.MirroredStrategy()\ns.run(f); s.distribute_dataset(d); s.extended.mesh",
        "import distribute\ndistribute.get_strategy",
        f"{TF}Kinds.MirroredStrategy; kind == Kinds.TPUStrategy",
        f"{TF}class Kinds:\n    def MirroredStrategy(self): ...\nKinds.MirroredStrategy(); k.MirroredStrategy()",
        f"{TF}tf.get_variable('v'); tf.train.Optimizer; tf.train.get_global_step()",
        "from mine import *\nMirroredStrategy(); distribute.get_strategy()",
        f"{TF}'TF_CONFIG'\n'''TF_CONFIG'''",
    ],
)
def test_what_is_no_use(lines: str) -> None:
    assert uses_of(lines) == []


def test_what_a_program_has_put_into_tensorflow_is_its_own() -> None:
    text = f"{TF}tf.distribute.Strategy.old_run = tf.distribute.Strategy.run\ntf.distribute.Strategy.old_run(s, f)\n"
    assert set(found_in(text)) == {"tf.distribute.Strategy", "tf.distribute.Strategy.run"}


def test_what_the_program_binds_is_not_from_a_star() -> None:
    text = "from tensorflow.distribute import *\ndef get_strategy(): ...\nget_strategy()\nhas_strategy()\n"
    assert list(found_in(text)) == ["import *", "has_strategy"]


def test_a_field_of_estimators_is_marked() -> None:
    """Other configurations have such a field, too."""
    [use] = uses_of(f"{TF}config.train_distribute\n")
    assert use.is_assumed


def test_names_alone_are_marked() -> None:
    [scope, run, old] = uses_of(f"{TF}strategy.scope(); strategy.run(f); strategy.experimental_run_v2(f)")
    assert (scope.is_assumed, run.is_assumed, old.is_assumed) == (True, True, False)
    assert (run.edit, old.edit.new if old.edit else None) == (None, "run")


TOWERS = """\
import tensorflow as tf
from tensorflow.contrib.distribute import MirroredStrategy, get_tower_context

d = MirroredStrategy(num_gpus=2)

def tower_fn(x):
    context = get_tower_context()
    total = context.merge_call(lambda d, x: d.reduce(tf.VariableAggregation.SUM, x, x), x)
    return total / context.num_towers

with d.scope():
    iterator = d.distribute_dataset(dataset_fn).make_one_shot_iterator()
    results = d.call_for_each_tower(tower_fn, iterator.get_next())
    print(d.unwrap(results), d.fetch(results))
"""


def test_tower_programs_keep_their_words() -> None:
    uses = {use.name: use.counterpart for use in uses_of(TOWERS)}
    assert uses["MirroredStrategy"].today == "replicax.compat.v1.MirroredStrategy"
    assert uses["tf.VariableAggregation.SUM"].today == "replicax.compat.v1.VariableAggregation.SUM"
    assert uses["tf.VariableAggregation.SUM"].modern == "replicax.Aggregation.SUM"
    for name in ("d.scope", "d.reduce", "d.call_for_each_tower", "d.unwrap", "d.fetch", "context.num_towers"):
        assert uses[name].today == "the same", name
    assert uses["context.num_towers"].modern == "context.num_replicas_in_sync"
    assert "MirroredStrategy(num_gpus=)" not in uses


def test_contrib_of_1_13_and_later_is_not_towers() -> None:
    text = f"{TF}s = tf.contrib.distribute.MirroredStrategy(num_gpus=2)\ns.experimental_run_v2(f)\n"
    assert found_in(text)["tf.contrib.distribute.MirroredStrategy"] == "replicax.MirroredStrategy"
    assert "name the devices" in found_in(text)["MirroredStrategy(num_gpus=)"]


def test_any_program_can_be_read() -> None:
    """Nothing is found, and nothing goes wrong, in programs that have nothing to do with it."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::5]
    assert len(files) > 20
    for path in files:
        program = read_program(path)
        assert [use for use in find_uses(program.tree, program.lines) if not use.is_assumed] == [], path


def test_names_in_terms_of_themselves() -> None:
    uses_of(f"{TF}a = b\nb = a\na.scope()\ndef f(x=None):\n    return f(f(x))\nf(a).run()\n")


# --- what is written ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{TF}s = tf.distribute.get_strategy()\n",
         f"import replicax\n{TF}s = replicax.get_strategy()\n"),
        (f"'''Doc.'''\nfrom __future__ import annotations\nimport os\n{TF}tf.distribute.ReduceOp.SUM",
         f"'''Doc.'''\nfrom __future__ import annotations\nimport os\nimport replicax\n{TF}replicax.ReduceOp.SUM"),
        (f"try:\n    {TF}except ImportError:\n    tf = None\nx = tf.VariableSynchronization.ON_READ\n",
         f"import replicax\ntry:\n    {TF}except ImportError:\n    tf = None\nx = replicax.Synchronization.ON_READ\n"),
        (f"import replicax\n{TF}tf.distribute.get_strategy()\n",
         f"import replicax\n{TF}replicax.get_strategy()\n"),
        ("x.experimental_run_v2(f)  # ä\r\ny = 'é'; x.experimental_run_v2(g)\r\n",
         "x.run(f)  # ä\r\ny = 'é'; x.run(g)\r\n"),
        ("import tensorflow as tf\r\nx\t= tf.distribute . Strategy\r\ntf.distribute.Strategy\r\n",
         "import replicax\r\nimport tensorflow as tf\r\nx\t= tf.distribute . Strategy\r\nreplicax.Strategy\r\n"),
        (f"{TF}x = (tf.distribute\n     .get_strategy())\n",
         f"{TF}x = (tf.distribute\n     .get_strategy())\n"),
        (f"{TF}s = tf.distribute.get_strategy()\nz = (s\n     .experimental_local_results(x))\n",
         f"import replicax\n{TF}s = replicax.get_strategy()\nz = (s\n     .local_results(x))\n"),
        (f"def f():\n    {TF}    return tf.distribute.get_strategy()\n",
         f"import replicax\ndef f():\n    {TF}    return replicax.get_strategy()\n"),
        (f"{TF}if old:\n    tf = tf.compat.v2\ntf.distribute.get_strategy()\n",
         f"import replicax\n{TF}if old:\n    tf = tf.compat.v2\nreplicax.get_strategy()\n"),
        (f"{TF}replicax = 1\ntf.distribute.get_strategy()\n",
         f"{TF}replicax = 1\ntf.distribute.get_strategy()\n"),
        (f"{TF}s = tf.distribute.get_strategy()\ns.num_towers_per_host; s.make_dataset_iterator(d)\n",
         f"import replicax\n{TF}s = replicax.get_strategy()\ns.num_towers_per_host; s.make_dataset_iterator(d)\n"),
    ],
)  # fmt: skip
def test_only_names_that_are_sure_are_written(before: str, after: str) -> None:
    assert written_into(before) == after
    assert written_into(after) == after


GET = f"{TF}s = tf.distribute.get_strategy()\n"
FUTURE = "from __future__ import annotations"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"'''D'''; {FUTURE}; {TF}", f"'''D'''; {FUTURE}; import replicax; {TF}"),
        (f"{FUTURE}; {TF}", f"{FUTURE}; import replicax; {TF}"),
        (f"'''D'''; {TF}", f"'''D'''; import replicax; {TF}"),
        (f"'''D\nü'''; {TF}", f"'''D\nü'''; import replicax; {TF}"),
        (f"'''D'''\n{FUTURE}; {TF}", f"'''D'''\n{FUTURE}; import replicax; {TF}"),
        (f"'''D'''; {FUTURE}\n{TF}", f"'''D'''; {FUTURE}\nimport replicax\n{TF}"),
        (f"'''D'''; import os\n{TF}", f"'''D'''; import replicax; import os\n{TF}"),
        (f"import os; {TF}", f"import replicax\nimport os; {TF}"),
    ],
)
@pytest.mark.parametrize("separator", ["\n", "; "])
def test_the_import_comes_early_enough_and_not_too_early(before: str, after: str, separator: str) -> None:
    """Also where a statement that must come first shares its line with others."""
    program = f"{before.rstrip()}{separator}s = tf.distribute.get_strategy()\nprint(s)\n"
    written = f"{after.rstrip()}{separator}s = replicax.get_strategy()\nprint(s)\n"
    compile(program, "program.py", "exec")
    compile(written, "program.py", "exec")
    assert written_into(program) == written
    assert written_into(written) == written


def test_a_name_that_two_stars_may_have_brought_stays() -> None:
    brought = "from tensorflow.distribute import *\nget_strategy()\n"
    assert written_into(brought).endswith("\nreplicax.get_strategy()\n")
    assert written_into(f"from mine import *\n{brought}") == f"from mine import *\n{brought}"


@pytest.mark.parametrize(
    "text",
    [
        "class Own:\n    def experimental_run_v2(self, f): ...\nother.experimental_run_v2(f)\n",
        "class Own:\n    experimental_run_v2 = run\nother.experimental_run_v2(f)\n",
        f"{TF}class Own(tf.keras.Model):\n    def experimental_run_v2(self): ...\ns.experimental_run_v2(f)\n",
        "other.experimental_run_v2 = fake\nother.experimental_run_v2(f)\n",
        f"{TF}tf.distribute.get_strategy = fake\ns = tf.distribute.get_strategy()\n",
        f"{TF}del tf.distribute.get_strategy\n",
        f"{TF}tf = load()\ns = tf.distribute.get_strategy()\n",
        f"{TF}try:\n    pass\nexcept E as tf:\n    s = tf.distribute.get_strategy()\n",
        f"{TF}def f(*tf):\n    s = tf.distribute.get_strategy()\n",
        f"{TF}match x:\n    case [*tf]:\n        s = tf.distribute.get_strategy()\n",
    ],
)
def test_what_is_perhaps_something_else_stays(text: str) -> None:
    assert written_into(text) == text


@pytest.mark.parametrize(
    "own",
    [
        "import other as replicax\n",
        "import replicax.errors as replicax\n",
        "from other import replicax\n",
        "def f(replicax): ...\n",
        "def f(*replicax): ...\n",
        "def f():\n    def replicax(): ...\n",
        "class replicax: ...\n",
        "try:\n    pass\nexcept E as replicax:\n    pass\n",
        "for replicax in x: ...\n",
    ],
)
def test_a_replicax_of_the_programs_own(own: str, tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "program.py"
    path.write_text(GET + own)
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_text() == GET + own
    assert "program.py: has a replicax of its own, so --write leaves it alone" in capsys.readouterr().err


def test_a_program_that_would_not_compile_is_not_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(GET)
    with pytest.raises(UnreadableError, match="with the new names line 2 would not compile"):
        rewriting.write_program(read_program(path), "s = 1\nreturn\n")
    assert path.read_text() == GET


def test_towers_are_written_as_compat() -> None:
    after = written_into(TOWERS)
    assert after.startswith(f"import replicax.compat.v1\n{TF}")
    assert "d = replicax.compat.v1.MirroredStrategy(num_gpus=2)" in after
    assert "d.reduce(replicax.compat.v1.VariableAggregation.SUM, x, x)" in after
    changed = [new for old, new in zip(TOWERS.splitlines(), after.splitlines()[1:], strict=True) if old != new]
    assert len(changed) == 3
    assert written_into(after) == after


@pytest.mark.parametrize(
    "raw",
    [
        "\ufeffimport tensorflow as tf\r\ntf.distribute.get_strategy()  # ü\r\n".encode(),
        f"# -*- coding: latin-1 -*-\n{TF}x = 'ü'; tf.distribute.get_strategy()".encode("latin-1"),
        b"import tensorflow as tf\n\x0c\ndef f():\n\ttf.distribute.get_strategy() \n\n\n",
        b"import tensorflow as tf\rtf.distribute.get_strategy()\r",
    ],
)  # fmt: skip
def test_all_else_stays_byte_for_byte(tmp_path: pathlib.Path, raw: bytes) -> None:
    path = tmp_path / "program.py"
    path.write_bytes(raw)
    path.chmod(0o640)
    link = tmp_path / "link.py"
    link.symlink_to(path)
    assert main(["migrate", "--write", str(link)]) == 0
    after = path.read_bytes()
    assert after.replace(b"import replicax\r\n", b"").replace(b"import replicax\n", b"").replace(
        b"import replicax\r", b""
    ) == raw.replace(b"tf.distribute.get_strategy", b"replicax.get_strategy")
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.py", "program.py"]
    assert main(["migrate", "--write", str(link)]) == 0
    assert path.read_bytes() == after


def test_a_file_is_written_whole_or_not_at_all(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    path = tmp_path / "program.py"
    path.write_text(STRATEGY)

    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rewriting.os, "replace", fails)
    assert main(["migrate", "--write", str(path)]) == 3
    assert "program.py: can't be written (No space left on device)" in capsys.readouterr().err
    assert path.read_text() == STRATEGY
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_file_that_may_not_be_written_is_left_alone(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    path = tmp_path / "program.py"
    path.write_text(STRATEGY)
    monkeypatch.setattr(rewriting.os, "access", lambda *args: False)
    assert main(["migrate", "--write", str(path)]) == 3
    assert "can't be written (Permission denied)" in capsys.readouterr().err
    assert path.read_text() == STRATEGY


def test_a_file_that_has_changed_meanwhile_is_left_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(STRATEGY)
    program = read_program(path)
    path.write_text("print(1)\n")
    with pytest.raises(UnreadableError, match="has changed"):
        rewriting.write_program(program, "print(2)\n")
    assert path.read_text() == "print(1)\n"


# --- the command ----------------------------------------------------------------------------------------


def test_what_is_printed(tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "p.py"
    path.write_text(f"{STRATEGY}s.run(f)\ns.run(g)\ns.unwrap(x)\n")
    assert main(["migrate", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        f"{path}:2:5  tf.distribute.MirroredStrategy → replicax.MirroredStrategy; without devices"
    )
    assert lines[1].startswith(f"{path}:3:1  s.run → s.run; the Python of a step runs once")
    assert lines[2] == f"{path}:4:1  s.run → s.run"  # what differs is said once
    assert lines[3].startswith(f"{path}:5:1  s.unwrap → strategy.local_results(value)")
    assert lines[4] == (
        "4 uses of 3 names in 1 file: 3 with a name of today, 1 to be changed by hand. --write can rename 1."
    )
    assert path.read_text().startswith(STRATEGY)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("print(1)\n", 0),
        (STRATEGY, 0),
        (f"{TF}tf.tpu.experimental.initialize_tpu_system()\n", 0),
        (f"{TF}tf.distribute.Server(x)\n", 1),
        ("def f(:\n", 1),
        ("print 'hello'\n", 1),
        ("x = '\0'\n", 1),
        ("# coding: no-such-code\n", 1),
    ],
)
def test_exit_status(tmp_path: pathlib.Path, capsys, text: str, status: int) -> None:
    path = tmp_path / "p.py"
    path.write_bytes(text.encode())
    assert main(["migrate", str(path)]) == status


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", r"line 1: is no Python \(invalid syntax\)"),
        ("print 'hello'\n", "line 1: is Python 2; convert it to Python 3 first"),
        ("try:\n    f()\nexcept E, e:\n    pass\n", "is Python 2"),
        ("raise E, 'x'\n", "is Python 2"),
        ("x = 0777\n", "is Python 2"),
        ("x = `y`\n", "is Python 2"),
        ("# `word` <> 0777\ndef f(:\n", "line 2: is no Python"),
        ("x = = '`word` <>'  # `word`\n", "line 1: is no Python"),
        ("# coding: no-such-code\n", "is not text in UTF-8, or in the encoding that it names"),
        ("x = 'ü'\n".encode("latin-1"), "is not text in UTF-8, or in the encoding that it names"),
        ("(" * 2000, "is no Python"),
    ],
)
def test_files_that_are_no_programs(tmp_path: pathlib.Path, capsys, text: str | bytes, message: str) -> None:
    path = tmp_path / "p.py"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (tmp_path / "q.py").write_text(STRATEGY)
    assert main(["migrate", str(tmp_path)]) == 1  # the others are read all the same
    captured = capsys.readouterr()
    assert re.search(rf"p.py: .*{message}", captured.err), captured.err
    assert captured.err.count("\n") == 1
    assert "q.py:2:5" in captured.out


@pytest.mark.parametrize(
    ("name", "message"), [("none.py", "there is no file"), ("notes.txt", "is neither a Python file")]
)
def test_wrong_arguments(tmp_path: pathlib.Path, capsys, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["migrate", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_standard_input(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(STRATEGY.encode())))
    assert main(["migrate", "-"]) == 0
    assert capsys.readouterr().out.startswith("<stdin>:2:5  tf.distribute.MirroredStrategy → replicax.Mirr")
    assert main(["migrate", "-", "--write"]) == 2
    assert "--write can't change standard input; name a file" in capsys.readouterr().err


def test_nobody_reads_the_output(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "p.py"
    path.write_text(STRATEGY)
    program = "import sys; from replicax.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "migrate", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=100)) == (b"", 1)


def test_an_encoding_without_arrows(tmp_path: pathlib.Path, monkeypatch) -> None:
    (tmp_path / "p.py").write_text(STRATEGY)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["migrate", str(tmp_path)]) == 0
    assert rb"tf.distribute.MirroredStrategy \u2192 replicax.Mirr" in out.buffer.getvalue()


def test_one_file_of_many_is_bad(tmp_path: pathlib.Path, capsys) -> None:
    (tmp_path / "empty.py").touch()
    (tmp_path / "good.py").write_text(STRATEGY)
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    assert main(["migrate", "--write", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "bad.py: is not text in UTF-8" in captured.err
    assert "1 use of 1 name in 2 files" in captured.out
    assert (tmp_path / "good.py").read_text() == f"import replicax\n{STRATEGY.replace('tf.distribute', 'replicax')}"
    assert (tmp_path / "empty.py").read_bytes() == b""


def test_the_exit_statuses_are_in_the_help(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["migrate", "--help"])
    text = capsys.readouterr().out.partition("exit status:")[2]
    assert re.findall(r"^  (\d)  \w", text, re.MULTILINE) == ["0", "1", "2", "3"]


def test_folders_and_json(tmp_path: pathlib.Path, capsys) -> None:
    for name in ("a.py", "inner/b.py", "inner/__pycache__/c.py", ".hidden/d.py", "inner/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(STRATEGY)
    report = tmp_path / "report.json"
    assert main(["migrate", str(tmp_path), str(tmp_path / "a.py"), "--json", str(report)]) == 0
    assert "2 uses of 1 name in 2 files: 2 with a name of today" in capsys.readouterr().out
    data = json.loads(report.read_text())
    assert [use["place"] for use in data] == [f"{tmp_path}/a.py:2:5", f"{tmp_path}/inner/b.py:2:5"]
    assert data[0]["today"] == "replicax.MirroredStrategy"
    assert data[0]["status"] == "name"
    assert main(["migrate", str(tmp_path / "a.py"), "--json", str(tmp_path / "no" / "report.json")]) == 2


def notebook(*cells: str) -> str:
    kinds = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "# Title"}, *kinds], "nbformat": 4})


def test_notebooks(tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(
        notebook(
            "!pip install tensorflow\n%matplotlib inline\nimport tensorflow as tf",
            "strategy = tf.distribute.MirroredStrategy()\nif x:\n  !ls \\\n   -l\nprint('%d'\n  %(3))",
            "%%bash\nstrategy.run this",
            "%%writefile main.py\nstrategy.run(f)\ntf.distribute?",
            "this is no Python",
            "  x = 1\n  strategy.scope()\n",
        )
    )
    before = path.read_bytes()
    assert main(["migrate", "--write", str(path)]) == 1
    captured = capsys.readouterr()
    places = [line.partition("  ")[0] for line in captured.out.splitlines()[:-1]]
    assert places == [f"{path}[cell 2]:1:12", f"{path}[cell 4]:2:1", f"{path}[cell 6]:2:1"]
    assert "n.ipynb: cell 5: line 1: is no Python" in captured.err
    assert "a notebook, which --write leaves alone" in captured.err
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": [{}]}', '{"worksheets": []}'])
def test_what_is_no_notebook(tmp_path: pathlib.Path, capsys, text: str) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(text)
    assert main(["migrate", str(path)]) == 1
    assert "is not a notebook of version 4" in capsys.readouterr().err


# --- the page -------------------------------------------------------------------------------------------


def test_the_page_is_what_the_table_says() -> None:
    """If this fails: python docs/migrate_page.py."""
    page = runpy.run_path(PAGE)["page"]
    text = (ROOT / "docs" / "migrate.md").read_text()
    assert page(text) == text


def scripts() -> list[str]:
    """The five scripts of the page: 2.x before and after, 1.x before, after and in today's words."""
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```$", (ROOT / "docs" / "migrate.md").read_text(), re.M | re.DOTALL)
    return [block for block in blocks if ">>>" not in block]


@pytest.mark.parametrize(
    ("index", "printed"),
    [(1, "loss 0.0654 after 128 examples"), (3, "w 3.000, 20 steps of towers"), (4, "w 3.000, 20 steps of replicas")],
)
def test_what_the_scripts_print(index: int, printed: str, capsys) -> None:
    exec(compile(scripts()[index], "migrate.md", "exec"), {})
    assert capsys.readouterr().out == f"{printed}\n"
    assert f"`{printed}`" in (ROOT / "docs" / "migrate.md").read_text()


@pytest.mark.parametrize(
    ("before", "after", "by_hand"),
    [
        (
            0,
            1,
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
            2,
            3,
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
def test_what_is_changed_by_hand_in_the_scripts(before: int, after: int, by_hand: list[str]) -> None:
    """All that ``--write`` leaves to do: what the page says has changed, and nothing else."""
    written = written_into(scripts()[before]).replace("replicax.compat.v1.", "tf.").splitlines()
    diff = difflib.ndiff([line.strip() for line in written], [line.strip() for line in scripts()[after].splitlines()])
    assert [line[2:] for line in diff if line.startswith("- ")] == by_hand
