"""Finds the files that paths, globs, and lists of them name."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from typing import TypeAlias

from replicax.errors import few

#: A path or a glob; ``**`` goes through directories.
Path: TypeAlias = str | os.PathLike[str]


def expand(files: Path | Iterable[Path], what: str) -> tuple[str, ...]:
    """The files that ``files`` names, sorted, each once, though several globs match it.

    Sorted, because the order in which a file system lists its files differs between machines, and workers that divide
    the files among themselves must agree on it. A path that exists literally is not a glob. ``what`` is the function
    that was called, for messages.
    """
    if isinstance(files, (str, os.PathLike)):
        patterns = [files]
    elif isinstance(files, Iterable) and not isinstance(files, (bytes, dict)):
        patterns = list(files)
    else:
        raise TypeError(f"{what}: files must be a path, a glob, or a list of these, got {files!r}")
    if not patterns:
        raise ValueError(f"{what}: files is an empty list; name at least one file")
    files_by_path: dict[str, str] = {}
    named: set[str] = set()  # by a path, not by a glob
    for pattern in patterns:
        for file in _matches(pattern, what):
            path = os.path.abspath(file)
            if not glob.has_magic(os.fspath(pattern)):
                if path in named:
                    raise ValueError(
                        f"{what}: files has {file!r} twice, and each file is read once: leave one out. To read a file "
                        "more often than others, mix datasets with grain.IterDataset.mix"
                    )
                named.add(path)
            files_by_path.setdefault(path, file)
    return tuple(sorted(files_by_path.values()))


def _matches(pattern: Path, what: str) -> list[str]:
    if not isinstance(pattern, (str, os.PathLike)) or not isinstance(os.fspath(pattern), str):
        raise TypeError(f"{what}: a file is named by a str or a PathLike of str, got {pattern!r}")
    path = os.fspath(pattern)
    if "://" in path and not os.path.exists(path):
        raise ValueError(
            f"{what}: {path!r} is an address, and only files of this machine are read: mount the storage, or copy the "
            "files here"
        )
    path = os.path.normpath(os.path.expanduser(path)) if path else path
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"{what}: {path!r} is a directory; to read the files in it, say {os.path.join(path, '*')!r}, and "
            f"{os.path.join(path, '**', '*')!r} for those in its directories, too"
        )
    if os.path.exists(path):
        return [path]
    is_glob = glob.has_magic(path)
    matches = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)] if is_glob else []
    if not matches:
        looked = f"no file matches {path!r}" if is_glob else f"there is no file {path!r}"
        raise FileNotFoundError(f"{what}: {looked}; {_where(path)}")
    return matches


def _where(path: str) -> str:
    """The part of ``path`` that exists: it shows a wrong working directory or a misspelt name."""
    directory = os.path.dirname(os.path.abspath(path))
    while glob.has_magic(directory):
        directory = os.path.dirname(directory)
    if not os.path.isdir(directory):
        parent = directory
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        return f"there is no directory {directory!r}, only {parent!r}"
    names = sorted(os.listdir(directory))
    if not names:
        return f"looked in {directory!r}, which is empty"
    return f"looked in {directory!r}, where there are {len(names)} other entries: {few(names)}"
