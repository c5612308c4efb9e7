"""Parsers of model output: what does not depend on one family, and every family's manners that no fixture shows."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_npu.text.envelope import Envelope
from xllm_npu.text.json_scanner import MAX_DEPTH
from xllm_npu.text.output_events import Content, Reasoning, ToolCall
from xllm_npu.text.output_format import ModelHints, output_format
from xllm_npu.text.tool_calls.registry import FORMATS
from xllm_npu.text.tool_spec import ToolSpec

TOOLS = [
    ToolSpec("get_weather", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    ToolSpec("get_time"),
]
TAGGED = sorted(name for name, one in FORMATS.items() if not isinstance(one, Envelope))

# One call each, as the family writes it: get_weather of Oslo for 3 days.
JSON = '{"city": "Oslo", "days": 3}'
OBJECT = f'{{"name": "get_weather", "arguments": {JSON}}}'
DSML = ('<｜DSML｜{s}{tag}>\n<｜DSML｜{s}invoke name="get_weather">\n'
        '<｜DSML｜{s}parameter name="city" string="true">Oslo</｜DSML｜{s}parameter>\n'
        '<｜DSML｜{s}parameter name="days" string="false">3</｜DSML｜{s}parameter>\n'
        "</｜DSML｜{s}invoke>\n</｜DSML｜{s}{tag}>")
CALLS = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "json": OBJECT,
    "llama3_json": f"<|python_tag|>{OBJECT}",
    "pythonic": "<|python_start|>[get_weather(city='Oslo', days=3)]<|python_end|>",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    "mistral_v3": f"[TOOL_CALLS] [{OBJECT}]",
    "minimax": f"<tool_calls>\n{OBJECT}\n</tool_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
                  '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
                   "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
             "<arg_value>3</arg_value>\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
             "<arg_value>3</arg_value></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
               f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                   f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
                    "<｜tool▁calls▁end｜>",
    "deepseek_v32": DSML.format(s="", tag="function_calls"),
    "deepseek_v4": DSML.format(s="", tag="tool_calls"),
    "deepseek_v41": DSML.format(s=" ", tag="calls"),
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
}
# Every format's call in its whole, then cut before its end.
ENVELOPED = {
    "gpt_oss": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
               '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
               '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
               "<|close|>tools<|sep|>",
}


def parser(calls, reasoning=None, prompt="", tools=TOOLS, shows_reasoning=True):
    return output_format(calls, reasoning, ModelHints()).parser(tools, prompt, reasoning=shows_reasoning)


def parse(one, pieces, cut_short=False):
    """Content, reasoning, calls as (name, arguments)."""
    events = [event for piece in pieces for event in one.push(piece)] + one.finish(cut_short)
    return ("".join(e.text for e in events if isinstance(e, Content)),
            "".join(e.text for e in events if isinstance(e, Reasoning)),
            [(e.name, json.loads(e.arguments)) for e in events if isinstance(e, ToolCall)])


WEATHER = ("get_weather", {"city": "Oslo", "days": 3})


def test_every_format_has_an_example():
    assert {*CALLS, *ENVELOPED} == set(FORMATS)


@pytest.mark.parametrize("name", CALLS)
def test_text_around_calls(name):
    call = CALLS[name]
    content, _, calls = parse(parser(name), [f"One.\n{call}\n{call} two"])
    assert calls == [WEATHER, WEATHER]
    assert re.sub(r"\s+", " ", content) == "One. two"


@pytest.mark.parametrize("name", CALLS)
def test_white_space_before_and_between_calls(name):
    """It is the format's, where the format has it; elsewhere it is the model's."""
    call = CALLS[name]
    content, _, _ = parse(parser(name), [f"One.\n\n{call}\n{call}\n"])
    assert content == ("One." if FORMATS[name].trims else "One.\n\n\n\n")
    content, _, _ = parse(parser(name), [f"One.\n\n{call}\n\nTwo. "])
    assert content == ("One.\n\nTwo." if FORMATS[name].trims else "One.\n\n\n\nTwo. ")


def test_a_section_that_the_model_did_not_close():
    text = CALLS["kimi_k2"].removesuffix("<|tool_calls_section_end|>") + "\n"
    assert parse(parser("kimi_k2"), [text]) == ("", "", [WEATHER])


@pytest.mark.parametrize("name", {**CALLS, **ENVELOPED})
def test_nobody_sees_a_call_before_it_is_whole(name):
    """At each character: no call or the whole call; and where the text is cut before, nothing of it."""
    text = {**CALLS, **ENVELOPED}[name]
    one = parser(name)
    for end in range(1, len(text) + 1):
        for event in one.push(text[end - 1 : end]):
            assert isinstance(event, ToolCall)
            assert json.loads(event.arguments) == WEATHER[1]
        made = one.num_tool_calls
        assert made in (0, 1)
        cut = parse(parser(name), [text[:end]], cut_short=True)
        assert len(cut[2]) == made
        assert not cut[0] or not made
    assert one.finish(False) == [] or one.num_tool_calls == 1
    assert one.num_tool_calls == 1


@pytest.mark.parametrize("name", CALLS)
def test_without_tools_markup_is_content(name):
    assert parse(parser(name, tools=[]), [CALLS[name]]) == (CALLS[name], "", [])


def test_plain_text_is_as_it_is():
    for text in ("", " \n", "  a  \n\n", "{", "```", "[1]", "<tool_cal", "<think>"):
        for name in TAGGED:
            assert parse(parser(name), [text]) == (text, "", [])
        assert parse(parser(None), [text]) == (text, "", [])
        assert parse(parser(None, tools=[]), list(text)) == (text, "", [])


# Cuttings and concatenations

PIECES = sorted({part for call in {**CALLS, **ENVELOPED}.values()
                 for part in re.findall(r"<[^<>]*>|\[[A-Z_]+\]|```|[{}\[\]\"',:;=()]|[^<>{}\[\]\"',:;=()`]+", call)})
NOISE = st.lists(st.sampled_from([*PIECES, "\n", " ", "x", "é", "<", "</", "\\", '\\"', "<think>", "</think>", "\ud83d"
                                  .encode("utf-16", "surrogatepass").decode("utf-16", "replace"), *CALLS.values(),
                                  *ENVELOPED.values()]), max_size=14).map("".join)


def cut(text, cuts):
    at = sorted({c % (len(text) + 1) for c in cuts})
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)])]


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=25, deadline=None)
@given(text=NOISE, cuts=st.lists(st.integers(0, 400), max_size=12), cut_short=st.booleans(),
       prompt=st.sampled_from(["", "<think>\n", "<|start|>assistant", "<|open|>think<|sep|>"]))
def test_noise_in_any_pieces(name, text, cuts, cut_short, prompt):
    reasoning = name if isinstance(FORMATS[name], Envelope) else "qwen3"
    results = [parse(parser(name, reasoning, prompt), pieces, cut_short) for pieces in ([text], cut(text, cuts), text)]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=25, deadline=None)
@given(text=NOISE)
def test_what_is_no_call_is_content(name, text):
    """But for sections, whose markers go even if there is nothing in them."""
    content, _, calls = parse(parser(name), [text])
    end = FORMATS[name].section[1].strip("\n")
    if not calls and (end in ("", "]") or end not in text):
        assert content == text


SENTENCES = st.text("abc.,!? \né{}<>=", min_size=1, max_size=20).filter(str.strip)


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=15, deadline=None)
@given(thought=SENTENCES | st.just(""), parts=st.lists(SENTENCES | st.none(), max_size=4),
       cuts=st.lists(st.integers(0, 900), max_size=8))
def test_reasoning_text_and_calls_in_a_row(name, thought, parts, cuts):
    """None is a call."""
    texts = [CALLS[name] if part is None else part for part in parts]
    text = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + "\n".join(texts)
    content, reasoning, calls = parse(parser(name, "deepseek_r1"), cut(text, cuts))
    assert reasoning == thought.strip()
    assert calls == [WEATHER] * parts.count(None)
    assert "".join(content.split()) == "".join("".join(part for part in parts if part).split())


# What is held back

LONG = {
    "json in hermes": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x\\n", 3000),
    "numbers": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "1, ", 3000),
    "white space in json": ("hermes", '<tool_call>{"name": "f",', "   ", 3000),
    "white space after json": ("hermes", f"<tool_call>{OBJECT}", "   ", 3000),
    "no markup": ("hermes", "", "<tool", 3000),
    "openers": ("hermes", "", "<tool_call>", 1000),
    "braces": ("json", "", "\n{", 3000),
    "bare parameter": ("qwen3_coder", "<function=f>\n<parameter=a>\n", "</parameter> x\n", 1000),
    "bare value": ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_value>", "</arg_value", 1000),
    "dsml": ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a">',
             "</｜DSML｜parameter> ", 500),
    "section": ("kimi_k2", "<|tool_calls_section_begin|>", "noise ", 1000),
    "python": ("pythonic", "[get_weather(city='", "\\'a", 1000),
    "gemma": ("gemma4", '<|tool_call>call:f{a:[', '<|"|>x<|"|>,', 500),
    "harmony body": ("gpt_oss", "<|channel|>final<|message|>", "<|end|> ", 500),
    "harmony header": ("gpt_oss", "<|channel|>", "to=", 500),
    "xtml": ("kimi_k3", "<|open|>response<|sep|>", "<|close|>response<|sep|>x", 300),
}


@pytest.mark.parametrize("case", LONG)
def test_work_is_linear(case):
    """Whatever has come, no more than a marker waits: a push looks at what it brings, and at that again."""
    name, begin, part, times = LONG[case]
    one = parser(name)
    waiting = one._parse.reader
    one.push(begin)
    for _ in range(times):
        one.push(part)
        assert len(waiting._text) <= 64
    one.finish(True)


# Policies

@pytest.mark.parametrize("text", [
    f"```json\n{OBJECT}\n```", f"```\n{OBJECT}\n```", f"[{OBJECT}]", f"Sure:\n{OBJECT}", f"  {OBJECT}",
    '{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}}',
    json.dumps({"name": "get_weather", "parameters": WEATHER[1]}),
    json.dumps({"name": "get_weather", "arguments": json.dumps(WEATHER[1])}),
])
def test_bare_json_of_small_models(text):
    for name in ("json", "hermes", "llama3_json"):
        content, _, calls = parse(parser(name), [text])
        assert calls == [WEATHER]
        assert content.strip() in ("", "Sure:")


@pytest.mark.parametrize("text", [
    '{"name": "Oslo", "arguments": {}}', '{"name": "get_weather"}', '{"name": "get_weather", "country": "Norway"}',
    '{"city": "Oslo"}', f"like {OBJECT}", '{"name": "get_weather", "arguments": [1]}', "```python\n{}\n```", "[1, 2]",
    '```json\n{"a": 1}\n```', '{"name": "get_weather", "arguments": {"a": 1}',
])
def test_json_that_is_an_answer(text):
    for name in ("json", "hermes", "llama3_json"):
        assert parse(parser(name), [text]) == (text, "", [])


def test_an_answer_in_json_is_not_held_back():
    one = parser("hermes")
    one.push('{"capital"')
    assert parse(one, [': "Oslo"']) == (': "Oslo"', "", [])


def test_a_list_in_the_tags():
    for name in ("hermes", "json"):
        assert parse(parser(name), [f"<tool_call>[{OBJECT}, {OBJECT}]</tool_call>"]) == ("", "", [WEATHER, WEATHER])
        assert parse(parser(name), ["<tool_call>[]</tool_call>"]) == ("<tool_call>[]</tool_call>", "", [])
        assert parse(parser(name), [f"<tool_call>[{OBJECT}, {OBJECT}"], True) == ("", "", [])


def test_several_bare_calls():
    for text in (f"{OBJECT}; {OBJECT}", f"{OBJECT}\n{OBJECT}", f"[{OBJECT}, {OBJECT}]"):
        assert parse(parser("llama3_json"), [text])[2] == [WEATHER, WEATHER]


def test_reasoning_that_the_prompt_began_or_closed():
    for prompt, text, expected in (
        ("<think>\n", "Hm.\n</think>\n\nYes.", ("Yes.", "Hm.")),
        ("<think>\n", "<think>Hm.</think>Yes.", ("Yes.", "Hm.")),
        ("<think>\n\n</think>\n\n", "Yes.", ("Yes.", "")),
        ("", "\n<think>Hm.</think>\n\n  Yes.", ("  Yes.", "Hm.")),
        ("", "Yes. <think>Hm.</think>", ("Yes. <think>Hm.</think>", "")),
        ("<think>", "Hm.", ("", "Hm.")),
        ("What is <think>?<|im_end|>", "A tag.", ("A tag.", "")),
    ):
        assert parse(parser("hermes", "qwen3", prompt), [text])[:2] == expected
        assert parse(parser(None, "deepseek_r1", prompt, tools=[]), list(text))[:2] == expected


def test_reasoning_can_be_left_in():
    text = "<think>Hm.</think>Yes."
    assert parse(parser("hermes", "qwen3", shows_reasoning=False), [text])[0] == text
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert parse(parser("gpt_oss", "gpt_oss", shows_reasoning=False), [analysis])[:2] == ("Hm.Yes.", "")


def test_a_call_in_reasoning_ends_it_where_the_family_does_so():
    text = f"Hm. {CALLS['hermes']} Then."
    assert parse(parser("hermes", "qwen3", "<think>"), [text]) == (" Then.", "Hm.", [WEATHER])
    assert parse(parser("hermes", "deepseek_r1", "<think>"), [text]) == ("", text, [])
    assert parse(parser("hermes", "qwen3", "<think>"), ["<tool_call> is a tag</think>Yes"])[:2] == (
        "Yes", "<tool_call> is a tag")


def test_ids_of_the_format():
    [call] = parser("kimi_k2").push(CALLS["kimi_k2"])
    assert call.id == "functions.get_weather:0"
    [call] = parser("mistral").push(f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{JSON}")
    assert call.id == "abc"


def test_arguments_are_strict_json():
    """Raw control characters and repeated keys are mended, everything else stays as the model wrote it."""
    written = {
        '{"a": 1.10, "b":[ ]}': '{"a": 1.10, "b":[ ]}',
        '{"a": "x\ny"}': '{"a": "x\\ny"}',
        '{"a": 1, "a": 2}': '{"a": 2}',
        '{"a": 123456789012345678901234567890.5}': '{"a": 123456789012345678901234567890.5}',
        '{"a": 1e999, "a": 1e999}': '{"a": 1.7976931348623157e+308}',
        '{"a": "\\ud800", "a": "\\ud800"}': '{"a": "\\ud800"}',
        "null": "{}",
    }
    for text, arguments in written.items():
        [call] = parser("hermes").push(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>')
        assert call.arguments == arguments
        call.arguments.encode()


@pytest.mark.parametrize("arguments", ["[1]", "1", "{'a': 1}", '{"a": 01}', '{"a": NaN}', '{"a": 1,}', '{"a": "\\x"}',
                                       '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", '{"a": ' + "1" * 600 + "}"])
def test_arguments_that_are_no_object(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse(parser("hermes"), [text]) == (text, "", [])


def test_a_name_that_no_tool_can_have():
    for name in ("", "a b", "a\n", "<b>", "x" * 300):
        text = f"<tool_call>{json.dumps({'name': name, 'arguments': {}})}</tool_call>"
        assert parse(parser("hermes"), [text]) == (text, "", [])


def test_harmony_without_its_format_is_an_answer():
    assert parse(parser("gpt_oss", "gpt_oss", "<|start|>assistant"), ["Hello."]) == ("Hello.", "", [])


def test_harmony_prompt_that_is_in_a_message():
    one = parser("gpt_oss", "gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>So")
    assert parse(one, [" far.<|end|><|start|>assistant<|channel|>final<|message|>Yes."])[:2] == ("Yes.", "far.")


def test_harmony_two_analysis_messages_are_lines():
    text = "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|>"
    assert parse(parser("gpt_oss", "gpt_oss"), [text])[1] == "A.\nB."


def test_python_literals():
    text = "[get_weather(a=[1, -2.5, (True, None)], b={'k': 'v'}, c='it\\'s \\u00e9\\n', d=\"\", e=1e3,)]"
    assert parse(parser("pythonic"), [text])[2] == [("get_weather", {
        "a": [1, -2.5, [True, None]], "b": {"k": "v"}, "c": "it's é\n", "d": "", "e": 1000.0})]
    for wrong in ("[get_weather(a=__import__('os'))]", "[get_weather(a=1+1)]", "[get_weather(1)]", "[other(a=1)]"):
        assert parse(parser("pythonic"), [wrong]) == (wrong, "", [])


# The choice of formats

def test_names_and_aliases():
    for name in ("hermes", "qwen3_xml", "qwen3_coder", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm45", "glm47",
                 "kimi_k2", "llama3_json", "llama4_json", "pythonic", "llama4_pythonic", "mistral", "minimax",
                 "minimax_m2", "openai", "Hermes", "kimi-k2"):
        assert output_format(name, None, ModelHints()).name_of_tools in FORMATS
    for name in ("deepseek_r1", "qwen3", "glm45", "kimi_k2", "minimax_m2", "mistral", "openai_gptoss", "gpt_oss"):
        assert output_format(None, name, ModelHints()).name_of_reasoning
    for nothing in (None, "none", ""):
        chosen = output_format(nothing, nothing, ModelHints())
        assert (chosen.name_of_tools, chosen.name_of_reasoning) == (None, None)


def test_an_unknown_name_says_which_there_are():
    with pytest.raises(ValueError, match=r"tool_call_parser has no format 'hermse'.*hermes.*qwen3_coder"):
        output_format("hermse", None, ModelHints())
    with pytest.raises(ValueError, match=r"reasoning_parser has no format 'r1'.*deepseek_r1"):
        output_format(None, "r1", ModelHints())


# A few characters of each family's template, or what else it is known by; the formats of calls and of reasoning.
FAMILIES = [
    (ModelHints(chat_template="<tool_call>\n{\"name\": <function-name>}"), "hermes", None),  # Qwen2.5
    (ModelHints(chat_template="'<tool_call>\\n' '</think>'"), "hermes", "qwen3"),  # Qwen3
    (ModelHints(chat_template="<tool_call>\\n<function=' <parameter="), "qwen3_coder", None),
    (ModelHints(chat_template="<tool_call>\\n<function=' <parameter= </think>"), "qwen3_coder", "qwen3"),  # Qwen3.5
    (ModelHints(chat_template="<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value> </think>"), "glm45", "glm45"),
    (ModelHints(chat_template="<tool_call>{name}<arg_key>{k}</arg_key><arg_value> </think>"), "glm47", "glm45"),
    (ModelHints(chat_template="'<｜tool▁calls▁begin｜>' + '```json' </think>"), "deepseek_v3", "deepseek_r1"),
    (ModelHints(chat_template="'<｜tool▁calls▁begin｜>' '<｜tool▁sep｜>' </think>"), "deepseek_v31", "deepseek_r1"),
    (ModelHints("DeepseekV32ForCausalLM"), "deepseek_v32", "deepseek_r1"),
    (ModelHints("DeepseekV4ForCausalLM"), "deepseek_v4", "deepseek_r1"),
    (ModelHints(chat_template="<|tool_calls_section_begin|>"), "kimi_k2", None),
    (ModelHints(chat_template="<|tool_calls_section_begin|> <think></think>"), "kimi_k2", "kimi_k2"),
    (ModelHints(added_tokens=frozenset({"<|open|>", "<|close|>", "<|sep|>"})), "kimi_k3", "kimi_k3"),
    (ModelHints(chat_template="<minimax:tool_call> </think>"), "minimax_m2", "minimax_m2"),
    (ModelHints(chat_template="<|channel|>commentary to=functions. <|message|>"), "gpt_oss", "gpt_oss"),
    (ModelHints("GptOssForCausalLM"), "gpt_oss", "gpt_oss"),
    (ModelHints(chat_template="<|tool_call>call: <tool_call|>"), "gemma4", "gemma4"),
    (ModelHints(chat_template="[TOOL_CALLS] ["), "mistral_v3", None),
    (ModelHints(chat_template="[TOOL_CALLS] [ARGS] [THINK]"), "mistral", "mistral"),
    (ModelHints(added_tokens=frozenset({"[TOOL_CALLS]", "[ARGS]", "[THINK]"})), "mistral", "mistral"),
    (ModelHints(chat_template='<|start_header_id|> {"name": function name, "parameters": ...}'), "llama3_json", None),
    (ModelHints(chat_template="[func_name1(params_name1=params_value1)]"), "pythonic", None),
    (ModelHints(chat_template="<|im_start|>"), "json", None),  # SmolLM2: no tools in the template
    (ModelHints(), "json", None),
]


@pytest.mark.parametrize(("hints", "calls", "reasoning"), FAMILIES)
def test_the_format_of_a_model(hints, calls, reasoning):
    chosen = output_format("auto", "auto", hints)
    assert (chosen.name_of_tools, chosen.name_of_reasoning) == (calls, reasoning)


def test_markers_that_may_be_special_tokens():
    for name, tokens in (("kimi_k2", {"<|tool_call_begin|>", "<|tool_call_end|>"}),
                         ("gpt_oss", {"<|channel|>", "<|end|>"}), ("mistral", {"[TOOL_CALLS]", "[ARGS]"}),
                         ("gemma4", {"<|tool_call>", '<|"|>', "<|channel>"}),
                         ("deepseek_v41", {"｜DSML｜"}), ("deepseek_v3", {"<｜tool▁sep｜>"})):
        assert tokens <= output_format(name, "gemma4", ModelHints()).shown_special_tokens
