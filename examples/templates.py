"""Chat templates: the Jinja program of a checkpoint that writes a conversation as its model was trained to see it.

They are written for transformers, whose names, filters and rules for white space they have here. The program comes with
the file, so it runs in a sandbox.
"""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """{% generation %} marks what the model said, for its training; here that is all the same."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str):
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Not jinja2's own filter, which writes <, > and & as HTML wants them."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@functools.cache
def _compiled(template: str):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(template)


def render(template: str, messages: list[dict[str, str]], special_tokens: Mapping[str, str]) -> str:
    """The text of a conversation, up to where the model answers. special_tokens: bos_token, say, and its text.

    Raises ValueError for what the template refuses.
    """
    nothing = {"tools": None, "documents": None}
    try:
        return _compiled(template).render(
            messages=messages, add_generation_prompt=True, **nothing, **special_tokens
        )
    except TemplateError as error:
        raise ValueError(f"the model's chat template says: {error}") from None


def chosen(templates: str | list[dict[str, str]] | Mapping[str, str] | None) -> str | None:
    """Where a checkpoint has several, the one for a plain chat."""
    if isinstance(templates, list):
        templates = {each["name"]: each["template"] for each in templates}
    return templates.get("default") if isinstance(templates, Mapping) else templates
