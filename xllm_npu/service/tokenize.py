"""POST /tokenize and /detokenize: what the model's tokenizer and chat template make of a text or of messages.

GET /tokenizer_info, where the operator wants it: their settings.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from xllm_npu.service.body import read_json
from xllm_npu.service.chat_prompt import encode_messages
from xllm_npu.service.context import ApiContext
from xllm_npu.service.protocol import DetokenizeBody, TokenizeBody, TokenizeChatBody, parse
from xllm_npu.service.replies import DetokenizeReply, TokenizeReply, json_response
from xllm_npu.service.tools import read_tools
from xllm_npu.state.sampling_params import InvalidParameter


def tokenize_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt, or of messages by the chat template."""
        raw = await read_json(request)
        body: TokenizeChatBody | TokenizeBody
        if "messages" in raw:
            body = parse(TokenizeChatBody, raw)
            target = context.target(body.model)
            tools = read_tools(body.tools, body.tool_choice, None)
            tokens = (await encode_messages(target.master, body, tools)).token_ids
        else:
            body = parse(TokenizeBody, raw)
            target = context.target(body.model)
            tokens = await target.master.text.encode(body.prompt, body.add_special_tokens is not False)
        strings = [target.master.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return json_response(TokenizeReply(len(tokens), target.info.max_model_len, tokens, strings))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = parse(DetokenizeBody, await read_json(request))
        target = context.target(body.model)
        for token in body.tokens:
            if not 0 <= token < target.info.vocab_size:
                raise InvalidParameter("tokens", f"tokens has token id {token}, which is not in the vocabulary "
                                       f"(0 to {target.info.vocab_size - 1}).")
        return json_response(DetokenizeReply(await target.master.text.decode(body.tokens)))

    return router


def tokenizer_info_router(context: ApiContext) -> APIRouter:
    router = APIRouter()

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """The tokenizer's settings, as the model brings them, and the chat template in use."""
        text = context.target(model).master.text
        settings = await text.run(text.tokenizer.settings)
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        settings["chat_template"] = text.template.text
        return Response(msgspec.json.encode(settings), media_type="application/json")

    return router
