"""Words in code style are links: a public name leads to its reference, and ``docs/loop.md`` to that page."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import replicax

_NAME = re.compile(
    r"(?:replicax\.)?(?:(?:"
    + "|".join(sorted({room.partition(".")[2] for room in replicax._MOVED.values()}))
    + r")\.)?(\w+)(?:\.\w+)*(?:\(.*\))?"
)
_PAGE = re.compile(r"docs/([\w/]+)\.md")


class CrossLinks(SphinxTransform):
    """Makes a reference of each literal that is a public name or a page, but in titles and in other links."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Go through one document."""
        for reference in self.document.findall(pending_xref):  # such as :class:`Variable` in any docstring
            first = reference["reftarget"].partition(".")[0]
            is_name = not first.islower() or reference["reftype"] == "func"
            if reference.get("refdomain") == "py" and is_name and first in replicax._PLACES:
                reference["reftarget"] = f"{replicax._PLACES[first]}.{reference['reftarget']}"
        for literal in list(self.document.findall(nodes.literal)):
            if _is_in_link(literal):
                continue
            if page := _PAGE.fullmatch(literal.astext()):
                self._link(literal, refdomain="std", reftype="doc", reftarget=f"/{page[1]}")
            elif name := _public_name(literal.astext()):
                self._link(literal, refdomain="py", reftype="obj", reftarget=name)

    def _link(self, literal: nodes.literal, **target: str) -> None:
        reference = pending_xref("", refexplicit=True, refwarn=True, refdoc=self.env.docname, **target)
        literal.replace_self(reference)
        reference += literal


def _public_name(text: str) -> str | None:
    match = _NAME.fullmatch(text)
    if not match or match[1] not in replicax._PLACES:
        return None
    is_word = match[1].islower() and not text.startswith("replicax.")  # such as "plan", "train", "assign"
    return None if is_word else f"{replicax._PLACES[match[1]]}.{match[1]}"


def _is_in_link(node: nodes.Node) -> bool:
    while (node := node.parent) is not None:
        if isinstance(node, (nodes.title, nodes.reference, pending_xref)):
            return True
    return False


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_transform(CrossLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
