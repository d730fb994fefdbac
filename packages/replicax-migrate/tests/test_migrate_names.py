"""What takes the place of each name: there is an answer for every one, and what it names is there."""

from __future__ import annotations

import inspect
import pathlib
import re

import replicax
from replicax.compat import v1
from replicax_migrate.counterparts import (
    TF_CONFIG,
    TOWER_CLASSES,
    Counterpart,
    has,
    of_member,
    of_path,
    of_tower_name,
    paths,
    public,
)
from replicax_migrate.differences import DIFFERENCES
from replicax_migrate.old_names import NAMES
from replicax_migrate.original_names import AROUND_TOWERS, KINDS, MEMBERS, MODERN, TOWER, TOWER_MEMBERS
from replicax_migrate.run_names import DIFFERENCES_OF_RUNS, MEMBERS_OF_RUNS, RUNS, STEPS, TODAY_OF_RUNS, TODAY_OF_STEPS

RELEASED = {
    name.partition(" ")[0]: (name.partition(" ")[2], members.split())
    for line in (pathlib.Path(__file__).with_name("tensorflow_names.txt")).read_text().splitlines()
    if not line.startswith("#")
    for name, _, members in (line.partition(":"),)
}
"""The public names of TensorFlow: their releases, and members."""


def test_every_public_name_has_an_answer() -> None:
    for name, (releases, members) in RELEASED.items():
        is_tower = releases.startswith(("1.9", "1.10", "1.11", "1.12"))
        whole = of_path(name.removeprefix("tf."), is_tower)
        assert whole is not None, name
        kind = KINDS.get(name.rpartition(".")[2])
        for member in members:
            assert of_member(kind or "", member, is_tower) is not None or not whole.is_renaming, (name, member)


def test_no_member_is_invented() -> None:
    private = {  # what methods return, and members of values, have no pages of their own
        "DistributedDataset": {"make_one_shot_iterator", "make_initializable_iterator"},
        "DistributedIterator": {"initialize", "initializer"},
        "StrategyExtended": {"experimental_enable_get_next_as_optional", "steps_per_run", "tpu_hardware_feature"},
        "ValueContext": {"replica_id"},
    }
    for kind in {*MEMBERS, *TOWER_MEMBERS}:
        names = [members for name, (_, members) in RELEASED.items() if KINDS.get(name.rpartition(".")[2]) == kind]
        released = {member for members in names for member in members}
        ours = {*MEMBERS.get(kind, "").split(), *TOWER_MEMBERS.get(kind, "").split()}
        assert not released or ours - released - private.get(kind, set()) == set(), kind


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
    answers = [of_path(path) for path in paths({**MODERN, **RUNS}) | paths(STEPS)] + [
        of_path(path, True) for path in paths({**TOWER, **AROUND_TOWERS})
    ]
    answers += [of_tower_name(name) for name in v1.__all__] + [TF_CONFIG]
    answers += [of_member(kind, name) for kind, names in MEMBERS.items() for name in names.split()]
    answers += [of_member(kind, name, True) for kind, names in TOWER_MEMBERS.items() for name in names.split()]
    answers += [of_member(kind, name) for kind, names in MEMBERS_OF_RUNS.items() for name in names]
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


def test_tower_names_are_today_what_their_own_documentation_says() -> None:
    members = [(kind, name) for kind in TOWER_CLASSES for name in TOWER_MEMBERS[kind].split() if kind != "Aggregation"]
    for kind, name in members:
        answer = of_member(kind, name, is_tower=True)
        assert answer is not None, (kind, name)
        owners = [each for each in TOWER_CLASSES[kind] if hasattr(each, name)]
        assert bool(owners) == (answer.modern is not None), (kind, name)
        dotted = re.search(r"\w+(?:(?:\(\))?\.\w+)+", answer.modern or "")
        if dotted is not None and not name.startswith("_"):
            said = inspect.getdoc(inspect.getattr_static(owners[0], name)).partition("\n")[0]
            assert re.search(rf"\b{dotted[0].rpartition('.')[2]}\b", said), (said, answer.modern)


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
        owner = public(kind)
        for name in names.split():
            if owner is not None and hasattr(owner, name):
                assert name not in NAMES.get(kind, {})


def test_differences_belong_to_names() -> None:
    for name in DIFFERENCES:
        kind, _, member = name.rpartition(".")
        if kind:
            assert of_member(kind, member) is not None or hasattr(public(kind), member)
        else:
            assert name in {*paths(MODERN).values(), *paths(TOWER).values()}


def test_names_of_runs_are_told_of_and_never_replaced() -> None:
    assert {*TODAY_OF_RUNS} == {*paths(RUNS).values()}
    assert {*DIFFERENCES_OF_RUNS} <= {*TODAY_OF_RUNS}
    assert not {*paths(STEPS)} & {*paths(RUNS), *paths(MODERN)}
    for path in paths(RUNS) | paths(STEPS):
        for is_tower in (False, True):
            answer = of_path(path, is_tower)
            assert answer is not None
            assert answer.is_renaming == (is_tower and path in paths(AROUND_TOWERS))
            assert not answer.is_nothing
    for kind, members in MEMBERS_OF_RUNS.items():
        for name, (today, _) in members.items():
            assert not of_member(kind, name).is_renaming
            member = re.match(r"(\w+)(\(|,|$)", today)
            assert member is None or has(public(kind), member[1]) or "checkpoint" in member[1], (kind, name)


def test_arguments_that_answers_name_are_there() -> None:
    told = [*TODAY_OF_RUNS.values(), *TODAY_OF_STEPS.values()]
    told += [today for members in MEMBERS_OF_RUNS.values() for today, _ in members.values()]
    calls = r"replicax\.(train|CheckpointManager)\(([^()]*(?:\([^()]*\))?[^()]*)\)"
    for what, arguments in re.findall(calls, " ".join(told)):
        parameters = inspect.signature(public(what)).parameters
        for argument in re.findall(r"(\w+)=", arguments):
            assert argument in parameters, (what, argument)
