"""Chat messages to a prompt, by the model's own template or one that the user gives.

Templates come with models and are run in jinja's immutable sandbox, with the helpers that Hugging Face
templates expect; the result is what transformers' `apply_chat_template(tokenize=False)` gives for the same
arguments, except that a list of text parts becomes one string, joined by newlines, before the template sees
it, and that tools, tool calls and developer messages get another form where the template knows none (see
text.tool_prompt). Whatever goes wrong while rendering is the client's message, as `InvalidParameter`; a template
that does not compile is the operator's, as `ChatTemplateError`. Knows no tokens. Safe to use from several threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.tool_prompt import calls_as_text, describe_tools

if TYPE_CHECKING:
    from xllm_npu.text.tokenizer import Tokenizer

Message = dict[str, Any]

# What a client may not set by chat_template_kwargs: arguments that have a field of their own, and ours.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "tokenize",
        "tokenizer",
        "return_dict",
        "return_tensors",
        "template",
    }
)
# Where the final message ends, to cut the prompt there. A template that trims shows by the lost blank.
_END_MARK = "\ue000final-message-ends\ue001 "
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_MAX_ERROR = 300


class ChatTemplateError(ValueError):
    """The template that the operator or the model gave cannot be used."""


class _GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is just its
    body.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """Jinja's namespace(), closed to names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _refuse_private(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace() does not take the name {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter writes HTML escapes, which models have never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    env.globals["namespace"] = _SafeNamespace
    return env


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=64)
def _names(source: str) -> frozenset[str]:
    """The names that the template takes from outside."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


class ChatTemplate:
    """The template of one model."""

    def __init__(self, source: str | dict[str, str] | None, special_tokens: dict[str, str]) -> None:
        """`source`: one template, or several by name ("default", "tool_use"); None: the model has none."""
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = special_tokens
        for name, text in self._sources.items():
            try:
                _compile(text)
            except jinja2.TemplateError as e:
                raise ChatTemplateError(f"The chat template ({name}) is not valid: {e}") from e

    @classmethod
    def of(cls, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """The model's template, or `override`: a file's path, or the template itself."""
        source = tokenizer.chat_template if override is None else read_template(override)
        return cls(source, tokenizer.special_tokens)

    @property
    def text(self) -> str:
        """The source; of several, all of them in a row."""
        return "\n".join(self._sources.values())

    def __bool__(self) -> bool:
        """Whether there is a template."""
        return bool(self._sources)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        template: str | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. `template` replaces the model's own, `kwargs` are more names for it to use.

        Raises InvalidParameter, with the name of the field that cannot be honoured.
        """
        compiled, source = self._choose(template, bool(tools))
        extra = _checked_kwargs(kwargs)
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude "
                "each other: set add_generation_prompt to false.",
            )
        chat = [_normalized(m, i) for i, m in enumerate(messages)]
        if not chat:
            raise InvalidParameter("messages", "messages must have at least one message.")
        chat = _known_roles(chat, source)
        last = _mark_end(chat, source) if continue_final_message else ""
        names = {
            **self._special_tokens,
            **extra,
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if tools and "tools" not in _names(source):
                prompt = _with_tools_described(compiled, {**names, "tools": None}, tools)
            else:
                prompt = _rendered(compiled, names)
        except Exception as e:  # a template is a program of the model's: it can fail in any way
            raise InvalidParameter("messages", "The chat template refused the messages: " + _short(e)) from e
        return _cut_at_mark(prompt, last) if continue_final_message else prompt

    def _choose(self, template: str | None, with_tools: bool) -> tuple[jinja2.Template, str]:
        if template is not None:
            try:
                return _compile(template), template
            except jinja2.TemplateError as e:
                raise InvalidParameter(
                    "chat_template", f"chat_template is not a valid template: {_short(e)}"
                ) from e
        if not self._sources:
            raise InvalidParameter(
                "messages",
                "This model has no chat template. Use /v1/completions, or start the "
                "server with --chat-template FILE.",
            )
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise InvalidParameter(
                "messages",
                "This model has several chat templates and no default "
                f"({', '.join(sorted(self._sources))}). Start the server with --chat-template FILE.",
            )
        return _compile(self._sources[name]), self._sources[name]


def _rendered(template: jinja2.Template, names: dict[str, Any]) -> str:
    """Most templates print the arguments of earlier calls as JSON; some add them to a string, which an object fails."""
    try:
        return template.render(names)
    except TypeError:
        chat = [_with_string_arguments(m) for m in names["messages"]]
        if chat == names["messages"]:
            raise
        return template.render({**names, "messages": chat})


def _with_string_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [
        {**call, "function": {**call["function"], "arguments": _tojson(call["function"].get("arguments"))}}
        for call in calls]}


def _with_tools_described(template: jinja2.Template, names: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    """For a template that knows no tools; one that takes no system message either gets them in the user's."""
    chat = names["messages"]
    try:
        return _rendered(template, {**names, "messages": describe_tools(chat, tools, "system")})
    except jinja2.TemplateError:
        if chat[0]["role"] != "user":
            raise
        return _rendered(template, {**names, "messages": describe_tools(chat, tools, "user")})


def _known_roles(chat: list[Message], source: str) -> list[Message]:
    """The conversation as this template can take it: roles and calls that it does not know get another form."""
    if "developer" not in source:
        chat = [{**m, "role": "system"} if m["role"] == "developer" else m for m in chat]
    if "tool_calls" not in source and any(m["role"] == "tool" or "tool_calls" in m for m in chat):
        chat = calls_as_text(chat)
    return chat


def read_template(given: str) -> str:
    """What --chat-template means: a file if there is one of that name, else the template itself."""
    inline = any(mark in given for mark in ("{{", "{%", "\n"))
    if not inline or len(given) < 256:
        path = Path(given).expanduser()
        if path.is_file():
            return path.read_text(encoding="utf-8")
    if not inline:
        raise ChatTemplateError(
            f"--chat-template: there is no file {given!r}, and it is no template either "
            "(it has no {{ or {%)."
        )
    return given


def _checked_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    taken = sorted(RESERVED.intersection(kwargs or {}))
    if taken:
        raise InvalidParameter(
            "chat_template_kwargs", f"chat_template_kwargs must not set {', '.join(taken)}."
        )
    return dict(kwargs or {})


def _normalized(message: Message, index: int) -> Message:
    """A message as templates expect it: no empty keys, text content in one string, reasoning under its usual
    name.
    """
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidParameter("messages", f"{where} must be an object with a role.")
    result = {k: v for k, v in message.items() if v is not None}
    if isinstance(result.get("content"), list | tuple):
        result["content"] = _joined(result["content"], where)
    reasoning = next((result[name] for name in _REASONING_NAMES if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _joined(parts: Sequence[Any], where: str) -> str:
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else part.get("text") if kind in ("text", "input_text") else None
        if not isinstance(text, str):
            raise InvalidParameter(
                "messages",
                f"{where}.content[{i}]: this model takes parts of type 'text' only"
                + (f", got {kind!r}." if kind else "."),
            )
        texts.append(text)
    return "\n".join(texts)


def _mark_end(chat: list[Message], source: str) -> str:
    """Append the mark to the final message, and return the message."""
    content = chat[-1].get("content")
    if not isinstance(content, str) or "content" not in source:
        raise InvalidParameter(
            "continue_final_message", "continue_final_message needs a final message with text content."
        )
    chat[-1]["content"] = content + _END_MARK
    return content


def _cut_at_mark(prompt: str, last: str) -> str:
    end = prompt.rfind(_END_MARK.rstrip())
    if end < 0 or last.strip() not in prompt:
        raise InvalidParameter(
            "continue_final_message",
            "The chat template changes the final message, so it cannot be continued.",
        )
    return prompt[:end] if prompt.startswith(_END_MARK, end) else prompt[:end].rstrip()


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_ERROR else text[: _MAX_ERROR - 3] + "..."
