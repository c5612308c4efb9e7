"""The grammar of forced calls: it takes what the model's own markup looks like, and nothing else can be made with it
than calls that the same format's parser finds, with arguments that fit the tool's schema.
"""

import json
import random

import llguidance
import llguidance.numpy as numpy_masks
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from xllm_npu.text.grammar_matcher import MatcherFactory
from xllm_npu.text.output_events import Reasoning, ToolCall
from xllm_npu.text.output_format import ModelHints, output_format
from xllm_npu.text.tokenizer import Tokenizer
from xllm_npu.text.tool_calls.registry import FORMATS
from xllm_npu.text.tool_spec import ToolSpec

WEATHER = ToolSpec("get_weather", {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["c", "f", "the other"]},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["city", "exact"],
    "$defs": {"place": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3},
                                                         "height": {"type": ["number", "null"], "maximum": 9000}},
                        "required": ["name"], "additionalProperties": False}},
})
TIME = ToolSpec("get_time", {"type": "object", "properties": {}})
TOOLS = [WEATHER, TIME]

JSON = '{"city": "Oslo", "days": 3, "exact": true}'
DSML = ('<｜DSML｜{s}invoke name="get_weather">\n'
        '<｜DSML｜{s}parameter name="city" string="true">Oslo</｜DSML｜{s}parameter>\n'
        '<｜DSML｜{s}parameter name="days" string="false">3</｜DSML｜{s}parameter>\n'
        '<｜DSML｜{s}parameter name="exact" string="false">true</｜DSML｜{s}parameter>\n</｜DSML｜{s}invoke>')
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
    "json": f'{{"name": "get_weather", "arguments": {JSON}}}',
    "llama3_json": f'{{"name": "get_weather", "parameters": {JSON}}}',
    "pythonic": '[get_weather(city="Oslo", days=3, exact=true)]',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    "mistral_v3": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}]',
    "minimax": f'<tool_calls>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_calls>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
                  '<parameter name="days">3</parameter>\n<parameter name="exact">true</parameter>\n</invoke>\n'
                  '</minimax:tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
                   "</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
             "<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
             "<arg_value>3</arg_value><arg_key>exact</arg_key><arg_value>true</arg_value></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
               f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
               '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
               '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
               '<|open|>argument key="exact" type="boolean"<|sep|>true<|close|>argument<|sep|>'
               "<|close|>call<|sep|><|close|>tools<|sep|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                   f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
                    "<｜tool▁calls▁end｜>",
    "deepseek_v32": "<｜DSML｜function_calls>\n" + DSML.format(s="") + "\n</｜DSML｜function_calls>",
    "deepseek_v4": "<｜DSML｜tool_calls>\n" + DSML.format(s="") + "\n</｜DSML｜tool_calls>",
    "deepseek_v41": "<｜DSML｜ calls>\n" + DSML.format(s=" ") + "\n</｜DSML｜ calls>",
    "gpt_oss": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3,exact:true}<tool_call|>',
}


class Bytes:
    """A vocabulary of bytes, one end of text, and special tokens."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self, special):
        self.special = list(special)
        self.special_token_ids = list(range(256, 257 + len(self.special)))
        self.tokens = [*(bytes([i]) for i in range(256)), b"<eos>", *(s.encode() for s in self.special)]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())

    def ids(self, text):
        """With special tokens where their text stands, as a model writes them."""
        for i, token in enumerate(self.special):
            text = text.replace(token, chr(0xE000 + i))
        return [i for c in text for i in ([257 + ord(c) - 0xE000] if 0xE000 <= ord(c) < 0xF000 else c.encode())]

    def text(self, ids):
        return b"".join(self.tokens[i] for i in ids).decode()


def special_of(name, kind):
    """The format's markers are plain text, or tokens; no vocabulary has whole tags with attributes as tokens."""
    markers = {m for m in FORMATS[name].markers if "=" not in m}
    return sorted(m for m in markers if not any(o in m for o in markers - {m})) if kind == "tokens" else []


def format_of(name, kind, reasoning=None):
    vocabulary = Bytes(special_of(name, kind))
    hints = ModelHints(marker_ids={text: 257 + i for i, text in enumerate(vocabulary.special)})
    tokenizer = llguidance.LLTokenizer(llguidance._tokenizer.TokenizerWrapper(vocabulary))
    return output_format(name, reasoning, hints), vocabulary, tokenizer


def matcher_of(name, kind, parallel):
    format, vocabulary, tokenizer = format_of(name, kind)
    grammar = format.forced_call_grammar(TOOLS, parallel)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error() + grammar
    return format, vocabulary, matcher


REASONED = [
    ("hermes", "qwen3", "<|im_start|>assistant\n<think>\n", "Hm, </b>.\n</think>\n\n"),
    ("hermes", "qwen3", "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\n"),
    ("hermes", "qwen3", "<|im_start|>assistant\n", ""),
    ("kimi_k2", "kimi_k2", "<|im_assistant|>assistant<|im_middle|><think>", "Hm.</think>"),
    ("gpt_oss", "gpt_oss", "<|start|>assistant", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"),
    ("gpt_oss", "gpt_oss", "<|start|>assistant", ""),
    ("kimi_k3", "kimi_k3", "<|open|>think<|sep|>", "Hm.<|close|>think<|sep|>"),
    ("gemma4", "gemma4", "<|turn>model\n", "<|channel>thought\nHm.<channel|>"),
    ("mistral", "mistral", "[/INST]", "[THINK]Hm.[/THINK]"),
]


@pytest.mark.parametrize("kind", ["text", "tokens"])
@pytest.mark.parametrize(("name", "reasoning", "prompt", "thought"), REASONED)
def test_reasoning_may_come_before(name, reasoning, prompt, thought, kind):
    format, vocabulary, tokenizer = format_of(name, kind, reasoning)
    grammar = json.dumps({"grammars": [
        {"lark_grammar": "start: @before @calls"},
        {"name": "before", "lark_grammar": format.reasoning_grammar(prompt, True)},
        {"name": "calls", "lark_grammar": format.forced_call_grammar(TOOLS, False)}]})
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error() + grammar
    ids = vocabulary.ids(thought + CALLS[name])
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    parser = format.parser(TOOLS, prompt)
    events = [*parser.push(thought + CALLS[name]), *parser.finish(False)]
    assert isinstance(events[-1], ToolCall)
    assert all(isinstance(event, Reasoning) for event in events[:-1])
    assert len(events) == 1 + bool(thought)


def test_reasoning_that_the_prompt_closed_does_not_come():
    format, _, _ = format_of("hermes", "text", "qwen3")
    assert format.reasoning_grammar("<think>\n\n</think>\n\n", True) is None
    assert format.reasoning_grammar("<think>\n", True) is not None


def calls_in(format, text):
    parser = format.parser(TOOLS, "")
    events = [*parser.push(text), *parser.finish(False)]
    assert all(isinstance(event, ToolCall) for event in events), (text, events)
    return [(event.name, json.loads(event.arguments)) for event in events]


def test_every_format_has_an_example():
    assert set(CALLS) == set(FORMATS)


@pytest.mark.parametrize("kind", ["text", "tokens"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_as_the_model_writes_it(name, kind):
    format, vocabulary, matcher = matcher_of(name, kind, False)
    ids = vocabulary.ids(CALLS[name])
    assert matcher.try_consume_tokens(ids) == len(ids), vocabulary.text(ids[: matcher.try_consume_tokens(ids)])
    assert matcher.is_accepting()
    assert calls_in(format, CALLS[name]) == [("get_weather", json.loads(JSON))]


@pytest.mark.parametrize("kind", ["text", "tokens"])
@pytest.mark.parametrize("name", CALLS)
def test_whatever_it_lets_through_is_calls(name, kind):
    for seed in range(3):
        parallel = seed > 0
        format, vocabulary, matcher = matcher_of(name, kind, parallel)
        text = random_walk(vocabulary, matcher, random.Random(seed))
        found = calls_in(format, text)
        assert found, text
        assert parallel or len(found) == 1
        for call in found:
            assert fits(*call), (text, call)


def random_walk(vocabulary, matcher, generator):
    ids = []
    mask = numpy_masks.allocate_token_bitmask(1, len(vocabulary.tokens))
    while not matcher.is_stopped():
        numpy_masks.fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")).tolist()
        assert allowed, vocabulary.text(ids)
        if 256 in allowed and (len(ids) > 300 or generator.random() < 0.7):
            break
        plain = [i for i in allowed if 32 <= i < 127 or i > 256]
        ids.append(generator.choice([i for i in plain or allowed if i != 256] or allowed))
        assert len(ids) < 3000, vocabulary.text(ids)
        assert matcher.consume_token(ids[-1])
    return vocabulary.text(ids)


def fits(name, arguments):
    if name == "get_time":
        return arguments == {}
    checks = {"city": lambda v: isinstance(v, str) and len(v) <= 6, "days": lambda v: type(v) is int and 0 <= v <= 99,
              "unit": lambda v: v in ("c", "f", "the other"), "exact": lambda v: isinstance(v, bool),
              "places": lambda v: isinstance(v, list) and all(map(fits_place, v))}
    return {"city", "exact"} <= set(arguments) <= set(checks) and all(checks[k](v) for k, v in arguments.items())


def fits_place(place):
    return isinstance(place, dict) and set(place) - {"height"} == {"name"} and isinstance(place["name"], str) and (
        place.get("height") is None or (type(place["height"]) in (int, float) and place["height"] <= 9000))


@pytest.mark.parametrize("special", [False, True])
def test_with_a_tokenizer_that_has_the_markers(tmp_path, special):
    """What the tokenizer's library makes of a call is what the engine's matcher takes, in its marker tokens."""
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    markers = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in markers])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer = Tokenizer(tmp_path)
    format = output_format("hermes", "qwen3", ModelHints(marker_ids=tokenizer.marker_ids))
    thought = "Hm, <think.\n</think>\n\n"
    grammar = json.dumps({"grammars": [
        {"lark_grammar": "start: @before @calls"},
        {"name": "before", "lark_grammar": format.reasoning_grammar("<think>\n", True)},
        {"name": "calls", "lark_grammar": format.forced_call_grammar(TOOLS, True)}]})
    end = tokenizer.added_tokens["<|im_end|>"]
    matcher = MatcherFactory(backend.to_str(), tokenizer.vocab_size, [end]).matcher(grammar)
    ids = tokenizer.encode(f"{thought}{CALLS['hermes']}\n{CALLS['hermes']}")
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    shown = tokenizer.detokenizer(shown_special_tokens=format.shown_special_tokens)
    parser = format.parser(TOOLS, "<think>\n")
    events = [event for i in ids for event in parser.push(shown.push(i))] + parser.finish(False)
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == "Hm, <think."
    assert [e.name for e in events if isinstance(e, ToolCall)] == ["get_weather", "get_weather"]
