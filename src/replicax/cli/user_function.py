"""Loads the function that a command line names, checks its arguments, and finds the line where it fails."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from replicax.cli.command_line import InputError, is_unread
from replicax.user_functions import why_not_taken

_FOLDER = "{} is a folder: expected a Python file, or a module"


def load(target: str) -> tuple[ModuleType, Callable[..., Any]]:
    """The module and the function of ``FILE_OR_MODULE[:FUNCTION]``; by default the function ``plan``."""
    place, colon, name = target.rpartition(":") if ":" in target else (target, "", "plan")
    if not place or not name.isidentifier():
        raise InputError(f"{target!r}: expected SCRIPT_OR_MODULE:FUNCTION, such as examples/digits.py:plan")
    is_path = place.endswith(".py") or place.startswith(".") or os.sep in place
    try:
        module = _from_file(Path(place)) if is_path else _from_name(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, InputError) or is_unread(error):
            raise
        if isinstance(error, SystemExit):
            raise InputError(
                f"{place} ended the program while it was imported (sys.exit({error.code!r})): put what is "
                "to run only when it is the main program under if __name__ == '__main__'"
            ) from error
        raise InputError(f"{place} can't be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        hint = "" if colon else " (name another: FILE:FUNCTION)"
        raise InputError(f"{place} has no function {name!r}{hint}")
    return module, function


def check_keywords(
    function: Callable[..., Any], keywords: Mapping[str, Any], target: str, varied: Iterable[str] = ()
) -> None:
    """Check that a function takes a strategy and these arguments, of which a search has ``varied`` some."""
    if keywords and (why := why_not_taken(function, None, **keywords)):
        option = "--search" if any(repr(name) in why for name in varied) else "--with"
        raise InputError(f"{option}: {target} does not take these arguments: {why}")


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The arguments of ``--with`` by name."""
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"--with gives an argument twice: {', '.join(twice)}")
    return dict(pairs)


def last_line(error: BaseException) -> str:
    """The place in the user's code where the error occurred."""
    here = Path(__file__).parents[1]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(here)]
    frames = [f for f in frames if "site-packages" not in f.filename]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _from_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise InputError(_FOLDER.format(path))
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    if path.suffix != ".py":
        raise InputError(f"{path}: the name of a Python file must end in .py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # as when it runs as a script
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    module = importlib.import_module(name)
    if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
        raise InputError(_FOLDER.format(name))
    return module
