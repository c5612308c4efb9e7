"""How each module of the kernel registry is called, beside its reference and the bytes that it cannot avoid moving.

One list for every place that compares numbers: the interpreter, a GPU. `wide` chooses sizes that fill a device; else
they are small and odd, for an interpreter. Knows no device but the one it is given.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from xllm_kernels_npu import registry

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(slots=True)
class Call:
    """`run` and `reference` give tensors that agree within TOLERANCE; `reference` may be slow and on the CPU."""

    name: str
    run: Callable[[], torch.Tensor]
    reference: Callable[[], torch.Tensor]
    bytes_moved: int  # read and written once each


@dataclass(slots=True, frozen=True)
class Where:
    device: torch.device
    dtype: torch.dtype
    wide: bool = False

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)


def _kernel(module: str) -> ModuleType:
    return importlib.import_module(f"xllm_kernels_npu.{module}")


def _rms_norm(where: Where) -> Iterator[Call]:
    module = _kernel("rms_norm")
    for rows, width in [(16384, 4096)] if where.wide else [(1, 7), (5, 128), (3, 576)]:
        x, weight = where.randn(rows, width), where.randn(width)
        yield Call(f"{rows} x {width}", lambda x=x, w=weight: module.rms_norm(x, w, 1e-5),
                   lambda x=x, w=weight: module.rms_norm_reference(x, w, 1e-5), 2 * x.nbytes)


def _add_rms_norm(where: Where) -> Iterator[Call]:
    module = _kernel("add_rms_norm")
    for rows, width in [(16384, 4096)] if where.wide else [(1, 7), (5, 128), (3, 576)]:
        x, residual, weight = where.randn(rows, width), where.randn(rows, width), where.randn(width)
        yield Call(f"{rows} x {width}", lambda x=x, r=residual, w=weight: _stacked(module.add_rms_norm(x, r, w, 1e-5)),
                   lambda x=x, r=residual, w=weight: _stacked(module.add_rms_norm_reference(x, r, w, 1e-5)),
                   4 * x.nbytes)


def _stacked(two: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """In the second's dtype."""
    return torch.stack((two[0].to(two[1].dtype), two[1]))


def _rotary(where: Where) -> Iterator[Call]:
    module = _kernel("rotary")
    # tokens, query heads, key heads, head size, rotated, interleaved, normed
    odd = [(1, 3, 1, 16, 16, False, False), (5, 2, 2, 24, 12, False, True), (3, 4, 1, 16, 16, True, False)]
    for tokens, heads, kv_heads, size, turned, pairs, normed in (
        [(16384, 32, 8, 128, 128, False, False)] if where.wide else odd
    ):
        qkv, norms = where.randn(tokens, (heads + 2 * kv_heads) * size), [None, None]
        if normed:
            norms = [where.randn(size) for _ in "qk"]
        table = torch.randn(50, turned, device=where.device)
        positions = torch.randint(50, (tokens,), device=where.device)
        before = qkv.clone()
        more = (positions, table, heads, kv_heads, *norms, 1e-6, pairs)
        yield Call(f"{tokens} tokens, {heads}+{kv_heads} heads, {turned} of {size}{', normed' * normed}",
                   lambda q=qkv, m=more: module.rotary(q if where.wide else q.clone(), *m),
                   lambda q=before, m=more: module.rotary_reference(q, *m),
                   2 * qkv.nbytes * (heads + kv_heads) // (heads + 2 * kv_heads))


def _swiglu(where: Where) -> Iterator[Call]:
    module = _kernel("swiglu")
    for rows, width in [(16384, 14336)] if where.wide else [(1, 7), (5, 128), (3, 700)]:
        x = where.randn(rows, 2 * width)
        yield Call(f"{rows} x {width}", lambda x=x: module.swiglu(x), lambda x=x: module.swiglu_reference(x),
                   x.nbytes * 3 // 2)


def _swiglu_quant(where: Where) -> Iterator[Call]:
    """Integers may differ by a step where rounding is close."""
    module = _kernel("swiglu_quant")
    for rows, width in [(16384, 14336)] if where.wide else [(1, 7), (5, 128)]:
        x = where.randn(rows, 2 * width)
        yield Call(f"{rows} x {width}", lambda x=x: _in_steps(*module.swiglu_quant(x)),
                   lambda x=x: _in_steps(*module.swiglu_quant_reference(x)), x.nbytes + x.numel() // 2)


def _in_steps(whole: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The integers as parts of the largest, and the scales beside them, in a dtype whose tolerance is over a step."""
    return torch.cat((whole.float() / 127, scales.float().unsqueeze(-1)), dim=-1).to(torch.bfloat16)


class Pages:
    """A paged cache filled at random, and rows of given lengths in shuffled blocks of it."""

    def __init__(self, where: Where, lengths: list[int], block_size: int, *token: int) -> None:
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=where.device)
        counts = [-(-length // block_size) for length in lengths]
        order = (torch.randperm(sum(counts)) + 1).tolist()
        table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.table = table.to(where.device)
        self.caches = [where.randn(sum(counts) + 1, block_size, *token) for _ in "kv"]

    @property
    def bytes_read(self) -> int:
        token = self.caches[0][0, 0].nbytes
        return int(self.lengths.sum()) * token


def _kv_store(where: Where) -> Iterator[Call]:
    module = _kernel("kv_store")
    for tokens, heads, head_dim in [(16384, 8, 128)] if where.wide else [(1, 2, 16), (7, 3, 24)]:
        packed = where.randn(tokens, 3 * heads, head_dim)
        key, value = packed[:, heads : 2 * heads], packed[:, 2 * heads :]
        slots = torch.randperm(tokens + 40, device=where.device)[:tokens]
        caches = [torch.zeros(-(-(tokens + 40) // 16), 16, heads, head_dim, dtype=where.dtype, device=where.device)
                  for _ in "kv"]

        def run(key=key, value=value, caches=caches, slots=slots) -> torch.Tensor:
            module.kv_store(key, value, *caches, slots)
            return torch.stack(caches) if not where.wide else caches[0]

        def reference(key=key, value=value, caches=caches, slots=slots) -> torch.Tensor:
            copies = [torch.zeros_like(cache) for cache in caches]
            for new, cache in zip((key, value), copies):
                module.kv_store_reference(new, cache, slots)
            return torch.stack(copies) if not where.wide else copies[0]

        yield Call(f"{tokens} tokens of {heads} x {head_dim}", run, reference, 4 * key.numel() * key.itemsize)


# query heads, key heads, head size, window, soft cap, sinks
_ODD = [(4, 2, 16, 0, 0.0, False), (6, 2, 24, 20, 0.0, False), (3, 3, 32, 0, 5.0, True)]
_SERVED = (32, 8, 128, 0, 0.0, False)


def _heads(where: Where) -> list[tuple[int, int, int, int, float, bool]]:
    """Odd ones, and on a device one that is served too: in an interpreter that takes minutes."""
    if where.wide:
        return [_SERVED]
    return _ODD if where.device.type == "cpu" else [*_ODD, _SERVED]


def _paged_decode(where: Where) -> Iterator[Call]:
    module = _kernel("paged_decode")
    for heads, kv_heads, head_dim, window, softcap, sunk in _heads(where):
        served = head_dim == _SERVED[2]
        lengths = [4096] * 64 if where.wide else [1, 130, 300] if served else [1, 16, 50, 17]
        pages = Pages(where, lengths, 128 if served else 16, kv_heads, head_dim)
        query = where.randn(len(lengths), heads, head_dim)
        sinks = torch.randn(heads, device=where.device) if sunk else None
        arguments = (query, *pages.caches, pages.table, pages.lengths)
        options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
        for splits in (0,) if where.wide else (1, 4):
            yield Call(
                f"{len(lengths)} rows, {heads}/{kv_heads} heads of {head_dim}, {splits or 'chosen'} splits",
                lambda a=arguments, o=options, s=splits: module.paged_decode(*a, **o, splits=s),
                lambda a=arguments, o=options, q=starts: _reference_attention(a, q, o), 2 * pages.bytes_read)


def _paged_prefill(where: Where) -> Iterator[Call]:
    module = _kernel("paged_prefill")
    for heads, kv_heads, head_dim, window, softcap, sunk in _heads(where):
        served = head_dim == _SERVED[2]
        counts, lengths = ([5, 129, 70], [5, 300, 200]) if served else ([5, 33, 2], [5, 50, 18])
        if where.wide:
            counts, lengths = [2048] * 4, [4096] * 4
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        pages = Pages(where, lengths, 128 if served else 16, kv_heads, head_dim)
        query = where.randn(sum(counts), heads, head_dim)
        sinks = torch.randn(heads, device=where.device) if sunk else None
        options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
        arguments = (query, *pages.caches, pages.table, starts.to(where.device), pages.lengths)
        yield Call(
            f"{sum(counts)} tokens, {heads}/{kv_heads} heads of {head_dim}",
            lambda a=arguments, o=options: module.paged_prefill(*a, **o),
            lambda a=arguments, o=options: _reference_attention((*a[:4], a[5]), a[4].cpu(), o),
            2 * query.nbytes + 2 * pages.bytes_read)


def _reference_attention(arguments: tuple, starts: torch.Tensor, options: dict) -> torch.Tensor:
    """On the CPU, in float32."""
    query, keys, values, table, lengths = (t.cpu() for t in arguments)
    moved = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    found = _kernel("paged_decode").paged_attention_reference(query, keys, values, table, lengths, starts, **moved)
    return found.to(arguments[0].dtype)


def _mla_decode(where: Where) -> Iterator[Call]:
    module = _kernel("mla_decode")
    lengths = [4096] * 64 if where.wide else [1, 16, 50]
    heads, latent, rotated = (128, 512, 64) if where.wide else (5, 24, 8)
    pages = Pages(where, lengths, 128 if where.wide else 16, latent + rotated)
    arguments = (where.randn(len(lengths), heads, latent), where.randn(len(lengths), heads, rotated), pages.caches[0],
                 pages.table, pages.lengths)
    scale = (latent + rotated) ** -0.5
    for splits in (0,) if where.wide else (1, 4):
        yield Call(f"{len(lengths)} rows, {heads} heads of {latent} + {rotated}, {splits or 'chosen'} splits",
                   lambda s=splits: module.mla_decode(*arguments, scale, splits=s),
                   lambda: module.mla_decode_reference(*(a.cpu() for a in arguments), scale).to(where.dtype),
                   pages.bytes_read)


def _decode_input(where: Where) -> Iterator[Call]:
    module = _kernel("decode_input")
    rows, block_size = (256, 128) if where.wide else (5, 16)
    max_rows, padded = 2 * rows, rows + 3

    def below(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.int32, device=where.device)

    tokens, start, table = below(3, rows, low=-1), below(4 * block_size, rows), below(1 << 14, rows, 4)
    order, last = torch.randperm(max_rows, device=where.device)[:rows].int(), below(1 << 18, max_rows).long()
    arguments = (tokens, order, start, table, last, block_size, padded, None if where.wide else below(2, max_rows))
    yield Call(f"{rows} of {padded} rows", lambda: _together(module.decode_input(*arguments)),
               lambda: _together(module.decode_input_reference(*arguments)), 40 * padded)


def _together(numbers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Integers below 2^24, which float32 has all."""
    return torch.stack([one.float() for one in numbers])


def _token_bitmask(where: Where) -> Iterator[Call]:
    module = _kernel("token_bitmask")
    for rows, vocab in [(64, 128256)] if where.wide else [(3, 7), (2, 2500)]:
        logits = where.randn(rows, vocab)
        bitmask = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocab // 32)), device=where.device).int()
        order = torch.randperm(rows, device=where.device).int()

        def run(logits=logits, bitmask=bitmask, order=order) -> torch.Tensor:
            masked = logits if where.wide else logits.clone()
            module.token_bitmask(masked, bitmask, order)
            return masked if where.wide else masked.clamp(min=-100)

        yield Call(f"{rows} x {vocab}", run,
                   lambda x=logits, b=bitmask, o=order: module.token_bitmask_reference(x, b, o).clamp(min=-100),
                   2 * logits.nbytes + bitmask.nbytes)


def _penalties(where: Where) -> Iterator[Call]:
    module = _kernel("penalties")
    for rows, vocab in [(64, 128256)] if where.wide else [(3, 7), (2, 2500)]:
        logits = torch.randn(rows, vocab, device=where.device)
        counts = torch.randint(0, 3, (rows + 2, vocab), dtype=torch.int32, device=where.device)
        prompt = torch.rand(rows + 2, vocab, device=where.device) < 0.3
        orders = [torch.randperm(size, device=where.device)[:rows].int() for size in (rows, rows + 2)]
        sizes = [torch.rand(rows, device=where.device) + 0.5 for _ in range(3)]

        def run(logits=logits, arguments=(*orders, counts, prompt, *sizes)) -> torch.Tensor:
            penalised = logits if where.wide else logits.clone()
            module.penalties(penalised, *arguments)
            return penalised

        yield Call(f"{rows} x {vocab}", run,
                   lambda x=logits, a=(*orders, counts, prompt, *sizes): module.penalties_reference(x, *a),
                   13 * rows * vocab)


def _sampling(where: Where) -> Iterator[Call]:
    """All filters at once, each alone, and greedy. Of a row's many passes one is counted as moved."""
    module = _kernel("sampling")
    filters = [(0.8, 50, 0.9, 0.01)] if where.wide else [(0.8, 5, 0.9, 0.01), (1.0, 3, 1.0, 0.0), (1.3, 0, 0.7, 0.0),
                                                        (1.0, 0, 1.0, 0.2), (0.0, 0, 1.0, 0.0)]
    for rows, vocab in [(64, 128256)] if where.wide else [(5, 7), (5, 2500)]:
        logits = 3 * torch.randn(rows, vocab, device=where.device)
        values = [torch.tensor([filters[row % len(filters)][place] for row in range(rows)], device=where.device)
                  for place in range(4)]
        values[1] = values[1].int()
        noise = -torch.empty(rows, vocab, device=where.device).exponential_().log()
        arguments = (logits, *values, noise)
        yield Call(f"{rows} x {vocab}", lambda a=arguments: module.sample(*a)[0].float(),
                   lambda a=arguments: module.sample_reference(*a)[0].float(), 2 * logits.nbytes)


CALLS: dict[str, Callable[[Where], Iterator[Call]]] = {
    "rms_norm": _rms_norm, "add_rms_norm": _add_rms_norm, "rotary": _rotary, "swiglu": _swiglu,
    "swiglu_quant": _swiglu_quant, "kv_store": _kv_store, "paged_decode": _paged_decode,
    "paged_prefill": _paged_prefill, "mla_decode": _mla_decode, "decode_input": _decode_input,
    "token_bitmask": _token_bitmask, "penalties": _penalties, "sampling": _sampling,
}


def calls(module: str, where: Where) -> Iterator[Call]:
    torch.manual_seed(0)
    return CALLS[module](where)


def without_calls() -> list[str]:
    """Modules of the registry that nothing here calls."""
    return [module for module in registry.MODULES if module not in CALLS]


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of what the tolerance allows: 1 and below agree. NaN if either has one."""
    assert found.shape == expected.shape
    tolerance = TOLERANCE[found.dtype]
    difference = (found.cpu().float() - expected.cpu().float()).abs()
    return float((difference / (tolerance * (1 + expected.cpu().float().abs()))).max())
