"""What the site is made of, without Sphinx: pages, links, cards, the reference and the gallery."""

from __future__ import annotations

import importlib
import pathlib
import re
import sys

import numpy as np
import pytest

from tests.public_names import PUBLIC

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site():
    """The modules of ``docs/site``, which find each other as a script's."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        yield {name: importlib.import_module(name) for name in ("gallery", "pages", "reference", "searches")}
    finally:
        sys.path.remove(str(ROOT / "docs" / "site"))
        for name in ("gallery", "pages", "reference", "searches"):
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def source(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "source"
    site["pages"].assemble(folder)
    return folder


def test_every_document_is_a_page_and_in_the_contents(source) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = re.findall(r"<([\w/-]+)>$", (source / "index.md").read_text(), re.MULTILINE)
    assert pages - {"index"} == {name for name in listed if not name.startswith("project/")}
    assert all((source / f"{name}.md").is_file() for name in listed)


def test_links_lead_to_pages_of_the_site(source) -> None:
    for page in source.rglob("*.md"):
        if page.is_relative_to(source / "files"):
            continue  # programs
        for target in re.findall(
            r"(?<=[^`])\]\(([^)#\s]+)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        ):
            if not re.match("[a-z]+:", target):
                assert (page.parent / target).is_file(), f"{page.relative_to(source)}: {target}"


def test_links_out_of_the_documents_become_pages(site) -> None:
    programs: set[pathlib.Path] = set()
    text = site["pages"].laid_out(ROOT / "docs" / "plan.md", pathlib.Path("plan.md"), programs)
    assert "[examples/digits.py](files/examples/digits.py.md)" in text
    assert ROOT / "examples" / "digits.py" in programs
    assert "](project/benchmarks.md#" in text
    assert "](tpu.md#topology)" in text


def test_a_link_to_a_heading_leads_to_a_page(site, tmp_path, monkeypatch) -> None:
    read = pathlib.Path.read_text
    page = ROOT / "docs" / "nowhere.md"
    text = "[x](../examples/digits.py#load)"
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self, *args: text if self == page else read(self, *args))
    with pytest.raises(LookupError, match=r"a heading of ../examples/digits.py: list it in docs/index.md"):
        site["pages"].laid_out(page, pathlib.Path("nowhere.md"), set())


def test_pictures_beside_the_documents_are_taken_along(site, monkeypatch) -> None:
    read = pathlib.Path.read_text
    page, picture = ROOT / "benchmarks" / "README.md", ROOT / "docs" / "site" / "static" / "logo.svg"
    text = "![x](../docs/site/static/logo.svg)"
    monkeypatch.setattr(site["pages"], "DOCS", ROOT / "docs" / "tutorials")
    monkeypatch.setattr(site["pages"], "pages", list)
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self, *args: text if self == page else read(self, *args))
    pictures: set[pathlib.Path] = set()
    laid_out = site["pages"].laid_out(page, pathlib.Path("project", "benchmarks.md"), pictures)
    assert laid_out == "![x](../files/docs/site/static/logo.svg)"
    assert site["gallery"].gallery(ROOT, pictures)["files/docs/site/static/logo.svg"] == picture.read_bytes()


def test_a_dead_link_is_an_error(site, tmp_path, monkeypatch) -> None:
    pages = site["pages"]
    page = ROOT / "docs" / "nowhere.md"
    monkeypatch.setattr(
        pathlib.Path,
        "read_text",
        lambda self, *args, _read=pathlib.Path.read_text: "[x](not-there.md)" if self == page else _read(self, *args),
    )
    with pytest.raises(LookupError, match=r"docs/nowhere.md has a link to not-there.md, which is not there"):
        pages.laid_out(page, pathlib.Path("nowhere.md"), set())


def test_examples_with_prompts_are_sessions(source) -> None:
    assert "```pycon\n>>> " in (source / "loop.md").read_text()
    assert "```python\n" in (source / "workers.md").read_text()
    assert not re.search(r"^```python\n>>> ", (source / "semantics.md").read_text(), re.MULTILINE)


def test_the_reference_has_the_docstring_of_every_public_name(source) -> None:
    text = "".join(path.read_text() for path in (source / "reference").glob("*.md"))
    described = re.findall(r"^\.\. auto(?:class|exception|function|data):: (replicax[\w.]+)$", text, re.MULTILINE)
    assert set(PUBLIC) <= set(described)
    assert len(described) == len(set(described))


def test_the_gallery_has_every_program(site, source) -> None:
    text = (source / "gallery.md").read_text()
    programs = [path for paths in site["gallery"].programs_of(ROOT / "examples").values() for path in paths]
    assert len(programs) > 8
    for path in programs:
        name = path.relative_to(ROOT).as_posix()
        assert f":link: files/{name}\n" in text
        assert path.read_text().rstrip() in (source / "files" / f"{name}.md").read_text()
    for picture in re.findall(r":img-top: (\S+)", text):
        assert (source / picture).read_bytes().startswith(b"<?xml")


def test_every_program_of_the_gallery_has_its_curves(site) -> None:
    found = site["gallery"].known_curves()
    assert sorted(found) == sorted(
        path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").glob("gallery/*/*.py")
    )
    for curves in found.values():
        assert curves["by"] in ("step", "epoch")
        one, four = curves["losses"].values()
        assert len(one) > 1
        # Later steps have added up the differences of earlier ones; in a picture one does not see them.
        np.testing.assert_allclose(four, one, rtol=0, atol=0.01 * max(one))


def test_what_people_search_for_is_in_a_heading_of_its_page(site, source, tmp_path) -> None:
    """``docs/site/build.py`` asks the same of the index of the search."""
    texts = {path.stem: re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S) for path in source.glob("*.md")}
    headings = [(page, heading) for page, text in texts.items() for heading in re.findall(r"^#+ (.+)", text, re.M)]
    assert site["searches"].not_found(headings) == []
    for page in ("recipes", "troubleshooting"):
        others = [(of, heading) for of, heading in headings if of != page]
        assert {place.rpartition(" ")[2] for place in site["searches"].not_found(others)} == {page}
    index = tmp_path / "searchindex.js"
    index.write_text(
        'Search.setIndex({"docnames": ["loop", "recipes"], "alltitles": {"Random seed": [[1, "random-seed"]]}})'
    )
    assert site["searches"].headings_of_index(index) == [("recipes", "Random seed")]
