"""SageMaker's one route for everything, and the tokenizer's settings."""

import json
from types import SimpleNamespace

import httpx
import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import FakeMaster, says
from tests.service.pooling_master import CLASSIFIER, CROSS_ENCODER, EMBEDDER, PoolingMaster
from tests.support.tiny_tokenizer import byte_tokenizer, write_tokenizer
from xllm_npu.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


def nameless(reply: dict) -> dict:
    return {name: value for name, value in reply.items() if name not in ("id", "created")}


async def same(client: httpx.AsyncClient, path: str, body: dict) -> None:
    """The answer is that of the other route."""
    here, there = await client.post("/invocations", json=body), await client.post(path, json=body)
    assert here.status_code == there.status_code == 200, here.text
    assert nameless(here.json()) == nameless(there.json())


async def test_text(client):
    await same(client, "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "n": 2})
    await same(client, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3})
    reply = await client.post("/invocations", json={"messages": MESSAGES, "odd": 1})
    assert reply.headers["x-ignored-fields"] == "odd"


@pytest.mark.parametrize(("pooling", "path", "body"), [
    (EMBEDDER, "/v1/embeddings", {"input": ["a", "b"]}), (EMBEDDER, "/v2/embed", {"texts": ["a"]}),
    (EMBEDDER, "/pooling", {"input": "a", "task": "embed"}), (CLASSIFIER, "/classify", {"input": "a"}),
    (CROSS_ENCODER, "/rerank", {"query": "a", "documents": ["b"]}),
    (CROSS_ENCODER, "/score", {"text_1": "a", "text_2": ["b", "c"]}),
    (CROSS_ENCODER, "/score", {"queries": "a", "documents": ["b", "c"]})])
async def test_vectors(pooling, path, body):
    async with client_of(PoolingMaster(pooling)) as client:
        await same(client, path, body)


async def test_a_stream(client, master):
    master.script = says("Hel", "lo")
    reply = await client.post("/invocations", json={"messages": MESSAGES, "stream": True})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == "Hello"
    assert reply.text.endswith("data: [DONE]\n\n")
    assert master.closed == 1


@pytest.mark.parametrize(("body", "status", "word"), [
    ({"model": "tiny"}, 400, "neither input nor"), ({"messages": MESSAGES, "model": "other"}, 404, "other"),
    ({"messages": MESSAGES, "temperature": 9}, 400, "temperature"), ({"input": "x", "model": 5}, 400, "model")])
async def test_errors_are_the_other_route_s(client, body, status, word):
    reply = await client.post("/invocations", json=body)
    assert reply.status_code == status
    assert word in reply.json()["error"]["message"]


async def test_behind_a_prefix_a_key_and_a_limit():
    async with client_of(FakeMaster(), root_path="/llm", api_key=("k",), requests_per_minute=1) as client:
        headers = {"Authorization": "Bearer k"}
        body = {"messages": MESSAGES}
        assert (await client.post("/llm/invocations", json=body)).status_code == 401
        assert (await client.post("/llm/invocations", json=body, headers=headers)).status_code == 200
        assert (await client.post("/llm/invocations", json=body, headers=headers)).status_code == 429


async def test_tokenizer_info(tmp_path):
    write_tokenizer(tmp_path, byte_tokenizer())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "name_or_path": "/home/somebody"}))
    master = FakeMaster()
    async with client_of(master) as client:
        assert (await client.get("/tokenizer_info")).status_code == 404
    async with client_of(master, enable_tokenizer_info_endpoint=True) as client:
        master.tokenizer = Tokenizer(tmp_path)
        master.template = SimpleNamespace(text="mine")
        assert (await client.get("/tokenizer_info")).json() == {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False, "chat_template": "mine"}
        assert (await client.get("/tokenizer_info", params={"model": "other"})).status_code == 404
