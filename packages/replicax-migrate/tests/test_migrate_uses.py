"""What ``replicax migrate`` finds in programs."""

from __future__ import annotations

import pathlib
import sysconfig

import pytest

from replicax_migrate.source_files import read_program
from replicax_migrate.uses import find_uses
from tensorflow_programs import STRATEGY, TF, TOWERS, found_in, uses_of, written_into


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
        (f"{TF}tf.tpu.experimental.embedding.SGD()", "tf.tpu.experimental.embedding.SGD", "nothing y"),
        (f"{TF}tf.nn.compute_average_loss(x)", "tf.nn.compute_average_loss", "compute_average_loss"),
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
        ("import os\nos.environ['TF_CONFIG'] = '{}'", "'TF_CONFIG'", "replicax.initialize_workers"),
        (f"{TF}tf.train.Checkpoint(model=m)", "tf.train.Checkpoint", "replicax.Checkpoint(**objects)"),
        (f"{TF}c = tf.train.Checkpoint(m=m)\nc.restore(p)", "c.restore", "restore(path)"),
        (
            f"{TF}m = tf.train.CheckpointManager(c, d, 3)\nm.restore_or_initialize()",
            "m.restore_or_initialize",
            "restore_latest(), which",
        ),
        (f"{TF}tf.compat.v1.train.Saver()", "tf.compat.v1.train.Saver", "replicax.Checkpoint, of a list"),
        (f"{TF}tf.train.MonitoredTrainingSession()", "tf.train.MonitoredTrainingSession", "replicax.train, with a"),
        ("from keras.callbacks import TensorBoard\nTensorBoard(d)", "TensorBoard", "replicax.train(…, logs=folder)"),
        (
            "from keras.callbacks import TensorBoard\nTensorBoard(d)",
            "TensorBoard",
            "the same for model.fit, with KERAS_BACK",
        ),
        (f"{TF}m = tf.keras.Sequential([])", "tf.keras.Sequential", "the same class of Keras 3, on JAX"),
        (f"{TF}m = tf.keras.Sequential([])\nm.fit(x, y)", "m.fit", "the same"),
        (f"{TF}class M(tf.keras.Model): ...\nM().evaluate(x)", "M().evaluate", "the same"),
        (f"{TF}def f(m): m.compile('adam', loss='mse')", "m.compile", "the same"),
        (f"{TF}def f(m): m.fit(data, epochs=2)", "m.fit", "the same"),
        (
            "from tensorflow.keras import mixed_precision as p\np.set_global_policy(x)",
            "p.set_global_policy",
            "keras.config",
        ),
        (
            f"{TF}tf.keras.mixed_precision.LossScaleOptimizer(o)",
            "tf.keras.mixed_precision.LossScaleOptimizer",
            "float16",
        ),
        (f"{TF}tf.summary.scalar('loss', x)", "tf.summary.scalar", "replicax.train(…, logs=folder)"),
        (f"{TF}class C(tf.keras.callbacks.Callback): ...", "tf.keras.callbacks.Callback", "replicax.Callback"),
        (
            f"{TF}tf.config.experimental_connect_to_cluster(r)",
            "tf.config.experimental_connect_to_cluster",
            "replicax.initialize_workers(cluster_resolver)",
        ),
        (f"{TF}tf.estimator.train_and_evaluate(e, t, v)", "tf.estimator.train_and_evaluate", "replicax.train(step"),
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
        ("r = tf.distribute.cluster_resolver.SimpleClusterResolver(x)\nr.task_type", "r.task_type", ""),
        ("r = tf.distribute.cluster_resolver.TPUClusterResolver.connect()\nr.master()", "r.master", "r.master"),
        ("c = tf.distribute.coordinator.ClusterCoordinator(s)\nc.schedule(f).fetch()", "c.schedule(f).fetch",
         "c.schedule(f).fetch"),
        ("s.cluster_resolver.task_id", "s.cluster_resolver.task_id", ""),
        ("s.run(f).values", "s.run(f).values", "s.run(f).values"),
        ("s.extended._in_multi_worker_mode()", "s.extended._in_multi_worker_mode", "nothing: TensorFlow's own"),
        ("s.reduce(aggregation=1, value=x)", "reduce(aggregation=)", "reduce_op"),
        ("tf.distribute.MirroredStrategy(cross_device_ops=1)", "MirroredStrategy(cross_device_ops=)", "Communication"),
        ("tf.distribute.InputOptions(experimental_fetch_to_device=0)", "InputOptions(experimental_fetch_to_device=)",
         "leave it out: elements are put"),
        ("tf.distribute.cluster_resolver.TPUClusterResolver(zone='')", "TPUClusterResolver(zone=)", "leave it out"),
        ("tf.distribute.cluster_resolver.TPUClusterResolver.connect(zone='')", "connect(zone=)", "leave it out"),
        ("tf.distribute.TPUStrategy(experimental_spmd_xla_partitioning=True)",
         "TPUStrategy(experimental_spmd_xla_partitioning=)", "leave it out"),
        ("tf.distribute.experimental.partitioners.MinSizePartitioner(bytes_per_string=1)",
         "MinSizePartitioner(bytes_per_string=)", "leave it out"),
        ("s.extended.colocate_vars_with(colocate_with_variable=v)",
         "colocate_vars_with(colocate_with_variable=)", "variable"),
        ("s.experimental_make_numpy_dataset(x, session=None)", "experimental_make_numpy_dataset(session=)", "leave it"),
        ("c = tf.distribute.experimental.coordinator.ClusterCoordinator(s)\nc.fetch(val=x)", "fetch(val=)", "values"),
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


def test_members_on_the_way_to_others_are_no_uses_of_their_own() -> None:
    found = found_in(STRATEGY + "s.cluster_resolver.task_id\ns.extended.update(v, f)")
    assert found.keys() - found_in(STRATEGY) == {"s.cluster_resolver.task_id", "s.extended.update"}


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


def test_names_that_are_tensorflows_in_one_branch_only_are_marked() -> None:
    text = f"{TF}d = tf.distribute if x else torch.distributed\n"
    [op, get, scope, run] = uses_of(f"{text}d.ReduceOp\ns = d.get_strategy()\ns.scope(); s.experimental_run_v2(f)\n")
    assert [use.is_assumed for use in (op, get, scope, run)] == [True, True, True, False]
    assert [use.is_assumed for use in uses_of(f"{TF}d = tf.distribute if x else None\nd.ReduceOp\n")] == [False]
    assert uses_of(f"{text}d.init_process_group()\n") == []  # perhaps a name of the other library
    both = (
        "try:\n    from tensorflow.distribute import ReduceOp\nexcept E:\n    from tensorflow.python import ReduceOp\n"
    )
    assert not any(use.is_assumed for use in uses_of(f"{both}ReduceOp.SUM"))  # two releases of TensorFlow


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


@pytest.mark.parametrize("imports", ["", TF])
def test_towers_of_something_else_are_marked(imports: str) -> None:
    uses = uses_of(f"{imports}print(args.num_towers, cell.tower_id)\n")
    assert [(use.is_assumed, use.edit, use.counterpart.modern) for use in uses] == [(True, None, None)] * 2


def test_a_program_with_towers_of_its_own_has_none_of_tensorflows() -> None:
    text = f"{TF}class M(tf.keras.Model):\n    def f(self): self.num_towers = 2\n"
    assert found_in(f"{text}s = tf.distribute.get_strategy()\ns.scope()\n")["s.scope"] == "s.scope"


def test_variables_of_estimators_are_not_towers() -> None:
    """Such a program may name a strategy of contrib, and have no other word of the tower API."""
    text = f"{TF}s = tf.contrib.distribute.MirroredStrategy()\nv = tf.get_variable('v')\n"
    assert list(found_in(text)) == ["tf.contrib.distribute.MirroredStrategy"]
    written = written_into(text)
    assert "replicax.compat.v1.MirroredStrategy" in written
    assert written_into(written) == written


def test_a_program_without_towers_has_none_after_writing() -> None:
    text = f"{TF}s = tf.distribute.MirroredStrategy()\nr = tf.contrib.cluster_resolver.TPUClusterResolver()\n"
    written = written_into(text)
    assert "s = replicax.MirroredStrategy()" in written
    assert "compat" not in written
    assert written_into(written) == written
