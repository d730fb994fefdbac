"""Sphinx's settings for the site. ``python docs/site/build.py`` writes its source, and runs Sphinx with them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

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


def setup(app):
    """An attribute of a class that is a class itself is no member to describe."""
    app.connect("autodoc-skip-member", lambda app, what, name, value, skip, options: isinstance(value, type) or None)
