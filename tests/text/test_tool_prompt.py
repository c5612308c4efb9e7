"""Tools, calls and results in front of a template that knows none of them, and of those that know them."""

import json

import pytest

from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.chat_template import ChatTemplate
from xllm_npu.text.output_events import ToolCall
from xllm_npu.text.output_format import ModelHints, output_format
from xllm_npu.text.tool_spec import ToolSpec

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501
STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # noqa: E501
OBJECTS = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"  # noqa: E501
STRINGS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'x' + c.function.arguments }}{% endfor %}{% endfor %}"  # noqa: E501
TOOL = {"type": "function", "function": {"name": "f", "description": "Does.", "parameters": {"type": "object"}}}
HISTORY = [
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "Yes.", "tool_calls": [
        {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": "é"}}}]},
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "2", "content": "two"},
    {"role": "user", "content": "And?"},
]  # fmt: skip


def test_tools_are_described_in_the_system_message():
    prompt = ChatTemplate(CHATML, {}).render([{"role": "user", "content": "Go"}], tools=[TOOL])
    assert prompt.startswith("<system>You can call functions.")
    assert json.dumps(TOOL) in prompt
    assert prompt.endswith("</tool_call>\n<user>Go\n<assistant>")
    with_system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go"}]
    prompt = ChatTemplate(CHATML, {}).render(with_system, tools=[TOOL])
    assert prompt.startswith("<system>Be brief.\n\nYou can call")
    assert prompt.count("<system>") == 1


def test_a_template_without_system_messages_gets_them_in_the_users():
    prompt = ChatTemplate(STRICT, {}).render([{"role": "user", "content": "Go"}], tools=[TOOL])
    assert prompt.startswith("<user>Go\n\nYou can call")
    with pytest.raises(InvalidParameter, match="no system"):
        ChatTemplate(STRICT, {}).render([{"role": "system", "content": "x"}], tools=[TOOL])


def test_calls_and_results_become_text():
    prompt = ChatTemplate(CHATML, {}).render(HISTORY, tools=None)
    assert prompt == (
        '<user>Go\n<assistant>Yes.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
        "<user><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n<user>And?\n<assistant>")


def test_what_an_earlier_call_became_is_read_as_a_call():
    prompt = ChatTemplate(CHATML, {}).render(HISTORY[:2], add_generation_prompt=False)
    parser = output_format("hermes", None, ModelHints()).parser([ToolSpec("f")], "")
    events = parser.push(prompt.partition("<assistant>")[2]) + parser.finish(False)
    [call] = [event for event in events if isinstance(event, ToolCall)]
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": "é"})


def test_a_template_that_knows_tools_gets_them():
    assert ChatTemplate(OBJECTS, {}).render(HISTORY, tools=[TOOL]) == 'f;{"a": "é"}'


def test_a_template_that_adds_arguments_to_a_string_gets_strings():
    assert ChatTemplate(STRINGS, {}).render(HISTORY) == 'x{"a": "é"}'


def test_developer_messages_are_system_messages_unless_known():
    chat = [{"role": "developer", "content": "Be brief."}]
    assert ChatTemplate(CHATML, {}).render(chat, add_generation_prompt=False) == "<system>Be brief.\n"
    own = CHATML + "{# developer #}"
    assert ChatTemplate(own, {}).render(chat, add_generation_prompt=False) == "<developer>Be brief.\n"
