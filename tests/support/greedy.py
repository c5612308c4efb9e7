"""Prompts for the greedy comparison, and what transformers' `generate` answers to them in float32."""

from __future__ import annotations

import asyncio
import pydoc_data.topics
from dataclasses import dataclass

import httpx
import numpy as np


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    expected: list[int]


def make_prompts(tokenizer, count: int, longest: int = 1500, shortest: int = 20) -> list[list[int]]:
    """`count` prompts of `shortest` to `longest` tokens, most of them short; every third begins with one of two long
    shared prefixes.
    """
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rng = np.random.default_rng(11)
    lengths = (shortest + (longest - shortest) * rng.uniform(size=count) ** 8).astype(int)
    lengths[1], lengths[2] = longest, shortest
    shared = [ids[:450], ids[5000:5330]]
    prompts = []
    for i, length in enumerate(lengths.tolist()):
        start = int(rng.integers(10_000, len(ids) - longest))
        own = ids[start : start + (max(5, length // 3) if i % 3 == 0 else length)]
        prompts.append(shared[(i // 3) % 2] + own if i % 3 == 0 else own)
    return prompts


def reference(model, prompts: list[list[int]], max_tokens: int) -> list[Case]:
    """Greedy continuations by transformers, one prompt at a time."""
    import torch

    cases = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
            cases.append(Case(prompt, out[0, len(prompt):].tolist()))
    return cases


def ask_server(
    url: str, cases: list[Case], max_tokens: int, concurrency: int = 16, uds: str | None = None
) -> list[list[int]]:
    """What a server answers, through /v1/completions, streaming every other request."""

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore, index: int, case: Case) -> list[int]:
        body = {"prompt": case.prompt, "temperature": 0, "max_tokens": max_tokens, "return_token_ids": True,
                "skip_special_tokens": False}
        async with gate:
            if index % 2:
                reply = await client.post(f"{url}/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                return reply.json()["choices"][0]["token_ids"]
            return await streamed(client, url, body)

    async def everything() -> list[list[int]]:
        gate = asyncio.Semaphore(concurrency)
        transport = httpx.AsyncHTTPTransport(uds=uds) if uds else None
        async with httpx.AsyncClient(timeout=600, transport=transport) as client:
            return await asyncio.gather(*(one(client, gate, i, c) for i, c in enumerate(cases)))

    return asyncio.run(everything())


async def streamed(client: httpx.AsyncClient, url: str, body: dict) -> list[int]:
    import json

    tokens: list[int] = []
    async with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    tokens += choice.get("token_ids") or []
    return tokens


def differences(cases: list[Case], answers: list[list[int]]) -> list[str]:
    return [f"prompt {i} ({len(c.prompt)} tokens): {a} != {c.expected}"
            for i, (c, a) in enumerate(zip(cases, answers)) if a != c.expected]
