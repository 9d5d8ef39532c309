"""Sphinx extension: a link to a Python file of the repository shows it, at the function that its title names.

Without it such a link downloads the file, and its title is lost.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes


def link(app, doctree, docname: str) -> None:
    if app.builder.format != "html":
        return
    for node in list(doctree.findall(addnodes.download_reference)):
        path, file = app.env.relfn2path(node["reftarget"], docname)
        if path.endswith(".py"):
            app.shown_files.add(path)
            uri = app.builder.get_relative_uri(docname, path)
            titled = {}
            if name := node.get("reftitle"):
                titled = {"reftitle": name}
                uri += f"#line-{line_of(name, Path(file).read_text())}"
            node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri, **titled))


def line_of(function: str, code: str) -> int:
    before, *_ = re.split(rf"^def {re.escape(function)}\(", code, maxsplit=1, flags=re.MULTILINE)
    return before.count("\n") + 1


def pages(app):
    for path in sorted(app.shown_files):
        code = app.builder.highlighter.highlight_block(
            (app.srcdir / path).read_text(), "python", lineanchors="line"
        )
        yield path, {"title": path, "body": f"<h1>{path}</h1>{code}"}, "page.html"


def setup(app):
    app.shown_files = set()  # relative to the repository
    app.connect("doctree-resolved", link)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
