"""What the routes for embeddings and scores share: bodies, inputs as tokens, and the vectors that come back.

Fields are vLLM's, and those of rerank Jina's and Cohere's too. A vector is what the network says; dimensions, length
and activation are settled here, so that one request's choice costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from xllm_npu.master.request_factory import GENERATES, PoolingInput
from xllm_npu.service import request_id
from xllm_npu.service.body import read_json
from xllm_npu.service.context import ApiContext, Target
from xllm_npu.service.errors import quote
from xllm_npu.service.generation import collect, submitted
from xllm_npu.service.protocol import Body, Int32, parse
from xllm_npu.service.replies import json_response
from xllm_npu.state.messages import PoolingInfo
from xllm_npu.state.output import RequestOutput
from xllm_npu.state.sampling_params import InvalidParameter

MAX_INPUTS = 2048  # of one request; OpenAI's
MAX_DOCUMENTS = 1000  # Cohere's
MAX_TOTAL_TOKENS = 2**20  # of one request's prompts together
LARGE_REPLY = 2**16  # values from which a reply is encoded off the event loop
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")

Vector = npt.NDArray[np.float32]


class VectorsBody(Body):
    """What all of these routes take."""

    priority: Int32 | None = None
    request_id: Annotated[str, Field(pattern=r"^[\w.:/+=@-]{1,128}$")] | None = None


class PoolingBody(VectorsBody):
    """vLLM's."""

    truncate_prompt_tokens: Int32 | None = Field(None, ge=-1)


class TextsBody(PoolingBody):
    input: Any  # str, list of str, list of ids, list of lists of ids: taken apart below
    add_special_tokens: bool | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class EmbeddingsBody(TextsBody):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = Field(None, ge=1)
    normalize: bool | None = None


class PoolBody(EmbeddingsBody):
    task: Literal["embed", "classify"] | None = None
    use_activation: bool | None = None


class ClassifyBody(TextsBody):
    use_activation: bool | None = None
    activation: bool | None = None


class PairsBody(PoolingBody):
    use_activation: bool | None = None
    activation: bool | None = None
    instruction: str | None = Field(None, max_length=8192)


class ScoreBody(PairsBody):
    text_1: Any = None  # a text or several of them, as the others: taken apart in rerank.py
    text_2: Any = None
    queries: Any = None  # instead of text_1
    documents: Any = None  # instead of text_2


class RerankBody(PairsBody):
    query: Any  # a string, or an object with one as "text"
    documents: list[Any]  # the same
    top_n: Int32 | None = Field(None, ge=0)
    return_documents: bool | None = None


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


B = TypeVar("B", bound=VectorsBody)


@dataclass(slots=True)
class PoolingCall:
    """One request on its way; `pooling` is what its model gives."""

    context: ApiContext
    request: Request
    body: VectorsBody
    id: str
    target: Target
    pooling: PoolingInfo
    created: int
    num_tokens: int = 0

    @property
    def usage(self) -> PoolingUsage:
        return PoolingUsage(self.num_tokens, self.num_tokens)

    @property
    def limit(self) -> int:
        """Tokens to keep of each prompt; 0: all."""
        keep: int | None = getattr(self.body, "truncate_prompt_tokens", None)
        longest = self.target.info.max_model_len
        if keep is None:
            return 0
        if keep == -1:
            return longest
        if not 1 <= keep <= longest:
            raise InvalidParameter("truncate_prompt_tokens",
                                   f"truncate_prompt_tokens must be -1 or in [1, {longest}], got {keep}.")
        return keep

    async def texts(self, param: str, given: Any) -> list[Vector]:
        """The vectors of `given`, a text or ids or several of them; `self.body` has the fields of a TextsBody."""
        body, inputs = self.body, list_inputs(param, given)
        with named(param):
            prompts = await self.target.master.text.encode_inputs(
                inputs, self.limit, getattr(body, "add_special_tokens", None) is not False,
                getattr(body, "truncation_side", None) or "right")
        return await self.vectors(prompts, names_of(param, given, len(prompts)))

    async def vectors(self, prompts: Sequence[list[int]], params: Sequence[str]) -> list[Vector]:
        """What the engine makes of each; `params` name them in errors."""
        self._check_total(prompts)
        salt, priority = getattr(self.body, "cache_salt", None) or "", self.body.priority or 0
        outputs = await submitted(self.context, self.request, self.target, [
            PoolingInput(prompt_token_ids=prompt, external_id=self.id, prompt_param=param, priority=priority,
                         cache_salt=salt) for prompt, param in zip(prompts, params)], False)
        found: list[Vector] = [np.zeros(0, np.float32)] * len(prompts)

        def take(index: int, output: RequestOutput) -> None:
            if output.vector is not None:
                found[index] = np.frombuffer(output.vector, np.float32)
            if output.finished:
                self.num_tokens += output.num_prompt_tokens

        await collect(self.request, self.context.admission, outputs, take)
        return found

    def _check_total(self, prompts: Sequence[list[int]]) -> None:
        total = sum(map(len, prompts))
        if total > MAX_TOTAL_TOKENS:
            raise InvalidParameter("input", f"The request's inputs have {total} tokens together; at most "
                                            f"{MAX_TOTAL_TOKENS} are taken at once.")


async def pooling_call(context: ApiContext, request: Request, kind: type[B], prefix: str) -> tuple[PoolingCall, B]:
    """The request, checked but for its inputs. Raises InvalidParameter."""
    body = parse(kind, await read_json(request))
    target = context.target(body.model)
    if target.info.pooling is None:
        raise InvalidParameter("model", GENERATES)
    id = prefix + (body.request_id or request.scope[request_id.SCOPE_KEY])
    return PoolingCall(context, request, body, id, target, target.info.pooling, int(time.time())), body


def list_inputs(param: str, given: Any) -> list[str | list[int]]:
    """The four forms that an input may have, as one list."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise InvalidParameter(param, f"{param} must be a string, a list of strings, a list of token ids or a list of "
                                      f"such lists, and not empty, got {quote(given)}.")
    if all(type(one) is int for one in given):
        return [given]
    if len(given) > MAX_INPUTS:
        raise InvalidParameter(param, f"{param} takes at most {MAX_INPUTS} inputs, got {len(given)}.")
    for i, one in enumerate(given):
        if not isinstance(one, str) and not (isinstance(one, list) and one and all(type(t) is int for t in one)):
            raise InvalidParameter(f"{param}[{i}]", f"{param}[{i}] must be a string or a list of token ids, got "
                                                    f"{quote(one)}.")
    return given


def names_of(param: str, given: Any, count: int) -> list[str]:
    """How errors call each of `given`."""
    if count == 1 and (isinstance(given, str) or not isinstance(given[0], str | list)):
        return [param]
    return [f"{param}[{i}]" for i in range(count)]


@contextmanager
def named(param: str) -> Iterator[None]:
    """A fault that a tokenizer finds in a prompt is one of this field."""
    try:
        yield
    except InvalidParameter as error:
        if error.param != "prompt":
            raise
        raise InvalidParameter(param, error.message) from None


def embedding(
    vector: Vector, info: PoolingInfo, dimensions: int | None = None, normalize: bool | None = None
) -> Vector:
    """[width] -> [dimensions]: cut, then brought to length 1 if the model's are."""
    if dimensions is not None:
        vector = vector[:dimensions]
    if info.normalize if normalize is None else normalize:
        vector = vector / max(float(np.sqrt(np.square(vector, dtype=np.float64).sum())), 1e-12)
    return vector.astype(np.float32, copy=False)


def check_embeds(info: PoolingInfo) -> None:
    if info.task != "embed":
        raise InvalidParameter("model", "This model classifies: /classify, /score and /rerank are its routes.")


def check_dimensions(dimensions: int | None, info: PoolingInfo) -> None:
    """Raises InvalidParameter where a shorter vector means nothing."""
    if dimensions is None or (dimensions == info.width and not info.dimensions):
        return
    if not info.matryoshka:
        raise InvalidParameter("dimensions", f"dimensions: this model's embeddings have {info.width} values and are "
                               "not made to be cut. Where they are, start the server with --hf-overrides "
                               '\'{"is_matryoshka": true}\'.')
    if info.dimensions and dimensions not in info.dimensions:
        raise InvalidParameter("dimensions", f"dimensions must be one of {info.dimensions}, got {dimensions}.")
    if dimensions > info.width:
        raise InvalidParameter("dimensions", f"dimensions must be at most {info.width}, got {dimensions}.")


def probabilities(vector: Vector, info: PoolingInfo, activated: bool | None = None) -> Vector:
    """Labels' values [num_labels] through the model's activation."""
    if info.activation == "none" or activated is False:
        return vector
    wide = vector.astype(np.float64)
    if info.activation == "sigmoid":
        return np.where(wide >= 0, 1 / (1 + np.exp(-np.abs(wide))), 1 - 1 / (1 + np.exp(-np.abs(wide)))
                        ).astype(np.float32)
    grown = np.exp(wide - wide.max())
    return (grown / grown.sum()).astype(np.float32)


async def reply(make: Callable[[], msgspec.Struct], size: int) -> Response:
    """`make`'s body of about `size` numbers, encoded where it delays nobody."""
    if size < LARGE_REPLY:
        return json_response(make())
    return await asyncio.to_thread(lambda: json_response(make()))
