"""POST /score and /rerank, under all their paths: how well documents answer a query.

A cross-encoder or reranker reads both together; of an embedding model the score is the cosine of both embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from xllm_npu.service.context import ApiContext
from xllm_npu.service.errors import quote
from xllm_npu.service.pooling_request import (
    MAX_DOCUMENTS,
    RERANK_PATHS,
    SCORE_PATHS,
    PairsBody,
    PoolingCall,
    PoolingUsage,
    RerankBody,
    ScoreBody,
    embedding,
    named,
    pooling_call,
    probabilities,
)
from xllm_npu.service.replies import json_response
from xllm_npu.state.sampling_params import InvalidParameter


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: str = "list"


class Document(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankReply(msgspec.Struct):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


def rerank_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    async def score(request: Request) -> Response:
        """How well each second text answers its first."""
        call, body = await pooling_call(context, request, ScoreBody, "score-")
        first = _several("text_1", body.text_1, "queries", body.queries)
        second = _several("text_2", body.text_2, "documents", body.documents)
        names, queries, documents = (first[0], second[0]), first[1], second[1]
        if len(queries) not in (1, len(documents)):
            raise InvalidParameter(names[0], f"{names[0]} must be one text or as many as {names[1]} has "
                                             f"({len(documents)}), got {len(queries)}.")
        scores = await _scores(call, body, queries, documents, names)
        return json_response(ScoreReply(call.id, call.created, call.target.name,
                                        [Score(i, value) for i, value in enumerate(scores)], call.usage))

    async def rerank(request: Request) -> Response:
        """Documents by how well they answer a query, the best first."""
        call, body = await pooling_call(context, request, RerankBody, "rerank-")
        query, documents = _text("query", body.query), _texts("documents", body.documents)
        scores = await _scores(call, body, [query], documents, ("query", "documents"))
        order = sorted(range(len(documents)), key=lambda i: -scores[i])[: body.top_n or None]
        shown = body.return_documents is not False
        return json_response(RerankReply(call.id, call.target.name, call.usage, [
            RerankResult(i, scores[i], Document(documents[i]) if shown else UNSET) for i in order]))

    for path in SCORE_PATHS:
        router.post(path)(score)
    for path in RERANK_PATHS:
        router.post(path)(rerank)
    return router


async def _scores(
    call: PoolingCall, body: PairsBody, queries: list[str], documents: list[str], names: tuple[str, str]
) -> list[float]:
    info = call.pooling
    if info.task == "embed":
        return await _cosines(call, queries, documents, names)
    if len(info.labels) != 1:
        raise InvalidParameter("model", f"This model has {len(info.labels)} labels, and a score is the value of one: "
                                        "its route is /classify.")
    if len(queries) == 1:
        queries = queries * len(documents)
    activated = body.use_activation if body.use_activation is not None else body.activation
    with named(names[1]):
        prompts = await call.target.master.text.encode_pairs(
            list(zip(queries, documents)), call.limit, body.instruction or "")
    vectors = await call.vectors(prompts, [f"{names[1]}[{i}]" for i in range(len(prompts))])
    return [float(probabilities(v, info, activated)[0]) for v in vectors]


async def _cosines(call: PoolingCall, queries: list[str], documents: list[str], names: tuple[str, str]) -> list[float]:
    with named(names[1]):
        prompts = await call.target.master.text.encode_inputs([*queries, *documents], call.limit)
    params = [names[0]] * len(queries) + [f"{names[1]}[{i}]" for i in range(len(documents))]
    vectors = [embedding(v, call.pooling, None, True) for v in await call.vectors(prompts, params)]
    of_queries, of_documents = vectors[: len(queries)], vectors[len(queries) :]
    cosines = [float(of_queries[i if len(queries) > 1 else 0] @ v) for i, v in enumerate(of_documents)]
    return [min(max(cosine, -1.0), 1.0) for cosine in cosines]  # rounding may carry them outside


def _several(name: str, given: Any, other: str, instead: Any) -> tuple[str, list[str]]:
    """The field that is there, and its texts."""
    if given is None:
        name, given = (other, instead) if instead is not None else (name, given)
    if given is None:
        raise InvalidParameter(name, f"{name} (or {other}) is required.")
    if isinstance(given, list):
        return name, _texts(name, given)
    return name, [_text(name, given)]


def _texts(name: str, given: Sequence[Any]) -> list[str]:
    if not 1 <= len(given) <= MAX_DOCUMENTS:
        raise InvalidParameter(name, f"{name} takes 1 to {MAX_DOCUMENTS} texts, got {len(given)}.")
    return [_text(f"{name}[{i}]", one) for i, one in enumerate(given)]


def _text(name: str, given: Any) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise InvalidParameter(name, f"{name} must be a string or an object with one as text, got {quote(given)}.")
    return text
