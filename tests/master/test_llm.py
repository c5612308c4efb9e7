"""LLM over a scripted engine: which requests it makes, how it steps, what it returns."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from xllm_npu import llm as module
from xllm_npu.config.errors import SettingsError
from xllm_npu.llm import LLM
from xllm_npu.state.lora_request import LoRARequest
from xllm_npu.state.messages import (
    FINISH_ABORT,
    FINISH_LENGTH,
    AbortRequest,
    AddRequest,
    CommandDone,
    EngineReady,
    Finished,
    LoadLora,
    Logprobs,
    PromptInfo,
    StepOutputs,
    sequence_key,
)
from xllm_npu.state.sampling_params import InvalidParameter, SamplingParams
from xllm_npu.text.chat_template import ChatTemplateError
from xllm_npu.text.tokenizer import TokenizerError

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}{{ extra }}"  # fmt: skip  # noqa: E501


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """One token for each byte, a </s>, a template."""
    vocab = {t: i for i, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    path = tmp_path_factory.mktemp("model")
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE})
    )
    return path


class EchoEngine:
    """Answers each prompt with its own tokens, over and over, one a step."""

    def __init__(self, directory: Path, max_model_len: int = 64) -> None:
        self.tokenizer_dir = directory
        self.ready = EngineReady(
            model_name="echo", architecture="Echo", platform="cpu", device="cpu", dtype="float32", vocab_size=257,
            max_model_len=max_model_len, eos_token_ids=[256], num_kv_blocks=100, block_size=16, max_seqs=8,
            max_tokens_per_batch=64, weight_bytes=0, kv_cache_bytes=0, graph_sizes=[], load_seconds=0.0)  # fmt: skip
        self.requests: list[AddRequest] = []
        self.aborts: list[AbortRequest] = []
        self.running: dict[int, tuple[AddRequest, int]] = {}  # key -> request, tokens so far
        self.closed = 0
        self.commands: list = []
        self.idle_first = False  # answer None once although there is work, as an overlapped engine does
        self.fail_at = -1

    def submit(self, message) -> None:
        if isinstance(message, AbortRequest):
            self.aborts.append(message)
            for key in message.keys:
                self.running.pop(key, None)
            return
        self.requests.append(message)
        for i in range(message.params.num_sequences):
            self.running[sequence_key(message.request_id, i)] = (message, 0)

    def command(self, message) -> CommandDone:
        self.commands.append(message)
        return CommandDone()

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> StepOutputs | None:
        if self.idle_first or not self.running:
            self.idle_first = False
            return None
        self.fail_at -= 1
        if self.fail_at == 0:
            raise KeyboardInterrupt
        out, keys, tokens = StepOutputs(), [], []
        for key, (request, count) in list(self.running.items()):
            token = int(request.prompt_token_ids[count % request.prompt_token_ids.size])
            keys.append(key)
            tokens.append(token)
            if request.params.logprobs is not None:
                out.logprobs[key] = Logprobs([token, token, 0], [-1.0, -1.0, -2.0], [1, 1, 2])
            if count == 0:
                rows = None if request.params.prompt_logprobs is None else [None, Logprobs([0], [-3.0], [1])]
                out.prompts.append(PromptInfo(request.request_id, num_cached_tokens=1, prompt_logprobs=rows))
            self.running[key] = (request, count + 1)
            if count + 1 == request.params.max_tokens:
                out.finished.append(Finished(key, FINISH_LENGTH))
                del self.running[key]
        out.keys, out.tokens = np.array(keys, np.int64).tobytes(), np.array(tokens, np.int32).tobytes()
        return out

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engine(model_dir, monkeypatch) -> EchoEngine:
    engine = EchoEngine(model_dir)
    monkeypatch.setattr(module, "start_engine", lambda settings, listener: engine)
    return engine


@pytest.fixture
def llm(engine):
    with LLM("echo-model") as llm:
        yield llm


def test_one_prompt(llm):
    (result,) = llm.generate("abc", SamplingParams(max_tokens=5))
    assert (result.prompt, len(result.prompt_token_ids), result.num_cached_tokens) == ("abc", 3, 1)
    (output,) = result.outputs
    assert (output.index, output.text, output.finish_reason, output.stop_reason) == (0, "abcab", "length", None)
    assert output.token_ids == [*result.prompt_token_ids, *result.prompt_token_ids[:2]]
    assert (output.logprobs, output.cumulative_logprob, result.prompt_logprobs, result.error) == (None,) * 4


def test_several_prompts_run_together_and_come_back_in_order(llm, engine):
    params = [SamplingParams(max_tokens=n) for n in (9, 1, 5)]
    results = llm.generate(["abc", "x", "yz"], params)
    assert [r.outputs[0].text for r in results] == ["abcabcabc", "x", "yzyzy"]
    assert len({r.request_id for r in results}) == 3
    assert [r.params.max_tokens for r in engine.requests] == [9, 1, 5]


def test_every_form_of_a_prompt(llm):
    ids = llm.tokenizer.encode("hi")
    params = SamplingParams(max_tokens=2)
    for prompt in (ids, tuple(ids), np.array(ids), [ids], {"prompt_token_ids": ids}, [{"prompt": "hi"}], ["hi"]):
        (result,) = llm.generate(prompt, params)
        assert (result.outputs[0].text, result.prompt_token_ids) == ("hi", ids)
    assert llm.generate([], params) == []


def test_without_parameters_it_runs_to_the_context_length(llm):
    (result,) = llm.generate("abcd")
    assert len(result.outputs[0].token_ids) == 60


def test_without_parameters_the_models_defaults_count(engine):
    engine.ready.default_sampling = {"temperature": 0.6, "top_k": 20}
    with LLM() as llm:
        llm.generate("a")
        llm.generate("a", SamplingParams())
    assert [(r.params.temperature, r.params.top_k) for r in engine.requests] == [(0.6, 20), (1.0, 0)]


def test_stop_string_and_n(llm, engine):
    (result,) = llm.generate("abc", SamplingParams(max_tokens=9, n=2, stop=("ca",)))
    assert [(o.index, o.text, o.finish_reason, o.stop_reason) for o in result.outputs] == [
        (0, "ab", "stop", "ca"), (1, "ab", "stop", "ca")]  # fmt: skip
    assert not engine.has_work()


def test_logprobs(llm):
    (result,) = llm.generate("ab", SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=0))
    (output,) = result.outputs
    assert output.cumulative_logprob == -2.0
    first = output.logprobs[0]
    assert list(first) == [output.token_ids[0], 0]
    assert (first[0].logprob, first[0].rank) == (-2.0, 2)
    assert result.prompt_logprobs[0] is None
    assert result.prompt_logprobs[1][0].logprob == -3.0


def test_chat(llm):
    one = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=1)
    (result,) = llm.chat(one, params)
    assert result.prompt == "[user]hi[a]"
    results = llm.chat([one, [*one, {"role": "assistant", "content": "yo"}]], params)
    assert [r.prompt for r in results] == ["[user]hi[a]", "[user]hi[assistant]yo[a]"]
    (result,) = llm.chat(one, params, add_generation_prompt=False, chat_template_kwargs={"extra": "!"})
    assert result.prompt == "[user]hi!"
    (result,) = llm.chat(one, params, chat_template="T{{ messages[0].content }}")
    assert result.prompt == "Thi"


def test_chat_template_setting(engine):
    with LLM(chat_template="mine {{ messages[0].content }}") as llm:
        (result,) = llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1))
    assert result.prompt == "mine x"


def test_several_engines_are_a_servers():
    with pytest.raises(SettingsError, match="dp_size must be 1, got 2"):
        LLM("m", dp_size=2)


def test_adapters_that_are_loaded_at_the_start_are_a_servers():
    with pytest.raises(SettingsError, match="lora_request"):
        LLM("m", enable_lora=True, lora_modules=("a=/b",))


def test_adapters_by_prompt(engine):
    one = LoRARequest("a", 7, "/adapters/a")
    with LLM(enable_lora=True) as llm:
        llm.generate(["x", "y"], SamplingParams(max_tokens=1), lora_request=[None, one])
        llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1), lora_request=one)
        assert [request.lora_id for request in engine.requests] == [0, 1, 1]
        assert engine.commands == [LoadLora(1, "/adapters/a")]
        with pytest.raises(ValueError, match="2 prompts and 1 lora_request"):
            llm.generate(["x", "y"], lora_request=[one])
    with LLM() as llm, pytest.raises(InvalidParameter, match="enable_lora=True"):
        llm.generate("x", lora_request=one)


def test_a_bad_prompt_is_named_and_nothing_runs(llm, engine):
    with pytest.raises(InvalidParameter, match="Prompt 1: This model's maximum context length is 64"):
        llm.generate(["a", "b" * 64])
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidParameter, match="needs 'prompt'"):
        llm.generate([{"text": "x"}])
    assert engine.requests == []


def test_a_step_without_news_is_no_end(llm, engine):
    engine.idle_first = True
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].outputs[0].text == "a"


def test_an_engine_that_loses_requests_is_an_error_and_no_endless_loop(llm, engine):
    engine.has_work = lambda: False
    engine.idle_first = True
    with pytest.raises(RuntimeError, match="1 requests unfinished"):
        llm.generate("a")


def test_interrupt_aborts_what_is_left_and_the_next_call_works(llm, engine):
    engine.fail_at = 3
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "x"], [SamplingParams(max_tokens=9), SamplingParams(max_tokens=1)])
    (left,) = [r for r in engine.requests if r.params.max_tokens == 9]
    assert engine.aborts == [AbortRequest([sequence_key(left.request_id, 0)], FINISH_ABORT)]
    assert llm.generate("q", SamplingParams(max_tokens=2))[0].outputs[0].text == "qq"


def test_close(engine):
    llm = LLM()
    llm.close()
    llm.close()
    assert engine.closed == 1
    with pytest.raises(RuntimeError, match="is closed"):
        llm.generate("a")


def test_the_engine_is_closed_when_the_rest_cannot_be_made(engine, model_dir, tmp_path):
    engine.tokenizer_dir = tmp_path
    with pytest.raises(TokenizerError):
        LLM()
    assert engine.closed == 1
    engine.tokenizer_dir = model_dir
    with pytest.raises(ChatTemplateError, match="not valid"):
        LLM(chat_template="{% if %}")
    assert engine.closed == 2


def test_unknown_settings_are_refused(engine):
    with pytest.raises(SettingsError, match="max_model_length"):
        LLM(max_model_length=5)


def test_progress_bar_on_a_terminal_only(llm, monkeypatch, capsys):
    llm.generate("a", SamplingParams(max_tokens=3))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    llm.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate("a", SamplingParams(max_tokens=3))
    err = capsys.readouterr().err
    assert "Generating" in err
    assert "3 tokens" in err
