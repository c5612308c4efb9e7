"""Routing, admission, health and metrics of several models in one application."""

from __future__ import annotations

import httpx
import pytest

from tests.service.fake_master import FakeMaster, says
from tests.service.test_sleeping_models import CHAT, body, client_of, set_of
from xllm_npu.master.llm_master import EngineStatus
from xllm_npu.service.admission import Admission


async def test_requests_go_to_the_model_they_name():
    first, second = FakeMaster(says("one")), FakeMaster(says("two"))
    async with client_of(first, second) as client:
        for name, text in (("a", "one"), ("b", "two"), (None, "one"), ("", "one")):
            reply = (await client.post(CHAT, json=body(name))).json()
            assert (reply["choices"][0]["message"]["content"], reply["model"]) == (text, name or "a")
        for path, fields in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"}),
                             ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
                             ("/detokenize", {"tokens": [65]}), (CHAT, body("c"))):
            unknown = await client.post(path, json={**fields, "model": "c"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/v1/models/c")).status_code == 404
        stream = await client.post(CHAT, json={**body("b"), "stream": True})
        assert "two" in stream.text
        assert '"model":"b"' in stream.text


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (EngineStatus.LOADING, "engine_loading", "The model 'b' is still loading"),
        (EngineStatus.RESTARTING, "engine_restarting", "The engine of the model 'b' is being started again: it broke"),
        (EngineStatus.DEAD, "engine_dead", "The engine of the model 'b' has stopped: it broke"),
    ],
)
async def test_one_that_cannot_serve_leaves_the_other_alone(status, code, said):
    other = FakeMaster(status=status)
    other.failure = "it broke"
    async with client_of(FakeMaster(), other) as client:
        assert (await client.post(CHAT, json=body("a"))).status_code == 200
        for path, fields in ((CHAT, body("b")), ("/tokenize", {"model": "b", "prompt": "x"})):
            refused = await client.post(path, json=fields)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, code)
            assert refused.json()["error"]["message"].startswith(said)
        health = await client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, code)
        assert said in health.json()["error"]["message"]
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["a"]
        assert (await client.get("/v1/models/b")).status_code == 503
    async with client_of(other, FakeMaster()) as client:  # whichever comes first
        assert (await client.post(CHAT, json=body("b"))).status_code == 200
        assert (await client.post(CHAT, json=body("a"))).status_code == 503


async def test_one_that_does_not_answer_is_named():
    silent = FakeMaster()
    silent.healthy = False
    async with client_of(FakeMaster(), silent) as client:
        said = (await client.get("/health")).json()["error"]["message"]
        assert said == "The engine of the model 'b' does not answer."


async def test_where_none_can_serve_nothing_of_a_body_is_read():
    first, second = (FakeMaster(status=EngineStatus.LOADING) for _ in range(2))
    async with client_of(first, second) as client:
        refused = await client.post(CHAT, content=b"not even JSON")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_loading")


async def test_the_limit_is_for_all_models_together():
    models = set_of(FakeMaster(), FakeMaster())
    admission = Admission(models, 2)
    with admission.slot() as one, admission.slot() as two:
        one.use(models.of("a"))
        two.use(models.of("b"))
        assert [model.in_flight for model in models] == [1, 1]
        assert admission.busy_error().status == 429
    assert [model.in_flight for model in models] == [0, 0]
    assert admission.busy_error() is None


async def test_metrics_name_their_model():
    first, second = FakeMaster(name="a"), FakeMaster(name="b")
    second.metrics.of_engine(0).on_first_token(0.03)
    async with client_of(first, second) as client:
        text: httpx.Response = await client.get("/metrics")
    counts = [line for line in text.text.splitlines() if line.startswith("xllm_npu:time_to_first_token_seconds_count")]
    assert counts == [f'xllm_npu:time_to_first_token_seconds_count{{engine="0",model_name="{name}"}} {count}'
                      for name, count in (("a", 0.0), ("b", 1.0))]
    assert text.text.count("# HELP xllm_npu:time_to_first_token_seconds ") == 1
