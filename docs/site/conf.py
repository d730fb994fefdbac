"""Sphinx's settings for the site. ``python docs/site/build.py`` writes its source, and runs Sphinx with them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sphinx.domains.python import PyObject
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

import replicax

project = "Replicax"
author = "The Replicax authors"
copyright = author
version = release = replicax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "cross_links",
    "signatures",
]
root_doc = "index"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it in words, with shapes
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_use_ivar = True
napoleon_use_rtype = False
python_display_short_literal_types = True
add_module_names = False
toc_object_entries_show_parents = "hide"
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!replicax\.).*"),  # types of other libraries: there is no network to look them up
    ("py:class", r"replicax\.planning\.timeline\..*"),  # the type of an attribute, which has no page
]

html_theme = "sphinx_book_theme"
html_title = "Replicax"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_logo = "static/logo.svg"
html_favicon = "static/logo.svg"
html_copy_source = False
html_show_sphinx = False
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_theme_options = {
    "navbar_persistent": [],  # one search field is enough
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "logo": {"text": "Replicax"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


# Docstrings name no types before colons: the sentence of a property or a result is one, with its colon.
GoogleDocstring._consume_inline_attribute = lambda self: ("", self._consume_to_end())
GoogleDocstring._consume_returns_section = lambda self, preprocess_types=False: [
    ("", "", self._dedent(self._consume_to_next_section()))
]
for field in PyObject.doc_field_types:
    if field.name == "variable":  # a Variable is something else here
        field.label = "Attributes"


def setup(app):
    """Connect what changes the descriptions of names."""
    app.connect("autodoc-skip-member", skipped)
    app.connect("autodoc-process-docstring", of_constant, priority=100)


def skipped(app, what, name, value, skip, options):
    """Leaves out classes that are attributes of a class, and older names; ``None``: as Sphinx decides."""
    is_older_name = name.startswith("experimental_") and getattr(value, "__name__", name) != name
    return isinstance(value, type) or is_older_name or None


def of_constant(app, what, name, value, options, lines):
    """A public constant is described where it is defined, and not by the docstring of its type."""
    if what == "data":
        word = name.rpartition(".")[2]
        holders = sorted(n for n, m in sys.modules.items() if n.startswith("replicax.") and word in vars(m))
        docs = (ModuleAnalyzer.for_module(holder).find_attr_docs().get(("", word)) for holder in holders)
        lines[:] = next(filter(None, docs), lines)
