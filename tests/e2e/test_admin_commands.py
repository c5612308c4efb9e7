"""What an operator asks of running engines: to forget prefixes, and to trace their steps."""

from __future__ import annotations

import pytest

from tests.support.master import Answer, metric, prompt_of, running_master
from xllm_npu.master.engine_group import CommandFailed
from xllm_npu.state.messages import Profile, ResetPrefixCache

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
async def test_commands(tiny_dir, tmp_path):
    async with running_master(tiny_dir) as master:
        prompt = prompt_of(200)
        first = await Answer(master, prompt, 4).whole()
        long = Answer(master, prompt, 300)  # runs while its prefix is forgotten
        await long.begun(5)
        hits = metric(master, "prefix_cache_hits_total")
        assert hits > 0
        await master.command(ResetPrefixCache())
        assert await Answer(master, prompt, 4).whole() == first
        assert metric(master, "prefix_cache_hits_total") == hits
        assert (await long.whole())[:4] == first
        assert await Answer(master, prompt, 4).whole() == first
        assert metric(master, "prefix_cache_hits_total") > hits

        await master.command(Profile(str(tmp_path)))
        with pytest.raises(CommandFailed, match="already"):
            await master.command(Profile(str(tmp_path)))
        await Answer(master, prompt, 4).whole()
        await master.command(Profile(""))
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size > 1000


@pytest.mark.slow
async def test_every_rank_writes_a_trace(tiny_dir, tmp_path):
    async with running_master(tiny_dir, tp_size=2) as master:
        await master.command(Profile(str(tmp_path)))
        await Answer(master, prompt_of(20), 4).whole()
        await master.command(Profile(""))
        await Answer(master, prompt_of(20), 4).whole()  # the other rank has written by then
        assert {file.name.split(".")[0] for file in tmp_path.iterdir()} == {"rank-0", "rank-1"}
