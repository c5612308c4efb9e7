"""Which grammar a chat turn is held to: a form of the answer, a call that must be, reasoning that may come before.

A forced call leaves no room for an answer, so what is asked of the answer's form does not count then. Where tools may
be called and the answer has a form, the model has the choice of both. A free answer has a grammar only if reasoning
before it is to be bounded, or calls in it are to follow the schemas of strict tools.
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

BUDGET = "thinking_token_budget"
NO_LIMIT = -1  # a budget


async def turn_grammar(master: LLMMaster, body: ChatBody, tools: Tools, prompt: str, longest: int) -> str | None:
    """Tried out; None where the text is free. Raises InvalidParameter, and ApiError where there is no telling now.

    `longest`: tokens that the output can have at most.
    """
    format = master.output_format
    budget = reasoning_budget(body, format)
    if budget is not None and budget >= longest:
        budget = None
    answer = await requested_grammar(master, body)
    if tools.forced and body.use_beam_search:
        raise InvalidParameter("tool_choice", "tool_choice: a forced call is not available with use_beam_search.")
    if answer is None and not tools.forced:
        held = tools.callable if tools.strict and format.triggers_calls and not body.use_beam_search else ()
        if budget is None and not held:
            return None
        free = await asyncio.to_thread(format.free_grammar, prompt, budget, held, tools.parallel)
        grammar, field = _serialized([{"lark_grammar": free}]), "tools" if held else BUDGET
    else:
        ways = []
        if answer is not None and not tools.forced:
            ways.append(_way("answer", format.reasoning_grammar(prompt, False, budget), json.loads(answer)["grammars"]))
        if tools.callable:
            call = await asyncio.to_thread(format.forced_call_grammar, tools.callable, tools.parallel)
            ways.append(_way("call", format.reasoning_grammar(prompt, True, budget), [{"lark_grammar": call}]))
        grammar, field = _one_of(ways), "tools" if tools.forced else grammar_field(body)
    await check_grammar(master, grammar, field)
    return grammar


def reasoning_budget(body: ChatBody, format: OutputFormat) -> int | None:
    """Most tokens of reasoning that the request allows; None if all. Raises InvalidParameter."""
    budget = body.thinking_token_budget
    if budget is None or budget == NO_LIMIT:
        return None
    if budget < 0:
        raise InvalidParameter(BUDGET, f"{BUDGET} must be at least 0, or -1 for no limit, got {budget}.")
    if not format.bounds_reasoning:
        why = ("the model has no reasoning that this server reads (--reasoning-parser)" if format.reasoning is None else
               f"the model's vocabulary lacks the tokens that end reasoning of the format {format.name_of_reasoning}")
        raise InvalidParameter(BUDGET, f"{BUDGET} cannot be held to: {why}.")
    if body.use_beam_search:
        raise InvalidParameter(BUDGET, f"{BUDGET} is not available with use_beam_search.")
    return budget


def _way(name: str, before: str | None, grammars: Grammars) -> tuple[str, Grammars]:
    """One way to answer, as Lark over named grammars, and these."""
    first = {**grammars[0], "name": grammars[0].get("name") or name}
    if before is None:
        return f"@{first['name']}", [first, *grammars[1:]]
    return (f"@before_{name} @{first['name']}",
            [{"name": f"before_{name}", "lark_grammar": before}, first, *grammars[1:]])


def _one_of(ways: Sequence[tuple[str, Grammars]]) -> str:
    start = "start: " + " | ".join(lark for lark, _ in ways)
    return _serialized([{"lark_grammar": start}, *(one for _, named in ways for one in named)])


def _serialized(grammars: Grammars) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
