"""The HTTP application: routes, and the layers that every request passes before it reaches one.

From the outside in: root path, request id, request log, trace context, CORS, Anthropic's form of errors, API key, rate
limit, admission, body limit, error boundary, routes.
Refusals therefore carry the request's id and CORS headers, and nothing of a body is read for a client that may
not come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from xllm_npu.master.residency import ResidencyCoordinator
from xllm_npu.service.admission import Admission, AdmissionMiddleware, is_generation
from xllm_npu.service.auth import OPEN_PATHS, ApiKeyMiddleware
from xllm_npu.service.body import BodyLimitMiddleware
from xllm_npu.service.chat import chat_router
from xllm_npu.service.cohere_embed import cohere_embed_router
from xllm_npu.service.completions import completions_router
from xllm_npu.service.console import console_paths, console_router
from xllm_npu.service.context import ApiContext
from xllm_npu.service.embeddings import embeddings_router
from xllm_npu.service.errors import ErrorBoundary, add_error_handlers
from xllm_npu.service.health import health_router
from xllm_npu.service.ignored_fields import IgnoredFieldsMiddleware
from xllm_npu.service.invocations import invocations_router
from xllm_npu.service.lora import lora_router
from xllm_npu.service.messages import messages_router
from xllm_npu.service.messages_errors import MessagesErrorMiddleware
from xllm_npu.service.models import models_router
from xllm_npu.service.openapi import describe
from xllm_npu.service.rate_limit import RateLimitMiddleware
from xllm_npu.service.request_id import RequestIdMiddleware
from xllm_npu.service.request_log import RequestLogMiddleware
from xllm_npu.service.rerank import rerank_router
from xllm_npu.service.response_store import ResponseStore
from xllm_npu.service.responses import responses_router
from xllm_npu.service.root_path import RootPathMiddleware
from xllm_npu.service.tokenize import tokenize_router, tokenizer_info_router
from xllm_npu.service.trace_context import TraceContextMiddleware
from xllm_npu.version import __version__

if TYPE_CHECKING:
    from xllm_npu.config.service import ServiceSettings
    from xllm_npu.config.settings import Settings
    from xllm_npu.master.model_set import ModelSet


def create_app(
    models: ModelSet, settings: Settings, admission: Admission | None = None,
    residency: ResidencyCoordinator | None = None,
) -> FastAPI:
    service = settings.service
    residency = residency or coordinator(models, service)
    admission = admission or Admission(models, service.max_concurrent_requests, service.max_queued_requests)
    context = ApiContext(models, admission, residency)
    # FastAPI's pages for the document load scripts from elsewhere, into the origin of the console with its API key.
    app = FastAPI(title="xllm-npu", version=__version__, docs_url=None, redoc_url=None)
    store = ResponseStore(service.responses_store_size)
    app.include_router(responses_router(context, store))
    for router in (chat_router, messages_router, completions_router, models_router, tokenize_router,
                   embeddings_router, cohere_embed_router, rerank_router, invocations_router):
        app.include_router(router(context))
    if service.enable_tokenizer_info_endpoint:
        app.include_router(tokenizer_info_router(context))
    app.include_router(health_router(context, service.metrics_vllm_names))
    app.include_router(lora_router(models, settings.lora.allow_runtime_lora_updating))
    if service.enable_console:
        app.include_router(console_router(context, service))
    add_error_handlers(app)
    # Added from the inside out.
    app.add_middleware(IgnoredFieldsMiddleware)
    app.add_middleware(ErrorBoundary)
    app.add_middleware(BodyLimitMiddleware, max_bytes=service.max_body_bytes)
    app.add_middleware(AdmissionMiddleware, admission=admission)
    if service.requests_per_minute:
        app.add_middleware(RateLimitMiddleware, requests_per_minute=service.requests_per_minute, limited=is_generation,
                           on_rejected=models.first.master.metrics.on_rejected)
    if service.api_key:
        app.add_middleware(ApiKeyMiddleware, api_keys=service.api_key, open_paths=open_paths(service))
    app.add_middleware(MessagesErrorMiddleware)
    if service.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(service.allowed_origins), allow_methods=["*"],
                           allow_headers=["*"], expose_headers=["X-Request-Id", "X-Ignored-Fields", "Retry-After"])
    if service.otlp_traces_endpoint:
        app.add_middleware(TraceContextMiddleware)
    if service.enable_request_logging:
        app.add_middleware(RequestLogMiddleware)
    app.add_middleware(RequestIdMiddleware)
    if service.root_path:
        app.add_middleware(RootPathMiddleware, root_path=service.root_path)
    describe(app)
    return app


def open_paths(service: ServiceSettings) -> frozenset[str]:
    """What is answered without an API key."""
    return (frozenset() if service.protect_health_and_metrics else OPEN_PATHS) | console_paths(service)


def coordinator(models: ModelSet, service: ServiceSettings) -> ResidencyCoordinator:
    return ResidencyCoordinator(models, auto_wakeup=service.auto_wakeup, evict_idle_models=service.evict_idle_models,
                                wakeup_timeout=service.wakeup_timeout)
