"""Which grammar a chat turn is held to: a form of the answer, a call that must be, reasoning that may come before.

A forced call leaves no room for an answer, so what is asked of the answer's form does not count then. Where tools may
be called and the answer has a form, the model has the choice of both.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xllm_npu.service.structured import check_grammar, grammar_field, requested_grammar
from xllm_npu.state.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from xllm_npu.master.llm_master import LLMMaster
    from xllm_npu.service.protocol import ChatBody
    from xllm_npu.service.tools import Tools
    from xllm_npu.text.output_format import OutputFormat

Grammars = list[dict[str, Any]]  # llguidance's list: matching begins with the first, `@name` refers to others


async def turn_grammar(master: LLMMaster, body: ChatBody, tools: Tools, prompt: str) -> str | None:
    """Tried out; None where the text is free. Raises InvalidParameter, and ApiError where there is no telling now."""
    answer = await requested_grammar(master, body)
    if answer is None and not tools.forced:
        return None
    field = "tools" if tools.forced else grammar_field(body)
    if tools.forced and body.use_beam_search:
        raise InvalidParameter("tool_choice", "tool_choice: a forced call is not available with use_beam_search.")
    ways = []
    if answer is not None and not tools.forced:
        ways.append(_way("answer", master.output_format, prompt, json.loads(answer)["grammars"], False))
    if tools.callable:
        call = await asyncio.to_thread(master.output_format.forced_call_grammar, tools.callable, tools.parallel)
        ways.append(_way("call", master.output_format, prompt, [{"lark_grammar": call}], True))
    grammar = _serialized(ways)
    await check_grammar(master, grammar, field)
    return grammar


def _way(name: str, format: OutputFormat, prompt: str, grammars: Grammars, for_call: bool) -> tuple[str, Grammars]:
    """One way to answer, as Lark over named grammars, and these."""
    first = {**grammars[0], "name": grammars[0].get("name") or name}
    before = format.reasoning_grammar(prompt, for_call)
    if before is None:
        return f"@{first['name']}", [first, *grammars[1:]]
    return (f"@before_{name} @{first['name']}",
            [{"name": f"before_{name}", "lark_grammar": before}, first, *grammars[1:]])


def _serialized(ways: Sequence[tuple[str, Grammars]]) -> str:
    start = "start: " + " | ".join(lark for lark, _ in ways)
    grammars = [{"lark_grammar": start}, *(one for _, named in ways for one in named)]
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
