"""Latent attention on the CPU: decode attends to the paged latents in place, prefill multiplies matrices.

Decode absorbs the up-projections into queries and outputs; one team of threads writes the step's latents and attends
for all one-token rows (cpu_mla_kernels). A prefill row's latents are gathered, and either expanded to keys and values
a few heads at a time or, where few queries see a long prefix, read by absorbed queries: whichever multiplies less.
A float16 cache is for models that compute in float32 (registry.build_model).
"""

from __future__ import annotations

import torch

from xllm_models.attention import cpu_mla_kernels, cpu_prefill
from xllm_models.attention.base import LayerAttention, NewCache
from xllm_models.attention.cpu_attention import untouched_zeros
from xllm_models.attention.mla_base import MlaBackend, MlaSpec
from xllm_models.forward_input import AttentionMetadata
from xllm_models.ops.cpu_numeric import BFLOAT16, FLOAT16, FLOAT32
from xllm_models.ops.cpu_team import float_bits, run

_ENCODINGS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_KERNEL_ROWS = 16  # up to so many tokens, kernels that read the matrices once absorb and project; above, bmm
_GROUP = 16  # heads that share a tile of latents
_QUERY_SLICE = 128  # queries whose scores exist at once
_SCORES = 1 << 22  # scores that exist at once, and so many expanded values
_EXACT_KEYS = 512  # up to so many keys, scores are not rounded to bfloat16
_WARM_BLOCKS = 8  # blocks whose memory is committed at start


class CpuMla(MlaBackend):
    def __init__(self, spec: MlaSpec) -> None:
        if spec.dtype not in _ENCODINGS:
            raise ValueError(f"the CPU attention stores float32, bfloat16 or float16, not {spec.dtype}")
        self.spec = spec
        self.caches = []
        self._warm_blocks = 0
        self._metadata: AttentionMetadata | None = None
        self._slots = self._table = self._lengths = torch.empty(0)
        self._tile = next((t for t in (32, 16) if spec.block_size % t == 0), spec.block_size)
        self._group = max(n for n in range(1, min(spec.num_heads, _GROUP) + 1) if spec.num_heads % n == 0)
        self._threads = 0
        self._parts = self._part_rows = torch.empty(0)

    def allocate_kv_caches(self, num_blocks: int, new_cache: NewCache | None = None) -> None:
        make = new_cache or untouched_zeros
        self._warm_blocks = 0 if new_cache else _WARM_BLOCKS
        shape = (num_blocks, self.spec.block_size, self.spec.width)
        self.caches = [make(shape, self.spec.dtype) for _ in range(self.spec.num_layers)]

    def warmup(self) -> None:
        """Commit the memory of the first blocks, which the first requests would otherwise wait for."""
        for cache in self.caches:
            cache[: self._warm_blocks].zero_()

    def prepare(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._slots = metadata.slot_mapping.contiguous()
        self._table = metadata.block_table.contiguous()
        self._lengths = metadata.seq_lens.contiguous()
        threads = torch.get_num_threads()
        if threads != self._threads:  # room for the parts of rows that are cut between threads
            self._threads = threads
            self._parts = torch.empty(2 * threads, self._group, self.spec.latent_size + 2)
            self._part_rows = torch.empty(2 * threads, dtype=torch.int64)

    def forward(
        self, layer: LayerAttention, query: torch.Tensor, latent: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        metadata, spec = self._metadata, self.spec
        assert metadata is not None, "prepare comes before forward"
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_size)
        decodes = metadata.num_decodes
        attended = torch.empty(decodes, spec.num_heads, spec.latent_size)
        self._write_and_decode(layer, self._absorb(query[:decodes], up), latent.contiguous(), attended)
        self._project(attended, up, out[:decodes])
        if metadata.num_prefills:
            starts, lengths = metadata.query_start_host.tolist(), metadata.seq_lens_host.tolist()
            for row in range(decodes, len(lengths)):
                tokens = slice(starts[row], starts[row + 1])
                self._prefill(layer, row, lengths[row], query[tokens], up, out[tokens])
        return out.flatten(1)

    def _absorb(self, query: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """query [n, H, R + P] -> [n, H, C + R] float32, whose product with a latent is the score."""
        spec, n = self.spec, query.shape[0]
        if n > _KERNEL_ROWS:
            rotated, nope = query.split((spec.rope_size, spec.nope_size), dim=2)
            absorbed = torch.bmm(nope.transpose(0, 1), up[:, : spec.nope_size])  # [H, n, C]
            return torch.cat((absorbed.transpose(0, 1), rotated), dim=2).float()
        out, query = torch.empty(n, spec.num_heads, spec.width), query.contiguous()
        run(cpu_mla_kernels.absorb.address, self._threads, _ENCODINGS[query.dtype], query.data_ptr(), n, spec.num_heads,
            spec.rope_size, spec.nope_size, up.data_ptr(), spec.value_size, spec.latent_size, out.data_ptr())
        return out

    def _project(self, attended: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
        """Sums of latents [n, H, C] float32 -> out [n, H, V]."""
        spec, n = self.spec, attended.shape[0]
        if n > _KERNEL_ROWS:
            values = up[:, spec.nope_size :].transpose(1, 2)  # [H, C, V]
            out.copy_(torch.bmm(attended.transpose(0, 1).to(up.dtype), values).transpose(0, 1))
            return
        run(cpu_mla_kernels.project.address, self._threads, _ENCODINGS[up.dtype], attended.data_ptr(), n,
            spec.num_heads, spec.latent_size, up.data_ptr(), spec.nope_size, spec.value_size, out.data_ptr())

    def _write_and_decode(
        self, layer: LayerAttention, query: torch.Tensor, latent: torch.Tensor, out: torch.Tensor
    ) -> None:
        """latent [T, C + R], query [D, H, C + R] and out [D, H, C], both float32."""
        spec, cache, rows = self.spec, self.caches[layer.layer], query.shape[0]
        encoding = _ENCODINGS[latent.dtype]
        assert (encoding == BFLOAT16) == (spec.dtype == torch.bfloat16), "latents and cache disagree about bfloat16"
        run(cpu_mla_kernels.step.address, self._threads,
            encoding, latent.data_ptr(), self._slots.data_ptr(), latent.shape[0], cache.data_ptr(), cache.shape[0],
            spec.block_size, spec.width, rows, self._table.data_ptr(), self._table.shape[1], self._lengths.data_ptr(),
            float_bits(layer.scale), self._parts.data_ptr(), self._part_rows.data_ptr(), self._group, self._tile,
            spec.num_heads, spec.latent_size, query.data_ptr(), out.data_ptr(), _ENCODINGS[spec.dtype])

    def _prefill(
        self, layer: LayerAttention, row: int, length: int, query: torch.Tensor, up: torch.Tensor, out: torch.Tensor
    ) -> None:
        """query [n, H, R + P], the last n of `length` positions; out [n, H, V]."""
        spec, n = self.spec, query.shape[0]
        blocks = self._table[row, : -(-length // spec.block_size)]
        latents = torch.index_select(self.caches[layer.layer], 0, blocks).view(-1, spec.width)[:length].to(query.dtype)
        expanding = (length - n) * (spec.nope_size + spec.value_size) * spec.latent_size
        reading = n * (length - n / 2) * (2 * spec.latent_size - spec.nope_size - spec.value_size)
        if expanding <= reading:
            self._prefill_expanded(layer, latents, query, up, out)
        else:
            self._prefill_absorbed(layer, latents, query, up, out)

    def _prefill_expanded(
        self, layer: LayerAttention, latents: torch.Tensor, query: torch.Tensor, up: torch.Tensor, out: torch.Tensor
    ) -> None:
        spec, n, length = self.spec, query.shape[0], latents.shape[0]
        compressed, rotated = latents.split((spec.latent_size, spec.rope_size), dim=1)
        step = max(1, _SCORES // (length * max(min(n, _QUERY_SLICE), spec.nope_size + spec.value_size)))
        for first in range(0, spec.num_heads, step):
            part = up[first : first + step]  # [h, P + V, C]
            heads = part.shape[0]
            expanded = torch.mm(compressed, part.flatten(0, 1).t()).view(length, heads, -1)
            nope, values = expanded.split((spec.nope_size, spec.value_size), dim=2)
            keys = torch.cat((rotated.unsqueeze(1).expand(-1, heads, -1), nope), dim=2)  # [length, h, R + P]
            queries = query[:, first : first + step].transpose(0, 1)  # [h, n, R + P]
            self._attend(layer, queries, keys.permute(1, 2, 0), values.transpose(0, 1), 1,
                         out[:, first : first + step].transpose(0, 1))

    def _prefill_absorbed(
        self, layer: LayerAttention, latents: torch.Tensor, query: torch.Tensor, up: torch.Tensor, out: torch.Tensor
    ) -> None:
        spec, n = self.spec, query.shape[0]
        queries = self._absorb(query, up).to(latents.dtype)  # [n, H, C + R]
        attended = torch.empty(n, spec.num_heads, spec.latent_size)
        rows = attended.view(1, n * spec.num_heads, spec.latent_size)
        self._attend(layer, queries.view(1, n * spec.num_heads, spec.width), latents.t().unsqueeze(0),
                     latents[:, : spec.latent_size].unsqueeze(0), spec.num_heads, rows)
        self._project(attended, up, out)

    def _attend(
        self, layer: LayerAttention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, groups: int,
        out: torch.Tensor,
    ) -> None:
        """query [h, n * groups, E] (the last n positions), keys [h, E, length], values [h, length, V]; out as query.

        The softmax is float32, and so are the scores of short contexts; those of long ones are in the compute dtype.
        """
        heads, length = keys.shape[0], keys.shape[2]
        n = query.shape[1] // groups
        step = max(1, min(_QUERY_SLICE, _SCORES // (heads * groups * length)))
        for begin in range(0, n, step):
            end = min(begin + step, n)
            high = length - n + end
            rows = slice(begin * groups, end * groups)
            part, seen = query[:, rows], keys[:, :, :high]
            if high <= _EXACT_KEYS:
                part, seen = part.float(), seen.float()
            scores = torch.bmm(part, seen)  # [h, queries * groups, keys]
            scratch = torch.empty(self._threads, high)
            run(cpu_prefill.soften_chunk.address, self._threads, _ENCODINGS[scores.dtype], scores.data_ptr(),
                heads * scores.shape[1], high, scratch.data_ptr(), self._threads, groups, end - begin,
                length - n + begin, 0, float_bits(layer.scale), float_bits(0.0), 0, 0)
            out[:, rows] = torch.bmm(scores.to(values.dtype), values[:, :high])
