"""Prompts are those that transformers makes; what cannot be rendered is refused with the field's name."""

import json

import pytest
from transformers import AutoTokenizer

from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.chat_template import RESERVED, ChatTemplate, ChatTemplateError, read_template
from xllm_npu.text.tokenizer import Tokenizer

# Short templates in the manner of well-known families, using what theirs use.
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nYear: " + date_string + "\\n" + system + "<|eot|>" }}
{%- if tools is not none and tools is defined %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
QWEN = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and loop.index0 > ns.last_query %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ content }}{% endgeneration %}
    {%- else %}{{- content }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a small model<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
    {% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
    {% endif %}
{% endfor %}"""
TOOLS_JSON = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ messages[0].content }}"  # fmt: skip  # noqa: E501
TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "json": TOOLS_JSON}

CHATS = [
    [{"role": "user", "content": "Hi <b>there</b> & 'you' 你好"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello  "},
        {"role": "user", "content": " x\n"},
    ],
    [{"role": "system", "content": "Be short.\n"}, {"role": "user", "content": "Hi", "name": None}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "4", "reasoning_content": "\n2+2\n"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "reasoning": "hm"}],
]
TOOL = {"type": "function", "function": {"name": "f", "description": "<a> & 'b'", "parameters": {"z": 1, "a": "ü"}}}


@pytest.fixture(scope="session")
def hf(directories, backends, write_tokenizer, tmp_path_factory):
    """transformers' tokenizer and ours with each template."""
    result = {}
    for name, template in TEMPLATES.items():
        path = write_tokenizer(tmp_path_factory.mktemp(name), backends["byte_level"], chat_template=template)
        result[name] = (AutoTokenizer.from_pretrained(path), ChatTemplate.of(Tokenizer(path)))
    return result


def outcome(render) -> str | None:
    try:
        return render()
    except Exception:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("options", [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1999"},
    {"add_generation_prompt": True, "tools": [TOOL], "documents": [{"title": "t", "text": "doc"}]},
    {"add_generation_prompt": False, "continue_final_message": True},
])  # fmt: skip
def test_equals_transformers(hf, name, chat, options):
    theirs, ours = hf[name]
    own = {k: v for k, v in options.items() if k in ("add_generation_prompt", "continue_final_message", "tools", "documents")}  # fmt: skip  # noqa: E501
    extra = {k: v for k, v in options.items() if k not in own}
    if name not in ("llama3", "json"):  # where the template knows no tools, ours describes them
        own.pop("tools", None)
    expected = outcome(lambda: theirs.apply_chat_template(chat, tokenize=False, **options))
    assert outcome(lambda: ours.render(chat, **own, kwargs=extra)) == expected
    if name in ("llama3", "qwen") and chat is CHATS[1]:
        assert expected  # the comparison is not one of failures


def test_the_callers_messages_are_left_alone(hf):
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    before = json.dumps(chat)
    hf["qwen"][1].render(chat, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(chat) == before


def test_text_parts_are_joined(hf):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = hf["mistral"][1].render([{"role": "user", "content": parts}])
    assert "[INST] one\ntwo [/INST]" in prompt


@pytest.mark.parametrize(("messages", "kwargs", "param", "says"), [
    ([], {}, "messages", "at least one"),
    (["hi"], {}, "messages", r"messages\[0\] must be an object with a role"),
    ([{"content": "x"}], {}, "messages", "with a role"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "messages", "'image_url'"),
    ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages", r"content\[0\]"),
    ([{"role": "assistant", "content": "x"}], {}, "messages", "must alternate"),
    ([{"role": "user", "content": "x"}], {"kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ([{"role": "user", "content": "x"}], {"kwargs": {"tokenize": 1}}, "chat_template_kwargs", "tokenize"),
    ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "continue_final_message", "exclude"),
    ([{"role": "user"}], {"continue_final_message": True, "add_generation_prompt": False},
     "continue_final_message", "final message with text"),
    ([{"role": "user", "content": "x"}], {"template": "{% if %}"}, "chat_template", "not a valid template"),
])  # fmt: skip
def test_refusals_name_the_field(hf, messages, kwargs, param, says):
    with pytest.raises(InvalidParameter, match=says) as e:
        hf["mistral"][1].render(messages, **kwargs)
    assert e.value.param == param


def test_reserved_names_cover_every_argument(hf):
    import inspect

    arguments = set(inspect.signature(ChatTemplate.render).parameters) - {"self", "kwargs"}
    assert arguments <= RESERVED


@pytest.mark.parametrize("template", [
    "{{ messages.append(1) }}",  # the sandbox is immutable
    "{{ ''.__class__.__mro__ }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ namespace(**{'__x': 1}) }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{{ 1 / 0 }}",
    "{{ undefined_name.x }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
])  # fmt: skip
def test_a_template_cannot_leave_the_sandbox_nor_break_the_server(template):
    with pytest.raises(InvalidParameter, match="The chat template refused") as e:
        ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])
    assert len(e.value.message) < 400


def test_errors_are_short():
    template = ChatTemplate("{{ raise_exception('long ' * 1000) }}", {})
    with pytest.raises(InvalidParameter) as e:
        template.render([{"role": "user", "content": "x"}])
    assert len(e.value.message) < 400


def test_model_without_template():
    template = ChatTemplate(None, {})
    assert not template
    with pytest.raises(InvalidParameter, match=r"no chat template.*--chat-template") as e:
        template.render([{"role": "user", "content": "x"}])
    assert e.value.param == "messages"
    assert template.render([{"role": "user", "content": "x"}], template="{{ messages[0].content }}") == "x"


def test_several_templates_by_name():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    chat = [{"role": "user", "content": "x"}]
    assert template.render(chat) == "plain"
    assert template.render(chat, tools=[TOOL]) == "tools"
    with pytest.raises(InvalidParameter, match="no default"):
        ChatTemplate({"rag": "x"}, {}).render(chat)


def test_template_file_of_the_model(backends, tmp_path, write_tokenizer):
    path = write_tokenizer(tmp_path / "t", backends["byte_level"], chat_template="from the configuration")
    (path / "chat_template.jinja").write_text("from the file {{ eos_token }}")
    assert ChatTemplate.of(Tokenizer(path)).render([{"role": "user", "content": "x"}]) == "from the file </s>"


def test_override_by_file_or_text(tokenizers, tmp_path):
    file = tmp_path / "my.jinja"
    file.write_text("file {{ messages[0].content }}\n")
    chat = [{"role": "user", "content": "x"}]
    assert ChatTemplate.of(tokenizers["byte_level"], str(file)).render(chat) == "file x"
    assert ChatTemplate.of(tokenizers["byte_level"], "inline {{ messages[0].content }}").render(chat) == "inline x"
    with pytest.raises(ChatTemplateError, match=r"no file 'nowhere\.jinja'"):
        read_template("nowhere.jinja")
    with pytest.raises(ChatTemplateError, match="not valid"):
        ChatTemplate.of(tokenizers["byte_level"], "{% if %}")
