"""POST /v2/embed: Cohere's embeddings of texts (https://docs.cohere.com/reference/embed).

`input_type` chooses among the prompts that a model of sentence-transformers brings, by their names; where it has none
of that name, nothing is put before the texts. Images are refused.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from xllm_npu.service.context import ApiContext
from xllm_npu.service.errors import renamed_faults
from xllm_npu.service.pooling_request import (
    MAX_INPUTS,
    PoolingCall,
    Vector,
    VectorsBody,
    check_dimensions,
    check_embeds,
    embedding,
    named,
    pooling_call,
    reply,
)
from xllm_npu.service.protocol import Int32
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.pooling_prompt import prompt_prefixes

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
RENAMED = {"dimensions": "output_dimension"}


class CohereEmbedBody(VectorsBody):
    texts: list[str] = Field(min_length=1, max_length=MAX_INPUTS)
    input_type: str | None = Field(None, max_length=128)
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Int32 | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Int32 | None = Field(None, ge=1)


class CohereEmbedReply(msgspec.Struct):
    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: str = "embeddings_by_type"


def cohere_embed_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v2/embed")
    async def embed(request: Request) -> Response:
        """Cohere's embeddings of texts."""
        call, body = await pooling_call(context, request, CohereEmbedBody, "embd-")
        check_embeds(call.pooling)
        types = dict.fromkeys(body.embedding_types or ("float",))
        with renamed_faults(RENAMED):
            check_dimensions(body.output_dimension, call.pooling)
        width = body.output_dimension or call.pooling.width
        if width % 8 and types.keys() & {"binary", "ubinary"}:
            raise InvalidParameter("embedding_types", "embedding_types: bits are packed by eight, and embeddings have "
                                   f"{width} values.")
        prompts = await _prompts(call, body)
        vectors = [embedding(vector, call.pooling, body.output_dimension)
                   for vector in await call.vectors(prompts, [f"texts[{i}]" for i in range(len(prompts))])]
        tokens = {"input_tokens": call.num_tokens}
        meta = {"api_version": {"version": "2"}, "billed_units": tokens, "tokens": tokens}
        return await reply(lambda: CohereEmbedReply(
            call.id, {kind: _WRITTEN[kind](vectors) for kind in types}, body.texts, meta),
            sum(vector.size for vector in vectors))

    return router


async def _prompts(call: PoolingCall, body: CohereEmbedBody) -> list[list[int]]:
    """The texts' tokens, cut as `truncate` says."""
    text, longest, prefix = call.target.master.text, call.target.info.max_model_len, ""
    most = longest if body.max_tokens is None else body.max_tokens
    if most > longest:
        raise InvalidParameter("max_tokens", f"max_tokens must be at most {longest}, got {most}.")
    if body.input_type:
        prefixes = await text.run(prompt_prefixes, text.tokenizer.directory)
        prefix = prefixes.get(body.input_type, "")
    with named("texts"):
        prompts = await text.encode_inputs([prefix + one for one in body.texts], 0 if body.truncate == "NONE" else most,
                                           True, "left" if body.truncate == "START" else "right")
    for i, prompt in enumerate(prompts):
        if len(prompt) > most:
            raise InvalidParameter(f"texts[{i}]", f"texts[{i}] has {len(prompt)} tokens, more than {most}; truncate "
                                   "is NONE.")
    return prompts


def _base64(vector: Vector) -> str:
    """Of float32 in the order of little-endian machines."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")


def _bits(vector: Vector) -> list[int]:
    """A bit for each value, 1 for those not below 0, the first of eight the highest."""
    packed: list[int] = np.packbits(vector >= 0).tolist()
    return packed


_WRITTEN: dict[str, Callable[[Sequence[Vector]], list[Any]]] = {
    "float": lambda vectors: [v.tolist() for v in vectors],
    "base64": lambda vectors: [_base64(v) for v in vectors],
    "ubinary": lambda vectors: [_bits(v) for v in vectors],
    "binary": lambda vectors: [[byte - 128 for byte in _bits(v)] for v in vectors],
}
