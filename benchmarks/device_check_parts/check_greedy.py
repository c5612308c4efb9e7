"""Greedy tokens of tiny checkpoints in float32: every attention backend of the platform, eager and by graph, against
torch's operators on the CPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import checkpoints
import torch
from paged_decoder import PagedDecoder, load_model
from part import Part
from xllm_models.attention.base import PagedBackend
from xllm_models.backends import attention_for, falls_back
from xllm_platform.base import Platform

STEPS = 24


def main() -> None:
    part = Part()
    platform = part.platform()
    architectures = checkpoints.ARCHITECTURES[:2] if part.dry_run else checkpoints.ARCHITECTURES
    steps = 6 if part.dry_run else STEPS
    asked = checkpoints.prompts()
    with tempfile.TemporaryDirectory() as folder:
        for architecture in architectures:
            directory = checkpoints.make(Path(folder), architecture)
            expected = checkpoints.reference(directory, asked, steps)
            model = load_model(platform, directory, torch.float32)
            for attention in platform.capabilities.attention_backends:
                backend = attention_for(model.config, attention)
                computes = not backend.dtypes or torch.float32 in backend.dtypes
                if not computes or falls_back(model.config, attention) or not model.attention_needs <= backend.features:
                    continue
                for graph in (False, True):
                    if graph and not can_capture(platform, backend):
                        continue
                    way = "graph" if graph else "eager"
                    with part.check(f"{architecture}, {attention}, {way}") as found:
                        part.need(2)
                        decoder = PagedDecoder(platform, model, attention, rows=len(asked),
                                               longest=checkpoints.LONGEST, block_size=checkpoints.BLOCK_SIZE)
                        wrong = checkpoints.difference(decoder.greedy(asked, steps, graph), expected)
                        found |= {"ok": not wrong, "detail": wrong}


def can_capture(platform: Platform, backend: type[PagedBackend]) -> bool:
    return platform.capabilities.graph == "compile" or backend.capture_safe


if __name__ == "__main__":
    main()
