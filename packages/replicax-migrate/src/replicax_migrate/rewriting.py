"""Writing today's names into a program: those that are sure, and the import that they need, and not a byte beyond."""

from __future__ import annotations

import ast
import errno
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from replicax_migrate.bindings import Bindings
from replicax_migrate.counterparts import V1
from replicax_migrate.source_files import SourceProgram, UnreadableError
from replicax_migrate.uses import NameUse


def rewritten(program: SourceProgram, uses: Sequence[NameUse]) -> str:
    """The text of a program with the edits of its uses; the text as it is if there are none."""
    edits = {use.edit for use in uses if use.edit is not None}
    if not edits or binds_replicax(program):
        return program.text
    lines = list(io.StringIO(program.text, newline=""))  # with their ends, whichever these are
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.start), reverse=True):
        line = lines[edit.line - 1].encode()
        lines[edit.line - 1] = (line[: edit.start] + edit.new.encode() + line[edit.end :]).decode()
    paths = [edit.new for edit in edits if edit.new.startswith("replicax.")]
    modules = {V1 if path.startswith(V1) else "replicax" for path in paths} - _imported(program.tree)
    if modules and (behind := _statement_with_more_behind(program.tree)) is not None:
        number, at = behind
        line, new = lines[number - 1].encode(), "".join(f"; import {module}" for module in sorted(modules))
        lines[number - 1] = (line[:at] + new.encode() + line[at:]).decode()
    elif modules:
        at = _place_of_imports(program.tree)
        end = lines[at][len(lines[at].rstrip("\r\n")) :] or "\n"
        lines[at:at] = [f"import {module}{end}" for module in sorted(modules)]
    return "".join(lines)


def write_program(program: SourceProgram, text: str) -> None:
    """Put ``text`` in the place of a program's file, whole or not at all.

    Raises:
      OSError: it can't be written.
      UnicodeError: nor can its text, in its encoding.
      UnreadableError: the result would be no Python, its other bytes would not stay the same, or the file is not what
        was read.
    """
    if program.text.encode(program.encoding) != program.raw:
        raise UnreadableError(f"in {program.encoding} some characters have several codes; make it UTF-8 first")
    try:
        with warnings.catch_warnings(action="ignore"):  # about the program's own strings
            compile(text, str(program.path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UnreadableError(f"with the new names line {error.lineno} would not compile: {error.msg}") from error
    target = Path(os.path.realpath(program.path))  # a link stays a link
    if target.read_bytes() != program.raw:
        raise UnreadableError("has changed while it was read")
    if not os.access(target, os.W_OK):  # to replace it would be permitted all the same
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode(program.encoding))
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def binds_replicax(program: SourceProgram) -> bool:
    """Whether ``replicax`` is, in any scope of a program, something other than the import of Replicax."""
    bindings = Bindings(program.tree)
    scopes = (bindings.module, *bindings.definitions.values())
    bound = (binding for scope in scopes for binding in scope.names.get("replicax", ()))
    return any(binding.how != "import" or binding.path != "replicax" for binding in bound)


def _imported(tree: ast.Module) -> set[str]:
    return {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names if a.asname is None}


def _must_lead(tree: ast.Module, statement: ast.stmt) -> bool:
    """Whether no import may stand before a statement: the docstring, and imports from the future."""
    is_docstring = statement is tree.body[0] and ast.get_docstring(tree) is not None
    return is_docstring or getattr(statement, "module", None) == "__future__"


def _statement_with_more_behind(tree: ast.Module) -> tuple[int, int] | None:
    """Where a statement ends that must lead and has the next one, or nothing, behind it on its line.

    The imports then go there, as a line of their own would be too early or too late. ``None`` if there is none.
    """
    leading = [statement for statement in tree.body if _must_lead(tree, statement)]
    if not leading:
        return None
    rest = tree.body[tree.body.index(leading[-1]) + 1 :]
    line, column = leading[-1].end_lineno, leading[-1].end_col_offset
    if line is None or column is None or (rest and rest[0].lineno != line):
        return None
    return line, column


def _place_of_imports(tree: ast.Module) -> int:
    """Before which line: that of the first import of TensorFlow, or else of the first statement after the docstring."""

    def is_first(statement: ast.stmt) -> bool:
        imports = (n for n in ast.walk(statement) if isinstance(n, ast.Import | ast.ImportFrom))
        names = (getattr(n, "module", None) or n.names[0].name for n in imports)
        is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        return not is_definition and any(name.startswith("tensorflow") for name in names)

    body = [s for i, s in enumerate(tree.body) if i == 0 or (tree.body[i - 1].end_lineno or 0) < s.lineno]
    body = [s for s in body if not _must_lead(tree, s)]
    place = next((s for s in body if is_first(s)), body[0])
    decorators = getattr(place, "decorator_list", [])
    return min([place.lineno, *(d.lineno for d in decorators)]) - 1
