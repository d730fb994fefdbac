"""Write the tables of ``docs/migrate.md`` anew, from the table that ``replicax migrate`` goes by.

python docs/migrate_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from replicax.cli.migration.counterparts import Counterpart, of_member, of_path
from replicax.cli.migration.original_names import MEMBERS, MODERN, TOWER, TOWER_MEMBERS

PAGE = Path(__file__).parent / "migrate.md"
_WRITTEN = {
    "Strategy": "a strategy",
    "StrategyExtended": "`strategy.extended`",
    "ReplicaContext": "the replica context",
    "PerReplica": "a distributed value",
}


_CODE = re.compile(r"(?<![\w`.])(?:replicax|strategy|extended|iterator|jax)(?:\.\w+(?:\((?:[^()]|\(\))*\))?)+")


def page(text: str) -> str:
    """The page with its tables as they ought to be."""
    for name, table in (("2.x", modern()), ("1.x", towers())):
        begin, end = f"<!-- {name}: python docs/migrate_page.py -->", f"<!-- end of {name} -->"
        inside = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, count = inside.subn(lambda _, new=f"{begin}\n\n{table}\n\n{end}": new, text)
        assert count == 1, f"the page has no place for the table of {name}"
    return text


def modern() -> str:
    parts = []
    for module, names in MODERN.items():
        rows = [(name, of_path(f"{module}.{name}".lstrip("."))) for name in sorted(names.split())]
        parts.append(_table(f"`tf.{module}`" if module else "`tf`", ("here", "what behaves differently"), _rows(rows)))
    for kind, names in MEMBERS.items():
        rows = [(name, of_member(kind, name)) for name in sorted(names.split())]
        if any(answer is not None and answer.today not in (name, "") for name, answer in rows) or kind in _WRITTEN:
            parts.append(_table(_title(kind), ("here", "what behaves differently"), _rows(rows)))
    return "\n\n".join(parts)


def towers() -> str:
    parts = []
    for module, names in TOWER.items():
        if module in ("contrib.cluster_resolver", "contrib.tpu"):
            continue  # those of 2.x
        rows = [(name, of_path(f"{module}.{name}".lstrip("."), True)) for name in sorted(names.split())]
        title = f"`tf.{module}`" if module else "`tf`"
        parts.append(_table(title, ("in `replicax.compat.v1`", "today"), _tower_rows(rows)))
    for kind, names in TOWER_MEMBERS.items():
        rows = [(name, of_member(kind, name, True)) for name in sorted(names.split())]
        parts.append(_table(_title(kind), ("in `replicax.compat.v1`", "today"), _tower_rows(rows)))
    return "\n\n".join(parts)


def _title(kind: str) -> str:
    return f"Of {_WRITTEN.get(kind, f'`{kind}`')}"


def _rows(rows: list[tuple[str, Counterpart | None]]) -> Iterator[tuple[str, str, str]]:
    for name, answer in rows:
        assert answer is not None
        yield name, _words(answer.today, answer.is_renaming), answer.differs or ""


def _tower_rows(rows: list[tuple[str, Counterpart | None]]) -> Iterator[tuple[str, str, str]]:
    for name, answer in rows:
        assert answer is not None
        if answer.modern is None:
            yield name, "", _words(answer.today, answer.is_renaming)
        else:
            yield name, "the same", _words(answer.modern, bool(re.fullmatch(r"[\w.]+", answer.modern)))


def _words(today: str, is_name: bool) -> str:
    return f"`{today}`" if is_name else _CODE.sub(r"`\g<0>`", today)


def _table(title: str, columns: tuple[str, str], rows: Iterator[tuple[str, str, str]]) -> str:
    by_answer: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        answers = tuple("the same" if cell == f"`{name}`" else cell for cell in cells)
        by_answer.setdefault(answers, []).append(f"`{name}`")
    lines = [f"#### {title}", "", f"| name | {columns[0]} | {columns[1]} |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in by_answer.items()]
    return "\n".join(line.replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
