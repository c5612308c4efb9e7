"""Free answers with a grammar: reasoning before them is bounded, and calls in them fit the schemas of strict tools."""

import json
import random

import llguidance
import llguidance.numpy as numpy_masks
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.text.test_forced_calls import CALLS, JSON, TIME, WEATHER, Bytes, fits
from xllm_npu.text.grammar_matcher import MatcherFactory
from xllm_npu.text.output_events import Content, ToolCall
from xllm_npu.text.output_format import ModelHints, output_format
from xllm_npu.text.reasoning import registry as reasoning_formats
from xllm_npu.text.tool_calls.registry import FORMATS
from xllm_npu.text.tool_spec import ToolSpec

STRICT = [ToolSpec("get_weather", WEATHER.parameters, strict=True), TIME]
PROMPT = {"kimi_k3": "<|open|>think<|sep|>", "gpt_oss": "<|start|>assistant"}
# Of each format of reasoning: calls that go with it, the prompt's end, what the model writes around its thought.
REASONED = [
    ("hermes", "qwen3", "assistant\n<think>\n", "", "</think>"),
    ("hermes", "qwen3", "assistant\n", "<think>", "</think>"),
    ("hermes", "deepseek_r1", "assistant\n", "<think>", "</think>"),
    ("kimi_k2", "kimi_k2", "<|im_middle|><think>", "", "</think>"),
    ("gpt_oss", "gpt_oss", PROMPT["gpt_oss"], "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("kimi_k3", "kimi_k3", PROMPT["kimi_k3"], "", "<|close|>think<|sep|>"),
    ("gemma4", "gemma4", "<|turn>model\n", "<|channel>thought\n", "<channel|>"),
    ("mistral", "mistral", "[/INST]", "[THINK]", "[/THINK]"),
]
ENVELOPES = ("gpt_oss", "kimi_k3")
ANSWER = {"gpt_oss": "<|channel|>final<|message|>The answer é.", "kimi_k3": "<|open|>response<|sep|>The answer é."}
CASES = [(*case, kind) for case in REASONED for kind in ("text", "tokens") if kind == "tokens" or
         case[0] not in ENVELOPES]


def format_of(name, kind, reasoning=None):
    """The markers of both formats are plain text, or tokens."""
    markers = {*FORMATS[name].markers, *(reasoning_formats.FORMATS[reasoning].markers if reasoning else ())}
    markers = {m for m in markers if "=" not in m and "\n" not in m}
    special = sorted(m for m in markers if not any(o in m for o in markers - {m})) if kind == "tokens" else []
    vocabulary = Bytes(special)
    hints = ModelHints(marker_ids={text: 257 + i for i, text in enumerate(special)})
    tokenizer = llguidance.LLTokenizer(llguidance._tokenizer.TokenizerWrapper(vocabulary))
    return output_format(name, reasoning, hints), vocabulary, tokenizer


def matcher_of(format, tokenizer, prompt, budget=None, tools=(), parallel=True):
    grammar = format.free_grammar(prompt, budget, tools, parallel)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error() + grammar
    return matcher


def budget_for(kind, end):
    """Six tokens, and where the end is plain text, which counts, those of the end."""
    return 6 + (len(end) if kind == "text" else 0)


def accepts(matcher, ids):
    matcher = matcher.deep_copy()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def allowed(matcher, vocabulary):
    mask = numpy_masks.allocate_token_bitmask(1, len(vocabulary.tokens))
    numpy_masks.fill_next_token_bitmask(matcher, mask)
    return set(np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(("name", "reasoning", "prompt", "start", "end", "kind"), CASES)
def test_reasoning_ends_with_its_budget(name, reasoning, prompt, start, end, kind):
    format, vocabulary, tokenizer = format_of(name, kind, reasoning)
    assert format.bounds_reasoning
    budget = budget_for(kind, end)
    matcher = matcher_of(format, tokenizer, prompt, budget)
    ids = vocabulary.ids
    answer = ANSWER.get(name, "The answer é.")
    assert accepts(matcher, ids(f"{start}Hm.{end}{answer}"))
    assert not accepts(matcher, ids(f"{start}Hm, this is too long.{end}{answer}"))
    assert not accepts(matcher, ids(f"{start}Hm."))  # an end of the sequence is not the end of reasoning
    if start:
        assert accepts(matcher, ids(answer))
    # Whoever goes on has to close when the tokens are used up, if not one before.
    thought = ids(start) + ids("a" * budget)
    count = matcher.try_consume_tokens(thought)
    assert len(thought) - 1 <= count <= len(thought)
    assert allowed(matcher, vocabulary) == {ids(end)[0]}
    assert accepts(matcher, ids(end + answer))


@pytest.mark.parametrize(("name", "reasoning", "prompt", "start", "end", "kind"), CASES)
def test_no_more_reasoning_comes_after_it(name, reasoning, prompt, start, end, kind):
    format, vocabulary, tokenizer = format_of(name, kind, reasoning)
    opener = start or ("<|open|>think<|sep|>" if name == "kimi_k3" else "<think>")
    for budget, before in ((budget_for(kind, end), f"{start}Hm.{end}"), (0, "" if start else end)):
        matcher = matcher_of(format, tokenizer, prompt, budget)
        again = vocabulary.ids(before + opener + "Once more.")
        if kind == "tokens" or (start and not budget):
            assert not accepts(matcher, again)
        else:  # what comes after reasoning is content to the parser, if no token
            parser = format.parser([], prompt)
            events = parser.push(before + opener + "Once more.") + parser.finish(False)
            assert events[-1] == Content(opener + "Once more.")


@pytest.mark.parametrize(("name", "reasoning", "prompt", "start", "end", "kind"), CASES)
def test_without_budget_there_is_none(name, reasoning, prompt, start, end, kind):
    format, vocabulary, tokenizer = format_of(name, kind, reasoning)
    matcher = matcher_of(format, tokenizer, prompt, 0)
    answer = ANSWER.get(name, "The answer é.")
    assert accepts(matcher, vocabulary.ids(("" if start else end) + answer))
    assert not accepts(matcher, vocabulary.ids(f"{start}Hm.{end}{answer}"))


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_the_budget_holds_in_the_middle_of_a_character(kind):
    format, vocabulary, tokenizer = format_of("hermes", kind, "qwen3")
    matcher = matcher_of(format, tokenizer, "<think>", 3)
    assert matcher.try_consume_tokens(vocabulary.ids("ab🎉")) == 3
    assert allowed(matcher, vocabulary) == {vocabulary.ids("</think>")[0]}


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_other_markers_stay_possible_in_the_answer(kind):
    format, vocabulary, tokenizer = format_of("hermes", kind, "qwen3")
    matcher = matcher_of(format, tokenizer, "<think>", budget_for(kind, "</think>"))
    for text in (CALLS["hermes"], "Well. " + CALLS["hermes"] + "\n" + CALLS["hermes"], "a </tool_call> b", ""):
        assert accepts(matcher, vocabulary.ids("Hm.</think>\n\n" + text))


def test_markup_that_no_grammar_can_force():
    for name in ENVELOPES:
        assert not output_format(name, name, ModelHints()).bounds_reasoning
    assert not output_format("hermes", None, ModelHints()).bounds_reasoning


# Calls

TRIGGERED = [name for name in CALLS if FORMATS[name].trigger]
HELD = [(name, kind) for name in TRIGGERED for kind in ("text", "tokens") if kind == "tokens" or name not in ENVELOPES]
BAD = {"hermes": ("true", '"yes"'), "qwen3_coder": ("\ntrue\n", "\nyes\n"), "glm45": (">true<", ">yes<"),
       "glm47": (">true<", ">yes<"), "gemma4": (":true", ":yes"), "kimi_k3": (">true<", ">yes<")}


def written(name):
    """A call as it comes in free text."""
    return ("<|python_tag|>" if name == "llama3_json" else "") + CALLS[name]


def spoiled(name):
    """The same with an argument that is none."""
    good, bad = BAD.get(name, (">true<", ">yes<") if JSON not in CALLS[name] else BAD["hermes"])
    call = written(name)
    assert good in call
    return call.replace(good, bad)


def around(name, call, before="Let me see.\n", after=""):
    if name == "gpt_oss":
        said = f"<|channel|>final<|message|>{before}<|end|><|start|>assistant" if before else ""
        return said + call
    if name == "kimi_k3":
        return f"<|open|>response<|sep|>{before}<|close|>response<|sep|>" * bool(before) + call + after
    return before + call + after


def test_which_formats_are_told_from_text():
    assert set(CALLS) - set(TRIGGERED) == {"json", "pythonic"}
    assert not output_format("gpt_oss", None, ModelHints()).triggers_calls


@pytest.mark.parametrize(("name", "kind"), HELD)
@pytest.mark.parametrize("parallel", [False, True])
def test_calls_of_strict_tools_follow_their_schema(name, kind, parallel):
    format, vocabulary, tokenizer = format_of(name, kind)
    assert format.triggers_calls
    matcher = matcher_of(format, tokenizer, "", tools=STRICT, parallel=parallel)
    text = around(name, written(name))
    assert accepts(matcher, vocabulary.ids(text))
    assert accepts(matcher, vocabulary.ids(around(name, written(name), "")))
    assert not accepts(matcher, vocabulary.ids(around(name, spoiled(name))))
    assert not accepts(matcher, vocabulary.ids(around(name, written(name).replace("get_weather", "get_money"))))
    assert accepts(matcher, vocabulary.ids(around(name, "", "No call, just text: <b> {} é")))
    parser = format.parser(STRICT, PROMPT.get(name, ""))
    events = [*parser.push(text), *parser.finish(False)]
    assert [type(event) for event in events] == [Content, ToolCall]
    if name != "gpt_oss":  # which ends its turn with a call
        after = "\nThat was it." if name != "kimi_k3" else "<|close|>message<|sep|>"
        assert accepts(matcher, vocabulary.ids(around(name, written(name), after=after)))
        twice = around(name, written(name), after="\nAgain.\n" + written(name))
        assert accepts(matcher, vocabulary.ids(twice)) is parallel


@pytest.mark.parametrize(("name", "kind"), HELD)
def test_other_tools_need_only_be_named(name, kind):
    format, vocabulary, tokenizer = format_of(name, kind)
    tools = [WEATHER, ToolSpec("get_time", TIME.parameters, strict=True)]
    matcher = matcher_of(format, tokenizer, "", tools=tools)
    assert accepts(matcher, vocabulary.ids(around(name, written(name))))
    if FORMATS[name].json_arguments:
        assert accepts(matcher, vocabulary.ids(around(name, spoiled(name))))
    assert not accepts(matcher, vocabulary.ids(around(name, written(name).replace("get_weather", "get_money"))))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), HELD)
def test_whatever_is_written_its_calls_fit(name, kind):
    """At random, with the marker of calls every now and then."""
    tools, prompt = [ToolSpec(tool.name, tool.parameters, strict=True) for tool in (WEATHER, TIME)], ""
    found = 0
    for seed in range(6):
        generator, ids, wanted = random.Random(seed), [], []
        format, vocabulary, tokenizer = format_of(name, kind)
        matcher = matcher_of(format, tokenizer, prompt, tools=tools, parallel=seed % 2 == 0)
        while len(ids) < 500 and not (len(ids) > 200 and matcher.is_accepting()):
            options = allowed(matcher, vocabulary) - {vocabulary.eos_token_id}
            if not wanted and generator.random() < 0.15:
                wanted = vocabulary.ids(FORMATS[name].trigger)
            if not wanted or wanted[0] not in options:
                wanted = [generator.choice(sorted(i for i in options if 32 <= i < 127 or i > 256) or sorted(options))]
            ids.append(wanted.pop(0))
            assert matcher.consume_token(ids[-1])
        text = b"".join(vocabulary.tokens[i] for i in ids).decode("utf-8", "ignore")
        parser = format.parser(tools, prompt)
        events = [*parser.push(text), *parser.finish(cut_short=not matcher.is_accepting())]
        calls = [event for event in events if isinstance(event, ToolCall)]
        assert all(fits(call.name, json.loads(call.arguments)) for call in calls), text
        assert seed % 2 == 0 or len(calls) <= 1
        found += len(calls)
    assert found


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_calls_and_a_budget(kind):
    format, vocabulary, tokenizer = format_of("hermes", kind, "qwen3")
    matcher = matcher_of(format, tokenizer, "<think>", budget_for(kind, "</think>"), STRICT)
    assert accepts(matcher, vocabulary.ids("Hm.</think>\n\n" + written("hermes")))
    assert accepts(matcher, vocabulary.ids("Hm.</think>\n\nWell.\n" + written("hermes")))
    assert not accepts(matcher, vocabulary.ids("Hm.</think>\n\n" + spoiled("hermes")))
    assert not accepts(matcher, vocabulary.ids("Hm, this is too long.</think>\n\n" + written("hermes")))
    if kind == "tokens":
        assert not accepts(matcher, vocabulary.ids("Hm." + written("hermes")))


@pytest.mark.parametrize("special", [False, True])
def test_with_a_tokenizer_that_has_the_markers(special):
    """The engine's matcher over the tokens of the tokenizers library."""
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    markers = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in markers])
    ids = {text: backend.token_to_id(text) for text in ("<|im_end|>", *markers)}
    format = output_format("hermes", "qwen3", ModelHints(marker_ids=ids))
    factory = MatcherFactory(backend.to_str(), backend.get_vocab_size(), [ids["<|im_end|>"]])

    def takes(text, prompt):
        lark = format.free_grammar(prompt, 4, STRICT, True)
        matcher = factory.matcher(json.dumps({"grammars": [{"lark_grammar": lark}]}))
        return accepts(matcher, backend.encode(text).ids)

    call = CALLS["hermes"]
    for prompt, start in (("<think>\n", ""), ("", "<think>")):
        assert takes(f"{start}Hm.</think>\n\nWell.\n{call}\n{call}", prompt)
        assert not takes(f"{start}Hm, no.</think>\n\nWell.", prompt)
        assert not takes(f"{start}Hm.</think>\n\n<think>Hm.</think>", prompt)
        assert not takes(f"{start}Hm.</think>\n\n{spoiled('hermes')}", prompt)
    assert takes(call + "<|im_end|>", "")
