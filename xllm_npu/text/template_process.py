"""A client's own chat template, rendered where it can do no harm: in a process of its own, once, with limits.

A template is a program. The sandbox keeps it from reaching out, but not from running or growing for ever, and a thread
that does cannot be ended; a process can. `TemplateProcesses` starts one for each rendering (a tenth of a second or two)
and ends it in any case; its time, memory and output are bounded. Run as a module it is that process: the request on
stdin, the reply on stdout, both JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from typing import Any

from xllm_npu.state.sampling_params import InvalidParameter

MAX_TEMPLATE_CHARS = 64 << 10
MAX_PROMPT_CHARS = 16 << 20
RENDER_SECONDS = 5.0  # the start of the process included
MAX_MEMORY_BYTES = 1 << 30
PROCESSES = 2  # at once; others wait for their turn
PARAM = "chat_template"


class TemplateProcesses:
    """For one event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PROCESSES)

    async def render(self, template: str, special_tokens: dict[str, str], messages: list[dict[str, Any]],
                     **kwargs: Any) -> str:
        """`ChatTemplate.render` with `template`; `kwargs` are its. Raises InvalidParameter."""
        if len(template) > MAX_TEMPLATE_CHARS:
            raise InvalidParameter(PARAM, f"{PARAM} takes at most {MAX_TEMPLATE_CHARS} characters.")
        request = json.dumps({"special_tokens": special_tokens, "messages": messages,
                              "kwargs": {**kwargs, "template": template}}).encode()
        async with self._slots:
            reply = await _ask(request)
        if "prompt" not in reply:
            raise InvalidParameter(reply.get("param", PARAM), reply.get("message", f"{PARAM} needs too much memory."))
        return str(reply["prompt"])


async def _ask(request: bytes) -> dict[str, Any]:
    """The reply; {} of a process that died."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "xllm_npu.text.template_process", stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
        start_new_session=True)  # Ctrl-C is the parent's
    try:
        async with asyncio.timeout(RENDER_SECONDS):
            out, _ = await process.communicate(request)
        return dict(json.loads(out)) if process.returncode == 0 else {}
    except TimeoutError:
        return {"message": f"{PARAM} takes longer than {RENDER_SECONDS:g} seconds."}
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _render(request: dict[str, Any]) -> dict[str, str]:
    from xllm_npu.text.chat_template import ChatTemplate

    try:
        prompt = ChatTemplate(None, request["special_tokens"]).render(request["messages"], **request["kwargs"])
    except InvalidParameter as error:
        return {"param": error.param, "message": error.message}
    except MemoryError:
        return {}
    if len(prompt) > MAX_PROMPT_CHARS:
        return {"message": f"{PARAM} makes a prompt of more than {MAX_PROMPT_CHARS} characters."}
    return {"prompt": prompt}


def main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    seconds = int(RENDER_SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # should the parent die first
    json.dump(_render(json.load(sys.stdin.buffer)), sys.stdout)


if __name__ == "__main__":
    main()
