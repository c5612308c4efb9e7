"""How the HTTP server is reached, protected and bounded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_serializer

from xllm_npu.config.section import Section
from xllm_npu.config.values import MASK, ByteCount, CaseFolded, FilePath, Metavar, Names, Secrets

LogFormat = Annotated[Literal["text", "json"], CaseFolded]
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], CaseFolded]


class ServiceSettings(Section):
    """HTTP service"""

    host: Annotated[str, Metavar("ADDR")] = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 lets the system choose one")
    uds: FilePath = Field(default=None, description="listen on this Unix socket instead of host and port")
    root_path: Annotated[str, Metavar("PATH")] = Field(
        default="", description="path prefix that a proxy in front strips, such as /llm"
    )
    ssl_keyfile: FilePath = Field(
        default=None, description="private key (PEM); serves HTTPS together with ssl-certfile"
    )
    ssl_certfile: FilePath = Field(default=None, description="certificate chain (PEM)")
    ssl_ca_certs: FilePath = Field(
        default=None, description="certificate authorities (PEM) that client certificates must come from"
    )
    api_key: Secrets = Field(
        default=(),
        repr=False,
        description="keys that clients may send as bearer tokens; repeatable; none: no authentication",
    )
    protect_health_and_metrics: bool = Field(
        default=False, description="ask for the API key on /health, /ping, /load and /metrics too"
    )
    allowed_origins: Names = Field(default=(), description="origins that browsers may call from (CORS); * for all")
    served_model_name: Names = Field(
        default=(), description="names that requests may give as `model`; the first one is shown"
    )
    tool_call_parser: Annotated[str, Metavar("NAME")] = Field(
        default="auto", description="how the model writes tool calls, such as hermes; auto: by the model; none"
    )
    reasoning_parser: Annotated[str, Metavar("NAME")] = Field(
        default="auto", description="how the model writes its reasoning, such as qwen3; auto: by the model; none"
    )
    enable_auto_tool_choice: bool = Field(
        default=True, description="vLLM's flag; the model may always choose tools that a request offers"
    )
    max_concurrent_requests: int = Field(
        default=200, ge=0, le=1_000_000, description="requests in flight before new ones get 429; 0: no limit"
    )
    max_connections: int = Field(
        default=4096, ge=1, le=1_000_000,
        description="open connections before new ones get 503; less where ulimit -n is lower",
    )
    max_queued_requests: int = Field(
        default=0, ge=0, le=1_000_000,
        description="requests of one model that wait for their first step before new ones get 429; 0: no limit",
    )
    requests_per_minute: int = Field(
        default=0, ge=0, le=1_000_000,
        description="requests that each API key (without keys: each client address) may make a minute before it gets "
        "429; 0: no limit",
    )
    max_body_bytes: ByteCount = Field(
        default=32 * 2**20, ge=1024, le=2**40, description="largest request body; above it 413"
    )
    trust_request_chat_template: bool = Field(
        default=False, description="requests may bring a chat_template, which is rendered in a process of its own"
    )
    responses_store_size: int = Field(
        default=0, ge=0, le=1_000_000,
        description="responses of /v1/responses that are kept in memory (256 MiB at most) for previous_response_id; "
        "0: none",
    )
    admin_port: int = Field(
        default=0, ge=0, le=65535,
        description="TCP port of the admin routes (sleep, wake-up, pause, fork, status); 0: there are none",
    )
    admin_host: Annotated[str, Metavar("ADDR")] = Field(
        default="127.0.0.1", min_length=1, description="address that the admin routes listen on"
    )
    auto_wakeup: bool = Field(
        default=False, description="a request for a sleeping model wakes it up and waits, instead of getting 503"
    )
    wakeup_timeout: float = Field(
        default=60.0, gt=0, le=86400, description="seconds that such a request waits at most; then 503"
    )
    evict_idle_models: bool = Field(
        default=False, description="the model that was used least recently is put to sleep when another needs memory"
    )
    shutdown_timeout: float = Field(
        default=30.0, ge=0, le=86400, description="seconds that SIGTERM lets running requests finish"
    )
    restart_on_failure: bool = Field(
        default=False, description="start a failed engine again instead of ending; requests get 503 meanwhile"
    )
    max_restarts: int = Field(
        default=3, ge=1, le=1000, description="restarts in ten minutes after which a failing server ends after all"
    )
    enable_tokenizer_info_endpoint: bool = Field(
        default=False, description="GET /tokenizer_info shows the tokenizer's settings and the chat template"
    )
    enable_console: bool = Field(default=True, description="serve the web console at /")
    metrics_vllm_names: bool = Field(
        default=False, description="expose every metric under vLLM's prefix too, for dashboards that ask for vllm:..."
    )
    otlp_traces_endpoint: Annotated[str, Metavar("URL")] = Field(
        default="", description="OpenTelemetry collector that gets a span of each request (OTLP over HTTP; extra: otel)"
    )
    profile_dir: FilePath = Field(
        default=None, description="directory that /start_profile of the admin routes writes traces to; unset: refused"
    )
    enable_request_logging: bool = Field(default=False, description="log one line for each request (never its text)")
    log_level: LogLevel = Field(default="info", description="least severe message that is logged")
    log_format: LogFormat = Field(
        default="text", description="lines for people, or one JSON object a line, with the id of its request"
    )

    @field_serializer("api_key")
    def _mask(self, keys: tuple[str, ...]) -> list[str]:
        return [MASK] * len(keys)
