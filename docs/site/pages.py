"""The source of the site: the repository's Markdown, laid out for Sphinx.

The documents are plain Markdown, read on a code host as they are. ``assemble`` copies them to a folder, in which links
out of ``docs`` lead to pages of the site, the lists of ``docs/index.md`` are cards and the table of contents, and the
reference and the gallery are pages of their own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from gallery import PICTURES, cards, gallery, known_curves
from reference import linked, reference_pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(```+)(.*?)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s#]*)(#[^()\s]*)?\)")
_ITEM = re.compile(r"^- \[(.+?)\]\((.+?)\): (.+?)(?=^- |^#|^$|\Z)", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def assemble(folder: Path) -> None:
    """Write the source of the site anew into ``folder``.

    Raises:
      LookupError: a link leads nowhere, or a page is in no list of ``docs/index.md``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for path in DOCS.rglob("*"):
        if path.suffix in PICTURES:
            _write_all(folder, {str(path.relative_to(DOCS)): path.read_bytes()})
    programs: set[Path] = set()
    for origin, place in pages():
        text = laid_out(origin, place, programs)
        if place == Path("index.md"):
            text = home(text)
        elif place == Path("gallery.md"):
            programs_list, pictures = cards(ROOT / "examples", known_curves())
            text += f"\n{programs_list}"
            _write_all(folder, pictures)
        elif place == Path("reference.md"):
            found = reference_pages(text)
            text = linked(text) + toctree("Names", [name for name, _ in found])
            _write_all(folder, {f"{name}.md": page.encode() for name, page in found})
        _write_all(folder, {str(place): text.encode()})
    _write_all(folder, gallery(ROOT, programs))


def pages() -> list[tuple[Path, Path]]:
    """Each document and its place on the site: all of ``docs``, and of others those that the home lists."""
    listed = {target for _, items in contents((DOCS / "index.md").read_text()) for _, target, _ in items}
    found = [(path, path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md"))]
    if missing := sorted(str(place) for _, place in found if str(place) not in {*listed, "index.md"}):
        raise LookupError(f"docs/index.md lists no {', '.join(missing)}")
    for target in sorted(target for target in listed if target.startswith("../")):
        origin = (DOCS / target).resolve()
        name = origin.stem if origin.stem != "README" else origin.parent.name
        found.append((origin, Path("project", f"{name.lower()}.md")))
    return found


def contents(index: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """The sections of ``docs/index.md``, with the title, the target and a sentence of each page in its list."""
    for title, text in _SECTION.findall(index):
        if items := [(name, target, " ".join(words.split())) for name, target, words in _ITEM.findall(text)]:
            yield title, items


def laid_out(origin: Path, place: Path, programs: set[Path]) -> str:
    """A document as a page at ``place``; programs and pictures that it links to are added to ``programs``."""
    places = dict(pages()) | {ROOT / "README.md": Path("index.md")}

    def on_the_site(match: re.Match[str]) -> str:
        kind, words, target, anchor = match.groups(default="")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = (origin.parent / target).resolve()
        if not path.exists():
            raise LookupError(f"{origin.relative_to(ROOT)} has a link to {target}, which is not there")
        if path in places:
            where = places[path]
            words = title_of(path) if words in (target, target.rpartition("/")[2]) else words
        elif path.is_relative_to(DOCS):
            where = path.relative_to(DOCS)
        elif path.suffix in PICTURES:
            programs.add(path)
            where = Path("files", path.relative_to(ROOT))
        elif path.is_file():
            if anchor:
                raise LookupError(
                    f"{origin.relative_to(ROOT)} has a link to a heading of {target}: list it in docs/index.md"
                )
            programs.add(path)
            where = Path("files", f"{path.relative_to(ROOT)}.md")
        else:
            return words  # a folder of the repository is no page
        return f"{kind}[{words}]({os.path.relpath(where, place.parent)}{anchor})"

    parts, end = [], 0
    text = origin.read_text()
    for fence in _FENCE.finditer(text):
        language = "pycon" if ">>> " in fence[3] and fence[2] == "python" else fence[2]
        code = fence[3].rstrip("\n")  # what doctest expects ends with an empty line
        parts += [_LINK.sub(on_the_site, text[end : fence.start()]), f"{fence[1]}{language}\n{code}\n{fence[1]}"]
        end = fence.end()
    return "".join([*parts, _LINK.sub(on_the_site, text[end:])])


def title_of(page: Path) -> str:
    """The heading of a document, as far as its colon."""
    heading = re.match(r"# (.+)", page.read_text())
    return heading[1].partition(":")[0] if heading else page.stem


def home(index: str) -> str:
    """The first page: each list of pages as cards, and all of them as the table of contents."""
    cards = _SECTION.sub(lambda match: f"## {match[1]}\n\n{_cards(match[2])}", index)
    entries = {title: [f"{name} <{_name(target)}>" for name, target, _ in items] for title, items in contents(index)}
    return cards + "".join(toctree(title, names) for title, names in entries.items())


def _cards(text: str) -> str:
    items = _ITEM.findall(text)
    if not items:
        return text
    grid = ["::::{grid} 1 2 2 3", ":gutter: 3", ""]
    for title, target, words in items:
        grid += [f":::{{grid-item-card}} {title}", f":link: {_name(target)}", ":link-type: doc", ""]
        grid += [words[0].upper() + " ".join(words.split())[1:], ":::"]
    return _ITEM.sub("", text).rstrip("\n") + "\n" + "\n".join([*grid, "::::", "", ""])


def toctree(title: str, entries: list[str]) -> str:
    """The directive of a part of the table of contents."""
    names = "\n".join(entries)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n:maxdepth: 1\n\n{names}\n```\n"


def _name(target: str) -> str:
    """What Sphinx calls a page."""
    return target.removesuffix(".md")


def _write_all(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
