"""One server with a model that writes, one that embeds and one that scores; and vectors over two ranks and a sleep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import transformers

from tests.support.pooling_models import make_encoder, prompts_of, run_pooling
from tests.support.server import ServerProcess
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_writing_embedding_and_scoring_side_by_side(tmp_path: Path) -> None:
    decoder = make_tiny_model(tmp_path / "decoder", "qwen3", initializer_range=0.2)
    cross = make_encoder(tmp_path / "cross", "Bert", "ForSequenceClassification", num_labels=1)
    sleepy = {"enable_vmm_weights": True, "enable_vmm_kvcache": True, "vmm_elastic": True}
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"max_cache_size": "20MiB", "models": [
        {"model": str(decoder), "served_model_name": ["writer"]},
        {"model": str(decoder), "served_model_name": ["embedder"], "runner": "pooling", **sleepy},
        {"model": str(tmp_path / "cross"), "served_model_name": ["scorer"]}]}))
    hf = transformers.AutoModel.from_pretrained(decoder, dtype=torch.float32)
    with ServerProcess.of_file(file, tmp_path / "run", "--dtype", "float32") as server, server.client() as client:
        texts = ["hello", "a longer text than the first"]
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=client)
        found = api.embeddings.create(model="embedder", input=texts)
        for text, item in zip(texts, found.data):
            with torch.no_grad():
                expected = hf(torch.tensor([byte_ids(client, text)])).last_hidden_state[0, -1]
            np.testing.assert_allclose(item.embedding, expected / expected.norm(), atol=1e-5)
        assert found.usage.prompt_tokens == sum(map(len, texts))
        written = api.completions.create(model="writer", prompt="x", max_tokens=3, temperature=0)
        assert written.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError, match="generates no text"):
            api.completions.create(model="embedder", prompt="x", max_tokens=3)
        with pytest.raises(openai.BadRequestError, match="generates text"):
            api.embeddings.create(model="writer", input="x")
        ranked = client.post("/rerank", json={"model": "scorer", "query": "hi", "documents": ["hello", "by"]}).json()
        ids = [257, *byte_ids(client, "hi"), 258, *byte_ids(client, "hello"), 258]
        types = [0] * 4 + [1] * 6
        with torch.no_grad():
            logit = cross(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0, 0]
        scores = {r["index"]: r["relevance_score"] for r in ranked["results"]}
        assert scores[0] == pytest.approx(torch.sigmoid(logit).item(), abs=1e-6)
        assert {m.id for m in api.models.list()} == {"writer", "embedder", "scorer"}
        assert client.get("/health").status_code == 200


def byte_ids(client, text: str) -> list[int]:
    reply = client.post("/tokenize", json={"model": "writer", "prompt": text, "add_special_tokens": False})
    tokens: list[int] = reply.json()["tokens"]
    return tokens


@pytest.mark.slow
def test_two_ranks_give_the_vectors_of_one(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen3", initializer_range=0.2)
    prompts = prompts_of(5, 40, 90)
    for settings in ({"runner": "pooling"}, {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}}):
        one, _ = run_pooling(directory, prompts, **settings)
        two, _ = run_pooling(directory, prompts, tp_size=2, **settings)
        for a, b in zip(one, two):
            np.testing.assert_allclose(a, b, atol=2e-5)
