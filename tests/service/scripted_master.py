"""A master whose engine says given texts, token by token, through the server's own request factory, detokenizer, stop
strings and dispatcher: everything between the engine's socket and the routes is real.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from tests.service.fake_master import INFO, FakeMaster
from xllm_npu.master.output_dispatcher import OutputDispatcher
from xllm_npu.master.request_factory import GenerationInput, RequestFactory
from xllm_npu.master.request_stream import RequestStream
from xllm_npu.state.messages import (
    FINISH_LENGTH,
    FINISH_STOP,
    AbortRequest,
    AddRequest,
    Finished,
    PromptInfo,
    StepOutputs,
    sequence_key,
)
from xllm_npu.state.output import RequestOutput
from xllm_npu.text.tokenizer import Tokenizer


class ScriptedMaster(FakeMaster):
    """Sequence i says `texts[i]`, `step` tokens at a time, then EOS, unless it reaches max_tokens before."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], step: int) -> None:
        super().__init__()
        assert tokenizer.eos_token_id is not None
        self.tokenizer: Any = tokenizer
        self._eos = tokenizer.eos_token_id
        self._tokens = [[*tokenizer.encode(text, False), self._eos] for text in texts]
        self._step = step
        self.factory = RequestFactory(tokenizer, structs.replace(INFO, vocab_size=tokenizer.vocab_size,
                                                         eos_token_ids=[self._eos], max_model_len=8192,
                                                         num_kv_blocks=1024))
        self._stopped: set[int] = set()
        self.dispatcher = OutputDispatcher(tokenizer, self._on_abort)
        self._engines: set[asyncio.Task[None]] = set()

    def _on_abort(self, message: AbortRequest) -> None:
        self._stopped.update(message.keys)

    def generate(self, request: GenerationInput, stream: bool = True) -> AsyncIterator[RequestOutput]:
        message = self.factory.make(request)
        outputs = RequestStream(lambda: self.dispatcher.close(message.request_id))
        self.dispatcher.open(message, outputs.put, stream)
        engine = asyncio.create_task(self._run(message))
        self._engines.add(engine)
        engine.add_done_callback(self._engines.discard)
        return outputs

    async def _run(self, message: AddRequest) -> None:
        prompts = [PromptInfo(message.request_id, 0)]
        max_tokens = message.params.max_tokens
        assert max_tokens is not None
        open = {sequence_key(message.request_id, i): tokens[:max_tokens] for i, tokens in enumerate(self._tokens)}
        while open:
            keys, tokens, finished = [], [], []
            for key, rest in list(open.items()):
                now, open[key] = rest[: self._step], rest[self._step:]
                keys += [key] * len(now)
                tokens += now
                if not open[key]:
                    del open[key]
                    by_itself = now[-1] == self._eos
                    finished.append(Finished(key, FINISH_STOP, self._eos) if by_itself else
                                    Finished(key, FINISH_LENGTH))
            self.dispatcher.handle(StepOutputs(
                keys=np.array(keys, np.int64).tobytes(), tokens=np.array(tokens, np.int32).tobytes(),
                finished=finished, prompts=prompts))
            prompts = []
            for key in self._stopped:
                open.pop(key, None)
            await asyncio.sleep(0)  # the reader may take what there is
