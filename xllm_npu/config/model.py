"""Which model, and what its checkpoint leaves open."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xllm_npu.config.section import Section
from xllm_npu.config.values import CaseFolded, DtypeSpelling, JsonObject, Metavar, OptionalTokenCount

DEFAULT_MODEL = "smollm2"


class ModelSettings(Section):
    """Model"""

    model: Annotated[str, Metavar("MODEL")] = Field(
        default=DEFAULT_MODEL,
        min_length=1,
        description="directory, .gguf file, hub id, or smollm2 (pulled on first use); a server takes several",
    )
    model_id: Annotated[str | None, Metavar("NAME")] = Field(
        default=None, description="the model's name in the API; default: the directory's name or hub id"
    )
    revision: Annotated[str | None, Metavar("REV")] = Field(
        default=None, description="branch, tag or commit of a hub id"
    )
    use_modelscope: bool = Field(default=False, description="resolve a hub id at ModelScope instead of Hugging Face")
    download_dir: Annotated[str | None, Metavar("DIR")] = Field(
        default=None, description="where hub ids are downloaded to; default: the user's cache"
    )
    tokenizer: Annotated[str | None, Metavar("DIR")] = Field(
        default=None, description="directory of another tokenizer; default: the model's own"
    )
    chat_template: Annotated[str | None, Metavar("FILE")] = Field(
        default=None, description="Jinja file, or the template itself; default: the model's own"
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], DtypeSpelling] = Field(
        default="auto", description="computation dtype; auto: the checkpoint's, where the device has it"
    )
    model_impl: Annotated[Literal["auto", "native", "transformers"], CaseFolded] = Field(
        default="auto",
        description="native: this package's networks; transformers: its code with our attention; auto: native if any",
    )
    load_format: Annotated[Literal["auto", "safetensors", "dummy"], CaseFolded] = Field(
        default="auto", description="dummy: small random weights from config.json alone, for trials; else the files'"
    )
    runner: Annotated[Literal["auto", "generate", "pooling"], CaseFolded] = Field(
        default="auto", description="pooling: the model gives vectors or scores; auto: generate, where it can"
    )
    convert: Annotated[Literal["auto", "none", "embed", "classify"], CaseFolded] = Field(
        default="auto", description="what of a pooling model's output is wanted; auto: by the model"
    )
    pooler_config: JsonObject = Field(
        default="", description="how outputs become a vector: pooling_type (LAST, CLS, MEAN, MAX), use_activation"
    )
    hf_overrides: JsonObject = Field(
        default="", description="keys for those of a pooling model's config.json, such as is_matryoshka"
    )
    enable_qwen3_reranker: bool = Field(
        default=False, description="the model is a Qwen3-Reranker, which scores by the words yes and no"
    )
    max_model_len: OptionalTokenCount = Field(
        default=None,
        ge=1,
        le=2**26,
        description="longest prompt plus output in tokens; default: the model's own limit",
    )
    generation_config: Annotated[Literal["auto", "none"], CaseFolded] = Field(
        default="auto", description="auto: sampling defaults from the model's generation_config.json"
    )
    max_logprobs: int = Field(
        default=20, ge=0, le=20, description="most logprobs a request may ask for at one position"
    )
