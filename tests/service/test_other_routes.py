import re

import pytest

from tests.service.conftest import client_of
from xllm_npu.version import __version__


async def test_models(client):
    reply = (await client.get("/v1/models")).json()
    assert reply["object"] == "list"
    card = reply["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    assert (await client.get("/v1/models/tiny")).json() == card


async def test_model_names_with_a_slash(master):
    async with client_of(master, served_model_name=("org/tiny",)) as client:
        assert (await client.get("/v1/models/org/tiny")).json()["id"] == "org/tiny"


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
async def test_health(client, method, path):
    response = await client.request(method, path)
    assert (response.status_code, response.text) == (200, "")


async def test_version(client):
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_metrics(client, master):
    master.metrics.of_engine(0).on_first_token(0.03)
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert re.search(r'xllm_npu:time_to_first_token_seconds_count\{engine="0",model_name="tiny"\} 1.0', response.text)


async def test_tokenize_and_detokenize(client, master):
    reply = (await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
    assert reply == {"count": 3, "max_model_len": 512, "tokens": [1, 97, 98], "token_strs": ["\x01", "a", "b"]}
    reply = (await client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False})).json()
    assert reply == {"count": 2, "max_model_len": 512, "tokens": [97, 98], "token_strs": None}
    reply = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}],
                                                  "add_generation_prompt": False})).json()
    assert bytes(reply["tokens"]) == b"<user>x"
    assert master.template_kwargs["add_generation_prompt"] is False
    assert (await client.post("/detokenize", json={"tokens": [97, 98]})).json() == {"prompt": "ab"}


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 1}, "prompt"), ("/detokenize", {"tokens": [300]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"), ("/tokenize", {"messages": [{}]}, "messages[0].role")])
async def test_tokenize_errors(client, path, body, param):
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_openapi_names_every_field(client):
    document = (await client.get("/openapi.json")).json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    assert {"messages", "temperature", "top_k"} <= document["components"]["schemas"][name]["properties"].keys()


async def test_openapi_has_the_answers_kinds_and_nothing_that_is_missing(client):
    reply = await client.get("/openapi.json")
    document = reply.json()
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', reply.text))
    assert refs <= document["components"]["schemas"].keys()
    assert "422" not in reply.text
    for path in ("/health", "/metrics", "/version", "/v1/models"):
        answer = await client.get(path)
        kinds = document["paths"][path]["get"]["responses"]["200"].get("content", {})
        assert answer.headers.get("content-type", "").partition(";")[0] == "".join(kinds)
    for path, name in (("/v1/chat/completions", "ErrorEnvelope"), ("/v1/messages", "MessagesErrorEnvelope")):
        answer = (await client.post(path, json={})).json()
        assert answer.keys() >= set(document["components"]["schemas"][name]["required"])
        described = document["paths"][path]["post"]["responses"]
        assert described["4XX"]["content"]["application/json"]["schema"]["$ref"].endswith("/" + name)
        assert described["200"]["content"].keys() == {"application/json", "text/event-stream"}


async def test_api_keys(master):
    async with client_of(master, api_key=("first", "second")) as client:
        for path in ("/health", "/ping", "/metrics"):
            assert (await client.get(path)).status_code == 200
        refused = [{}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"},
                   {"Authorization": "first"}, {"Authorization": "Bearer "}, {"Host": "x", "X-Api-Key": "first"}]
        for headers in refused:
            for path in ("/v1/models", "/version", "/openapi.json", "/nothing", "/health/"):
                response = await client.get(path, headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            for scheme in ("Bearer", "bearer"):
                headers = {"Authorization": f"{scheme} {key}"}
                assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_cors(master):
    origin = {"Origin": "https://a.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with client_of(master, allowed_origins=("https://a.example",), api_key=("k",)) as client:
        allowed = await client.options("/v1/chat/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refusal = await client.get("/v1/models", headers=origin)  # browsers must be able to read errors too
        assert refusal.status_code == 401
        assert refusal.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.options("/v1/chat/completions", headers={**preflight, "Origin": "https://b.example"})
        assert other.status_code == 400
    async with client_of(master) as client:
        assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=origin)).headers


async def test_root_path_stripped_or_not(master):
    async with client_of(master, root_path="/llm", api_key=("k",)) as client:
        for prefix in ("", "/llm"):
            assert (await client.get(prefix + "/health")).status_code == 200
            assert (await client.get(prefix + "/v1/models")).status_code == 401
            response = await client.get(prefix + "/v1/models", headers={"Authorization": "Bearer k"})
            assert response.status_code == 200
