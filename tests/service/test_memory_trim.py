"""When freed memory is given back, and that it is."""

from __future__ import annotations

from xllm_npu.service.memory_trim import STEP_BYTES, MemoryTrim, malloc_trim, resident_bytes


async def test_after_it_has_grown_by_a_step_and_again_from_there():
    sizes = iter([100, 100 + STEP_BYTES - 1, 50, 50 + STEP_BYTES, 70, 69 + STEP_BYTES, 70 + STEP_BYTES, 70])
    trims: list[int] = []
    watch = MemoryTrim(lambda: trims.append(1), lambda: next(sizes))
    counts = []
    for _ in range(6):
        await watch.look()
        counts.append(len(trims))
    assert counts == [0, 0, 0, 1, 1, 2]
    assert next(sizes, None) is None


async def test_what_was_freed_goes_back():
    trim = malloc_trim()
    assert trim is not None
    watch = MemoryTrim(trim)
    await watch.look()
    before = resident_bytes()
    kept = [bytes(1000) for _ in range(200_000)]  # too small to be mapped by themselves
    last = bytes(1000)  # and the heap does not end with them
    assert resident_bytes() > before + STEP_BYTES
    del kept
    await watch.look()
    assert resident_bytes() < before + STEP_BYTES
    assert len(last) == 1000
