"""Who has to wait: the rate of each client, and the queue of each model."""

import asyncio

import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import FakeMaster
from xllm_npu.master.queue_gauge import QueueGauge
from xllm_npu.service import rate_limit
from xllm_npu.service.rate_limit import RateLimit
from xllm_npu.service.rate_limit import client_of as client_name

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def test_a_bucket_holds_a_minute_s_worth_and_fills_again():
    now = [0.0]
    limit = RateLimit(6, lambda: now[0])
    assert [limit.take("a") for _ in range(6)] == [0.0] * 6
    assert limit.take("a") == pytest.approx(10)
    assert limit.take("b") == 0.0
    now[0] = 9.0
    assert limit.take("a") == pytest.approx(1)
    now[0] = 10.0
    assert limit.take("a") == 0.0
    assert limit.take("a") == pytest.approx(10)
    now[0] = 1e6
    assert [limit.take("a") for _ in range(7)][-1] > 0  # no more than a minute's worth is ever saved


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(rate_limit, "MAX_CLIENTS", 3)
    limit = RateLimit(1, lambda: 0.0)
    for client in "abcd":
        assert limit.take(client) == 0.0
    assert limit.take("d") > 0
    assert limit.take("a") == 0.0  # forgotten


def test_who_a_client_is():
    assert client_name({"client": ("10.0.0.1", 5)}) == "10.0.0.1"
    assert client_name({"client": None}) == ""
    assert client_name({"client": ("10.0.0.1", 5), "xllm_npu.client": 1}) == "key 1"


async def test_each_key_has_its_own(master):
    async with client_of(master, api_key=("one", "two"), requests_per_minute=2) as client:
        async def status(key: str, path: str = CHAT) -> int:
            return (await client.post(path, json=BODY, headers={"Authorization": f"Bearer {key}"})).status_code

        assert [await status("one") for _ in range(3)] == [200, 200, 429]
        assert await status("two") == 200
        assert await status("wrong") == 401
        reply = await client.post(CHAT, json=BODY, headers={"Authorization": "Bearer one"})
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(reply.headers["retry-after"]) <= 30
        assert reply.headers["x-ratelimit-limit-requests"] == "2"
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer one"})).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'admission_rejections_total{model_name="tiny",reason="requests_per_minute"} 2.0' in metrics


async def test_a_full_queue(master):
    async with client_of(master, max_queued_requests=2) as client:
        master.num_waiting = 1
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        master.num_waiting = 2
        reply = await client.post("/v1/completions", json={"prompt": "a"})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert "max_queued_requests" in reply.json()["error"]["message"]
        metrics = (await client.get("/metrics")).text
    assert 'admission_rejections_total{model_name="tiny",reason="max_queued_requests"} 1.0' in metrics
    assert len(master.requests) == 1


def test_the_queue_as_the_http_process_knows_it():
    queue = QueueGauge(2, max_seqs=4)
    assert queue.waiting == 0
    for _ in range(3):
        queue.on_sent(0)
    assert queue.waiting == 0  # the batch has room for them
    for _ in range(3):
        queue.on_sent(0)
    assert queue.waiting == 2
    queue.on_stats(0, running=4, waiting=2)
    assert queue.waiting == 2
    queue.on_sent(0)
    queue.on_sent(1)
    assert queue.waiting == 3
    queue.on_stats(0, running=1, waiting=0)
    assert queue.waiting == 0


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics", "/load"])
async def test_health_and_metrics_can_be_protected(master, path):
    async with client_of(master, api_key=("k",)) as client:
        assert (await client.get(path)).status_code == (401 if path == "/load" else 200)
    async with client_of(master, api_key=("k",), protect_health_and_metrics=True) as client:
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers={"Authorization": "Bearer k"})).status_code == 200


async def test_load_counts_generations(master):
    from tests.service.fake_master import says_then_waits

    gate = asyncio.Event()
    master.script = says_then_waits("x", gate)
    async with client_of(master) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        request = asyncio.create_task(client.post(CHAT, json=BODY))
        await master.submitted_one.wait()
        assert (await client.get("/load")).json() == {"server_load": 1}
        gate.set()
        await request
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_one_line_for_each_request(master, caplog):
    caplog.set_level("INFO", logger="xllm_npu.service.request")
    async with client_of(master, enable_request_logging=True) as client:
        await client.post(CHAT + "?secret=1", json=BODY, headers={"X-Request-Id": "mine"})
        await client.get("/nothing%0A2026%20forged")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(f"POST {CHAT} 200 ")
    assert lines[0].endswith(" mine")
    assert "secret" not in lines[0]
    assert "404" in lines[1]
    assert "\n" not in lines[1]
    caplog.clear()
    async with client_of(FakeMaster()) as client:
        await client.get("/health")
    assert caplog.records == []
