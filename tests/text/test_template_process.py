"""Templates that clients bring: rendered like the model's own, in a process that ends in time."""

import pytest

from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text import template_process
from xllm_npu.text.chat_template import ChatTemplate
from xllm_npu.text.template_process import TemplateProcesses

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ extra }}{% endfor %}"
CHAT = [{"role": "user", "content": "é ✓"}]


async def render(template: str, **kwargs: object) -> str:
    return await TemplateProcesses().render(template, {"bos_token": "<s>"}, CHAT, **kwargs)


async def test_equals_the_same_template_of_a_model():
    own = ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(CHAT, kwargs={"extra": "!"})
    assert await render(TEMPLATE, kwargs={"extra": "!"}) == own == "<s>[user]é ✓!"


@pytest.mark.parametrize(("template", "says"), [
    ("{% if %}", "not a valid template"), ("{{ raise_exception('no') }}", "no"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"), ("{{ 'x' * 17000000 }}", "more than"),
    ("x" * 70_000, "at most")])  # fmt: skip
async def test_refusals(template, says):
    with pytest.raises(InvalidParameter, match=says):
        await render(template)


async def test_one_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(template_process, "RENDER_SECONDS", 1.0)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidParameter, match="takes longer"):
        await render(endless)


@pytest.mark.slow
async def test_one_that_grows_for_ever_is_ended():
    grows = "{% set ns = namespace(x='x' * 1000000) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    with pytest.raises(InvalidParameter, match=r"MemoryError|too much memory"):
        await render(grows)
