"""The documentation site: ``make docs`` builds it into ``site/`` with Sphinx.

The pages are the repository's own Markdown files, so that the same links work in a checkout and on the site. The README is the first page.
The site needs no other host: equations become MathML while it is built, and neither fonts nor scripts come from elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import offload

project = "offload"
version = release = offload.__version__
copyright = "the authors of offload, Apache-2.0"
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/results/README.md",
    "docs/*.md",
    "docs/*/*.md",
    "examples/README.md",
    "examples/*/README.md",
]
exclude_patterns = [".*", "build", "dist", "node_modules", "runs", "site", "data"]

# Names in signatures that other projects document, or that no page documents.
ELSEWHERE = [
    r"(?!offload\.).*",
    r"offload\.(loader\.loader\.T_co|train\.worker\.(context\.(Model|Other|Third)|data\.batch\.Batch(Iterator)?))",
]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
myst_heading_anchors = 4  # as GitHub makes them
myst_fence_as_directive = ["math"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
nitpicky = True  # a role of a docstring that names nothing is an error
nitpick_ignore_regex = [("py:.*", pattern) for pattern in ELSEWHERE]

html_theme = "furo"
html_title = "offload"
html_show_sourcelink = False
html_copy_source = False
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style, pygments_dark_style = "tango", "monokai"

CONTENTS = (Path(__file__).parent / "contents.txt").read_text(encoding="utf-8")


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the site's table of contents to the README, which lacks it in a checkout."""
    if docname == root_doc:
        source[0] += "\n" + CONTENTS


def inline_equation(translator: HTML5Translator, node: nodes.Element) -> None:
    """Write an equation within a line."""
    translator.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def equation(translator: HTML5Translator, node: nodes.Element) -> None:
    """Write an equation of its own."""
    translator.body.append(latex2mathml.converter.convert(node.astext(), display="block"))
    raise nodes.SkipNode


def add_front_page(app: Sphinx, error: Exception | None) -> None:
    """Let the README also be the page that a web server shows first."""
    if error is None:
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions above to the build."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_front_page)
    app.add_html_math_renderer("mathml", (inline_equation, None), (equation, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
