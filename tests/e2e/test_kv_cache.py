"""The KV cache as clients see it: shared prefixes, and a cache too small for all at once."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import ServerProcess

pytestmark = pytest.mark.multiprocess

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
BLOCK = 16


def cached_tokens(client, prompt: str, **fields: object) -> tuple[int, str]:
    body = client.post(COMPLETIONS, json={**GREEDY, "prompt": prompt, **fields}).json()
    return body["usage"]["prompt_tokens_details"]["cached_tokens"], body["choices"][0]["text"]


def test_a_second_equal_prompt_is_found_in_the_cache(server):
    prompt = "a long beginning, " * 30  # 540 tokens
    with server.client() as client:
        first, text = cached_tokens(client, prompt)
        second, again = cached_tokens(client, prompt)
        assert first == 0
        assert second == (len(prompt) - 1) // BLOCK * BLOCK  # all whole blocks; one token at least is computed
        assert again == text
        longer, _ = cached_tokens(client, prompt + "and something else")
        assert longer == len(prompt) // BLOCK * BLOCK
        other, _ = cached_tokens(client, "x" + prompt)
        assert other == 0
    server.wait_idle()  # what is only cached does not count as used
    metrics = server.metrics()
    assert metrics["prefix_cache_hits_total"] >= second + longer
    assert metrics["prefix_cache_queries_total"] > metrics["prefix_cache_hits_total"]


def test_salts_keep_clients_apart(server):
    prompt = "a secret beginning, " * 30
    with server.client() as client:
        assert cached_tokens(client, prompt, cache_salt="one")[0] == 0
        assert cached_tokens(client, prompt, cache_salt="two")[0] == 0
        assert cached_tokens(client, prompt)[0] == 0
        assert cached_tokens(client, prompt, cache_salt="one")[0] > 0


@pytest.fixture(scope="module")
def small(tiny_dir: Path, tmp_path_factory) -> Iterator[ServerProcess]:
    """63 blocks of 16 tokens: room for about four of the requests below."""
    flags = ("--max-cache-size", "512KiB", "--max-model-len", "512")
    with ServerProcess(tiny_dir, tmp_path_factory.mktemp("small"), *flags) as started:
        yield started


@pytest.mark.slow
async def test_preemption_changes_no_text(server, small):
    bodies = [{**GREEDY, "prompt": f"{i} begins " * (3 + i), "max_tokens": 200} for i in range(10)]
    bodies += [{**body, "temperature": 1.0, "seed": 5, "n": 2} for body in bodies[:3]]

    async def texts(where: ServerProcess) -> list[list[str]]:
        async with where.async_client() as client:
            answers = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200] * len(bodies)
        assert all(a.json()["usage"]["completion_tokens"] == 200 * b.get("n", 1) for a, b in zip(answers, bodies))
        return [[choice["text"] for choice in answer.json()["choices"]] for answer in answers]

    assert server.metrics()["num_preemptions_total"] == 0
    plenty = await texts(server)
    assert server.metrics()["num_preemptions_total"] == 0
    assert await texts(small) == plenty
    assert small.metrics()["num_preemptions_total"] > 0
    small.wait_idle()


@pytest.mark.slow
def test_what_can_never_fit_is_refused_at_the_door(small):
    with small.client() as client:
        refused = client.post(COMPLETIONS, json={**GREEDY, "prompt": "x" * 600})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert "512" in refused.json()["error"]["message"]
        assert client.post(COMPLETIONS, json={**GREEDY, "prompt": "x" * 500}).status_code == 200
