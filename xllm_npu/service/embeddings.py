"""POST /v1/embeddings, /pooling and /classify: one vector for each input."""

from __future__ import annotations

import base64

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from xllm_npu.service.context import ApiContext
from xllm_npu.service.pooling_request import (
    ClassifyBody,
    EmbeddingsBody,
    PoolBody,
    PoolingCall,
    PoolingUsage,
    Vector,
    check_dimensions,
    check_embeds,
    embedding,
    pooling_call,
    probabilities,
    reply,
)
from xllm_npu.state.sampling_params import InvalidParameter


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Pooled(msgspec.Struct):
    index: int
    data: list[float] | str
    object: str = "pooling"


class Classified(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class PoolingReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Embedding] | list[Pooled] | list[Classified]
    usage: PoolingUsage
    object: str = "list"


def embeddings_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        """OpenAI's embeddings."""
        call, body = await pooling_call(context, request, EmbeddingsBody, "embd-")
        check_embeds(call.pooling)
        check_dimensions(body.dimensions, call.pooling)
        vectors = [embedding(v, call.pooling, body.dimensions, body.normalize)
                   for v in await call.texts("input", body.input)]
        return await _reply(call, vectors, lambda: [
            Embedding(i, _encoded(v, body.encoding_format)) for i, v in enumerate(vectors)])

    @router.post("/pooling")
    async def pooling(request: Request) -> Response:
        """What the model gives: embeddings, or its labels' probabilities."""
        call, body = await pooling_call(context, request, PoolBody, "pool-")
        info = call.pooling
        if body.task is not None and body.task != info.task:
            raise InvalidParameter("task", f"task: this model's is {info.task}, not {body.task}.")
        embeds = info.task == "embed"
        if embeds:
            check_dimensions(body.dimensions, info)
        elif body.dimensions is not None:
            raise InvalidParameter("dimensions", "dimensions: this model classifies and gives a value for each label.")
        normalize = body.normalize if body.normalize is not None else body.use_activation
        vectors = [embedding(v, info, body.dimensions, normalize) if embeds else
                   probabilities(v, info, body.use_activation) for v in await call.texts("input", body.input)]
        return await _reply(call, vectors, lambda: [
            Pooled(i, _encoded(v, body.encoding_format)) for i, v in enumerate(vectors)])

    @router.post("/classify")
    async def classify(request: Request) -> Response:
        """The labels' probabilities, and the likeliest one."""
        call, body = await pooling_call(context, request, ClassifyBody, "classify-")
        if call.pooling.task != "classify" or call.pooling.pairs == "qwen3_reranker":
            raise InvalidParameter("model", "This model has no labels: it gives embeddings or scores.")
        activated = body.use_activation if body.use_activation is not None else body.activation
        vectors = [probabilities(v, call.pooling, activated) for v in await call.texts("input", body.input)]
        labels = call.pooling.labels
        return await _reply(call, vectors, lambda: [
            Classified(i, labels[int(v.argmax())], v.tolist(), len(v)) for i, v in enumerate(vectors)])

    async def _reply(call: PoolingCall, vectors: list[Vector], items: object) -> Response:
        size = sum(v.size for v in vectors)
        return await reply(lambda: PoolingReply(call.id, call.created, call.target.name, items(), call.usage), size)  # type: ignore[operator]

    return router


def _encoded(vector: Vector, form: str | None) -> list[float] | str:
    """Numbers, or base64 of float32 in the order of little-endian machines."""
    if form != "base64":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
