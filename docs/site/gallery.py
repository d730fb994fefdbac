"""The gallery: a page for each program of ``examples``, and the list of all, made from the programs' docstrings.

A program's picture is drawn from its curves in ``curves.json``, which ``python docs/site/curves.py`` measures.
"""

from __future__ import annotations

import ast
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.figure
import matplotlib.ticker

Curves = dict[str, Any]
"""What ``curves.json`` has of a program: ``by``, "step" or "epoch", and ``losses``, by where it ran."""

PICTURES = (".svg", ".png")
CURVES = Path(__file__).with_name("curves.json")
_GROUPS = {
    "nnx": "Flax NNX",
    "equinox": "Equinox",
    "linen": "Flax Linen",
    "pytrees": "Plain pytrees",
    "keras": "Keras",
    "": "Replicax alone",
}
_HELPERS = re.compile(r"_(demo|pictures|tensorflow)$|^(__init__|data|_.*)$")
_WIDTH = 4.0  # inches; a card is about as wide


def programs_of(examples: Path) -> dict[str, list[Path]]:
    """The programs, by the library of their models."""
    found: dict[str, list[Path]] = {title: [] for title in _GROUPS.values()}
    for path in sorted([*examples.glob("*.py"), *examples.glob("gallery/*/*.py")]):
        if not _HELPERS.search(path.stem):
            library = path.parent.name if path.parent != examples else ""
            found.setdefault(_GROUPS.get(library, library), []).append(path)
    return {title: paths for title, paths in found.items() if paths}


def title_of(path: Path) -> str:
    """The first sentence of a program's docstring, without its full stop."""
    sentence = (ast.get_docstring(ast.parse(path.read_text())) or path.name).split("\n\n")[0].replace("\n", " ")
    words = sentence.rstrip(".")
    if "gallery" in path.parts:  # there it begins with the library, which stands above
        words = re.sub(r"^[\w .]+: (?=\w)", "", words)
    return words[0].upper() + words[1:]


def program_page(path: Path, root: Path, known: dict[str, Curves]) -> str:
    """A file as a page: its curves, and all of it."""
    name, text = path.relative_to(root).as_posix(), path.read_text()
    language = {".py": "python", ".md": "markdown"}.get(path.suffix, "text")
    picture = ""
    if (example := name.removeprefix("examples/")) in known:
        picture = f"![Its losses, on one device and on four replicas](/{picture_of(example)})\n\n"
    return f"---\norphan: true\n---\n\n# {name}\n\n{picture}`````{language}\n{text.rstrip()}\n`````\n"


def picture_of(name: str) -> str:
    """Where the picture of a program is."""
    return f"curves/{name.replace('/', '-')}.svg"


def cards(examples: Path, curves: dict[str, Curves]) -> tuple[str, dict[str, bytes]]:
    """The list of all programs, and the pictures in it."""
    lines: list[str] = []
    pictures: dict[str, bytes] = {}
    for title, paths in programs_of(examples).items():
        lines += [f"## {title}", "", "::::{grid} 1 2 2 3", ":gutter: 3", ""]
        for path in paths:
            name = path.relative_to(examples).as_posix()
            lines += [f":::{{grid-item-card}} {path.stem}", f":link: files/examples/{name}", ":link-type: doc"]
            if name in curves:
                pictures[picture_of(name)] = drawn(curves[name])
                lines += [f":img-top: {picture_of(name)}"]
            lines += ["", title_of(path), ":::"]
        lines += ["::::", ""]
    return "\n".join(lines), pictures


def drawn(curves: Curves) -> bytes:
    """Losses by the step or the epoch, as SVG: a thin curve on a thick one shows that they are the same."""
    figure = matplotlib.figure.Figure(figsize=(_WIDTH, _WIDTH * 0.55), layout="constrained")
    axes = figure.add_subplot()
    colors = ["#9ecbff", "#0b5cad", "#c2410c"]
    for i, (name, losses) in enumerate(curves["losses"].items()):
        axes.plot(range(1, len(losses) + 1), losses, color=colors[i], linewidth=5 if i == 0 else 1.5, label=name)
    axes.set_xlabel(curves["by"])
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "replicax", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def gallery(root: Path, linked: set[Path]) -> dict[str, bytes]:
    """All files of the gallery but its first page: the programs, and what pages link to, pictures too."""
    paths = {path for group in programs_of(root / "examples").values() for path in group} | linked
    known = known_curves()
    files = {}
    for path in paths:
        name = f"files/{path.relative_to(root).as_posix()}"
        if path.suffix in PICTURES:
            files[name] = path.read_bytes()
        else:
            files[f"{name}.md"] = program_page(path, root, known).encode()
    return files


def known_curves() -> dict[str, Curves]:
    """The curves that were measured, by program."""
    return json.loads(CURVES.read_text()) if CURVES.exists() else {}
