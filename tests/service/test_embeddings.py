"""/v1/embeddings, /pooling and /classify over a master whose vectors are known."""

from __future__ import annotations

import asyncio
import base64
import random

import httpx
import msgspec
import numpy as np
import openai
import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import FakeMaster
from tests.service.pooling_master import (
    BEGIN,
    CLASSIFIER,
    CROSS_ENCODER,
    EMBEDDER,
    END,
    MATRYOSHKA,
    RERANKER,
    PoolingMaster,
    vector_of,
)
from xllm_npu.master.llm_master import EngineStatus
from xllm_npu.service import pooling_request

PATH = "/v1/embeddings"


@pytest.fixture
def master() -> PoolingMaster:
    return PoolingMaster()


def tokens_of(master: PoolingMaster, text: str) -> list[int]:
    return [BEGIN, *master.tokenizer.encode(text, add_special_tokens=False), END]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


async def test_the_four_forms_of_an_input(client: httpx.AsyncClient, master: PoolingMaster) -> None:
    for given, prompts in (
        ("hello", [tokens_of(master, "hello")]), (["a", "bc"], [tokens_of(master, "a"), tokens_of(master, "bc")]),
        ([5, 6, 7], [[5, 6, 7]]), ([[5], [6, 7]], [[5], [6, 7]]), (["", [9]], [[BEGIN, END], [9]]),
    ):
        reply = (await client.post(PATH, json={"input": given})).json()
        assert [d["index"] for d in reply["data"]] == list(range(len(prompts)))
        for item, prompt in zip(reply["data"], prompts):
            np.testing.assert_allclose(item["embedding"], unit(vector_of(prompt)), rtol=1e-6)
        total = sum(map(len, prompts))
        assert reply["usage"] == {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
        assert (reply["object"], reply["model"]) == ("list", "tiny")


@pytest.mark.parametrize("format", ["float", "base64", None])
async def test_openais_client(client: httpx.AsyncClient, master: PoolingMaster, format: str | None) -> None:
    """Which asks for base64 by itself, where it is not told, and decodes it."""
    given = {} if format is None else {"encoding_format": format}
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=client) as api:
        reply = await api.embeddings.create(model="tiny", input=["one", "two"], **given)
    assert reply.usage.total_tokens == 10
    for text, item in zip(("one", "two"), reply.data):
        values = item.embedding
        if isinstance(values, str):
            values = np.frombuffer(base64.b64decode(values), "<f4")
        np.testing.assert_allclose(values, unit(vector_of(tokens_of(master, text))), rtol=1e-6)


async def test_dimensions_are_cut_before_the_length_is_settled() -> None:
    master = PoolingMaster(MATRYOSHKA)
    async with client_of(master) as client:
        reply = (await client.post(PATH, json={"input": "x", "dimensions": 3})).json()
        cut = vector_of(tokens_of(master, "x"))[:3]
        np.testing.assert_allclose(reply["data"][0]["embedding"], unit(cut), rtol=1e-6)
        plain = (await client.post(PATH, json={"input": "x", "dimensions": 3, "normalize": False})).json()
        np.testing.assert_allclose(plain["data"][0]["embedding"], cut, rtol=1e-6)
        long = (await client.post(PATH, json={"input": "x", "dimensions": 9})).json()["error"]
        assert long["param"] == "dimensions"
    listed = msgspec.structs.replace(MATRYOSHKA, dimensions=[2, 4])
    async with client_of(PoolingMaster(listed)) as client:
        assert (await client.post(PATH, json={"input": "x", "dimensions": 4})).status_code == 200
        assert "[2, 4]" in (await client.post(PATH, json={"input": "x", "dimensions": 3})).json()["error"]["message"]


async def test_a_model_that_is_not_made_for_fewer_dimensions_says_so(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json={"input": "x", "dimensions": EMBEDDER.width})).status_code == 200
    refused = await client.post(PATH, json={"input": "x", "dimensions": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")


async def test_inputs_that_are_too_long(master: PoolingMaster) -> None:
    text = "abcdefghijklmnop"
    ids = master.tokenizer.encode(text, add_special_tokens=False)
    small = PoolingMaster(max_model_len=10)
    async with client_of(small) as client:
        refused = (await client.post(PATH, json={"input": ["a", text]})).json()["error"]
        assert (refused["param"], "18 tokens" in refused["message"]) == ("input[1]", True)
        assert len(small.aborted) == 1, "the input before it was taken back"
        assert small.pooled[0].prompt_param == "input[0]"
        for keep, side, expected in ((-1, None, [BEGIN, *ids[:8], END]), (5, None, [BEGIN, *ids[:3], END]),
                                     (5, "left", [BEGIN, *ids[-3:], END])):
            body = {"input": text, "truncate_prompt_tokens": keep, "truncation_side": side}
            reply = (await client.post(PATH, json=body)).json()
            np.testing.assert_allclose(reply["data"][0]["embedding"], unit(vector_of(expected)), rtol=1e-6)
        body = {"input": list(range(30)), "truncate_prompt_tokens": 4}
        assert (await client.post(PATH, json=body)).json()["usage"]["total_tokens"] == 4
        for keep in (0, -2, 11, 2):  # two are the special ones
            refused = await client.post(PATH, json={"input": text, "truncate_prompt_tokens": keep})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens"), keep


@pytest.mark.parametrize(("given", "param"), [
    ([], "input"), (5, "input"), ({}, "input"), ([[]], "input[0]"), (["a", 5], "input[1]"), ([1.5], "input[0]"),
    ([[300]], "input[0]"), ([-1], "input"), ([2**70], "input"), (["a", None], "input[1]"), ([True], "input[0]"),
])
async def test_wrong_inputs(client: httpx.AsyncClient, given: object, param: str) -> None:
    refused = await client.post(PATH, json={"input": given})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_limits(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    many = await client.post(PATH, json={"input": ["a"] * (pooling_request.MAX_INPUTS + 1)})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "input")
    monkeypatch.setattr(pooling_request, "MAX_TOTAL_TOKENS", 8)
    assert (await client.post(PATH, json={"input": ["abc", "d"]})).status_code == 200
    assert (await client.post(PATH, json={"input": ["abc", "de"]})).status_code == 400
    monkeypatch.setattr(pooling_request, "LARGE_REPLY", 0)  # encoded elsewhere, to the same text
    assert len((await client.post(PATH, json={"input": ["a", "b"]})).json()["data"]) == 2


async def test_many_inputs_let_others_have_their_turn(client: httpx.AsyncClient, master: PoolingMaster) -> None:
    seen = set()

    async def look() -> None:
        while True:
            seen.add(len(master.pooled))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    assert (await client.post(PATH, json={"input": ["a"] * 200})).status_code == 200
    looking.cancel()
    assert any(0 < count < 200 for count in seen), seen


async def test_texts_do_not_come_from_these_models_nor_vectors_from_others(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "x"}]
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": messages}),
                       ("/v1/responses", {"input": "x"}), ("/v1/messages", {"messages": messages, "max_tokens": 5})):
        refused = await client.post(path, json={"model": "tiny", **body})
        assert refused.status_code == 400, (path, refused.text)
        assert "generates no text" in refused.text
    async with client_of(FakeMaster()) as other:
        for path, body in ((PATH, {"input": "x"}), ("/pooling", {"input": "x"}), ("/classify", {"input": "x"}),
                           ("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
            refused = await other.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
            assert "--runner pooling" in refused.text


async def test_classes(client: httpx.AsyncClient) -> None:
    master = PoolingMaster(CLASSIFIER)
    async with client_of(master) as labels:
        reply = (await labels.post("/classify", json={"input": ["a", "b"]})).json()
        for text, item in zip("ab", reply["data"]):
            values = np.exp(vector_of(tokens_of(master, text), 3).astype(np.float64))
            np.testing.assert_allclose(item["probs"], values / values.sum(), rtol=1e-5)
            assert item["label"] == CLASSIFIER.labels[int(values.argmax())]
            assert item["num_classes"] == 3
        raw = (await labels.post("/classify", json={"input": "a", "use_activation": False})).json()
        np.testing.assert_allclose(raw["data"][0]["probs"], vector_of(tokens_of(master, "a"), 3), rtol=1e-6)
        pooled = (await labels.post("/pooling", json={"input": "a"})).json()
        assert pooled["data"][0]["data"] == reply["data"][0]["probs"]
        assert (await labels.post(PATH, json={"input": "a"})).status_code == 400
        assert (await labels.post("/pooling", json={"input": "a", "task": "embed"})).status_code == 400
        assert (await labels.post("/pooling", json={"input": "a", "dimensions": 2})).status_code == 400
        assert (await labels.post("/score", json={"text_1": "a", "text_2": "b"})).status_code == 400
    assert (await client.post("/classify", json={"input": "a"})).status_code == 400
    pooled = (await client.post("/pooling", json={"input": "a", "encoding_format": "base64", "task": "embed"})).json()
    values = np.frombuffer(base64.b64decode(pooled["data"][0]["data"]), "<f4")
    assert np.linalg.norm(values) == pytest.approx(1, abs=1e-6)


async def test_engines_that_fail_sleep_or_died(client: httpx.AsyncClient, master: PoolingMaster) -> None:
    master.broken = True
    assert (await client.post(PATH, json={"input": "a"})).status_code == 500
    master.broken = False
    master.status = EngineStatus.DEAD
    assert (await client.post(PATH, json={"input": "a"})).status_code == 503


FIELDS = {
    "input": ["x", ["x"], [1], [[1]], None, 5, "\ud800", {"a": 1}, [None], "x" * 600],
    "text_1": ["a", ["a", "b"], {}, 3], "text_2": ["a", [], ["a", "b"], [{"text": "t"}], [{"text": 5}]],
    "query": ["q", {"text": "t"}, 1, []],
    "documents": [["a"], [], "a", [{}], [{"text": "\U0001f600"}], [[]]], "top_n": [1, 0, -1, 10**30, "1"],
    "encoding_format": ["float", "base64", "bytes", 1], "dimensions": [1, 0, 8, 10**9, "8", -3],
    "model": ["tiny", "no"],
    "truncate_prompt_tokens": [-1, 0, 1, 3, 10**6, 2**40, None, "2"], "use_activation": [True, None, "x"],
    "truncation_side": ["left", "right", "up"], "priority": [0, 2**31, -5], "cache_salt": ["", "s", "s" * 200],
    "add_special_tokens": [True, False], "instruction": ["i", 5, "i" * 9000], "normalize": [True, False, 3],
    "return_documents": [False, 1], "request_id": ["r-1", "a b"], "task": ["embed", "classify", "token_embed"],
    "max_tokens_per_doc": [1, 0],
}
PATHS = (PATH, "/pooling", "/classify", *pooling_request.SCORE_PATHS, *pooling_request.RERANK_PATHS)


@pytest.mark.parametrize("pooling", [MATRYOSHKA, CROSS_ENCODER, RERANKER, CLASSIFIER],
                         ids=["embed", "cross", "reranker", "classify"])
async def test_no_body_is_the_servers_fault(pooling) -> None:
    rng, master = random.Random(7), PoolingMaster(pooling)
    seen = set()
    async with client_of(master) as client:
        for _ in range(200):
            names = rng.sample(sorted(FIELDS), rng.randint(1, 6))
            body = {name: rng.choice(FIELDS[name]) for name in ("input", "text_1", "text_2", "query", "documents")}
            body |= {name: rng.choice(FIELDS[name]) for name in names}
            content = msgspec.json.encode(body) if "\ud800" not in body.values() else b'{"input": "\\ud800"}'
            reply = await client.post(rng.choice(PATHS), content=content, headers={"Content-Type": "application/json"})
            assert reply.status_code in (200, 400, 404), (reply.status_code, body, reply.text)
            seen.add(reply.status_code)
    assert seen == {200, 400, 404}
    assert master.closed == len(master.pooled), "every input's stream was closed"
