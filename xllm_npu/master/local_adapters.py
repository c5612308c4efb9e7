"""The LoRA adapters of an `LLM`: loaded when a call first names them, and dropped again where others need the room.

One call after the other, as the engine is the caller's; between two calls no adapter is in use. A server's are
`master.adapters`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from xllm_npu.config.lora import LoraSettings
from xllm_npu.state.lora_request import LoRARequest
from xllm_npu.state.messages import CommandDone, EngineCommand, LoadLora, UnloadLora
from xllm_npu.state.sampling_params import InvalidParameter

PARAM = "lora_request"


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int  # the engine's; another load of the same directory is another adapter
    path: Path


class LocalAdapters:
    def __init__(self, settings: LoraSettings, command: Callable[[EngineCommand], CommandDone]) -> None:
        self._settings, self._command = settings, command
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()  # by lora_int_id, the latest used last
        self._last = 0

    def numbers(self, requests: Sequence[LoRARequest | None]) -> list[int]:
        """The engine's number for each, 0 for None; all of them can be used together until the next call.

        Raises InvalidParameter for what cannot be loaded.
        """
        wanted = {one.lora_int_id: one for one in requests if one is not None}
        if wanted and not self._settings.enable_lora:
            raise InvalidParameter(PARAM, f"{PARAM} needs LLM(..., enable_lora=True).")
        if len(wanted) > self._settings.most_loaded:
            raise InvalidParameter(PARAM, f"{PARAM} names {len(wanted)} adapters, and {self._settings.most_loaded} can "
                                   "be loaded at once (max_cpu_loras).")
        for one in requests:
            if one is not None:
                self._check(one, wanted[one.lora_int_id])
        for id in wanted.keys() & self._loaded.keys():
            self._loaded.move_to_end(id)
        for id, one in wanted.items():
            if id not in self._loaded:
                self._load(one, wanted)
        return [0 if one is None else self._loaded[one.lora_int_id].number for one in requests]

    def _check(self, one: LoRARequest, first: LoRARequest) -> None:
        if type(one.lora_int_id) is not int or one.lora_int_id < 1:
            raise InvalidParameter(PARAM, f"{PARAM}: lora_int_id must be at least 1, got {one.lora_int_id!r}.")
        known = self._loaded.get(one.lora_int_id)
        if Path(one.lora_path) != (Path(first.lora_path) if known is None else known.path):
            raise InvalidParameter(PARAM, f"{PARAM}: lora_int_id {one.lora_int_id} stands for another directory "
                                   "already; give each its own.")

    def _load(self, one: LoRARequest, wanted: Collection[int]) -> None:
        if len(self._loaded) >= self._settings.most_loaded:
            self._drop_oldest(wanted)
        self._last += 1
        done = self._command(LoadLora(self._last, str(one.lora_path)))
        if done.error:
            raise InvalidParameter(PARAM, f"{PARAM}: the adapter {one.lora_name} cannot be loaded: {done.error}")
        self._loaded[one.lora_int_id] = _Loaded(self._last, Path(one.lora_path))

    def _drop_oldest(self, wanted: Collection[int]) -> None:
        for id in [id for id in self._loaded if id not in wanted]:
            if not self._command(UnloadLora(self._loaded[id].number)).error:
                del self._loaded[id]
                return
        # A call that was interrupted has left requests whose last step is still on the device.
        raise InvalidParameter(PARAM, f"{PARAM}: the adapters that are loaded are all in use; try again.")
