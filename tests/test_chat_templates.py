"""examples/templates.py, on templates in the style of those that models come with, which transformers renders alike."""

import datetime
import re

import pytest

pytest.importorskip("jinja2")
pytestmark = pytest.mark.numerics

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hé?"},
    {"role": "assistant", "content": " Yes. "},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture
def render(example):
    templates = example("templates")
    return lambda template, messages=TALK: templates.render(template, messages, SPECIAL)


def test_lines_and_special_tokens(render):
    """Blocks of their own lines leave no white space; bos_token and eos_token are the model's."""
    text = render(
        """{{- bos_token -}}
{% for message in messages %}
    {% if message.role == 'assistant' %}
{{ message.role }}: {{ message.content | trim }}{{ eos_token }}
    {% else %}
{{ message['role'] }}: {{ message['content'] }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{%- endif %}"""
    )
    lines = ["<s>system: Be <brief> & kind.", "user: Hé?", "assistant: Yes.</s>", "user: Why?", "assistant:"]
    assert text == "\n".join(lines)


def test_date(render):
    """As Llama 3.2 and SmolLM3 have it."""
    text = render(
        "{%- if strftime_now is defined %}{%- set today = strftime_now('%d %b %Y') %}"
        "{%- else %}{%- set today = '26 Jul 2024' %}{%- endif %}Today Date: {{ today }}"
    )
    days = [datetime.datetime.now() - datetime.timedelta(days=i) for i in (0, 1)]  # at midnight
    assert text in {f"Today Date: {day.strftime('%d %b %Y')}" for day in days}


def test_refusals(render):
    """As Gemma and Mistral have them."""
    template = "{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}"
    with pytest.raises(ValueError, match="the model's chat template says: System role not supported"):
        render(template)
    assert render(template, TALK[1:]) == ""


def test_json(render):
    """Letters as they are, <, > and & too; keys in their order; indent, as templates for tools ask for it."""
    template = "{{ {'b': messages[0].content, 'a': [1, none, true]} | tojson }}"
    assert render(template) == '{"b": "Be <brief> & kind.", "a": [1, null, true]}'
    assert render("{{ messages[1] | tojson(indent=2) }}") == '{\n  "role": "user",\n  "content": "Hé?"\n}'
    assert render("{{ messages[1].content | tojson(ensure_ascii=True) }}") == '"H\\u00e9?"'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}") == '{"a":2,"b":1}'


def test_loop_controls_and_namespaces(render):
    """As Qwen 3 looks for the last question, from behind."""
    text = render(
        "{%- set ns = namespace(last=messages|length - 1, found=false) %}"
        "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if message.role == 'assistant' %}{%- continue %}{%- endif %}"
        "{%- if message.role == 'user' and not message.content.startswith('<tool') %}"
        "{%- set ns.last = index %}{%- set ns.found = true %}{%- break %}{%- endif %}{%- endfor %}"
        "{{ ns.last }} {{ ns.found }}"
    )
    assert text == "3 True"


def test_what_the_model_said(render):
    template = (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{%- else %}[{{ m.content }}]{%- endif %}{%- endfor %}"
    )
    assert render(template) == "[Be <brief> & kind.][Hé?] Yes. [Why?]"


def test_no_tools(render):
    """They are None, and not undefined, which `is not none` would take for some."""
    assert render("{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}") == ""
    assert render("{% if enable_thinking is defined %}thinking{% endif %}") == ""


def test_macros_and_slices(render):
    """Pieces of text in a list, a system message taken off the front, a macro."""
    template = (
        "{%- macro said(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
        "{%- if messages[0]['role'] == 'system' %}{%- set loop_messages = messages[1:] %}"
        "{%- set system = messages[0]['content'] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
        "{{ system | upper }}{%- for m in loop_messages %}{{ said(m) }}{%- endfor %}"
    )
    assert render(template) == "BE <BRIEF> & KIND.<user>Hé?<assistant> Yes. <user>Why?"


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__init__.__globals__ }}"],
)
def test_sandbox(template, render):
    """A template is a stranger's program."""
    with pytest.raises(ValueError, match=re.escape("the model's chat template says: ")):
        render(template)


def test_several(example):
    chosen = example("templates").chosen
    assert chosen([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]) == "b"
    assert chosen({"default": "b", "rag": "c"}) == "b"
    assert chosen("b") == "b"
    assert chosen(None) is None
