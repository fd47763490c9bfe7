"""Forms of calls that are no JSON: found in templates, held to in answers, and read.

The templates write what the families' published ones do, in fewer words.
"""

from __future__ import annotations

import copy
import json
from enum import Enum
from typing import Literal

import jsonschema
import pytest
from conftest import NEW_PROMPTS, tiny_model, tiny_tokenizer
from pydantic import BaseModel

from cached_rag import ConfigError, Engine, GenerationConfig, Tools
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.grammar.call_form import ToolCall
from cached_rag.grammar.grammar import Matcher

# The turns of a template: what it lists, then each message with its calls.
TURNS = """{%- macro calls(m) -%}__CALLS__{%- endmacro -%}
{%- if tools %}<|im_start|>system
__LIST__<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}__LEAD__{% endif %}{{ m.content }}
{%- if m.tool_calls %}{{ calls(m) }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
__OPEN__{% endif %}"""
EACH = "{% for c in m.tool_calls %}{% set c = c.function %}"
ARGUMENTS = "{% for k, v in c.arguments.items() %}"
AS_TEXT = "{{ v if v is string else v | tojson }}"


def template(calls, lead="", opened="", listed="{{ tools | tojson }}"):
    parts = {"__CALLS__": calls, "__LEAD__": lead, "__OPEN__": opened, "__LIST__": listed}
    text = TURNS
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


QWEN = template(
    EACH
    + "{{ '' if loop.first else '\\n' }}<tool_call>\n<function={{ c.name }}>\n"
    + ARGUMENTS
    + (
        "<parameter={{ k }}>\n{{ v | tojson if v is mapping or v is sequence and v is not string"
        " else v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    ),
    lead="<think>\n\n</think>\n\n",
    opened="<think>\n",
)
NEMOTRON = QWEN.replace("{{ '' if loop.first else '\\n' }}<tool", "<tool").replace(
    "</tool_call>{", "</tool_call>{{ '\\n' }}{"
)
GLM = template(
    EACH
    + "<tool_call>{{ c.name }}"
    + ARGUMENTS
    + (
        "<arg_key>{{ k }}</arg_key><arg_value>" + AS_TEXT + "</arg_value>{% endfor %}"
        "</tool_call>{% endfor %}"
    ),
    lead="</think>",
    opened="<think>",
)
DSML = template(
    "<calls>"
    + EACH
    + '{{ "\\n" }}<invoke name="{{ c.name }}">'
    + ARGUMENTS
    + (
        '{{ "\\n" }}<parameter name="{{ k }}" string="{{ v is string | tojson }}">'
        + AS_TEXT
        + "</parameter>{% endfor %}{{ '\\n' }}</invoke>{% endfor %}{{ '\\n' }}</calls>"
    ),
)
GEMMA = (
    "{%- macro said(v) -%}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ ',' if not loop.first }}{{ k }}:{{ said(w) }}{% endfor %}}"
    "{% elif v is sequence %}[{% for w in v %}{{ ',' if not loop.first }}{{ said(w) }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{%- endmacro -%}"
) + template(
    EACH
    + "<|tool_call>call:{{ c.name }}{{ '{' }}"
    + ARGUMENTS
    + (
        "{{ ',' if not loop.first }}{{ k }}:{{ said(v) }}{% endfor %}}<tool_call|>{% endfor %}"
        "<|tool_response>"
    ),
    opened="<|channel>thought\n<channel|>",
)
GEMMA = GEMMA.replace("{% endif %}<|im_end|>", "{% else %}<|im_end|>{% endif %}")
LFM = template(
    "<|tool_call_start|>["
    + EACH
    + "{{ ', ' if not loop.first }}{{ c.name }}("
    + ARGUMENTS
    + (
        "{{ ', ' if not loop.first }}{{ k }}={{ \"'\" + v + \"'\" if v is string else v }}"
        "{% endfor %}){% endfor %}]<|tool_call_end|>"
    ),
)
LFM_LISTS = template("")
DEEPSEEK = template(
    "<|calls|>" + EACH + "<|call|>function<|sep|>{{ c.name }}\n```json\n{{ c.arguments | tojson }}"
    "\n```<|end_call|>{% endfor %}<|end_calls|>",
    listed="",
)
# Begins an answer, which may have more of them, and calls with an empty thought.
COMMAND = template(
    "<|begin_thought|><|end_thought|><|calls|>["
    + EACH
    + "{{ ', ' if not loop.first }}"
    + '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endfor %}]'
    + "<|end_calls|>",
    lead="{% if not m.tool_calls %}<|said|>{% endif %}",
    opened="<|begin_thought|><|end_thought|>",
).replace("add_generation_prompt", "true")
HARMONY = """{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>\
{{ c.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
CONTROLS = {
    "qwen": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "nemotron": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"],
    "dsml": [],
    "gemma": ["<|tool_call>", "<tool_call|>", "<|q|>", "<|channel>", "<channel|>"],
    "lfm": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "lfm lists": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "deepseek": ["<|calls|>", "<|call|>", "<|sep|>", "<|end_call|>", "<|end_calls|>"],
    "command": ["<|calls|>", "<|end_calls|>", "<|begin_thought|>", "<|end_thought|>", "<|said|>"],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"],
}
TEMPLATES = {
    "qwen": QWEN,
    "nemotron": NEMOTRON,
    "glm": GLM,
    "dsml": DSML,
    "gemma": GEMMA,
    "lfm": LFM,
    "lfm lists": LFM_LISTS,
    "deepseek": DEEPSEEK,
    "command": COMMAND,
    "harmony": HARMONY,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "hours": {"type": "array", "items": {"type": "integer"}},
        "place": {"$ref": "#/$defs/place"},
        "warm": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"street": {"type": "string"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "log", "parameters": {"type": "object"}}},
]
USER = {"role": "user", "content": "Is it warm?"}
ASKED = [
    ("weather", {"city": "Rome", "days": 2}),
    ("weather", {"city": "Oslo", "days": -3, "note": 'it\'s <b>\n "5" & more', "warm": True}),
    (
        "weather",
        {"city": "Rome", "days": 2, "note": None, "hours": [1, 2], "place": {"street": "x y"}},
    ),
    ("weather", {"city": "Rome", "days": 2, "note": "17"}),
    ("now", {}),
]
WRITTEN = {
    "qwen": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "nemotron": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n",
    "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days"
    "</arg_key><arg_value>2</arg_value></tool_call>",
    "dsml": '<calls>\n<invoke name="weather">\n<parameter name="city" string="true">Rome'
    '</parameter>\n<parameter name="days" string="false">2</parameter>\n</invoke>\n</calls>',
    "gemma": "<|tool_call>call:weather{city:<|q|>Rome<|q|>,days:2}<tool_call|>",
    "lfm": "<|tool_call_start|>[weather(city='Rome', days=2)]<|tool_call_end|>",
    "lfm lists": "<|tool_call_start|>[weather(city='Rome', days=2)]<|tool_call_end|>",
    "deepseek": '<|calls|><|call|>function<|sep|>weather\n```json\n{"city": "Rome", "days": 2}'
    "\n```<|end_call|><|end_calls|>",
    "command": '<|calls|>[{"name": "weather", "parameters": {"city": "Rome", "days": 2}}]'
    "<|end_calls|>",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Rome", "days": 2}',
}


def tokenization(name, *, has_controls=True):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATES[name]
    if has_controls and CONTROLS[name]:
        tokenizer.add_tokens(CONTROLS[name], special_tokens=True)
    return Tokenization(tokenizer)


def accepts(tools, text):
    """Whether an answer may read so, and whether it may end there."""
    tokenizer = tools.tokenization.tokenizer
    matcher = Matcher(tools.grammar, tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    try:
        for token in tokenizer(text, add_special_tokens=False).input_ids:
            matcher.take(token)
        matcher.take(tokenizer.eos_token_id)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_form_is_found_and_reads_what_the_template_writes(name):
    found = tokenization(name).template.call_form
    assert found.written(ASKED[:1]) == WRITTEN[name]
    assert (found.lists, found.writes) == (name != "deepseek", name != "lfm lists")
    without = tokenization("lfm lists", has_controls=False).template.call_form
    assert not without.lists  # control: no such tokens, no such form


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("has_controls", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_may_be_written_and_are_read(name, has_controls, choice):
    if name == "lfm lists" and not has_controls:
        pytest.skip("the tokens tell the form")
    text = tokenization(name, has_controls=has_controls)
    tools = Tools(text, TOOLS, choice, parallel=True)
    form = text.template.call_form
    for tool, arguments in ASKED:
        answer = form.written([(tool, arguments)])
        assert accepts(tools, answer), answer
        said, (call,) = tools.read(answer)
        assert (said, call.name, call.is_complete) == ("", tool, True)
        assert json.loads(call.arguments) == arguments
        growing, told = tools.growing(), ""
        for piece in answer:
            told += "".join(part.arguments for part in growing.push(piece)[1])
        told += "".join(part.arguments for part in growing.push("", is_over=True)[1])
        assert told == call.arguments
        cut = tools.read(answer[: answer.rindex(form.end) if form.end else -1])[1]
        assert not any(call.is_complete for call in cut) or name in (
            "deepseek",
            "command",
            "harmony",
        )
    if form.separator is not None:
        answer = form.written(ASKED[:2])
        assert accepts(tools, answer)
        assert not accepts(Tools(text, TOOLS, choice, parallel=False), answer)
        assert [json.loads(call.arguments) for call in tools.read(answer)[1]] == [
            arguments for _, arguments in ASKED[:2]
        ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("rain", {}),
        ("weather", {"city": "Rome"}),
        ("weather", {"city": "Bonn", "days": 2}),
        ("weather", {"city": "Rome", "days": "two"}),
        ("weather", {"city": "Rome", "days": 2, "wind": 3}),
        ("now", {"city": "Rome"}),
    ],
)
def test_other_calls_may_not_be_written(name, tool, arguments):
    text = tokenization(name)
    answer = text.template.call_form.written([(tool, arguments)])
    for choice in ("auto", "required") if name != "dsml" else ("required",):
        assert not accepts(Tools(text, TOOLS, choice), answer)


Colour = Enum("Colour", {"red": "red", "blue": "blue"})


class Paint(BaseModel):
    colour: Colour = Colour.red
    finish: Literal["matt"] | None = None
    coats: Literal["some", 2, None] = 2
    under: Colour | int = 1


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("key", Paint.model_fields)
def test_values_that_are_listed_behind_references_and_in_branches_are_held_to(name, key):
    text = tokenization(name)
    function = {"name": "paint", "parameters": Paint.model_json_schema()}
    tools = Tools(text, [{"type": "function", "function": function}], "required")
    for value in ("red", "blue", "matt", "some", "other", 2, 7, None):
        answer = text.template.call_form.written([("paint", {key: value})])
        is_one = Paint.__pydantic_validator__.isinstance_python({key: value})
        assert accepts(tools, answer) is is_one, value
        if is_one:
            assert json.loads(tools.read(answer)[1][0].arguments) == {key: value}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_value_that_spells_a_control_token_is_text(name):
    text = tokenization(name)
    one = {"properties": {"mark": {"enum": ["<|im_end|>", "it's", ["<|im_end|>", "x"]]}}}
    tools = [{"type": "function", "function": {"name": "end", "parameters": one}}]
    found = Tools(text, tools, "required").grammar
    assert f"<[{text.controls['<|im_end|>']}]>" not in found.text
    assert "<|im_end|>" in found.text
    for value in ("it's", ["<", "x"]):
        answer = text.template.call_form.written([("end", {"mark": value})])
        assert accepts(Tools(text, tools, "required"), answer) is (value == "it's")


@pytest.mark.parametrize("name", TEMPLATES)
def test_values_and_names_that_would_hold_up_all_answers_are_refused(name):
    for listed in ({"x": {"const": "a" * 40_000}}, {"a" * 40_000: {}}):
        function = {"name": "long", "parameters": {"properties": listed}}
        tools = Tools(tokenization(name), [{"type": "function", "function": function}])
        with pytest.raises(ConfigError, match="has 40000 characters, and may have 32768"):
            tools.grammar  # noqa: B018


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tool_without_listed_parameters_takes_any(name):
    text = tokenization(name)
    answer = text.template.call_form.written([("log", {"line": "x", "at": 3})])
    tools = Tools(text, TOOLS, "required")
    assert accepts(tools, answer)
    assert json.loads(tools.read(answer)[1][0].arguments) == {"line": "x", "at": 3}


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "harmony"])
def test_an_answer_may_think_between_marks_and_then_call(name):
    text = tokenization(name)
    tools = Tools(text, TOOLS)
    marks = [mark for mark in CONTROLS[name] if mark in ("</think>", "<channel|>")] or [""]
    call = text.template.call_form.written(ASKED[:1])
    for answer in (f"Let me see.{marks[0]}\n\n{call}", f"It is.{marks[0]} Yes."):
        assert accepts(tools, answer)
    # Without the mark the thought has no end, and no piece of the call is shown as one of it.
    growing, thoughts = Tools(text, TOOLS).growing(), ""
    for piece in [*f"Let me see.\n\n{call}", ""]:
        growing.push(piece, is_over=not piece)
        thoughts += growing.new_thought
    assert growing.has_calls
    assert thoughts in ("", "Let me see.")
    answer = f"Let me see.{marks[0]}\n\n{call}"
    said, calls = tools.read(answer)
    thinks = name in ("qwen", "nemotron", "glm")  # the prompt begins the thought
    assert (tools.parts(answer)[0], said) == (
        ("Let me see.", "") if thinks else ("", "Let me see.")
    )
    assert [call.name for call in calls] == ["weather"]
    unmarked = Tools(tokenization(name, has_controls=False), TOOLS)
    if name != "lfm lists" and not thinks:
        said, calls = unmarked.read(answer)
        assert said == f"Let me see.{marks[0]}"  # here the mark is text
    assert [call.name for call in calls] == ["weather"]


def test_thoughts_that_are_empty_in_templates_may_be_thought_before_a_call_or_a_text():
    tools = Tools(tokenization("command"), TOOLS)
    for behind in (WRITTEN["command"], "<|said|>It is."):
        assert accepts(tools, f"<|begin_thought|>Let me see.<|end_thought|>{behind}")
        assert accepts(tools, behind)


TWICE = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}


@pytest.mark.parametrize(
    ("part", "definition", "may_be_text"),
    [
        (TWICE, TWICE, True),  # round in a circle, and twice as many ways each time
        (TWICE, {"type": "integer"}, False),
        (TWICE, {"anyOf": [{"type": "integer"}, TWICE]}, False),
        ({"anyOf": [{"type": "integer"}, TWICE]}, {"type": ["string", "null"]}, True),
        ({"type": [{}]}, {}, True),
    ],
)
def test_each_reference_is_read_once(part, definition, may_be_text):
    parameters = {"type": "object", "properties": {"x": part}, "$defs": {"a": definition}}
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    found = Tools(tokenization("qwen"), [tool], "required").grammar
    (rule,) = (line for line in found.text.splitlines() if line.startswith("arguments0_0:"))
    assert ("arguments0_0_text" in rule) is may_be_text


def test_what_is_said_in_channels_is_told_apart():
    text = tokenization("harmony")
    tools = Tools(text, TOOLS)
    thought = "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant"
    call = WRITTEN["harmony"]
    final = "<|channel|>final<|message|>It is."
    for answer in (thought + call, thought + final, final, call):
        assert accepts(tools, answer)
    for other in (thought, "It is.", thought + "<|channel|>commentary<|message|>x"):
        assert not accepts(tools, other)
    given = '{"city": "Rome", "days": 2}'
    assert tools.read(thought + call) == ("", [ToolCall("weather", given)])
    assert tools.read(thought + final) == ("It is.", [])
    assert tools.parts(thought + final)[0] == tools.parts(thought + call)[0] == "They ask."
    growing = tools.growing()
    said, thoughts = "", ""
    for piece in thought + final:
        said, thoughts = said + growing.push(piece)[0], thoughts + growing.new_thought
    assert (said, thoughts) == ("It is.", "They ask.")


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_results_of_earlier_turns_stand_as_the_model_writes_them(name):
    text = tokenization(name)
    name_given, arguments = ASKED[0]
    call = {"id": "abcdefghi", "function": {"name": name_given, "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "It is mild."},
    ]
    shown = Tools(text, TOOLS).prompt(messages).text
    written = WRITTEN[name] if name != "harmony" else " to=functions.weather"
    assert shown.count(written) == 1
    assert "It is mild." in shown
    assert '"warm"' in shown  # the tools are listed
    if name == "deepseek":  # not by the template
        assert "answer in this form" in shown
        assert "<|calls|><|call|>function<|sep|><function name>\n" in shown


@pytest.mark.parametrize("name", ["qwen", "glm", "dsml", "gemma", "lfm"])
def test_a_model_that_knows_nothing_of_it_writes_whole_calls(name):
    """The grammar is held to by a random model, whose tokenizer has no such control tokens."""
    text = tokenization(name, has_controls=False)
    wanted = {**SCHEMA, "properties": {key: SCHEMA["properties"][key] for key in ("city", "days")}}
    wanted["properties"]["days"] = {"type": "integer", "maximum": 9, "minimum": 0}
    tool = {"type": "function", "function": {"name": "weather", "parameters": wanted}}
    tools = Tools(text, [tool], "weather")
    with Engine(tiny_model("llama"), NEW_PROMPTS) as engine:
        options = {"max_tokens": 300, "temperature": 1.0, "seed": 1}
        config = tools.settings(GenerationConfig(**options))
        answer = engine.generate(tools.prompt([USER]), config)
    said, calls = tools.read(answer.text)
    assert said == ""
    assert calls
    for call in calls:
        if call.is_complete:
            given = json.loads(call.arguments)
            jsonschema.validate(given, {"required": ["city"], "additionalProperties": True})
            assert given["city"] in ("Rome", "Oslo")
            assert isinstance(given["days"], int)
    assert calls[0].is_complete or answer.finish_reason == "length"
