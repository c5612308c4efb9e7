"""The OpenAPI document: routes are FastAPI's; bodies, kinds of answers and errors are added here, because the routes
read and write them by themselves.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from xllm_npu.service.cohere_embed import CohereEmbedBody
from xllm_npu.service.errors import ErrorEnvelope
from xllm_npu.service.lora import LoadLoraBody, UnloadLoraBody
from xllm_npu.service.messages_errors import MessagesErrorEnvelope
from xllm_npu.service.messages_request import CountTokensBody, MessagesBody
from xllm_npu.service.pooling_request import (
    RERANK_PATHS,
    SCORE_PATHS,
    ClassifyBody,
    EmbeddingsBody,
    PoolBody,
    RerankBody,
    ScoreBody,
)
from xllm_npu.service.protocol import (
    BatchChatBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)
from xllm_npu.service.responses_request import ResponsesBody

BODIES: dict[str, tuple[type[Body], ...]] = {
    "/v1/chat/completions": (ChatBody,),
    "/v1/chat/completions/batch": (BatchChatBody,),
    "/v1/completions": (CompletionBody,),
    "/v1/responses": (ResponsesBody,),
    "/v1/messages": (MessagesBody,),
    "/v1/messages/count_tokens": (CountTokensBody,),
    "/v1/embeddings": (EmbeddingsBody,),
    "/v2/embed": (CohereEmbedBody,),
    "/pooling": (PoolBody,),
    "/classify": (ClassifyBody,),
    **dict.fromkeys(SCORE_PATHS, (ScoreBody,)),
    **dict.fromkeys(RERANK_PATHS, (RerankBody,)),
    "/v1/load_lora_adapter": (LoadLoraBody,),
    "/v1/unload_lora_adapter": (UnloadLoraBody,),
    "/tokenize": (TokenizeBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations")
EMPTY = ("/health", "/ping")
TEXT = ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
SCHEMAS = "#/components/schemas/"


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` name the bodies too; built once, on the first call."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [kind for alternatives in BODIES.values() for kind in alternatives]
    refs, schemas = models_json_schema([(kind, "validation") for kind in kinds],
                                       ref_template=SCHEMAS + "{model}")
    _, errors = msgspec.json.schema_components([ErrorEnvelope, MessagesErrorEnvelope], ref_template=SCHEMAS + "{name}")
    # FastAPI's own errors are not among them: a path or query that it refuses is a 400 with our envelope.
    document["components"] = {"schemas": schemas.get("$defs", {}) | errors}
    for path, alternatives in BODIES.items():
        options = [refs[kind, "validation"] for kind in alternatives]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": schema}}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path)
    return document


def _responses(path: str) -> dict[str, Any]:
    """Its answer's media types, and its errors."""
    kinds = ["text/plain"] if path in TEXT else [] if path in EMPTY else ["application/json"]
    if path in STREAMS:
        kinds.append("text/event-stream")
    envelope = MessagesErrorEnvelope if path.startswith("/v1/messages") else ErrorEnvelope
    error = {"application/json": {"schema": {"$ref": SCHEMAS + envelope.__name__}}}
    good: dict[str, Any] = {"description": "The answer"}
    if kinds:
        good["content"] = {kind: {} for kind in kinds}
    return {"200": good, "4XX": {"description": "What is wrong with the request", "content": error},
            "5XX": {"description": "Why the server cannot answer now", "content": error}}
