"""A real uvicorn on a socket: what only a connection shows."""

import asyncio
import json
import os
import shutil
import ssl
import subprocess

import httpx
import openai
import pytest

from tests.service.conftest import live_server
from tests.service.fake_master import output, says, says_then_waits
from xllm_npu.service.errors import unavailable
from xllm_npu.state.output import SequenceDelta

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_async_openai_client(master):
    async with live_server(master) as server, openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
        assert [m.id async for m in await client.models.list()] == ["tiny"]
        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1)
        assert whole.choices[0].message.content == "Hello world"
        assert whole.choices[0].logprobs.content[0].token == "H"
        assert whole.usage.completion_tokens == 11
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage
            text += "".join(c.delta.content or "" for c in chunk.choices)
        assert (text, usage.total_tokens) == ("Hello world", 19)
        completion = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1,
                                                     extra_body={"top_k": 3})
        assert [c.text for c in completion.choices] == ["Hello world"] * 2
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="gpt", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
        assert refused.value.param == "temperature"


async def test_sync_openai_client(master):
    def use(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
            chunks = client.completions.create(model="tiny", prompt="a", stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].text for c in chunks)

    async with live_server(master, api_key=("k",)) as server:
        assert await asyncio.to_thread(use, server.url) == ("Hello world", "Hello world")


async def test_error_frame_reaches_openai_client(master):
    async def script(request):
        yield output(request, SequenceDelta(0, "x", [1]))
        yield output(request, finished=True, error="The engine stopped.")

    master.script = script
    async with live_server(master) as server, openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match=r"The engine stopped\."):
            async for _ in stream:
                pass


async def test_chunks_arrive_as_they_are_made(master):
    gate = asyncio.Event()
    master.script = says_then_waits("first", gate)
    async with (live_server(master) as server, httpx.AsyncClient(base_url=server.url) as client,
                client.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True}) as response):
        lines = response.aiter_lines()
        async for line in lines:
            if '"first"' in line:
                break
        gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [
    (CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "a"}), ("/v1/completions", {"prompt": ["a", "b"]})])
async def test_disconnect_aborts(master, stream, path, prompt):
    master.script = says_then_waits("x", asyncio.Event())
    async with live_server(master) as server, httpx.AsyncClient(base_url=server.url) as client:
        post = asyncio.create_task(client.post(path, json={**prompt, "stream": stream}))
        await master.submitted_one.wait()
        post.cancel()
        await master.aborted_one.wait()
        await server.admission.idle.wait()
        assert len(master.aborted) == len(prompt.get("prompt", "a"))


async def test_disconnect_before_the_first_token(master):
    async def script(request):
        await asyncio.Event().wait()
        yield

    master.script = script
    async with live_server(master) as server, httpx.AsyncClient(base_url=server.url) as client:
        post = asyncio.create_task(client.post(CHAT, json={"messages": MESSAGES, "stream": True}))
        await master.submitted_one.wait()
        post.cancel()
        await master.aborted_one.wait()
        await server.admission.idle.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_all_ends_requests_with_the_reason(master, stream):
    master.script = says_then_waits("x", asyncio.Event())
    async with live_server(master) as server, httpx.AsyncClient(base_url=server.url) as client:
        post = asyncio.create_task(client.post(CHAT, json={"messages": MESSAGES, "stream": stream}))
        await master.submitted_one.wait()
        server.admission.drain()
        refused = await client.post(CHAT, json={"messages": MESSAGES})
        assert refused.json()["error"]["code"] == "shutting_down"
        health = await client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "shutting_down")
        server.admission.abort_all(unavailable("The server is shutting down.", "shutting_down"))
        response = await post
        assert response.status_code == (200 if stream else 503)
        assert '"message":"The server is shutting down."' in response.text
        await server.admission.idle.wait()
        assert len(master.aborted) == 1


async def test_a_slow_reader_holds_back_its_own_stream(master):
    made = 0

    async def script(request):
        nonlocal made
        for _ in range(10_000):
            made += 1
            yield output(request, SequenceDelta(0, "x" * 10_000, [1]))

    master.script = script
    async with live_server(master) as server:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        data = json.dumps({"messages": MESSAGES, "stream": True}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(data) + data)
        before = -1
        while made != before or not made:  # until the sockets' buffers are full and nothing more is asked for
            before = made
            for _ in range(200):
                await asyncio.sleep(0)
        assert made < 5000
        async with httpx.AsyncClient(base_url=server.url) as other:
            assert (await other.get("/v1/models")).status_code == 200
        writer.close()
        await master.aborted_one.wait()
        await server.admission.idle.wait()


async def test_413_leaves_the_answer_readable(master):
    async with live_server(master, max_body_bytes=1024) as server, httpx.AsyncClient(base_url=server.url) as client:
        headers = {"Content-Type": "application/json"}
        for content in (b" " * 3_000_000, chunked(300)):
            response = await client.post(CHAT, content=content, headers=headers)
            assert response.status_code == 413
        assert (await client.get("/v1/models")).status_code == 200


async def chunked(count):
    for _ in range(count):
        yield b" " * 10_000


async def test_unix_socket(master, tmp_path):
    path = str(tmp_path / "s")
    async with live_server(master, uds=path) as server:
        assert server.url == f"unix:{path}"
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://x") as client:
            reply = (await client.post(CHAT, json={"messages": MESSAGES})).json()
        assert reply["choices"][0]["message"]["content"] == "Hello world"


@pytest.fixture
def certificate(tmp_path):
    """(key file, certificate file), self-signed for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return key, cert


async def test_tls(master, certificate):
    key, cert = certificate
    async with live_server(master, ssl_keyfile=key, ssl_certfile=cert) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(verify=context, base_url=server.url) as client:
            response = await client.post(CHAT, json={"messages": MESSAGES, "stream": True})
            assert response.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(base_url=server.url) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs the curl program")
async def test_curl(master):
    async with live_server(master) as server:
        process = await asyncio.create_subprocess_exec(
            "curl", "-sSi", "-N", server.url + CHAT, "-H", "Content-Type: application/json", "-d",
            json.dumps({"messages": MESSAGES, "stream": True}), stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "no_proxy": "*"})
        out, _ = await process.communicate()
    head, _, body = out.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-type: text/event-stream" in head
    assert body.endswith(b"data: [DONE]\n\n")


async def test_many_streams_at_once(master):
    master.script = says(*"abcdefgh")
    async with live_server(master) as server, httpx.AsyncClient(
            base_url=server.url, limits=httpx.Limits(max_connections=40)) as client:
        responses = await asyncio.gather(*(
            client.post(CHAT, json={"messages": MESSAGES, "stream": True}) for _ in range(40)))
        for response in responses:
            frames = [json.loads(f[6:]) for f in response.text.split("\n\n") if f.startswith("data: {")]
            assert "".join(f["choices"][0]["delta"].get("content", "") for f in frames) == "abcdefgh"
    assert master.closed == 40
