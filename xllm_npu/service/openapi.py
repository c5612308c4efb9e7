"""The OpenAPI document: routes are FastAPI's, bodies are added here, because the routes read them by themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from xllm_npu.service.lora import LoadLoraBody, UnloadLoraBody
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
    "/pooling": (PoolBody,),
    "/classify": (ClassifyBody,),
    **dict.fromkeys(SCORE_PATHS, (ScoreBody,)),
    **dict.fromkeys(RERANK_PATHS, (RerankBody,)),
    "/v1/load_lora_adapter": (LoadLoraBody,),
    "/v1/unload_lora_adapter": (UnloadLoraBody,),
    "/tokenize": (TokenizeBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
}


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
                                       ref_template="#/components/schemas/{model}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas.get("$defs", {}))
    for path, alternatives in BODIES.items():
        options = [refs[kind, "validation"] for kind in alternatives]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": schema}}}
    return document
