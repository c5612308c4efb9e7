"""A conversation's way to tokens in the master: by the model's template, or by one that came with the request."""

import asyncio

import pytest

from xllm_npu.config.load import settings_from_kwargs
from xllm_npu.master.llm_master import LLMMaster
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.chat_template import ChatTemplate
from xllm_npu.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def master(tiny_dir):
    master = LLMMaster(settings_from_kwargs(model=str(tiny_dir)))
    master.text.tokenizer = await asyncio.to_thread(Tokenizer, tiny_dir)
    master.text.template = ChatTemplate.of(master.tokenizer)
    yield master
    await master.shutdown(1.0)


async def test_text_and_tokens_are_of_one_rendering(master):
    prompt = await master.text.encode_chat(CHAT)
    assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids == master.tokenizer.encode(prompt.text, False)


async def test_a_template_of_the_clients(master):
    template = "{{ messages[0].content }}{{ eos_token }}!{{ x }}"
    prompt = await master.text.encode_chat(CHAT, template=template, kwargs={"x": 1})
    assert prompt.text == "Hi<|im_end|>!1"
    assert await master.text.decode(prompt.token_ids) == prompt.text
    with pytest.raises(InvalidParameter, match="not a valid template"):
        await master.text.encode_chat(CHAT, template="{% if %}")
