"""The gallery: a page for each program of ``examples``, and the list of all, made from the programs' docstrings.

A program's picture is drawn from its curves in ``curves.json``, which ``python docs/site/curves.py`` measures.
"""

from __future__ import annotations

import ast
import io
import json
import re
from pathlib import Path

import matplotlib
import matplotlib.figure

CURVES = Path(__file__).with_name("curves.json")
_GROUPS = {
    "": "Replicax alone",
    "nnx": "Flax NNX",
    "equinox": "Equinox",
    "linen": "Flax Linen",
    "pytrees": "Plain pytrees",
    "keras": "Keras",
}
_HELPERS = re.compile(r"_(demo|pictures)$|^(__init__|data|_.*)$")
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


def program_page(path: Path, root: Path) -> str:
    """A file as a page: what it says of itself, and all of it."""
    name, text = path.relative_to(root).as_posix(), path.read_text()
    language = {".py": "python", ".md": "markdown"}.get(path.suffix, "text")
    return f"---\norphan: true\n---\n\n# {name}\n\n`````{language}\n{text.rstrip()}\n`````\n"


def cards(examples: Path, curves: dict[str, dict[str, list[float]]]) -> tuple[str, dict[str, bytes]]:
    """The list of all programs, and the pictures in it."""
    lines: list[str] = []
    pictures: dict[str, bytes] = {}
    for title, paths in programs_of(examples).items():
        lines += [f"## {title}", "", "::::{grid} 1 2 2 3", ":gutter: 3", ""]
        for path in paths:
            name = path.relative_to(examples).as_posix()
            lines += [f":::{{grid-item-card}} {path.stem}", f":link: files/examples/{name}", ":link-type: doc"]
            if name in curves:
                picture = f"curves/{name.replace('/', '-')}.svg"
                pictures[picture] = drawn(curves[name])
                lines += [f":img-top: {picture}"]
            lines += ["", title_of(path), ":::"]
        lines += ["::::", ""]
    return "\n".join(lines), pictures


def drawn(curves: dict[str, list[float]]) -> bytes:
    """Losses by the step, as SVG: a thin curve on a thick one shows that they are the same."""
    figure = matplotlib.figure.Figure(figsize=(_WIDTH, _WIDTH * 0.55), layout="constrained")
    axes = figure.add_subplot()
    colors = ["#9ecbff", "#0b5cad", "#c2410c"]
    for i, (name, losses) in enumerate(curves.items()):
        axes.plot(range(1, len(losses) + 1), losses, color=colors[i], linewidth=5 if i == 0 else 1.5, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "replicax", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def gallery(root: Path, linked: set[Path]) -> dict[str, bytes]:
    """All files of the gallery but its first page: the programs, what pages link to, and pictures."""
    paths = {path for group in programs_of(root / "examples").values() for path in group} | linked
    return {f"files/{path.relative_to(root).as_posix()}.md": program_page(path, root).encode() for path in paths}


def known_curves() -> dict[str, dict[str, list[float]]]:
    """The curves that were measured, by program."""
    return json.loads(CURVES.read_text()) if CURVES.exists() else {}
