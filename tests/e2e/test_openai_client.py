"""A model behind the whole server, asked through the client that users have."""

import asyncio

import openai
import pytest

pytestmark = pytest.mark.multiprocess

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüß Gott, 你好"}]
PROMPTS = ["Hello", "The quick brown fox", "def main():", "Ünïcödé 🎉", *(f"{i} prompt " * (i + 1) for i in range(12))]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 48}


def complete(client: openai.OpenAI, **fields):
    return client.completions.create(**{**GREEDY, "prompt": "Hello", **fields})


def chat(client: openai.OpenAI, **fields):
    return client.chat.completions.create(**{**GREEDY, "messages": MESSAGES, **fields})


def test_greedy_tokens_are_those_of_transformers(server, tiny_dir, openai_client):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_dir), AutoTokenizer.from_pretrained(tiny_dir)
    got = complete(openai_client, prompt=PROMPTS, extra_body={"return_token_ids": True})
    for prompt, choice in zip(PROMPTS, got.choices):
        ids = tokenizer(prompt, return_tensors="pt").input_ids  # [1, prompt] int64
        with torch.inference_mode():
            expected = model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1]:].tolist()
        assert choice.prompt_token_ids == ids[0].tolist()
        assert choice.token_ids == expected
        assert choice.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_models(openai_client):
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    assert openai_client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="other"):
        chat(openai_client, model="other")


def test_chat_whole_and_streamed(openai_client):
    whole = chat(openai_client)
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert whole.usage.completion_tokens == 48
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 48
    chunks = list(chat(openai_client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 48
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(c.delta.content or "" for c in choices) == choice.message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    assert len(chunks) > 4, "text comes as it is made"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_several_choices(openai_client):
    fields = {"n": 3, "temperature": 1.0, "seed": 7}
    first, again, other = chat(openai_client, **fields), chat(openai_client, **fields), chat(openai_client, n=3, seed=8)
    texts = [c.message.content for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [c.message.content for c in again.choices] == texts
    assert [c.message.content for c in other.choices] != texts
    assert first.usage.completion_tokens == 3 * 48
    streamed = ["", "", ""]
    for chunk in chat(openai_client, stream=True, **fields):
        for c in chunk.choices:
            streamed[c.index] += c.delta.content or ""
    assert streamed == texts


def test_a_seed_gives_the_same_text_beside_other_requests(server, openai_client):
    fields = {"temperature": 1.0, "seed": 11, "max_tokens": 200}
    alone = complete(openai_client, **fields).choices[0].text
    batch = complete(openai_client, prompt=["other", "Hello", "third"], **fields)
    assert batch.choices[1].text == alone
    assert complete(openai_client, **{**fields, "seed": 12}).choices[0].text != alone


def test_logprobs(openai_client):
    choice = chat(openai_client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert entry.token == entry.top_logprobs[0].token, "greedy takes the likeliest"
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0
    completion = complete(openai_client, logprobs=2, echo=True).choices[0]
    assert completion.text.startswith("Hello")
    assert "".join(completion.logprobs.tokens) == completion.text
    assert completion.logprobs.token_logprobs[0] is None
    assert completion.logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(openai_client, stream):
    text = complete(openai_client).choices[0].text
    stop = text[20:24]  # no token ends where it does: a token is one character
    before = text[: text.index(stop)]
    answer = complete(openai_client, stop=["never there", stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(c.text for c in choices) == before
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)


def test_stopping_at_a_string_frees_the_engine(server, openai_client):
    text = complete(openai_client).choices[0].text
    before = server.metrics()["generation_tokens_total"]
    complete(openai_client, stop=text[20:24], max_tokens=20000)
    server.wait_idle()
    assert server.metrics()["generation_tokens_total"] - before < 10000


def test_end_token_and_stop_ids(openai_client):
    ids = complete(openai_client, extra_body={"return_token_ids": True}).choices[0].token_ids
    stopped = complete(openai_client, extra_body={"stop_token_ids": [ids[9]], "return_token_ids": True}).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == ids[: ids.index(ids[9]) + 1]
    forced = {"logit_bias": {"258": 100}}  # <|im_end|>
    assert complete(openai_client, **forced).choices[0].finish_reason == "stop"
    assert complete(openai_client, **forced).choices[0].text == ""
    endless = complete(openai_client, **forced, extra_body={"ignore_eos": True})
    assert (endless.choices[0].finish_reason, endless.usage.completion_tokens) == ("length", 48)


def test_refusals_name_the_field(openai_client):
    for fields, param in (
        ({"temperature": 9}, "temperature"), ({"max_tokens": 10**7}, None), ({"prompt": [999999]}, "prompt"),
        ({"prompt": "x" * 40000}, "prompt"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
    ):  # fmt: skip
        if param is None:  # as much as there is room for
            assert complete(openai_client, **{**fields, "stop": "!"}).choices[0].finish_reason in ("stop", "length")
            continue
        with pytest.raises(openai.BadRequestError) as refused:
            complete(openai_client, **fields)
        assert refused.value.param == param


async def test_async_requests_at_once_equal_those_in_a_row(server, openai_client):
    expected = [complete(openai_client, prompt=prompt).choices[0].text for prompt in PROMPTS]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        async def whole(prompt: str) -> str:
            return (await client.completions.create(**GREEDY, prompt=prompt)).choices[0].text

        async def streamed(prompt: str) -> str:
            stream = await client.completions.create(**GREEDY, prompt=prompt, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert list(await asyncio.gather(*map(whole, PROMPTS), *map(streamed, PROMPTS))) == expected * 2
        assert [model.id async for model in await client.models.list()] == ["tiny"]
    server.wait_idle()


def test_beam_search(server, tiny_dir, openai_client):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_dir), AutoTokenizer.from_pretrained(tiny_dir)
    before = server.metrics()
    extra = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    fields = {"n": 3, "max_tokens": 12, "logprobs": 2, "temperature": 0.7, "extra_body": extra}
    got = complete(openai_client, prompt=PROMPTS[:4], **fields)
    assert [choice.index for choice in got.choices] == list(range(12))
    for i, prompt in enumerate(PROMPTS[:4]):
        ids = tokenizer(prompt, return_tensors="pt").input_ids  # [1, prompt] int64
        with torch.inference_mode():
            expected = model.generate(ids, max_new_tokens=12, do_sample=False, num_beams=3, num_return_sequences=3,
                                      eos_token_id=None)[:, ids.shape[1]:].tolist()
        choices = got.choices[3 * i : 3 * i + 3]
        assert [choice.token_ids for choice in choices] == expected
        assert [choice.text for choice in choices] == tokenizer.batch_decode(expected, skip_special_tokens=True)
        assert [len(choice.logprobs.token_logprobs) for choice in choices] == [12] * 3
    assert got.usage.completion_tokens == 4 * 3 * 12
    after = server.metrics()
    assert after["request_success_total:length"] - before["request_success_total:length"] == 4
    reply = chat(openai_client, n=2, max_tokens=5, extra_body=extra)
    assert len({choice.message.content for choice in reply.choices}) == 2
    with pytest.raises(openai.BadRequestError, match="use_beam_search is not available when stream"):
        chat(openai_client, stream=True, extra_body=extra)
    server.wait_idle()


def test_repetition_is_detected(openai_client):
    extra = {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}, "return_token_ids": True}
    choice = complete(openai_client, logit_bias={"40": 100}, extra_body=extra).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("repetition", "repetition_detected")
    assert choice.token_ids == [40, 40]
