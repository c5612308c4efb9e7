"""What a shell script sees: raw HTTP over TCP and over a Unix socket, keys, limits, the small routes."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.support.server import ServerProcess, poll

pytestmark = pytest.mark.multiprocess

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "Hello", "max_tokens": 30000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Hello", "max_tokens": 4}
JSON = {"Content-Type": "application/json"}
KEYS = ("sk-one", "sk-two")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tiny_dir: Path, tmp_path_factory) -> Iterator[ServerProcess]:
    """On a Unix socket, with keys, for two requests at once, under a name of its own."""
    flags = ["--max-concurrent-requests", "2", "--served-model-name", "mine"]
    flags += [word for key in KEYS for word in ("--api-key", key)]
    with ServerProcess(tiny_dir, tmp_path_factory.mktemp("guarded"), *flags, uds=True) as started:
        yield started


def test_whole_reply(server):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", COMPLETIONS, json.dumps(SHORT), JSON)
    response = connection.getresponse()
    body = json.loads(response.read())
    assert (response.status, response.getheader("content-type")) == (200, "application/json")
    assert body["usage"]["completion_tokens"] == 4
    connection.request("GET", "/health")  # the connection is kept
    assert connection.getresponse().status == 200
    connection.close()


def test_the_http_process_has_no_torch(server):
    """Every megabyte and second of it would be the model's, or the user's who waits for the start."""
    assert not [m.path for m in psutil.Process(server.pid).memory_maps() if "libtorch" in m.path]
    assert [m.path for m in psutil.Process(server.engine_pid).memory_maps() if "libtorch" in m.path]


def test_stream_is_chunks_of_events(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**SHORT, "stream": True})
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nUser-Agent: curl/8\r\nAccept: */*\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, rest = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert "text/event-stream" in head
    assert "transfer-encoding: chunked" in head.lower()
    assert rest.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")
    frames = [line.removeprefix("data: ") for line in rest.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(frame)["choices"][0]["text"] for frame in frames)
    assert json.loads(frames[-1])["choices"][0]["finish_reason"] == "length"


def test_tokenize_and_back(server):
    text = "Grüß Gott, 你好 🎉\n\tend"
    with server.client() as client:
        there = client.post("/tokenize", json={"prompt": text}).json()
        assert there["count"] == len(there["tokens"]) == len(text.encode())
        assert client.post("/detokenize", json={"tokens": there["tokens"]}).json() == {"prompt": text}
        messages = [{"role": "user", "content": text}]
        asked = client.post("/tokenize", json={"messages": messages}).json()["count"]
        answered = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
        assert answered["usage"]["prompt_tokens"] == asked > len(text.encode())


def test_errors_are_openais_envelope(server):
    with server.client() as client:
        for answer, status in (
            (client.post(COMPLETIONS, content="{", headers=JSON), 400), (client.post(COMPLETIONS, content="{}"), 415),
            (client.post(COMPLETIONS, json={}), 400),
            (client.get("/nothing"), 404), (client.get(COMPLETIONS), 405),
            (client.post(COMPLETIONS, json={**SHORT, "model": "x"}), 404),
        ):  # fmt: skip
            assert answer.status_code == status
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert client.get("/version").json()["version"]


def test_keys(guarded):
    with guarded.client() as client:
        for headers in ({}, bearer("sk-three"), bearer("sk-on"), {"Authorization": "Basic sk-one"}):
            refused = client.post(COMPLETIONS, json=SHORT, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in KEYS:
            assert client.post(COMPLETIONS, json=SHORT, headers=bearer(key)).status_code == 200
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        assert client.get("/v1/models").status_code == 401
    assert not any(key in guarded.stderr for key in KEYS)


def test_openai_client_over_a_unix_socket(guarded):
    transport = httpx.HTTPTransport(uds=guarded.uds)
    with openai.OpenAI(base_url="http://server/v1", api_key=KEYS[0], http_client=httpx.Client(transport=transport),
                       max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["mine"]
        assert client.completions.create(model="mine", **SHORT).choices[0].text
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="tiny", **SHORT)


def test_one_request_too_many_is_told_to_come_back(guarded):
    with ExitStack() as stack:
        client = stack.enter_context(guarded.client(headers=bearer(KEYS[0])))
        for _ in range(2):
            streams = [stack.enter_context(client.stream("POST", COMPLETIONS, json=ENDLESS)) for _ in range(2)]
            assert [stream.status_code for stream in streams] == [200, 200]
            refused = client.post(COMPLETIONS, json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) > 0
            assert client.get("/health").status_code == 200
            for stream in streams:
                stream.close()
            poll(lambda: client.post(COMPLETIONS, json=SHORT).status_code == 200, "a free place")
        assert guarded.metrics()["admission_rejections_total:max_concurrent_requests"] >= 2
    guarded.wait_idle()


def test_a_unix_socket_goes_with_its_server(tiny_dir, guarded):
    assert Path(guarded.uds).is_socket()
    guarded.stop()
    assert not Path(guarded.uds).exists()
