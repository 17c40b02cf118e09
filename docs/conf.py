"""Sphinx's settings: `make docs` builds the site into docs/_build/html. It opens from the disk, without a network."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pipejax  # noqa: E402

project = "pipejax"
author = "the authors of pipejax"
copyright = f"{author}, Apache-2.0"
release = pipejax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
smartquotes_action = "D"  # dashes alone: quotes are as they are typed
default_role = "code"  # docstrings write `name` for code
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["misc.highlighting_failure"]  # shell blocks show output, too

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 100

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"pipejax {release}"
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
