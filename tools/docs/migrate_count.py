"""Count how many uses in real programs ``replicax migrate`` names rightly, for ``docs/migrate.md``.

python tools/docs/migrate_count.py FOLDER

``FOLDER`` has clones of the repositories that ``packages/replicax-migrate/tests/real_programs.txt`` lists, each under
its name with a plus for the slash (``keras-team+keras-cv``). That file says, program by program, which uses a
reader has found in them.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from replicax_migrate.rewriting import rewritten
from replicax_migrate.run_names import MEMBERS_OF_RUNS, RUNS, STEPS
from replicax_migrate.source_files import SourceProgram, parse, read_program
from replicax_migrate.uses import find_uses

TABLE = Path(__file__).parents[2] / "packages" / "replicax-migrate" / "tests" / "real_programs.txt"
_UNCOUNTED = re.compile(r"\.embedding\.|'TF_CONFIG'")
"""What has one answer wherever it stands."""
_NAMES = (*RUNS.values(), *STEPS.values(), *map(" ".join, MEMBERS_OF_RUNS.values()))
_OF_RUNS = {name for names in _NAMES for name in names.split()}
"""Last names of checkpoints, callbacks, sessions and steps, which the reader did not look for."""


@dataclasses.dataclass(frozen=True)
class RealProgram:
    """A program of a public repository.

    Attributes:
      group: why it was chosen.
      repository: its owner and name.
      commit: which state of it.
      path: of the program, in it.
      uses: those that a reader has found, each as ``LINE NAME``; in a notebook with the cell before the line.
    """

    group: str
    repository: str
    commit: str
    path: str
    uses: tuple[str, ...]

    def read(self, folder: Path) -> SourceProgram:
        """The program itself."""
        clone = folder / self.repository.replace("/", "+")
        shown = subprocess.run(
            ["git", "-C", str(clone), "show", f"{self.commit}:{self.path}"], check=True, capture_output=True
        )
        with tempfile.TemporaryDirectory() as here:
            path = Path(here, f"program{Path(self.path).suffix}")
            path.write_bytes(shown.stdout)
            return read_program(path)


def reported(program: SourceProgram) -> list[tuple[str, bool]]:
    """The uses that the command finds, in the form of the table, and whether it says that it guesses."""
    found = []
    for use in find_uses(program.tree, program.lines):
        place = program.place(use.line, use.column).removeprefix(str(program.path)).lstrip(":").rpartition(":")[0]
        if not _UNCOUNTED.search(use.name) and re.split(r"[ .]", use.name)[-1] not in _OF_RUNS:
            found.append((f"{place} {use.name}", use.is_assumed))
    return found


def written(program: SourceProgram) -> bool:
    """Whether ``--write`` changes a program; the result is Python, and is not changed again."""
    text = rewritten(program, find_uses(program.tree, program.lines))
    again = dataclasses.replace(program, text=text, tree=parse(text))
    compile(again.tree, str(program.path), "exec")
    assert rewritten(again, find_uses(again.tree, again.lines)) == text
    return text != program.text


def real_programs() -> Iterator[RealProgram]:
    """The programs of the table."""
    group = repository = commit = path = ""
    uses: list[str] = []
    for line in [*TABLE.read_text().splitlines(), "= end"]:
        if not line or line.startswith("#"):
            continue
        if path and not line.startswith("  "):
            yield RealProgram(group, repository, commit, path, tuple(uses))
            path, uses = "", []
        if line.startswith("= "):
            group = line[2:]
        elif line.startswith("  "):
            uses.append(line[2:])
        elif line.startswith(" "):
            path = line[1:]
        else:
            repository, commit = line.split()


def main(folder: Path) -> None:
    """Print the table, and below it each difference."""
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    differences, files, changed = [], 0, 0
    for program in real_programs():
        source = program.read(folder)
        if not source.cells:
            files += 1
            changed += written(source)
        uses = reported(source)
        expected, found = collections.Counter(program.uses), collections.Counter(use for use, _ in uses)
        groups[program.group].update(
            programs=1,
            uses=expected.total(),
            rightly=(expected & found).total(),
            other=(found - expected).total(),
            guessed=sum(is_assumed for use, is_assumed in uses if use in expected),
        )
        where = f"{program.repository}/{program.path}"
        differences += [f"missed: {where} {use}" for use in (expected - found).elements()]
        differences += [f"not listed: {where} {use}" for use in (found - expected).elements()]
    print("| programs | uses | named rightly | as a guess, with a `?` | reported, and not listed |")
    print("| --- | --- | --- | --- | --- |")
    for group, n in groups.items():
        share = f"{n['rightly']} ({n['rightly'] / n['uses']:.0%})"
        print(f"| {n['programs']} {group} | {n['uses']} | {share} | {n['guessed']} | {n['other']} |")
    print(f"--write changes {changed} of the {files} Python files; all are Python then, and none is changed again.")
    print("\n".join(differences))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
