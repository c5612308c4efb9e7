"""A master of a model that gives vectors, without an engine: real tokenizer and checks, and vectors by a plain rule."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import processors

from tests.service.fake_master import INFO, FakeMaster, FakeStream
from tests.support.tiny_tokenizer import VOCAB, byte_tokenizer, write_tokenizer
from xllm_npu.master.llm_master import EngineDeadError, EngineStatus, ModelSleeping
from xllm_npu.master.request_factory import GenerationInput, PoolingInput, RequestFactory
from xllm_npu.state.messages import PoolingInfo
from xllm_npu.state.output import RequestOutput, SequenceDelta
from xllm_npu.text.pooling_prompt import encode_inputs, encode_pairs
from xllm_npu.text.tokenizer import Tokenizer

WIDTH = 8
BEGIN, END = 257, 258  # put around a text
EMBEDDER = PoolingInfo(task="embed", width=WIDTH, all_positions=True, normalize=True)
MATRYOSHKA = msgspec.structs.replace(EMBEDDER, matryoshka=True)
CROSS_ENCODER = PoolingInfo(task="classify", width=1, all_positions=True, activation="sigmoid", labels=["LABEL_0"],
                            pairs="tokens", num_types=2)
RERANKER = msgspec.structs.replace(CROSS_ENCODER, pairs="qwen3_reranker", num_types=1)
CLASSIFIER = PoolingInfo(task="classify", width=3, all_positions=True, activation="softmax",
                         labels=["bad", "fair", "good"], pairs="tokens")


def vector_of(ids: Sequence[int], width: int = WIDTH) -> np.ndarray:
    """Another for every prompt, of no particular length."""
    return (np.random.default_rng(list(ids)).standard_normal(width) * 3).astype(np.float32)


@dataclass
class _Closed:
    external_id: str


class PoolingMaster(FakeMaster):
    def __init__(self, pooling: PoolingInfo = EMBEDDER, max_model_len: int = 512, name: str = "tiny") -> None:
        super().__init__(name=name)
        self.info = msgspec.structs.replace(
            INFO, pooling=pooling, vocab_size=VOCAB, max_model_len=max_model_len, chunked_prefill=False)
        backend = byte_tokenizer()
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>", pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
            special_tokens=[("<|im_start|>", BEGIN), ("<|im_end|>", END)])
        with tempfile.TemporaryDirectory() as directory:
            write_tokenizer(Path(directory), backend)
            self.tokenizer = Tokenizer(Path(directory))
        self.factory = RequestFactory(self.tokenizer, self.info)
        self.pooled: list[PoolingInput] = []
        self.broken = False

    def generate(self, request: GenerationInput, stream: bool = True) -> AsyncIterator[RequestOutput]:
        self.factory.make(request)
        raise AssertionError("it generates no text")

    def pool(self, request: PoolingInput) -> AsyncIterator[RequestOutput]:
        if self.status is EngineStatus.DEAD:
            raise EngineDeadError("The engine process has ended.")
        if self.status is EngineStatus.SLEEPING:
            raise ModelSleeping("The model is asleep.")
        message = self.factory.make_pooling(request)
        self.pooled.append(request)
        self.submitted_one.set()
        ids = message.prompt_token_ids.tolist()

        async def output() -> AsyncIterator[RequestOutput]:
            vector = vector_of(ids, self.info.pooling.width).tobytes()
            yield RequestOutput(1, [SequenceDelta(0, finish_reason="stop")], len(ids), finished=True, vector=vector,
                                error="The server failed." if self.broken else None)

        return FakeStream(self, _Closed(request.external_id), output())

    async def encode_inputs(self, texts, limit, add_special_tokens=True, side="right"):
        return encode_inputs(self.tokenizer, texts, limit, add_special_tokens, side)

    async def encode_pairs(self, pairs, limit, instruction=""):
        pooling = self.info.pooling
        return encode_pairs(self.tokenizer, pairs, limit, pooling.pairs, self.info.vocab_size, pooling.num_types,
                            instruction)
