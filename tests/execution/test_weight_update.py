"""Weights that are replaced in an engine that runs: its tokens are then those of one that was started with them."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engine import run_engine
from tests.support.hf_model import make_hf_model
from tests.support.pooling_models import (
    add_modules,
    make_decoder_classifier,
    make_encoder,
    pooled_by,
    prompts_of,
    run_pooling,
)
from tests.support.sleeping import KINDS, SMALL, answer, engine_of, opened, prompts, resume, suspend
from tests.support.tiny_model import make_tiny_model
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.engine_weights import LoadFailed, WeightsLost
from xllm_npu.execution.weight_update import CheckpointLoader, WeightsRefused
from xllm_npu.llm import LLM
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.master.residency_error import ResidencyError, check_can_update
from xllm_npu.state.messages import PAUSED, AddRequest, CheckWeights, Pause, Residency, Resume, UpdateWeights
from xllm_npu.state.sampling_params import SamplingParams

TOKENS = 16  # of an answer
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def new(tmp_path_factory) -> Path:
    """Another checkpoint of the tiny model's network."""
    return make_tiny_model(tmp_path_factory.mktemp("new") / "m", seed=7, max_length=32768)


def update(loop: EngineLoop, checkpoint: Path | str) -> Residency:
    """As a master does it."""
    answer = loop.change(CheckWeights(str(checkpoint)))
    if not answer.error:
        loop.change(Pause("keep"))
        answer = loop.change(UpdateWeights(str(checkpoint)))
        loop.change(Resume())
    return answer


def of(model: Path, **settings) -> list[list[int]]:
    return run_engine(model, prompts(), TOKENS, **{**SMALL, **settings})[0]


@pytest.mark.parametrize("kind", ["plain", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS)])
def test_tokens_are_those_of_an_engine_that_was_started_with_the_checkpoint(tiny_dir, new, kind):
    """Prompts that were cached, too: all of them come again."""
    with opened(tiny_dir, **{**KINDS.get(kind, {}), "enable_prefix_cache": True}) as loop:
        before = answer(loop, prompts(), TOKENS)
        places = [p.data_ptr() for p in parameters(loop)]
        for checkpoint, expected in ((new, of(new)), (tiny_dir, before)):
            hits = loop.scheduler.running.blocks.prefix.stats.hits
            assert update(loop, checkpoint).error == ""
            assert answer(loop, prompts(), TOKENS) == expected != (before if checkpoint == new else [])
            assert loop.scheduler.running.blocks.prefix.stats.hits == hits
            assert kind == "plain" or [p.data_ptr() for p in parameters(loop)] == places
        assert answer(loop, prompts(), TOKENS) == before
        assert kind == "elastic" or loop.scheduler.running.blocks.prefix.stats.hits > hits


def parameters(loop: EngineLoop) -> list[torch.nn.Parameter]:
    return list(updater_of(loop)._model.parameters())


def updater_of(loop: EngineLoop):
    return engine_of(loop)._weights._checker


class Copy:
    """A copy of a checkpoint, with something wrong about it."""

    def __init__(self, source: Path, directory: Path) -> None:
        shutil.copytree(source, directory)
        self.directory = directory
        self.file, self.config = directory / FILE, directory / "config.json"

    def configure(self, **keys) -> None:
        self.config.write_text(json.dumps({**json.loads(self.config.read_text()), **keys}))

    def rewrite(self, change) -> None:
        tensors = load_file(self.file)
        change(tensors)
        save_file(tensors, self.file)


HEAD = "lm_head.weight"
WRONG = {
    "hidden_act is 'gelu', and 'silu' is served": lambda c: c.configure(hidden_act="gelu"),
    "num_layers is 1": lambda c: c.configure(num_hidden_layers=1),
    "tie_word_embeddings is True": lambda c: c.configure(tie_word_embeddings=True),
    "quantized": lambda c: c.configure(quantization_config={"quant_method": "gptq"}),
    "NoModel": lambda c: c.configure(architectures=["NoModel"]),
    "no config.json": lambda c: c.config.unlink(),
    "lacks 1 of the model's tensors: lm_head.weight": lambda c: c.rewrite(lambda t: t.pop(HEAD)),
    "lm_head.weight is": lambda c: c.rewrite(lambda t: t.update({HEAD: t[HEAD][1:].clone()})),
    "dtype I8": lambda c: c.rewrite(lambda t: t.update({HEAD: t[HEAD].to(torch.int8)})),
    "truncated": lambda c: c.file.write_bytes(c.file.read_bytes()[:-10]),
    "only pickle checkpoints": lambda c: c.file.rename(c.directory / "pytorch_model.bin"),
    "no \\*.safetensors files": lambda c: c.file.unlink(),
    "header is damaged": lambda c: c.file.write_bytes((8).to_bytes(8, "little") + b"no json!"),
}  # fmt: skip


def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_has_changed(tiny_dir, new, tmp_path, monkeypatch):
    expected = of(tiny_dir)
    monkeypatch.chdir(tmp_path)
    with opened(tiny_dir) as loop:
        versions = [p._version for p in parameters(loop)]
        for number, (reason, spoil) in enumerate(WRONG.items()):
            spoil(Copy(new, tmp_path / f"m{number}"))
            with pytest.raises(WeightsRefused, match=reason) as refused:
                engine_of(loop).check_weights(f"m{number}").result(60)
            assert str(tmp_path) not in str(refused.value)
        (tmp_path / "x.gguf").write_bytes(b"GGUF")
        for path, reason in (("x.gguf", "gguf"), ("nowhere", "no directory"), ("no/such", "no/such")):
            with pytest.raises(WeightsRefused, match=reason):
                engine_of(loop).check_weights(path).result(60)
        refusal = loop.change(CheckWeights("m1"))
        assert (refusal.reason, refusal.state) == ("checkpoint", "awake")
        assert [p._version for p in parameters(loop)] == versions
        assert answer(loop, prompts(), TOKENS) == expected


def test_a_checkpoint_of_a_hub_is_found_once_and_named_as_it_was_given(tiny_dir, new, tmp_path, monkeypatch):
    """Not again while no step runs; nor do messages say where it lies here."""
    copy, found = Copy(new, tmp_path / "m"), []
    monkeypatch.setattr("xllm_models.hub._from_hugging_face", lambda name, *_: found.append(name) or tmp_path / "m")
    with opened(tiny_dir) as loop:
        answer(loop, prompts(2), 4)
        assert engine_of(loop).check_weights("some/model").result(60) is None
        whole = copy.file.read_bytes()
        copy.file.write_bytes(whole[:-10])
        with pytest.raises(LoadFailed, match=r"some/model/model\.safetensors is truncated") as failed:
            engine_of(loop).load_weights("some/model")
        copy.file.write_bytes(whole)
        engine_of(loop).load_weights("some/model")
        assert found == ["some/model"]
        copy.file.unlink()
        with pytest.raises(WeightsRefused, match="some/model holds no") as refused:
            engine_of(loop).check_weights("some/model").result(60)
        assert str(tmp_path) not in f"{failed.value} {refused.value}"


def fail_on(monkeypatch, *failing: str) -> list[str]:
    """Loading these checkpoints fails when half is done; what was tried."""
    tried: list[str] = []
    load = CheckpointLoader.load

    def half(self) -> None:
        tried.append(str(self.path))
        if str(self.path) in failing:
            self._model.allocate_weights()
            for parameter in self._model.parameters():
                parameter.data.fill_(float("nan"))
            raise OSError("The disk is gone.")
        load(self)

    monkeypatch.setattr(CheckpointLoader, "load", half)
    return tried


@pytest.mark.parametrize("kind", ["plain", pytest.param("fixed", marks=pytest.mark.slow)])
def test_a_load_that_fails_in_the_middle_brings_the_old_weights_back(tiny_dir, new, monkeypatch, kind):
    with opened(tiny_dir, **KINDS.get(kind, {})) as loop:
        expected = answer(loop, prompts(), TOKENS)
        tried = fail_on(monkeypatch, str(new))
        failed = update(loop, new)
        assert (failed.state, failed.reason) == (PAUSED, "failed")
        assert "The disk is gone" in failed.error
        assert tried == [str(new), str(tiny_dir)]
        assert answer(loop, prompts(), TOKENS) == expected
        with pytest.raises(LoadFailed):
            engine_of(loop).load_weights(str(new))


def test_where_the_old_weights_are_gone_too_the_engine_ends(tiny_dir, new, monkeypatch):
    with opened(tiny_dir) as loop:
        fail_on(monkeypatch, str(new), str(tiny_dir))
        with pytest.raises(WeightsLost, match="nor the old ones"):
            update(loop, new)


def test_requests_that_are_kept_go_on_with_the_new_weights(tiny_dir, new):
    """Each gives what it had, and then what the new model makes of prompt and all that."""
    asked = prompts(3)
    with opened(tiny_dir, enable_prefix_cache=True) as loop:
        answers, steps = [list[int]() for _ in asked], 0

        def hear(outputs) -> None:
            for key, token in zip(outputs.key_array().tolist(), outputs.token_array().tolist()):
                answers[key >> 8].append(token)

        submit(loop, asked)
        while loop.has_work():
            outputs = loop.step()
            assert outputs is not None
            hear(outputs)
            steps += 1
            if steps == 5:
                for message in (CheckWeights(str(new)), Pause("keep")):
                    loop.residency.ask(message)
                    while (done := loop.residency.advance()) is None:
                        hear(loop.step())
                    assert done.error == ""
                had = [list(one) for one in answers]
                assert loop.change(UpdateWeights(str(new))).error == ""
                loop.change(Resume())
        loop.scheduler.check_integrity()
    assert [len(one) for one in answers] == [TOKENS] * 3
    assert all(0 < len(one) < TOKENS for one in had)
    for prompt, first, whole in zip(asked, had, answers):
        rest = run_engine(new, [prompt + first], TOKENS - len(first), **SMALL)[0][0]
        assert whole == first + rest


def submit(loop: EngineLoop, asked: list[list[int]]) -> None:
    for i, prompt in enumerate(asked):
        loop.submit(AddRequest(
            request_id=i, external_id=str(i), prompt=np.array(prompt, np.int32).tobytes(),
            params=SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True), arrival_time=time.time()))


def test_weights_that_sleep_and_weights_that_woke_alone(tiny_dir, new):
    before, after = of(tiny_dir), of(new)
    with opened(tiny_dir, **KINDS["fixed"]) as loop:
        suspend(loop, 2)
        engine_of(loop).load_weights(str(new))
        resume(loop)
        assert answer(loop, prompts(), TOKENS) == after
        suspend(loop, 2)
        resume(loop, ("weights",))
        engine_of(loop).load_weights(str(tiny_dir))
        resume(loop, ("kv_cache",))
        assert answer(loop, prompts(), TOKENS) == before
        found = engine_of(loop).weights_hash()
        suspend(loop, 1)
        resume(loop)
        assert engine_of(loop).weights_hash() == found
        engine_of(loop).load_weights(str(new))
        suspend(loop, 1)
        resume(loop)
        assert answer(loop, prompts(), TOKENS) == after


EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32}
FAMILIES = {"qwen3_moe": EXPERTS, "deepseek_v3": {}, "gpt_oss": {"num_local_experts": 8},
            "gemma3": {"tie_word_embeddings": True}, "llama": {"tie_word_embeddings": True}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "fixed"])
def test_nothing_grows_with_the_number_of_updates(tmp_path, kind):
    """Resident bytes, open files, threads."""
    models = [make_tiny_model(tmp_path / name, hidden=256, layers=4, seed=seed) for seed, name in enumerate("ab")]
    process, sizes = psutil.Process(), []
    with opened(models[0], **KINDS.get(kind, {})) as loop:
        before = answer(loop, prompts(), TOKENS)
        for number in range(40):
            assert update(loop, models[(number + 1) % 2]).error == ""
            assert (answer(loop, prompts(), TOKENS) == before) == bool(number % 2)
            if number % 10 == 9:
                sizes.append((process.memory_info().rss, process.num_fds(), threading.active_count()))
    assert sizes[-1][0] - sizes[0][0] < 2**21, sizes
    assert sizes[-1][1:] == sizes[0][1:]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_dtypes(tmp_path, family, dtype):
    """The new files have another dtype than the old ones."""
    first = make_tiny_model(tmp_path / "a", family, **FAMILIES[family])
    second = make_tiny_model(tmp_path / "b", family, seed=3, dtype=torch.bfloat16, **FAMILIES[family])
    expected = of(second, dtype=dtype)
    with opened(first, dtype=dtype) as loop:
        assert answer(loop, prompts(), TOKENS) != expected
        assert update(loop, second).error == ""
        assert answer(loop, prompts(), TOKENS) == expected


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["olmo2", "olmoe"])
def test_models_through_transformers_code(tmp_path, model_type):
    """The second one's tensors are rearranged by transformers."""
    first, second = make_hf_model(tmp_path / "a", model_type), make_hf_model(tmp_path / "b", model_type, seed=3)
    options = {"model_impl": "transformers"}
    expected = of(second, **options)
    spoiled = Copy(second, tmp_path / "c")
    spoiled.rewrite(lambda t: t.pop("model.norm.weight"))
    with opened(first, **options) as loop:
        before = answer(loop, prompts(), TOKENS)
        with pytest.raises(WeightsRefused, match=r"model\.norm\.weight"):
            engine_of(loop).check_weights(str(spoiled.directory)).result(60)
        assert answer(loop, prompts(), TOKENS) == before
        assert update(loop, second).error == ""
        assert answer(loop, prompts(), TOKENS) == expected != before


@pytest.mark.slow
def test_compiled_decode_steps_use_the_new_weights(tiny_dir, new):
    with opened(tiny_dir, enable_graph=True, graph_batch_sizes=(1, 4)) as loop:
        answer(loop, prompts(), TOKENS)
        assert update(loop, new).error == ""
        assert answer(loop, prompts(), TOKENS) == of(new)
        assert loop.scheduler.stats.graph_misses_total == 0


def dense_encoder(directory: Path, seed: int) -> None:
    make_encoder(directory, "Bert", seed=seed)
    torch.manual_seed(seed)
    add_modules(directory, "mean", dense=24)


# A bias by distance that is kept between steps, and a head; a head over a decoder; a layer beside the network.
POOLING = {
    "mpnet": lambda d, seed: make_encoder(d, "MPNet", "ForSequenceClassification", seed=seed, num_labels=3),
    "decoder": lambda d, seed: make_decoder_classifier(d, 3, seed=seed),
    "dense": dense_encoder,
}


@pytest.mark.parametrize("kind", ["mpnet", *(pytest.param(k, marks=pytest.mark.slow) for k in ("decoder", "dense"))])
def test_models_that_give_vectors(tmp_path, kind):
    first, second, asked = tmp_path / "a", tmp_path / "b", prompts_of(5, 40, 100)
    POOLING[kind](first, 0)
    POOLING[kind](second, 1)
    expected, _ = run_pooling(second, asked)
    loop = EngineLoop.create(settings_from_kwargs(
        model=str(first), dtype="float32", block_size=16, max_cache_size="24MiB", num_threads=1,
        max_seqs_per_batch=16))
    try:
        before = pooled_by(loop, asked)
        assert update(loop, second).error == ""
        after = pooled_by(loop, asked)
    finally:
        loop.close()
    for old, new, fresh in zip(before, after, expected):
        np.testing.assert_array_equal(new, fresh)
        assert np.abs(old - new).max() > 1e-3


def test_offline(tiny_dir, new, tmp_path):
    """Prefixes that were cached are forgotten here too, and what is refused changes nothing."""
    params, options = SamplingParams(temperature=0.0, max_tokens=TOKENS), {**SMALL, "max_cache_size": "24MiB"}
    with LLM(str(tiny_dir), **options, dtype="float32", num_threads=1) as llm:

        def tokens() -> list[list[int]]:
            return [r.outputs[0].token_ids for r in llm.generate(prompts(), params, use_tqdm=False)]

        before = tokens()
        with pytest.raises(ResidencyError, match="no directory") as refused:
            llm.update_weights(str(tmp_path / "nowhere"))
        assert refused.value.code == "checkpoint"
        assert tokens() == before
        llm.update_weights(str(new))
        assert tokens() == of(new) != before


@pytest.mark.parametrize("settings", [{"load_format": "dummy"}, {"model": "m.gguf"}])
def test_weights_of_no_checkpoint_are_not_replaced(settings):
    with pytest.raises(ResidencyError) as refused:
        check_can_update(settings_from_kwargs(**{"model": "m", **settings}).model)
    assert refused.value.code == "unsupported"
