"""Every way to spread a model over ranks gives transformers' tokens, over HTTP, with overlap and preemptions.

Each launch line of docs/parallelism.md on one machine, and two machines; a few by default, all with the `slow` marker.
Ray is in test_ray.py.
"""

from __future__ import annotations

import itertools

import pytest

from tests.docs.markdown import blocks
from tests.support.greedy import ask_server, differences
from tests.support.machines import loopback_machines, start_nodes
from tests.support.server import ServerProcess
from tests.support.spread_models import NEW_TOKENS, TINY, SpreadModels, tight

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

SMOLLM2_BLOCK = 2 * 30 * 3 * 64 * 4 * 16  # bytes: keys and values, layers, heads, head size, float32, tokens
BALANCE_OFTEN = ("--eplb-update-interval", "4", "--eplb-update-threshold", "1")


def documented(kind: str) -> dict[str, tuple[str, ...]]:
    """Flags of the launch lines in docs/parallelism.md, by themselves as text."""
    (block,) = [b for b in blocks("docs/parallelism.md") if b.info == ("bash", kind)]
    return {" ".join(flags): tuple(flags) for flags in (line.split()[3:] for line in block.text.splitlines())}


DENSE, EXPERTS = documented("ranks"), documented("experts")
ALL = [("qwen3", way) for way in DENSE] + list(itertools.product(("qwen3_moe", "deepseek_v3"), EXPERTS))
FEW = [("qwen3_moe", "--tp-size 2 --dp-size 2 --ep-size 4 --enable-eplb"),
       pytest.param("qwen3", "--dp-size 2", marks=pytest.mark.slow),
       pytest.param("deepseek_v3", "--dp-size 2 --ep-size 2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> SpreadModels:
    return SpreadModels(tmp_path_factory.mktemp("models"))


def check(server: ServerProcess, cases, flags: tuple[str, ...]) -> None:
    server.wait_ready()
    assert differences(cases, ask_server(server.url, cases, NEW_TOKENS, uds=server.uds)) == []
    server.wait_idle()
    metrics = server.metrics()
    assert metrics["num_preemptions_total"] > 0
    if "--dp-size" in flags:
        assert min(metrics[f"generation_tokens_total@{rank}"] for rank in (0, 1)) > 0


def check_tiny(models, tmp_path, name: str, way: str) -> None:
    directory, cases = models.tiny(name)
    flags = EXPERTS[way] + (BALANCE_OFTEN if "--enable-eplb" in way else ())
    with ServerProcess(directory, tmp_path, *tight(name, flags)) as server:
        check(server, cases, flags)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), FEW)
def test_few(models, tmp_path, name, way):
    check_tiny(models, tmp_path, name, way)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [one for one in ALL if one not in FEW])
def test_all(models, tmp_path, name, way):
    check_tiny(models, tmp_path, name, way)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), [
    *((name, ("--tp-size", "2")) for name in TINY), ("qwen3", ("--dp-size", "2")),
    *((name, ("--dp-size", "2", "--ep-size", "2")) for name in TINY if name != "qwen3"),
])
def test_two_machines(models, tmp_path, name, flags):
    directory, cases = models.tiny(name)
    with start_nodes(directory, tmp_path, loopback_machines(), *tight(name, flags)) as (server, _):
        check(server, cases, flags)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("flags", [("--tp-size", "3"), ("--dp-size", "2"), ("--tp-size", "3", "--dp-size", "2")],
                         ids=" ".join)
def test_smollm2(models, tmp_path, flags):
    """Nine heads and three key/value heads: three ranks, not two, can share them."""
    directory, cases = models.smollm2()
    cache = 50 * SMOLLM2_BLOCK // (3 if "--tp-size" in flags else 1)  # the longest sequence takes 46 blocks
    with ServerProcess(directory, tmp_path, *flags, "--dtype", "float32", "--max-model-len", "768",
                       "--max-tokens-per-batch", "256", "--block-size", "16", "--max-cache-size", str(cache),
                       "--prefill-scheduling-memory-usage-threshold", "1.0") as server:
        check(server, cases, flags)
