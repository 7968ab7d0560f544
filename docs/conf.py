# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration; `make docs` builds into docs/_build/html."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

import linbias

project = "linbias"
author = "The linbias authors"
copyright = author
release = version = linbias.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpicky = True
# "(B, T): positions" above an attribute reads like a type; of classes, only our own are looked for.
nitpick_ignore_regex = [("py:class", r"(?!linbias\.).*")]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "linbias"

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "Returns" is prose


def escape_bars(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings write |p_i - r_j| as people do; to docutils a bare bar would start a substitution."""
    for number, line in enumerate(lines):
        if not line.startswith("    "):
            pieces = re.split(r"(`+[^`]*`+)", line)
            lines[number] = "".join(piece if "`" in piece else piece.replace("|", r"\|") for piece in pieces)


def write_math(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Formulas as MathML, which browsers draw themselves: no script, no network."""
    block = isinstance(node, nodes.math_block)
    formula = convert(node.astext(), display="block" if block else "inline")
    # A formula wider than a phone scrolls by itself.
    translator.body.append(f'<div class="math" style="overflow-x: auto">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("autodoc-process-docstring", escape_bars)
