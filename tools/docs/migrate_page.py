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
from replicax_migrate.counterparts import V1, Counterpart, of_member, of_path, of_tower_name, paths
from replicax_migrate.original_names import AROUND_TOWERS, KINDS, MEMBERS, MODERN, TOWER, TOWER_MEMBERS
from replicax_migrate.run_names import MEMBERS_OF_RUNS, RUNS

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "migrate.md"
DOCUMENTS = _ROOT / "tests" / "compat" / "documents.json"
RELEASES = _ROOT / "packages" / "replicax-migrate" / "tests" / "tensorflow_names.txt"
_WRITTEN = {
    "Strategy": "a strategy",
    "StrategyExtended": "`strategy.extended`",
    "ReplicaContext": "the replica context",
    "PerReplica": "a distributed value",
}


_KINDS = {**KINDS, "PerDeviceIterator": "DistributedIterator", "Optimizer": "Optimizer"}
_NESTED = {"GATE_GRAPH", "GATE_NONE", "GATE_OP", "OFF_CLUSTER", "WITHIN_CLUSTER", "create", "register"}
"""Classes and constants inside of classes, and members of ``rpc.Server``, which is another class."""

_CODE = re.compile(
    r"(?<![\w`.])(?:replicax|strategy|extended|iterator|jax|optimizer)(?:\.\w+(?:\((?:[^()]|\(\))*\))?)+"
)


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
    parts = []
    for module, names in MODERN.items():
        rows = _rows((name, _of_path(module, name, False)) for name in sorted(names.split()))
        parts.append(_table(f"`tf.{module}`" if module else "`tf`", _COLUMNS, rows))
    for kind in dict.fromkeys((*MEMBERS, *sorted(listed.keys() - {""}))):
        answers = _members(kind, {*MEMBERS.get(kind, "").split(), *listed[kind]}, False)
        parts.append(_table(_title(kind), _COLUMNS, _rows(answers)))
    return "\n\n".join(parts)


def towers() -> str:
    listed = checklist(is_tower=True)
    known = {*paths(TOWER).values(), *paths(AROUND_TOWERS).values()}
    parts = []
    for module in (*TOWER, *(each for each in AROUND_TOWERS if each not in TOWER)):
        names = f"{TOWER.get(module, '')} {AROUND_TOWERS.get(module, '')}"
        rows = _tower_rows((name, _of_path(module, name, True)) for name in sorted(names.split()))
        parts.append(_table(f"`tf.{module}`" if module else "`tf`", _TOWER_COLUMNS, rows))
    further = sorted(listed[""] - known)
    _check_listed(set(further), set(v1.__all__))
    rows = _tower_rows((name, of_tower_name(name)) for name in further)
    parts.append(_table("Further names of `replicax.compat.v1`", _TOWER_COLUMNS, rows))
    for kind in dict.fromkeys((*TOWER_MEMBERS, *sorted(listed.keys() - {""}))):
        answers = _members(kind, {*TOWER_MEMBERS.get(kind, "").split(), *listed[kind]}, True)
        parts.append(_table(_title(kind), _TOWER_COLUMNS, _tower_rows(answers)))
    return "\n\n".join(parts)


def runs() -> str:
    parts = []
    for module, names in RUNS.items():
        rows = _rows((name, _of_path(module, name, False)) for name in sorted(names.split()))
        parts.append(_table(f"`tf.{module}`", _COLUMNS, rows))
    for kind, members in MEMBERS_OF_RUNS.items():
        parts.append(_table(_title(kind), _COLUMNS, _rows(_members(kind, members, False))))
    return "\n\n".join(parts)


_COLUMNS = ("here", "what behaves differently")
_TOWER_COLUMNS = ("in `replicax.compat.v1`", "today")


def _check_listed(names: set[str], known: set[str]) -> None:
    if names - known:
        raise LookupError(f"no counterpart is told of {', '.join(sorted(names - known))}")


def _of_path(module: str, name: str, is_tower: bool) -> Counterpart:
    found = of_path(f"{module}.{name}".lstrip("."), is_tower)
    if found is None:
        raise LookupError(f"no counterpart is told of {module}.{name}")
    return found


def _members(kind: str, names: Iterable[str], is_tower: bool) -> list[tuple[str, Counterpart]]:
    answers = [(name, of_member(kind, name, is_tower)) for name in sorted(names)]
    if missing := [name for name, answer in answers if answer is None]:
        raise LookupError(f"no counterpart is told of {', '.join(missing)} of {kind}")
    return [(name, answer) for name, answer in answers if answer is not None]


def _title(kind: str) -> str:
    return f"Of {_WRITTEN.get(kind, f'`{kind}`')}"


def _rows(rows: Iterable[tuple[str, Counterpart]]) -> Iterator[tuple[str, str, str]]:
    for name, answer in rows:
        yield name, _words(answer.today, answer.is_renaming), answer.differs or ""


def _tower_rows(rows: Iterable[tuple[str, Counterpart]]) -> Iterator[tuple[str, str, str]]:
    for name, answer in rows:
        if answer.modern is None:
            yield name, "", _words(answer.today, answer.is_renaming)
        else:
            same = answer.today in ("the same", f"{V1}.{name}")
            here = "the same" if same else answer.today.replace(f"{V1}.{name}", "the same")
            yield name, here, _words(answer.modern, bool(re.fullmatch(r"[\w.]+", answer.modern)))


def _words(today: str, is_name: bool) -> str:
    return f"`{today}`" if is_name else _CODE.sub(r"`\g<0>`", today)


def _table(title: str, columns: tuple[str, str], rows: Iterator[tuple[str, str, str]]) -> str:
    by_answer: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        answers = tuple("the same" if cell == f"`{name}`" else cell for cell in cells)
        by_answer.setdefault(answers, []).append(f"`{name}`")
    lines = [f"### {title}", "", f"| name | {columns[0]} | {columns[1]} |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in by_answer.items()]
    return "\n".join(line.replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
