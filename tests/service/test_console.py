"""The console without a browser: its files, its headers, and the figures of its live page."""

import re
from importlib import resources

import pytest

from tests.service.conftest import client_of, make_settings, set_of
from tests.service.fake_master import FakeMaster
from xllm_npu.service.admission import Admission
from xllm_npu.service.app import coordinator
from xllm_npu.service.console import FILES, STATE_PATH, console_paths
from xllm_npu.service.console_state import StateCache
from xllm_npu.service.context import ApiContext


@pytest.mark.parametrize("path", sorted({"/", *(f"/console/{name}" for name in FILES if name != "index.html")}))
async def test_every_file_is_served_under_a_strict_policy(client, path):
    reply = await client.get(path)
    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    again = await client.get(path, headers={"If-None-Match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_the_page_names_only_files_that_exist(client):
    """And none of another host's."""
    page = (await client.get("/")).text
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page)
    for name in re.findall(r"(?:src|href)=\"(console/[^\"]+)\"", page):
        assert (await client.get("/" + name)).status_code == 200, name
    scripts = [name for name in FILES if name.endswith(".js")]
    for script in scripts:
        text = (await client.get(f"/console/{script}")).text
        assert set(re.findall(r"from \"\./([^\"]+)\"", text)) <= set(scripts)
        assert "innerHTML" not in text
        assert not re.search(r"\beval\(|document\.write|insertAdjacentHTML|outerHTML", text)


def test_the_package_has_these_files_and_no_other():
    assert {file.name for file in (resources.files("xllm_npu.service") / "console_static").iterdir()} == set(FILES)


@pytest.mark.parametrize("path", ["/console/", "/console/../console.py", "/console/%2e%2e/console.py", "/console/x.js"])
async def test_nothing_else_is_served(client, path):
    assert (await client.get(path)).status_code == 404


async def test_a_prefix_of_a_proxy_is_the_page_s_base(master):
    async with client_of(master, root_path="/a\"b") as client:
        page = (await client.get("/a\"b/")).text
        assert '<base href="/a&quot;b/">' in page


async def test_it_can_be_turned_off(master):
    async with client_of(master, enable_console=False) as client:
        for path in ("/", "/console/main.js", STATE_PATH):
            assert (await client.get(path)).status_code == 404, path


async def test_the_page_is_open_and_its_figures_are_not(master):
    async with client_of(master, api_key=("k",)) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/console/main.js")).status_code == 200
        assert (await client.get(STATE_PATH)).status_code == 401
        assert (await client.get(STATE_PATH, headers={"Authorization": "Bearer k"})).status_code == 200


def test_the_live_page_s_figures_are_not_among_the_open_paths(master):
    assert STATE_PATH not in console_paths(make_settings().service)


async def test_figures(master):
    master.metrics.set_model("tiny", [{}, {}])
    master.metrics.set_engine(0, running=2, waiting=1, kv_usage=0.5, steps_total=9, last_step_seconds=0.25,
                              generation_tokens_total=40, owned_pages={"weights": 8},
                              pages={"mapped": 3, "reserved": 1, "free": 4, "pinned": 1, "refusals": {}})
    master.metrics.set_engine(1, running=1, steps_total=2, owned_pages={"weights": 8})
    master.metrics.of_engine(1).on_first_token(0.5)
    async with client_of(master) as client:
        state = (await client.get(STATE_PATH)).json()
    (model,) = state["models"]
    assert (model["name"], model["status"], model["state"]) == ("tiny", "ready", "awake")
    first, second = model["engines"]
    assert first == {**first, "running": 2, "waiting": 1, "kv_usage": 0.5, "steps_total": 9, "step_seconds": 0.25,
                     "generation_tokens_total": 40, "pages": {"mapped": 3, "reserved": 1, "free": 4, "pinned": 1}}
    assert (second["running"], second["pages"]) == (1, None)
    assert model["memory_bytes"] == {"weights": 16}
    assert model["latencies"]["time_to_first_token_seconds"] == {"count": 1, "sum": 0.5}


async def test_figures_hold_nothing_of_the_machine(master):
    async with client_of(master) as client:
        text = (await client.get(STATE_PATH)).text
    assert not re.search(r"/(?:home|root|tmp|work|usr)/", text)
    assert "failure" not in text


def test_many_readers_cost_one_reading():
    master, settings, now = FakeMaster(), make_settings(), [0.0]
    models = set_of(master, settings)
    context = ApiContext(models, Admission(models, 0), coordinator(models, settings.service))
    cache = StateCache(context, lambda: now[0])
    first = cache.state()
    now[0] = 0.9
    assert cache.state() is first
    now[0] = 1.0
    assert cache.state() is not first


async def test_no_page_of_this_origin_loads_scripts_from_elsewhere(client):
    """FastAPI's own would."""
    for path in ("/docs", "/redoc"):
        assert (await client.get(path)).status_code == 404, path
    assert (await client.get("/openapi.json")).status_code == 200
