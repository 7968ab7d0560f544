# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration; `make docs` builds into docs/_build/html."""

import re
from typing import Any

import linbias

project = "linbias"
author = "The linbias authors"
copyright = author
release = version = linbias.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "linbias"

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def escape_bars(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings write |p_i - r_j| as people do; to docutils a bare bar would start a substitution."""
    for number, line in enumerate(lines):
        if not line.startswith("    "):
            pieces = re.split(r"(`+[^`]*`+)", line)
            lines[number] = "".join(piece if "`" in piece else piece.replace("|", r"\|") for piece in pieces)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", escape_bars)
