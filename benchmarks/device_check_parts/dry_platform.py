"""The CPU platform as a dry run uses it: torch's operators, and graphs that run the captured call again.

Compiling the CPU's own kernels and graphs takes minutes on a machine that has not done it before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from xllm_platform.base import Capabilities, Graph, GraphBackend
from xllm_platform.cpu.device import CpuPlatform


class RepeatedCall(Graph):
    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run

    def replay(self) -> torch.Tensor:
        return self._run()


class RepeatingBackend(GraphBackend):
    def capture(self, run: Callable[[], torch.Tensor]) -> Graph:
        run()
        return RepeatedCall(run)


class DryPlatform(CpuPlatform):
    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, kernels="torch", attention_backends=("torch",))

    def graph_backend(self) -> GraphBackend:
        return RepeatingBackend()
