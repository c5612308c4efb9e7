"""Whether a client's grammar can be used, found out where it can do no harm: in a few processes of our own.

Compiling cannot be interrupted, and some grammars make it take for ever, or take all memory, or the stack. A process
that has not answered in time is ended and another one started. The engine compiles what has passed here again, without
such care. One object a model, used from one event loop; nothing is started before the first grammar comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable, Sequence

from xllm_npu.state.sampling_params import MAX_GRAMMAR_CHARS, InvalidParameter
from xllm_npu.text.grammar_process import frame

PROCESSES = 2
COMPILE_SECONDS = 2.5  # a grammar that takes longer is refused
START_SECONDS = 60.0  # for a process to build its tables
QUEUE_SECONDS = 10.0  # that a grammar waits for its turn
MAX_REMEMBERED = 1024
CODE_OF_DEATH = "It needs too much memory, or is nested too deeply."


class GrammarsBusy(RuntimeError):
    """Other grammars are being compiled, and have been for too long."""


class UnusableTokenizer(RuntimeError):
    """The model cannot have grammars."""


class _GrammarProcess:
    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, description: str) -> _GrammarProcess:
        """Raises GrammarsBusy; UnusableTokenizer, which says why the model cannot have grammars."""
        self = cls(await asyncio.create_subprocess_exec(
            sys.executable, "-m", "xllm_npu.text.grammar_process", stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
            start_new_session=True))  # Ctrl-C is the parent's
        try:
            failure = await self.ask(description, START_SECONDS)
        except (TimeoutError, EOFError):
            await self.close()
            raise GrammarsBusy("The server could not start what compiles grammars.") from None
        if failure:
            await self.close()
            raise UnusableTokenizer(failure)
        return self

    async def ask(self, text: str, seconds: float) -> str:
        """The reply. After TimeoutError, and after EOFError, which is its death, it has to be closed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                self._process.stdin.write(frame(text))
                await self._process.stdin.drain()
                (size,) = struct.unpack("<I", await self._process.stdout.readexactly(4))
                return (await self._process.stdout.readexactly(size)).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EOFError("the process has ended") from None
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # now, as the caller may be cancelled before it gets to `close`
            raise

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class GrammarCompiler:
    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json` is called on a thread, for each process that is started."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size, self._eos_token_ids = vocab_size, list(eos_token_ids)
        self._slots = asyncio.Semaphore(PROCESSES)
        self._idle: list[_GrammarProcess] = []
        self._known: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()  # the latest asked for last

    async def check(self, grammar: str, param: str) -> None:
        """Raise InvalidParameter about the field `param` for a grammar that the engine could not use.

        That is one that does not compile, is too large, takes too long, or that nothing matches. Raises GrammarsBusy
        where there is no telling in time.
        """
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidParameter(param, f"{param} takes at most {MAX_GRAMMAR_CHARS} characters.")
        try:
            data = grammar.encode()
        except UnicodeEncodeError:
            raise InvalidParameter(param, f"{param} has a lone surrogate, which is not valid Unicode.") from None
        key = hashlib.blake2b(data, digest_size=16).digest()
        task = self._known.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._known[key] = asyncio.create_task(self._try(grammar))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        self._known.move_to_end(key)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        failure = await asyncio.shield(task)  # another request may wait for the same answer
        if failure:
            raise InvalidParameter(param, f"{param} cannot be used: {failure}")

    async def close(self) -> None:
        running = [task for task in self._known.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        idle, self._idle = self._idle, []
        for process in idle:
            await process.close()

    async def _try(self, grammar: str) -> str:
        """What is wrong with it, or ""."""
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            raise GrammarsBusy("The server is compiling other grammars.") from None
        try:
            failure = await self._ask(self._idle.pop(), grammar) if self._idle else None
            if failure is None:  # one that others have used may have died of something else
                failure = await self._ask(await self._start(), grammar)
            return CODE_OF_DEATH if failure is None else failure
        except UnusableTokenizer as error:
            return str(error)
        finally:
            self._slots.release()

    async def _ask(self, process: _GrammarProcess, grammar: str) -> str | None:
        """What is wrong with it, or ""; None if the process died."""
        try:
            failure = await process.ask(grammar, COMPILE_SECONDS)
        except TimeoutError:
            await process.close()
            return f"It takes longer than {COMPILE_SECONDS:g} seconds to compile."
        except EOFError:
            await process.close()
            return None
        self._idle.append(process)
        return failure

    async def _start(self) -> _GrammarProcess:
        tokenizer = await asyncio.to_thread(self._tokenizer_json)
        return await _GrammarProcess.start(json.dumps({
            "tokenizer": tokenizer, "vocab_size": self._vocab_size, "eos_token_ids": self._eos_token_ids}))
