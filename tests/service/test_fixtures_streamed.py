"""Every fixture of canitoolcall as a chat reply: streamed in pieces and whole, it says the same, and what is right."""

from collections.abc import Iterator

import pytest

from tests.service.conftest import client_of
from tests.service.fake_master import FakeMaster, output
from tests.service.test_stream_equals_whole import both, folded_choices, whole_choices
from tests.text.test_output_fixtures import cuttings, families, format_of, problem_of, prompt_of
from xllm_npu.state.output import SequenceDelta


def every_fixture() -> Iterator[dict]:
    for _, fixtures in families().values():
        yield from fixtures


async def test_every_fifth_fixture():
    await check(list(every_fixture())[::5])


@pytest.mark.slow
async def test_every_fixture():
    await check(list(every_fixture()))


async def check(fixtures: list[dict]) -> None:
    master = FakeMaster()
    problems = []
    async with client_of(master) as client:
        for number, fixture in enumerate(fixtures):
            pieces = list(cuttings(fixture))[number % 5]
            end = "length" if "truncated" in fixture["tags"] else "stop"

            async def script(request, pieces=pieces, end=end):
                said = pieces if master.streamed[-1] else ["".join(pieces)]
                for i, piece in enumerate(said or [""]):
                    last = i == max(0, len(said) - 1)
                    yield output(request, SequenceDelta(0, piece, [i], None, end if last else None), finished=last)

            master.script, master.output_format = script, format_of(fixture)
            master.prompt_end = prompt_of(fixture)
            whole, chunks = await both(client, "/v1/chat/completions", {
                "messages": [{"role": "user", "content": "x"}], "tools": fixture["tools"]})
            message = whole["choices"][0]["message"]
            message.setdefault("reasoning", None)  # of a family that has none
            whole["choices"][0] |= {"logprobs": {"content": []}, "token_ids": []}
            [streamed], [choice] = folded_choices(chunks, 1), whole_choices(whole)
            assert streamed == choice, fixture["id"]
            calls = [(name, arguments, None) for name, arguments in choice["calls"]]
            problem = problem_of(fixture, (choice["content"], choice["reasoning"], calls))
            if problem is not None:
                problems.append((fixture["id"], problem))
            assert choice["finish_reason"] == ("tool_calls" if calls and end == "stop" else end), fixture["id"]
    assert problems == []
    assert len(master.requests) == 2 * len(fixtures) >= 2 * 469 // 5
