"""Milliseconds of a decode step of models with random weights: ours, eager and by graph, and transformers'.

The roofline is the time that reading all weights and the batch's keys and values once takes at the rate of a plain copy
on this device. Transformers' way is its static cache with torch's attention, eager and, where the device captures
streams, as a captured graph (what `generate` reaches with a compiled static cache, without the minutes of compiling).
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import shapes
import torch
import transformers_decoder
from paged_decoder import PagedDecoder, random_model
from part import Part, Skip
from xllm_models.backends import attention_for
from xllm_models.config import ModelConfig
from xllm_platform.base import Platform, PlatformError

BATCHES = (1, 16, 64, 256)
CONTEXT = 1024  # tokens that each row sees
BLOCK_SIZE = 128


class Case:
    """One model shape."""

    def __init__(self, part: Part, platform: Platform, shape: str, directory: Path) -> None:
        self.part, self.platform, self.shape, self.directory = part, platform, shape, directory
        self.context = 96 if part.dry_run else CONTEXT
        self.block_size = 16 if part.dry_run else BLOCK_SIZE
        self.batches = (1, 3) if part.dry_run else BATCHES
        self.dtype = torch.float32 if part.dry_run else getattr(torch, platform.capabilities.dtypes[0])
        self.best: dict[int, float] = {}  # batch -> our milliseconds

    def roofline_ms(self, batch: int) -> float:
        read = shapes.weight_bytes_read(self.shape) + batch * self.context * shapes.kv_bytes_per_token(self.shape)
        return read / self.part.copy_bytes_per_second(self.platform) * 1e3

    def fits(self, batch: int) -> None:
        """Raises Skip, which skips the case, where the keys and values have no room."""
        need = 1.15 * batch * self.context * shapes.kv_bytes_per_token(self.shape)
        free = self.platform.memory_info().free
        if need > free:
            raise Skip(f"the cache takes {need / 1e9:.0f} GB and {free / 1e9:.0f} GB are free")

    def ours(self) -> None:
        model = random_model(self.platform, ModelConfig.from_dir(self.directory), self.dtype)
        names = [name for name in self.platform.capabilities.attention_backends
                 if not (dtypes := attention_for(model.config, name).dtypes) or self.dtype in dtypes]
        names = [name for name in names if name != "torch"] or names  # the reference takes seconds for a step
        graphs = self.platform.capabilities.graph
        for batch in self.batches:
            for name in names if batch == self.batches[-1] else names[:1]:
                safe = graphs == "compile" or attention_for(model.config, name).capture_safe
                for way in ("eager", "graph") if safe else ("eager",):
                    with self.part.check(f"{self.shape} b{batch} {way} {name}") as found:
                        self.part.need(2)
                        self.fits(batch)
                        found |= self._row(batch, self._our_ms(model, name, batch, way == "graph"))
                        self.best[batch] = min(found["ms"], self.best.get(batch, found["ms"]))
                    _release(self.platform)

    def _our_ms(self, model: torch.nn.Module, attention: str, batch: int, graph: bool) -> float:
        decoder = PagedDecoder(self.platform, model, attention, rows=batch, longest=self.context,  # type: ignore[arg-type]
                               block_size=self.block_size)
        input = decoder.decode_input([7] * batch, np.full(batch, self.context, np.int32), graph)
        step = decoder.replay if graph else decoder.forward
        return self.part.median_ms(self.platform, lambda: step(input))

    def theirs(self) -> None:
        model = transformers_decoder.random_model(self.platform, self.directory, self.dtype)
        ways = ("eager", "graph") if self.platform.capabilities.graph == "capture" or self.part.dry_run else ("eager",)
        for batch in self.batches:
            for way in ways:
                with self.part.check(f"{self.shape} b{batch} {way} transformers") as found:
                    self.part.need(2)
                    self.fits(batch)
                    step = self._their_step(model, batch, way == "graph")
                    found |= self._row(batch, self.part.median_ms(self.platform, step))
                    del step
                    if batch in self.best:
                        found["times_ours"] = round(found["ms"] / self.best[batch], 2)
                        found["show"] += f", {found['times_ours']} times ours"
                _release(self.platform)

    def _their_step(self, model: torch.nn.Module, batch: int, graph: bool) -> Callable[[], torch.Tensor]:
        try:
            return transformers_decoder.step(self.platform, model, batch, self.context, graph)
        except PlatformError as error:  # this version of transformers asks the device something in a forward pass
            raise Skip(f"transformers' step cannot be captured: {error}"[:200]) from error

    def _row(self, batch: int, ms: float) -> dict[str, object]:
        bound = self.roofline_ms(batch)
        return {"ms": round(ms, 4), "roofline_ms": round(bound, 4), "of_roofline": round(bound / ms, 3),
                "tokens_per_second": round(batch / ms * 1e3, 1),
                "show": f"{ms:9.3f} ms  {batch / ms * 1e3:10,.0f} tok/s  {100 * bound / ms:5.1f} % of the roofline"}


def _release(platform: Platform) -> None:
    gc.collect()
    platform.empty_cache()


def main() -> None:
    part = Part()
    platform = part.platform()
    part.report("copy", bytes_per_second=round(part.copy_bytes_per_second(platform)),
                show=f"{part.copy_bytes_per_second(platform) / 1e9:,.0f} GB/s read and written")
    with tempfile.TemporaryDirectory() as folder:
        cases = [Case(part, platform, shape, shapes.write(Path(folder), shape))
                 for shape in (("tiny",) if part.dry_run else ("1B", "8B"))]
        for case in cases:
            case.ours()
            _release(platform)
        for case in cases:
            with part.check(f"{case.shape} transformers"):
                part.need(10)
                case.theirs()
            _release(platform)


if __name__ == "__main__":
    main()
