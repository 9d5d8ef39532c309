"""The site: `make docs`.

Its source is the whole repository, so that a link from one file to another holds here as it does on a code host.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "jaxgemv"
copyright = "the jaxgemv authors, Apache-2.0"
release = version = importlib.metadata.version("jaxgemv")

extensions = ["myst_parser", "sphinx.ext.autodoc", "source_pages"]
include_patterns = ["docs/*.md", "CHANGELOG.md", "CONTRIBUTING.md"]
root_doc = "docs/index"

myst_heading_anchors = 4  # `page.md#a-heading`, as code hosts have them
# Docstrings say `name` for arguments, expressions and what is on some page: a link where it is that, else code.
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", ".*")]
autodoc_typehints = "none"  # dtypes and shapes, which types do not tell, are in the text
autodoc_member_order = "bysource"
smartquotes = False  # "relu" is code

html_theme = "furo"
html_title = "jaxgemv"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}  # the first page is docs/index.html
templates_path = ["_templates"]


def setup(app):
    app.connect("autodoc-process-docstring", arguments_in_bold)


def arguments_in_bold(app, what, name, obj, options, lines):
    text = re.sub(r"^- (\w+(?:,\s+\w+)*):", r"- **\1**:", "\n".join(lines), flags=re.MULTILINE)
    lines[:] = text.split("\n")
