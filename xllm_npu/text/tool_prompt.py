"""Tools for a model whose chat template knows none: they become text, in the form that most open models were taught.

The system message lists the tools and says how to call one; earlier calls stand in the assistant's messages as
`<tool_call>` blocks and their results in user messages as `<tool_response>` blocks (the Hermes function-calling
format, whose parser reads the answers). Knows no template and no request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_INSTRUCTIONS = """You can call functions. They are described here, one JSON object a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments as JSON inside <tool_call> tags, one pair of tags a call:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def describe_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]], role: str) -> list[Message]:
    """`messages`, whose content is text, with the tools in a first message of `role`, which is made if need be."""
    described = _INSTRUCTIONS.format(tools="\n".join(_json(tool) for tool in tools))
    first, rest = messages[0], list(messages[1:])
    if first["role"] != role:
        return [{"role": role, "content": described}, first, *rest]
    return [{**first, "content": "\n\n".join(filter(None, (first.get("content"), described)))}, *rest]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """`messages` without tool calls and tool messages: what they said stands in their content."""
    result: list[Message] = []
    responses: list[str] | None = None  # of the tool messages in a row
    for message in messages:
        if message["role"] == "tool":
            if responses is None:
                responses = []
                result.append({"role": "user"})
            responses.append(f"<tool_response>\n{message.get('content', '')}\n</tool_response>")
            result[-1]["content"] = "\n".join(responses)
            continue
        responses = None
        result.append(_without_calls(message) if "tool_calls" in message else message)
    return result


def _without_calls(message: Message) -> Message:
    blocks = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in message["tool_calls"]]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(filter(None, (message.get("content"), *blocks)))}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
