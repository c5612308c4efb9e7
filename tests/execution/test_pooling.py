"""Vectors of encoders and decoders against transformers: mixed lengths, chunks, prefixes, little memory, many steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from xllm_models.config_keys import ModelConfigError

from tests.support.pooling_models import (
    add_modules,
    make_decoder_classifier,
    make_encoder,
    pooled_by,
    prompts_of,
    run_pooling,
)
from tests.support.tiny_model import make_tiny_model
from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.execution.model_loader import LoadError
from xllm_npu.execution.pooled_rows import pool_plainly
from xllm_npu.master.engine_loop import EngineLoop
from xllm_npu.master.request_factory import POOLING_PARAMS
from xllm_npu.state.messages import FINISH_ABORT, AbortRequest, AddRequest, Resume, Sleep, Wake, sequence_key

LENGTHS = (5, 40, 40, 3, 100, 1, 127)
FAMILIES = ("Bert", "Roberta", "XLMRoberta", "DistilBert", "MPNet")


def hidden_of(model, prompt: list[int], **inputs: torch.Tensor) -> torch.Tensor:
    """[n, hidden] of the last layer."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt]), **inputs).last_hidden_state[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_equal_transformers(tmp_path: Path, family: str) -> None:
    model, prompts = make_encoder(tmp_path, family), prompts_of(*LENGTHS)
    vectors, loop = run_pooling(tmp_path, prompts, max_tokens_per_batch=150)  # so that it takes several steps
    for prompt, vector in zip(prompts, vectors):
        np.testing.assert_allclose(vector, hidden_of(model, prompt)[0], atol=1e-5)
    assert loop.scheduler.stats.steps_total > 1
    assert loop.ready.kv_cache_bytes == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_cross_encoders_equal_transformers(tmp_path: Path, family: str) -> None:
    model, prompts = make_encoder(tmp_path, family, "ForSequenceClassification", num_labels=3), prompts_of(*LENGTHS)
    vectors, loop = run_pooling(tmp_path, prompts)
    for prompt, vector in zip(prompts, vectors):
        with torch.no_grad():
            np.testing.assert_allclose(vector, model(input_ids=torch.tensor([prompt])).logits[0], atol=1e-5)
    pooling = loop.ready.pooling
    assert pooling is not None
    assert (pooling.task, pooling.activation, pooling.width) == ("classify", "softmax", 3)


def test_ids_from_the_vocabularys_size_on_are_of_the_second_type(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "Bert")
    first, second = prompts_of(4, 6)
    (vector,), _ = run_pooling(tmp_path, [[*first, *(i + model.config.vocab_size for i in second)]])
    types = torch.tensor([[0] * 4 + [1] * 6])
    np.testing.assert_allclose(vector, hidden_of(model, first + second, token_type_ids=types)[0], atol=1e-5)


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "last"])
def test_modules_of_sentence_transformers(tmp_path: Path, mode: str) -> None:
    model, prompts = make_encoder(tmp_path, "Bert"), prompts_of(*LENGTHS)
    layer = add_modules(tmp_path, mode, dense=24)
    vectors, loop = run_pooling(tmp_path, prompts)
    for prompt, vector in zip(prompts, vectors):
        with torch.no_grad():
            expected = torch.tanh(layer(pool_plainly(mode, hidden_of(model, prompt))))
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    assert loop.ready.pooling is not None
    assert loop.ready.pooling.normalize


def test_the_longest_input_is_what_the_directory_says(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert")
    add_modules(tmp_path, "mean", max_length=48)
    vectors, loop = run_pooling(tmp_path, prompts_of(48))
    assert loop.ready.max_model_len == 48
    assert vectors[0].shape == (64,)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    directory = make_tiny_model(tmp_path_factory.mktemp("decoder"), "qwen3", initializer_range=0.2, max_length=256)
    return directory, transformers.AutoModel.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("mode", ["last", "mean", "cls", "max"])
def test_decoders_in_chunks_equal_transformers(decoder, mode: str) -> None:
    directory, model = decoder
    prompts = prompts_of(*LENGTHS, 256)  # the last one as long as the model goes
    vectors, loop = run_pooling(directory, prompts, runner="pooling", max_tokens_per_batch=48,
                                pooler_config={"pooling_type": mode.upper()})
    for prompt, vector in zip(prompts, vectors):
        np.testing.assert_allclose(vector, pool_plainly(mode, hidden_of(model, prompt)), atol=2e-5)
    assert loop.scheduler.stats.generation_tokens_total == 0


def test_prefixes_are_shared_where_the_last_position_says_all(decoder) -> None:
    directory, model = decoder
    (head,) = prompts_of(64)
    prompts = [head + tail for tail in prompts_of(3, 20, 5)]
    for mode, shared in (("LAST", True), ("MEAN", False)):
        settings = {"runner": "pooling", "pooler_config": {"pooling_type": mode}}
        loop = EngineLoop.create(settings_from_kwargs(
            model=str(directory), dtype="float32", block_size=16, max_cache_size="24MiB", num_threads=1, **settings))
        try:
            once, again = pooled_by(loop, prompts), pooled_by(loop, prompts)
        finally:
            loop.close()
        for prompt, *vectors in zip(prompts, once, again):
            expected = pool_plainly(mode.lower(), hidden_of(model, prompt))
            for vector in vectors:
                np.testing.assert_allclose(vector, expected, atol=2e-5)
        assert (loop.scheduler.stats.prefix_hits_total > 0) == shared


@pytest.mark.parametrize("mode", ["LAST", "MEAN"])
@pytest.mark.parametrize("overlap", [True, False])
def test_little_memory_changes_no_vector(decoder, mode: str, overlap: bool) -> None:
    """Prompts that wait, and in part give way, for each other's blocks."""
    directory, model = decoder
    prompts = prompts_of(*[90] * 6, seed=1)
    vectors, _ = run_pooling(directory, prompts, runner="pooling", max_tokens_per_batch=32, max_model_len=100,
                             max_cache_size="160KiB", enable_schedule_overlap=overlap,
                             pooler_config={"pooling_type": mode})
    for prompt, vector in zip(prompts, vectors):
        np.testing.assert_allclose(vector, pool_plainly(mode.lower(), hidden_of(model, prompt)), atol=2e-5)


@pytest.mark.parametrize("num_labels", [1, 4])
def test_decoders_with_a_score_head_equal_transformers(tmp_path: Path, num_labels: int) -> None:
    model, prompts = make_decoder_classifier(tmp_path, num_labels), prompts_of(*LENGTHS)
    vectors, loop = run_pooling(tmp_path, prompts, max_tokens_per_batch=48)
    for prompt, vector in zip(prompts, vectors):
        with torch.no_grad():
            np.testing.assert_allclose(vector, model(input_ids=torch.tensor([prompt])).logits[0], atol=2e-5)
    assert loop.ready.pooling is not None
    assert loop.ready.pooling.activation == ("sigmoid" if num_labels == 1 else "softmax")


def test_a_bare_decoder_checkpoint_gives_embeddings(tmp_path: Path, decoder) -> None:
    """As Qwen3-Embedding's: tensors have no "model." before their names."""
    _, model = decoder
    model.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((decoder[0] / file).read_bytes())
    prompts = prompts_of(7, 30)
    vectors, loop = run_pooling(tmp_path, prompts)
    for prompt, vector in zip(prompts, vectors):
        np.testing.assert_allclose(vector, hidden_of(model, prompt)[-1], atol=2e-5)
    assert loop.ready.architecture == "Qwen3Model"


def test_qwen3_reranker_says_how_much_likelier_yes_is(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3", vocab=264, tie_word_embeddings=True, initializer_range=0.2)
    file = tmp_path / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    backend.add_tokens(["no", "yes"])
    backend.save(str(file))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = prompts_of(7, 30)
    for settings in ({"enable_qwen3_reranker": True},
                     {"hf_overrides": {"is_original_qwen3_reranker": True, "classifier_from_token": ["no", "yes"],
                                       "architectures": ["Qwen3ForSequenceClassification"]}}):
        vectors, loop = run_pooling(tmp_path, prompts, **settings)
        for prompt, vector in zip(prompts, vectors):
            with torch.no_grad():
                no, yes = model(input_ids=torch.tensor([prompt])).logits[0, -1, [260, 261]]
            expected = torch.stack((no, yes)).softmax(0)[1]
            np.testing.assert_allclose(1 / (1 + np.exp(-vector)), [expected], rtol=1e-4)
        assert loop.ready.pooling is not None
        assert loop.ready.pooling.pairs == "qwen3_reranker"


@pytest.mark.parametrize("level", [1, 2])
def test_vectors_after_a_sleep_are_those_before(decoder, level: int) -> None:
    directory, model = decoder
    prompts = prompts_of(5, 60)
    settings = {"enable_vmm_weights": True, "enable_vmm_kvcache": True, "vmm_elastic": True, "runner": "pooling",
                "phy_page_granularity_size": "64KiB", "pooler_config": {"pooling_type": "MEAN"}}
    loop = EngineLoop.create(settings_from_kwargs(
        model=str(directory), dtype="float32", block_size=16, max_cache_size="24MiB", num_threads=1, **settings))
    try:
        before = pooled_by(loop, prompts)
        asleep = loop.change(Sleep(level, "abort"))
        assert (asleep.error, asleep.freed_bytes > 0) == ("", True)
        for message in (Wake([]), Resume()):
            assert loop.change(message).error == ""
        after = pooled_by(loop, prompts)
    finally:
        loop.close()
    for prompt, one, two in zip(prompts, before, after):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, pool_plainly("mean", hidden_of(model, prompt)), atol=2e-5)


@pytest.mark.parametrize("overlap", [True, False])
def test_clients_that_leave_get_no_vector_and_leave_nothing(decoder, overlap: bool) -> None:
    """Before their first step, between chunks, and with their last step in flight."""
    directory, model = decoder
    prompts = prompts_of(60, 60, 60, 60, seed=3)
    loop = EngineLoop.create(settings_from_kwargs(
        model=str(directory), dtype="float32", block_size=16, max_cache_size="24MiB", num_threads=1, runner="pooling",
        max_tokens_per_batch=32, enable_schedule_overlap=overlap))
    try:
        for steps in range(8):
            for i, prompt in enumerate(prompts):
                loop.submit(AddRequest(request_id=i, external_id="", prompt=np.array(prompt, np.int32).tobytes(),
                                       params=POOLING_PARAMS, arrival_time=0.0))
            found: dict[int, bytes] = {}
            for _ in range(steps):
                outputs = loop.step()
                found |= outputs.vectors if outputs is not None else {}
            leaving = sequence_key(1, 0)
            left = leaving not in found
            loop.submit(AbortRequest([leaving], FINISH_ABORT))
            while loop.has_work():
                outputs = loop.step()
                found |= outputs.vectors if outputs is not None else {}
            assert (leaving in found) != left
            for i in (0, 2, 3):
                vector = np.frombuffer(found[sequence_key(i, 0)], np.float32)
                np.testing.assert_allclose(vector, hidden_of(model, prompts[i])[-1], atol=2e-5)
            loop.scheduler.check_integrity()
            loop.scheduler.reset_prefix_cache()
    finally:
        loop.close()


def test_a_network_that_is_broken_ends_its_requests_alone(tmp_path: Path) -> None:
    """A vector that is not a number is an error, and no vector."""
    model = make_encoder(tmp_path, "Bert")
    model.embeddings.word_embeddings.weight.data[7] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(AssertionError):  # where ends with a message are refused
        run_pooling(tmp_path, [[7, 8]])
    vectors, _ = run_pooling(tmp_path, [[9, 8]])
    assert np.isfinite(vectors[0]).all()


@pytest.mark.parametrize(("settings", "named"), [
    ({"tp_size": 2}, "tp_size"), ({"enable_graph": True}, "enable_graph"), ({"runner": "generate"}, "generates no"),
    ({"enable_vmm_weights": True, "enable_vmm_kvcache": True}, "virtual memory"),
    ({"max_tokens_per_batch": 50}, "max_tokens_per_batch"), ({"model_impl": "transformers"}, "native"),
    ({"attention_backend": "numba"}, "attention"), ({"convert": "classify"}, "classification head"),
    ({"pooler_config": {"pooling_type": "STEP"}}, "pooling_type"), ({"hf_overrides": {"vocab_size": 3}}, "vocab_size"),
    ({"enable_qwen3_reranker": True}, "Qwen3ForCausalLM"),
])
def test_what_an_encoder_cannot_do_is_refused_at_start(tmp_path: Path, settings: dict, named: str) -> None:
    make_encoder(tmp_path, "Bert")
    with pytest.raises((LoadError, ModelConfigError), match=named):
        run_pooling(tmp_path, [], **settings)
