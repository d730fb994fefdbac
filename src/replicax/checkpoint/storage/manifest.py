"""The manifest: the files of a checkpoint, with their sizes and SHA-256, written last.

A folder without a manifest is unfinished, and one whose files differ from it is damaged. The manifest also contains its
own hash.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from replicax.system.json_files import check_regular, read_json

NAME = "manifest.json"
_FORMAT = 1


class DamagedError(Exception):
    """A checkpoint is incomplete or damaged; the message says what is wrong."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint."""

    id: str  # the id of the save; another save has another id, even of the same step
    manager: str | None  # the id of the manager that wrote it; ``None`` if there was none
    step: int | None  # the number of steps before the save; ``None`` without a manager
    files: Mapping[str, tuple[int, str]]  # sizes and hashes of all files, by their paths in the folder

    def dumps(self) -> str:
        """Return the manifest as JSON."""
        fields = {"format": _FORMAT, **dataclasses.asdict(self)}
        return json.dumps({**fields, "sha256": _own_hash(fields)}, indent=1)


def read_manifest(folder: str) -> Manifest:
    """The manifest in ``folder``.

    Raises:
      DamagedError: there is none, or it is damaged.
      FileNotFoundError: there is no such folder.
    """
    try:
        data = read_json(os.path.join(folder, NAME))
        if not isinstance(data, dict):
            raise DamagedError(f"{NAME} is no manifest: it should have an object, and has a {type(data).__name__}")
        claimed = data.pop("sha256")
        if claimed != _own_hash(data):
            raise DamagedError(f"{NAME} is damaged: it does not fit its own hash")
        if data["format"] > _FORMAT:
            raise DamagedError(f"it has format {data['format']}, and this version of Replicax reads up to {_FORMAT}")
        files = {name: (int(size), str(digest)) for name, (size, digest) in data["files"].items()}
        for name in files:
            check_inside(name)
        return Manifest(data["id"], data["manager"], data["step"], files)
    except FileNotFoundError:
        if not os.path.lexists(folder):
            raise
        raise DamagedError(f"it has no {NAME}, so it was never finished, or is half a copy") from None
    except NotADirectoryError:
        raise DamagedError("it is a file, and no folder") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{NAME} can't be read: {type(error).__name__}: {error}") from None


def check_inside(name: str) -> None:
    """Raise a ValueError unless ``name`` is a path inside the folder of the checkpoint."""
    if os.path.isabs(name) or not {"", os.curdir, os.pardir}.isdisjoint(name.split("/")):
        raise ValueError(f"{name!r} is not in the folder of the checkpoint")


def check_sizes(folder: str, manifest: Manifest) -> None:
    """Raise a DamagedError unless all files exist with their sizes; takes no time."""
    for name, (size, _) in manifest.files.items():
        try:
            there = os.stat(os.path.join(folder, name))
            check_regular(there)
        except OSError as error:
            raise DamagedError(f"{name} is missing: {error.strerror}") from None
        except ValueError as error:
            raise DamagedError(f"{name} can't be read: {error}") from None
        if there.st_size != size:
            raise DamagedError(f"{name} has {there.st_size} bytes, and should have {size}")


def check_hashes(folder: str, manifest: Manifest) -> None:
    """Raise a DamagedError unless every byte is as it was written. Ignores further files."""
    check_sizes(folder, manifest)
    try:
        with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            found = dict(pool.map(lambda name: (name, _hash(os.path.join(folder, name))), manifest.files))
    except OSError as error:
        raise DamagedError(f"{error.filename} can't be read: {error.strerror}") from None
    for name, (_, digest) in manifest.files.items():
        if found[name][1] != digest:
            raise DamagedError(f"{name} has other bytes than were written: its SHA-256 is {found[name][1]}")


def hashes(folder: str, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Sizes and SHA-256 of files. Without threads, because a save may run while Python shuts down."""
    return {name: _hash(os.path.join(folder, name)) for name in names}


def files_below(folder: str, start: str = "") -> list[str]:
    """The files below ``start`` in ``folder``, by their paths in ``folder``."""
    found = []
    for parent, _, names in os.walk(os.path.join(folder, start), onerror=_raised):
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names]
    return sorted(found)


def _raised(error: OSError) -> NoReturn:
    """Raise what :func:`os.walk` would pass over: the files of a folder that can't be listed would be left out."""
    raise error


def flush(path: str) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def flush_below(folder: str) -> None:
    """Flush all files and folders in ``folder``, and itself."""
    for parent, _, names in os.walk(folder, topdown=False, onerror=_raised):
        for name in names:
            flush(os.path.join(parent, name))
        flush(parent)


def write_flushed(path: str, text: str) -> None:
    """Write a file, and flush it to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _hash(path: str) -> tuple[int, str]:
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _own_hash(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
