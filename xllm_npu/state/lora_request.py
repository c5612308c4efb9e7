"""Which LoRA adapter a prompt of `LLM.generate` is computed with; names and meaning are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """`lora_int_id`, 1 and up, stands for the directory `lora_path`; `lora_name` is for people."""

    lora_name: str
    lora_int_id: int
    lora_path: str
