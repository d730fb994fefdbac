"""The reference's pages: one for each heading of ``docs/reference.md``, with the docstrings of the names below it."""

from __future__ import annotations

import inspect
import pkgutil
import re
from types import ModuleType

import replicax

_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_FIRST_CELL = re.compile(r"^\| (`.+?`) \|", re.MULTILINE)


def reference_pages(text: str) -> list[tuple[str, str]]:
    """The name and the text of each page."""
    found = []
    for title, section in _SECTION.findall(text):
        names = re.findall(r"`([\w.]+)`", " ".join(_FIRST_CELL.findall(section)))
        directives = "\n".join(_directive(name if "." in name else f"replicax.{name}") for name in names)
        page = f"# {title}\n\n```{{eval-rst}}\n.. currentmodule:: replicax\n\n{directives}```\n"
        found.append((f"reference/{title.lower().replace(' ', '_')}", page))
    return found


def linked(text: str) -> str:
    """The page of ``docs/reference.md``, in whose tables each name is a link to its docstring."""
    return _FIRST_CELL.sub(lambda row: re.sub(r"`([\w.]+)`", _link, row[0]), text)


def _link(match: re.Match[str]) -> str:
    return f"{{py:obj}}`{match[1]} <{match[1] if '.' in match[1] else f'replicax.{match[1]}'}>`"


def _directive(name: str) -> str:
    value = pkgutil.resolve_name(name)
    if isinstance(value, ModuleType):
        return f".. automodule:: {name}\n{_members(value)}"
    if not inspect.isclass(value):
        return f".. autofunction:: {name}\n" if callable(value) else f".. autodata:: {name}\n   :no-value:\n"
    if issubclass(value, BaseException):
        return f".. autoexception:: {name}\n"
    return f".. autoclass:: {name}\n   :members:\n   :inherited-members: {', '.join(_documented_bases(value))}\n"


def _members(module: ModuleType) -> str:
    """All public names of a module that has such a list, but for those that the reference has under another name."""
    if not hasattr(module, "__all__"):
        return ""
    elsewhere = [n for n in module.__all__ if replicax._PLACES.get(n) in (replicax.__name__, module.__name__)]
    return f"   :members:\n   :exclude-members: {', '.join(elsewhere)}\n"


def _documented_bases(value: type) -> list[str]:
    """The bases whose members are described elsewhere: public ones with their own, and those of other libraries."""
    described = [
        base
        for base in value.__mro__[1:]
        if base.__name__ in replicax.__all__ or not base.__module__.startswith("replicax")
    ]
    return sorted({base.__name__ for public in described for base in public.__mro__})
