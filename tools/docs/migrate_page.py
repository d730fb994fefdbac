"""Write the tables of ``docs/migrate.md`` anew, with what ``replicax migrate`` says of each name.

python tools/docs/migrate_page.py

Which names there are is read from three lists: the checklist that the tests' parser has made of the documents
(``tests/compat/documents.json``), the public names of TensorFlow's releases (``tensorflow_names.txt``), and
what ``replicax.compat.v1`` has. A name of theirs that has no counterpart is an error.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from replicax.compat import v1
from replicax_migrate.counterparts import STAYS_FOR_FIT, Counterpart, of_member, of_path, of_tower_name, paths
from replicax_migrate.original_names import AROUND_TOWERS, KINDS, MEMBERS, MODERN, TOWER, TOWER_MEMBERS
from replicax_migrate.run_names import MEMBERS_OF_RUNS, RUNS, STEPS

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "migrate.md"
DOCUMENTS = _ROOT / "tests" / "compat" / "documents.json"
RELEASES = _ROOT / "packages" / "replicax-migrate" / "tests" / "tensorflow_names.txt"
_WRITTEN = {
    "Strategy": "a strategy",
    "StrategyExtended": "`strategy.extended`",
    "ReplicaContext": "the replica context",
}


_KINDS = {**KINDS, "PerDeviceIterator": "DistributedIterator", "Optimizer": "Optimizer"}
_NESTED = {"GATE_GRAPH", "GATE_NONE", "GATE_OP", "OFF_CLUSTER", "WITHIN_CLUSTER", "create", "register"}
"""Classes and constants inside of classes, and members of ``rpc.Server``, which is another class."""

_INSIDE = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_CODE = re.compile(
    rf"(?<![\w`.])(?:(?:replicax|strategy|extended|iterator|jax|jnp|keras|optax|optimizer|tf)(?:\.\w+(?:{_INSIDE})?)+"
    rf"|(?:close|iter|next|restore|save|wait)(?:{_INSIDE})|[a-z]+(?:_[a-z]+)+(?:\(\))?=?|[A-Z]+(?:_[A-Z]+)+(?:=\w+)?|TPUStrategy"
    r"|\w+='?\w*'?|(?!Tensor)(?:[A-Z][a-z]+){2,}|\[\])"
)
"""What is code in an answer: dotted names and calls, names with an underscore, arguments, classes."""


def checklist(is_tower: bool) -> dict[str, set[str]]:
    """All names of a generation: by what has them, a kind of value, or ``""`` for modules (their last names)."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for document in json.loads(DOCUMENTS.read_text()).values():
        if ("contrib" in document["path"]) != is_tower:
            continue
        found[""] |= {document["path"].rpartition(".")[2], *document["names"]} | {document["inherits"]} - {None}
        found["Strategy"] |= {*document["properties"], *document["methods"]} - {"__init__"}
        for owner, names in document["members"].items():
            found[_KINDS[owner]] |= set(names)
        found["Aggregation"] |= {name for name in document["aggregations"] if name.isupper()}
    for line in RELEASES.read_text().splitlines():
        name, _, members = line.partition(":")
        name, _, releases = name.partition(" ")
        last = name.rpartition(".")[2]
        is_first = releases.startswith(("1.9", "1.10", "1.11", "1.12"))
        if line.startswith("#") or is_first != is_tower or name.startswith("tf.tpu.experimental.embedding."):
            continue  # an embedding's names have one answer for all of them
        found[""].add(last)
        if not is_first and last in KINDS:  # the strategies of contrib outlived the tower API, with other members
            found[KINDS[last]] |= {member for member in members.split() if member not in _NESTED}
    if is_tower:
        found[""] |= set(v1.__all__)
    return found


def page(text: str) -> str:
    """The page with its tables as they ought to be."""
    for name, table in (("2.x", modern()), ("1.x", towers()), ("runs", runs())):
        begin, end = f"<!-- {name}: python tools/docs/migrate_page.py -->", f"<!-- end of {name} -->"
        inside = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, count = inside.subn(lambda _, new=f"{begin}\n\n{table}\n\n{end}": new, text)
        assert count == 1, f"the page has no place for the table of {name}"
    return text


def modern() -> str:
    listed = checklist(is_tower=False)
    _check_listed(listed[""], {*paths(MODERN).values(), *paths(TOWER).values()})
    return "\n\n".join([*_modules(MODERN, _FAMILIES), *_classes(_modern_members(listed))])


def runs() -> str:
    classes = {kind: _members(kind, members, False) for kind, members in MEMBERS_OF_RUNS.items()}
    tables = [*_modules(RUNS, _FAMILIES_OF_RUNS), *_modules(STEPS, _FAMILIES_OF_STEPS)]
    return "\n\n".join([*tables, *_classes(classes)])


def towers() -> str:
    """What :mod:`replicax.compat.v1` has, and what has another answer than a name of 2.x."""
    listed = checklist(is_tower=True)
    known = {*paths(TOWER).values(), *paths(AROUND_TOWERS).values()}
    further = sorted(listed[""] - known)
    _check_listed(set(further), set(v1.__all__))
    told = {name: _of_path(module, name, False) for module, names in MODERN.items() for name in names.split()}
    answers = {name: of_tower_name(name) for name in further}
    for module, names in [*TOWER.items(), *AROUND_TOWERS.items()]:
        for name in names.split():
            answer = _of_path(module, name, True)
            if answer.modern is not None or name not in told or told[name].today != answer.today:
                answers[name] = answer
    parts = [_table("Names of modules", ((name, _tower_words(name, answers[name])) for name in sorted(answers)))]
    members = {
        kind: _members(kind, {*TOWER_MEMBERS.get(kind, "").split(), *listed[kind]}, True)
        for kind in dict.fromkeys((*TOWER_MEMBERS, *sorted(listed.keys() - {""})))
    }
    parts.append(_table("Methods of a strategy", ((n, _tower_words(n, a)) for n, a in members.pop("Strategy").items())))
    rows = [
        (f"{_TOWER_CLASSES.get(kind, kind)}.{name}", words)
        for kind, each in members.items()
        if not _is_of_class(each, _of_class(kind))
        for name, words in ((name, _tower_words(name, answer)) for name, answer in each.items())
        if words != "the same"
    ]
    parts.append(_table("Of other classes", rows))
    return "\n\n".join(parts)


_FAMILIES = {
    "`tf.distribute` and its modules": ("distribute",),
    "`tf.tpu` and its modules": ("tpu",),
    "Elsewhere in `tf`": ("", "config", "data", "nn", "keras", "train"),
}
_FAMILIES_OF_RUNS = {
    "`tf.train` and `tf.estimator`": ("train", "estimator"),
    "`tf.keras.callbacks`, in a loop of your own": ("keras.callbacks",),
    "Keras, mixed precision and summaries": ("keras", "mixed_precision", "summary"),
}
_FAMILIES_OF_STEPS = {
    "In a training step: `tf`, `tf.data`, `tf.nn` and others": (
        *("", "config", "data", "debugging", "nn", "profiler", "random", "saved_model", "summary", "train"),
    ),
    "In a training step: `tf.keras`": ("keras", "losses", "metrics", "optimizers"),
}
"""The modules of a table, with those inside of them; each is in the first that has it, but a longer name goes first."""

_CLASSES = {"PerReplica": "DistributedValues"}
_TOWER_CLASSES = {"ReplicaContext": "TowerContext", "Aggregation": "VariableAggregation"}
"""What the classes of values were called."""


def _modules(table: dict[str, str], families: dict[str, tuple[str, ...]]) -> Iterator[str]:
    places = {module: title for title, modules in families.items() for module in modules}
    found: dict[str, dict[str, Counterpart]] = {title: {} for title in families}
    for module, names in table.items():
        parts = module.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        title = next(places[prefix] for prefix in prefixes if prefix in places)
        for name in names.split():
            answer = _of_path(module, name, False)
            if module.startswith("keras.callbacks"):
                answer = Counterpart(answer.today.removeprefix(STAYS_FOR_FIT))
            assert found[title].setdefault(name, answer) == answer, f"two answers for {name}"
    for title, answers in found.items():
        yield _table(title, ((name, _cell(name, answers[name], {})) for name in sorted(answers)))


def _modern_members(listed: dict[str, set[str]]) -> dict[str, dict[str, Counterpart]]:
    kinds = dict.fromkeys((*MEMBERS, *sorted(listed.keys() - {""})))
    return {kind: _members(kind, {*MEMBERS.get(kind, "").split(), *listed[kind]}, False) for kind in kinds}


def _classes(classes: dict[str, dict[str, Counterpart]]) -> Iterator[str]:
    """A table for each class that has a title, and one for the others without what is the same or has no class."""
    rows: list[tuple[str, str]] = []
    for kind, answers in classes.items():
        cells = [(name, _cell(name, answer, answers)) for name, answer in answers.items()]
        if kind in _WRITTEN:
            yield _table(f"Of {_WRITTEN[kind]}", cells)
        elif not _is_of_class(answers, _of_class(kind)):
            rows += [
                (f"{_CLASSES.get(kind, kind)}.{name}", cell)
                for name, cell in cells
                if not _is_same(name, cell, _of_class(kind))
            ]
    yield _table("Of other classes", rows)


def _of_class(kind: str) -> Counterpart | None:
    name = next((name for name, given in KINDS.items() if given == kind), kind)
    module = next((module for module, names in {**MODERN, **TOWER, **RUNS}.items() if name in names.split()), None)
    return None if module is None else _of_path(module, name, False)


def _is_same(name: str, cell: str, of_class: Counterpart | None) -> bool:
    """Whether a member keeps its name, and differs in nothing but what is told of its class."""
    return (
        cell in ("the same", name) or cell == f"the same; {_CODE.sub(_in_code, (of_class and of_class.differs) or '')}"
    )


def _is_of_class(answers: dict[str, Counterpart], of_class: Counterpart | None) -> bool:
    return of_class is not None and {answer.today for answer in answers.values()} == {of_class.today}


def _check_listed(names: set[str], known: set[str]) -> None:
    if names - known:
        raise LookupError(f"no counterpart is told of {', '.join(sorted(names - known))}")


def _of_path(module: str, name: str, is_tower: bool) -> Counterpart:
    found = of_path(f"{module}.{name}".lstrip("."), is_tower)
    if found is None:
        raise LookupError(f"no counterpart is told of {module}.{name}")
    return found


def _members(kind: str, names: Iterable[str], is_tower: bool) -> dict[str, Counterpart]:
    answers = {name: of_member(kind, name, is_tower) for name in sorted(names)}
    if missing := [name for name, answer in answers.items() if answer is None]:
        raise LookupError(f"no counterpart is told of {', '.join(missing)} of {kind}")
    return {name: answer for name, answer in answers.items() if answer is not None}


def _cell(name: str, answer: Counterpart, others: dict[str, Counterpart]) -> str:
    """What takes a name's place and how it differs, unless that stands at another name of the table."""
    referred = next((n for n in sorted(others) if n != name and re.search(rf"(^|\.){n}(\(|$)", answer.today)), None)
    if answer.differs is None or (referred and answer.differs in (others[referred].differs or "")):
        return _words(name, answer)
    return f"{_words(name, answer)}; {_CODE.sub(_in_code, answer.differs)}"


def _tower_words(name: str, answer: Counterpart) -> str:
    if answer.modern is None:
        return f"{_words(name, answer)} †"
    other = answer.today.partition(", ")[2]
    words = _words(name, Counterpart(answer.modern, bool(re.fullmatch(r"[\w.]+", answer.modern))))
    return f"{words} ({other})" if other else words


def _words(name: str, answer: Counterpart) -> str:
    """What takes a name's place; of names that only move to another module, and the like, the rule."""
    if not answer.is_renaming:
        return _CODE.sub(_in_code, answer.today)
    owner, _, last = answer.today.rpartition(".")
    if last != name:
        return "without `experimental_`" if name == f"experimental_{answer.today}" else f"`{answer.today}`"
    return "the same" if owner in ("", "context", "optimizer", "strategy") else f"the same in `{owner}`"


def _in_code(found: re.Match[str]) -> str:
    return f"`{found[0]}`"


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    by_answer: dict[str, list[str]] = {}
    for name, cell in rows:
        by_answer.setdefault(cell, []).append(f"`{name}`")
    lines = [f"### {title}", "", "| name | in Replicax |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {cell} |" for cell, names in by_answer.items())])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
