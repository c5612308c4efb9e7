"""/score and /rerank under their paths: of cross-encoders, Qwen3-Reranker and embeddings."""

from __future__ import annotations

import numpy as np
import pytest

from tests.service.conftest import client_of
from tests.service.pooling_master import BEGIN, CROSS_ENCODER, EMBEDDER, END, RERANKER, PoolingMaster, vector_of
from tests.support.tiny_tokenizer import VOCAB
from xllm_npu.service import pooling_request

DOCUMENTS = ["alpha", "be", "gamma rays", "d"]


def sigmoid(value: float) -> float:
    return 1 / (1 + np.exp(-float(value)))


def pair_score(master: PoolingMaster, query: str, document: str) -> float:
    one, two = (master.tokenizer.encode(text, add_special_tokens=False) for text in (query, document))
    return sigmoid(vector_of([BEGIN, *one, END, *(i + VOCAB for i in [*two, END])], 1)[0])


@pytest.mark.parametrize("path", pooling_request.RERANK_PATHS)
async def test_documents_come_best_first(path: str) -> None:
    master = PoolingMaster(CROSS_ENCODER)
    async with client_of(master) as client:
        documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
        reply = (await client.post(path, json={"model": "tiny", "query": "q", "documents": documents})).json()
        scores = {r["index"]: r["relevance_score"] for r in reply["results"]}
        for i, document in enumerate(DOCUMENTS):
            assert scores[i] == pytest.approx(pair_score(master, "q", document), rel=1e-5)
        assert [r["index"] for r in reply["results"]] == sorted(scores, key=lambda i: -scores[i])
        assert [r["document"]["text"] for r in reply["results"]] == [DOCUMENTS[r["index"]] for r in reply["results"]]
        assert reply["usage"]["total_tokens"] == sum(len(d) + 4 for d in DOCUMENTS)
        two = (await client.post(path, json={
            "query": "q", "documents": DOCUMENTS, "top_n": 2, "return_documents": False})).json()
        assert [r["index"] for r in two["results"]] == [r["index"] for r in reply["results"]][:2]
        assert "document" not in two["results"][0]


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_scores_of_one_query_and_of_pairs(names: tuple[str, str]) -> None:
    master = PoolingMaster(CROSS_ENCODER)
    async with client_of(master) as client:
        for first, second in (("q", "d"), ("q", DOCUMENTS), (["q", "r"], ["s", "t"]), (["q"], ["s", "t"])):
            reply = (await client.post("/v1/score", json={names[0]: first, names[1]: second})).json()
            queries = [first] if isinstance(first, str) else first
            documents = [second] if isinstance(second, str) else second
            queries = queries * len(documents) if len(queries) == 1 else queries
            expected = [pair_score(master, q, d) for q, d in zip(queries, documents)]
            assert [d["score"] for d in reply["data"]] == pytest.approx(expected, rel=1e-5)
        wrong = await client.post("/score", json={names[0]: ["a", "b"], names[1]: ["c"]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, names[0])
        assert (await client.post("/score", json={names[0]: "a"})).json()["error"]["param"] == "text_2"


async def test_the_longer_of_a_pair_gives_way() -> None:
    master = PoolingMaster(CROSS_ENCODER, max_model_len=32)
    async with client_of(master) as client:
        refused = (await client.post("/score", json={"text_1": "query", "text_2": ["d", "e" * 60]})).json()["error"]
        assert refused["param"] == "text_2[1]"
        body = {"text_1": "query", "text_2": "e" * 60, "truncate_prompt_tokens": -1}
        reply = (await client.post("/score", json=body)).json()
        assert reply["usage"]["total_tokens"] == 32
        assert reply["data"][0]["score"] == pytest.approx(pair_score(master, "query", "e" * 24), rel=1e-5)


async def test_qwen3_rerankers_prompt_is_that_of_its_model_card() -> None:
    master = PoolingMaster(RERANKER)
    master.info.max_model_len = 1024
    begin = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the '
             'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
    end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    async with client_of(master) as client:
        for given, instruction in (
            ({}, "Given a web search query, retrieve relevant passages that answer the query"),
            ({"instruction": "Find"}, "Find"),
        ):
            master.pooled.clear()
            reply = await client.post("/rerank", json={"query": "q?", "documents": ["d."], **given})
            assert reply.status_code == 200, reply.text
            text = f"{begin}<Instruct>: {instruction}\n<Query>: q?\n<Document>: d.{end}"
            assert master.pooled[0].prompt_token_ids == master.tokenizer.encode(text, add_special_tokens=False)
        whole = len(master.pooled[0].prompt_token_ids)
        body = {"query": "q?", "documents": ["d" * 900], "truncate_prompt_tokens": whole + 5, "instruction": "Find"}
        assert (await client.post("/rerank", json=body)).status_code == 200
        cut = master.pooled[-1].prompt_token_ids
        assert len(cut) == whole + 5
        assert master.tokenizer.decode(cut, False).endswith("ddd" + end)
        little = await client.post("/rerank", json={**body, "truncate_prompt_tokens": 20})
        assert little.json()["error"]["param"] == "truncate_prompt_tokens"
        assert (await client.post("/classify", json={"input": "x"})).status_code == 400


async def test_scores_of_an_embedding_model_are_cosines() -> None:
    master = PoolingMaster(EMBEDDER)
    async with client_of(master) as client:
        reply = (await client.post("/rerank", json={"query": "q", "documents": DOCUMENTS})).json()
    query, *others = (vector_of([BEGIN, *master.tokenizer.encode(t, False), END]) for t in ["q", *DOCUMENTS])
    cosines = [q @ query / np.linalg.norm(q) / np.linalg.norm(query) for q in others]
    assert {r["index"]: r["relevance_score"] for r in reply["results"]} == pytest.approx(
        dict(enumerate(cosines)), abs=1e-6)


async def test_limits_and_wrong_documents() -> None:
    async with client_of(PoolingMaster(CROSS_ENCODER)) as client:
        for documents, param in ((["d"] * (pooling_request.MAX_DOCUMENTS + 1), "documents"), ([], "documents"),
                                 (["a", {"text": 3}], "documents[1]"), ([{}], "documents[0]")):
            refused = await client.post("/rerank", json={"query": "q", "documents": documents})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
