"""Damaging checkpoints, and telling which are whole, with a reader of its own: not the one that is tested."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from pathlib import Path

from tests.chaos.faults import EMPTIED, FLIPPED, HALF_COPIED, TRUNCATED, Damage


def whole_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints have all files of their manifests with the right bytes; the newest last."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name))]
    return sorted(step for step, path in found if _is_whole(path))


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def damage(checkpoint: Path, what: Damage) -> str:
    """Do it; returns what was done, in words."""
    rng = random.Random(what.seed)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size > 1)
    if what.how == HALF_COPIED:
        original = checkpoint.rename(checkpoint.with_name("original"))
        rng.shuffle(files)
        copied = files[: rng.randrange(1, len(files))]
        for file in copied:
            to = file
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original / file.relative_to(checkpoint), to)
        shutil.rmtree(original)
        return f"{len(copied)} of {len(files)} files"
    file = rng.choice(files)
    content = bytearray(file.read_bytes())
    name = file.relative_to(checkpoint)
    if what.how == EMPTIED:
        file.write_bytes(b"")
        return str(name)
    place = rng.randrange(len(content))
    if what.how == TRUNCATED:
        file.write_bytes(content[:place])
        return f"{name} to {place} of {len(content)} bytes"
    assert what.how == FLIPPED
    content[place] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return f"{name} at byte {place} of {len(content)}"


def _is_whole(checkpoint: Path) -> bool:
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        own = manifest.pop("sha256")
        if hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() != own:
            return False
        return all(
            hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == digest
            for name, (_, digest) in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False
