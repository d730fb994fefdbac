"""``replicax migrate``: the table of names, what is found in programs, and what is written into them."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pathlib
import re
import runpy
import stat
import sysconfig
import textwrap

import pytest

import replicax
from replicax.cli import main
from replicax.cli.migration import rewriting
from replicax.cli.migration.counterparts import Counterpart, has, of_member, of_path, paths
from replicax.cli.migration.differences import DIFFERENCES
from replicax.cli.migration.original_names import COMPAT, COMPAT_KINDS, KINDS, MEMBERS, MODERN, TOWER, TOWER_MEMBERS
from replicax.cli.migration.rewriting import rewritten
from replicax.cli.migration.source_files import UnreadableError, parse, read_program
from replicax.cli.migration.uses import NameUse, find_uses
from replicax.compat import v1
from replicax.compat.v1 import tower_datasets
from replicax.old_names import NAMES

ROOT = pathlib.Path(__file__).parents[2]
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


def test_all_that_the_documents_name_has_an_answer() -> None:
    """By the table that the tests of the tower API have made of the four documents."""
    table = ROOT / "tests" / "compat" / "documents.json"
    for document in json.loads(table.read_text()).values() if table.exists() else ():
        is_tower = "contrib" in document["path"]
        assert of_path(document["path"].removeprefix("tf."), is_tower) is not None
        for member in {*document["properties"], *document["methods"]} - {"__init__"}:
            assert of_member("Strategy", member, is_tower) is not None, member


@pytest.mark.parametrize("kind", sorted({*MEMBERS, *TOWER_MEMBERS}))
def test_no_member_is_invented(kind: str) -> None:
    released = {m for n, (_, members) in RELEASED.items() if KINDS.get(n.rpartition(".")[2]) == kind for m in members}
    ours = {*MEMBERS.get(kind, "").split(), *TOWER_MEMBERS.get(kind, "").split()}
    private = {  # what methods return, and members of values, have no pages of their own
        "DistributedDataset": {"make_one_shot_iterator", "make_initializable_iterator"},
        "DistributedIterator": {"initialize", "initializer"},
        "StrategyExtended": {"steps_per_run", "tpu_hardware_feature"},
    }
    if released:
        assert ours - released - private.get(kind, set()) == set()


def test_what_takes_their_place_is_there() -> None:
    """Names of today in the answers exist; those of ``compat.v1`` are those that it promises."""
    answers = [of_path(path) for path in paths(MODERN)] + [of_path(path, True) for path in paths(TOWER)]
    answers += [of_member(kind, name) for kind, names in MEMBERS.items() for name in names.split()]
    answers += [of_member(kind, name) for kind, names in TOWER_MEMBERS.items() for name in names.split()]
    for answer in answers:
        assert isinstance(answer, Counterpart)
        for dotted in re.findall(r"\breplicax\.(?!compat)(\w+(?:\.[A-Z]\w+)?)", f"{answer.today} {answer.modern}"):
            owner = replicax
            for part in dotted.split("."):
                owner = getattr(owner, part)
        for name in re.findall(r"\breplicax\.compat\.v1\.(\w+)", answer.today):
            assert name in COMPAT.split()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in COMPAT_KINDS.split() for name in TOWER_MEMBERS[kind].split() if kind != "Aggregation"],
)
def test_tower_names_are_today_what_their_own_documentation_says(kind: str, name: str) -> None:
    classes = {
        "Strategy": (v1.DistributionStrategy, v1.TPUStrategy),
        "ReplicaContext": (v1.TowerContext,),
        "MultiStepContext": (v1.MultiStepContext,),
        "DistributedDataset": (tower_datasets.PerDeviceDataset,),
        "DistributedIterator": (tower_datasets.PerDeviceIterator,),
    }[kind]
    answer = of_member(kind, name, is_tower=True)
    assert answer is not None
    said = [inspect.getdoc(inspect.getattr_static(each, name)) for each in classes if hasattr(each, name)]
    assert bool(said) == (answer.modern is not None)
    dotted = re.search(r"\w+(?:(?:\(\))?\.\w+)+", answer.modern or "")
    if dotted is not None:
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


# What of the oracle's differences is said under which name, or, after "page:", on the page.
TOLD = {
    "variables: on_write, none": "VariableAggregation",
    "variables: on_write, sum": "VariableAggregation",
    "variables: on_read, none": "VariableSynchronization",
    "variables in detail: a trainable on-read": "VariableSynchronization",
    "variables in detail: an integer on-read sum": "page:integer",
    "variables in detail: an on-write variable is assigned a per-replica": "page:from across",
    "variables in detail: an on-write sum variable is assigned a per-replica": "page:from across",
    "variables in detail: a float is assigned": "page:TypeError",
    "variables in detail: made anew": "Strategy.run",
    "variables in detail: one replica": "page:single copy",
    "reducing: ": "Strategy.reduce",
    "gathering: a gather after one that failed": "ReplicaContext.all_reduce",
    "gathering: ": "Strategy.gather",
    "collectives: all_reduce": "ReplicaContext.all_reduce",
    "collectives: all_gather": "ReplicaContext.all_gather",
    "collectives: a collective on one replica": "ReplicaContext.merge_call",
    "merge_call: ": "ReplicaContext.merge_call",
    "contexts: scopes left": "Strategy.scope",
    "contexts: an error on one replica": "Strategy.run",
    "contexts: local_results": "Strategy.experimental_local_results",
    "contexts: distribute_values": "Strategy.experimental_distribute_values_from_function",
    "contexts: apply_gradients": "page:apply_gradients",
    "contexts: a variable made outside": "get_strategy",
    "run: ": "Strategy.run",
    "values and nests: distribute_values": "Strategy.experimental_distribute_values_from_function",
    "values and nests: a per-replica value has no truth": "PerReplica.values",
    "extended: reduce_to": "StrategyExtended.reduce_to",
    "extended: batch_reduce_to": "StrategyExtended.batch_reduce_to",
    "extended: update": "StrategyExtended.update",
    "extended: colocate": "StrategyExtended.colocate_vars_with",
    "extended: value_container": "StrategyExtended.value_container",
    "training: compute_average_loss": "compute_average_loss",
    "training: the gradient": "page:gradient",
    "training: apply_gradients": "page:apply_gradients",
    "input: the next element": "DistributedIterator.get_next",
    "input: distributed inside": "Strategy.experimental_distribute_dataset",
}


def test_all_that_the_oracle_has_found_is_told() -> None:
    text = (ROOT / "oracle" / "differences.md").read_text().partition("\n## Where Replicax's exact")[0]
    programs = [row.split(" | ")[0].removeprefix("| ") for row in text.splitlines() if re.match(r"\| \w[^|]*: ", row)]
    assert len(programs) > 50
    page = (ROOT / "docs" / "migrate.md").read_text()
    used = set()
    for program in programs:
        title = next((title for title in TOLD if program.startswith(title)), None)
        assert title is not None, program
        used.add(title)
        where = TOLD[title]
        assert where.removeprefix("page:") in page if where.startswith("page:") else where in DIFFERENCES
    assert used == set(TOLD)


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
        ("r = tf.distribute.cluster_resolver.SimpleClusterResolver(x)\nr.task_type", "r.task_type", "r.task_type"),
        ("r = tf.distribute.cluster_resolver.TPUClusterResolver.connect()\nr.master()", "r.master", "r.master"),
        ("c = tf.distribute.coordinator.ClusterCoordinator(s)\nc.schedule(f).fetch()", "c.schedule(f).fetch", "noth"),
        ("s.cluster_resolver.task_id", "s.cluster_resolver.task_id", "s.cluster_resolver.task_id"),
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
    ],
)
def test_what_is_no_use(lines: str) -> None:
    assert uses_of(lines) == []


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


def test_a_program_that_would_not_compile_is_not_written(tmp_path: pathlib.Path, capsys) -> None:
    path = tmp_path / "program.py"
    text = f'"""D"""; from __future__ import annotations; {TF.strip()}; s = tf.distribute.get_strategy()\n'
    path.write_text(text)
    assert main(["migrate", "--write", str(path)]) == 3
    assert path.read_text() == text
    assert "can't be written (with the new names line 2 would not compile: from __future__" in capsys.readouterr().err


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
        ("# coding: no-such-code\n", "is not text in the encoding that it names"),
        ("x = 'ü'\n".encode("latin-1"), "is not text in the encoding that it names"),
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
    page = runpy.run_path(str(ROOT / "docs" / "migrate_page.py"))["page"]
    text = (ROOT / "docs" / "migrate.md").read_text()
    assert page(text) == text


def test_the_script_in_the_tower_words(capsys) -> None:
    """The page has it in a block that is not run with the others."""
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / "migrate.md").read_text(), re.MULTILINE | re.DOTALL)
    [script] = [block for block in blocks if "replicax.compat" in block]
    compiled = compile(script, "migrate.md", "exec")
    exec(compiled, {})
    assert capsys.readouterr().out == "w 3.000, 20 steps of towers\n"


def test_the_tower_names_are_there() -> None:
    owners = {
        "Strategy": v1.TPUStrategy,
        "ReplicaContext": v1.TowerContext,
        "MultiStepContext": v1.MultiStepContext,
        "DistributedDataset": v1.PerDeviceDataset,
        "DistributedIterator": v1.PerDeviceIterator,
        "Aggregation": v1.VariableAggregation,
    }
    assert [name for name in COMPAT.split() if not hasattr(v1, name)] == []
    for kind in COMPAT_KINDS.split():
        answers = {name: of_member(kind, name, True) for name in TOWER_MEMBERS[kind].split()}
        same = [name for name, answer in answers.items() if answer and answer.today == "the same"]
        assert [name for name in same if not has(owners[kind], name)] == []
