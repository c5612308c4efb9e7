"""Cohere's /v2/embed over a master whose vectors are known."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import pytest

from tests.service.conftest import client_of
from tests.service.pooling_master import BEGIN, CLASSIFIER, END, MATRYOSHKA, PoolingMaster, vector_of

PATH = "/v2/embed"


@pytest.fixture
def master() -> PoolingMaster:
    return PoolingMaster(MATRYOSHKA)


def tokens_of(master: PoolingMaster, text: str) -> list[int]:
    return [BEGIN, *master.tokenizer.encode(text, add_special_tokens=False), END]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


async def test_the_reply(client: httpx.AsyncClient, master: PoolingMaster) -> None:
    reply = (await client.post(PATH, json={
        "model": "tiny", "texts": ["hello", "b"], "embedding_types": ["float", "base64", "ubinary", "binary"]})).json()
    expected = [unit(vector_of(tokens_of(master, text))) for text in ("hello", "b")]
    given = reply["embeddings"]
    np.testing.assert_allclose(given["float"], expected, rtol=1e-6)
    read = [np.frombuffer(base64.b64decode(text), "<f4") for text in given["base64"]]
    np.testing.assert_allclose(read, expected, rtol=1e-6)
    bits = [int("".join("1" if value >= 0 else "0" for value in vector), 2) for vector in expected]
    assert given["ubinary"] == [[one] for one in bits]
    assert given["binary"] == [[one - 128] for one in bits]
    assert reply["id"].startswith("embd-")
    assert (reply["texts"], reply["response_type"]) == (["hello", "b"], "embeddings_by_type")
    count = {"input_tokens": 7 + 3}
    assert reply["meta"] == {"api_version": {"version": "2"}, "billed_units": count, "tokens": count}
    assert list((await client.post(PATH, json={"texts": ["x"]})).json()["embeddings"]) == ["float"]


async def test_truncation_and_dimensions(client: httpx.AsyncClient, master: PoolingMaster) -> None:
    async def prompt(**fields: object) -> list[int]:
        reply = await client.post(PATH, json={"texts": ["abcdef"], **fields})
        assert reply.status_code == 200, reply.text
        return master.pooled[-1].prompt_token_ids

    assert await prompt(max_tokens=4) == tokens_of(master, "ab")
    assert await prompt(max_tokens=4, truncate="START") == tokens_of(master, "ef")
    assert await prompt(max_tokens=9, truncate="NONE") == tokens_of(master, "abcdef")
    assert len((await client.post(PATH, json={"texts": ["x" * 2000]})).json()["embeddings"]["float"]) == 1
    reply = await client.post(PATH, json={"texts": ["abc"], "output_dimension": 4})
    np.testing.assert_allclose(reply.json()["embeddings"]["float"][0], unit(vector_of(tokens_of(master, "abc"))[:4]),
                               rtol=1e-6)


async def test_the_model_s_prompts(client: httpx.AsyncClient, master: PoolingMaster, tmp_path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(
        {"prompts": {"search_query": "query: ", "odd": 5}}))
    master.tokenizer.directory = tmp_path
    for kind, text in (("search_query", "query: a"), ("search_document", "a"), ("odd", "a"), (None, "a")):
        reply = await client.post(PATH, json={"texts": ["a"], "input_type": kind})
        assert reply.json()["texts"] == ["a"]
        assert master.pooled[-1].prompt_token_ids == tokens_of(master, text)


@pytest.mark.parametrize(("fields", "param"), [
    ({"texts": None}, "texts"), ({"texts": []}, "texts"), ({"texts": ["a"] * 2049}, "texts"),
    ({"texts": [5]}, "texts[0]"),
    ({"embedding_types": ["int8"]}, "embedding_types[0]"), ({"truncate": "MIDDLE"}, "truncate"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 9999}, "max_tokens"),
    ({"texts": ["ok", "abcdef"], "truncate": "NONE", "max_tokens": 4}, "texts[1]"),
    ({"texts": ["x" * 2000], "truncate": "NONE"}, "texts[0]"), ({"output_dimension": 99}, "output_dimension"),
    ({"output_dimension": 3, "embedding_types": ["binary"]}, "embedding_types")])
async def test_400_names_the_field(client: httpx.AsyncClient, fields: dict, param: str) -> None:
    reply = await client.post(PATH, json={"texts": ["a"], **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


async def test_a_model_that_classifies() -> None:
    async with client_of(PoolingMaster(CLASSIFIER)) as client:
        assert (await client.post(PATH, json={"texts": ["a"]})).json()["error"]["param"] == "model"
