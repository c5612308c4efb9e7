"""Which versions belong together: Ascend driver, CANN, torch, torch_npu, triton-ascend.

Sources: the CANN 8.5.0, 9.1.0, 9.1.1 and 9.2.0 release notes (driver series), torch_npu's table of matching versions
(2.10 to 2.12), triton-ascend's installation guide and vLLM-Ascend's release table (CANN of 3.2.x). torch_npu 2.13.0 is
not in a published table. Its release branch has the number of the driver that CANN 9.2.0 came with, and the newest
CANN that its code asks for is 9.1.0, which is taken as the oldest that has everything. Newer drivers run older CANN,
and newer CANN runs older torch_npu: neither is reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Series = tuple[int, int]  # (9, 1) for 9.1.0, 9.1.RC1, 9.1.0-beta.3


@dataclass(frozen=True, slots=True)
class Adapter:
    """A torch_npu release and the CANN it was made for. `published`: whether its maker's table has it."""

    torch_npu: str
    torch: str
    cann: Series
    published: bool = True


ADAPTERS = (
    Adapter("2.10.0", "2.10.0", (9, 0)),
    Adapter("2.10.0.post4", "2.10.0", (9, 1)),
    Adapter("2.11.0", "2.11.0", (9, 1)),
    Adapter("2.12.0", "2.12.0", (9, 1)),
    Adapter("2.13.0", "2.13.0", (9, 1), published=False),
)
# The oldest driver series that a CANN series supports.
OLDEST_DRIVER: dict[Series, Series] = {(8, 5): (25, 0), (9, 0): (25, 0), (9, 1): (25, 2), (9, 2): (25, 3)}
OLDEST_CANN: Series = (8, 5)  # two series before the first that torch_npu 2.10 is built with
TRITON_CANN: dict[str, Series] = {"3.2.0": (8, 5), "3.2.1": (9, 0), "3.2.2": (9, 1)}
# Before these a device runs out of streams after about 1,800, which captured graphs use up.
MANY_STREAMS_DRIVER, MANY_STREAMS_CANN = (25, 5, 1), (8, 5)


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (25, 3) for 25.3.rc1, (9, 1, 0) for 9.1.0-beta.3."""
    found = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def series(text: str) -> Series | None:
    """The first two numbers; None if the text is no version."""
    parts = numbers(text)
    return (parts[0], parts[1]) if len(parts) > 1 else None


def shown(version: Series) -> str:
    return ".".join(map(str, version))


def adapter_of(torch_npu: str) -> Adapter | None:
    """The row for a release: its own, or that of the nearest earlier post-release of the same version."""
    base, post = _release(torch_npu)
    rows = [(row, *_release(row.torch_npu)) for row in ADAPTERS]
    near = [(row_post, row) for row, row_base, row_post in rows if row_base == base and row_post <= post]
    return max(near, key=lambda pair: pair[0])[1] if near else None


def base_version(text: str) -> str:
    """2.13.0 for 2.13.0+cpu, 2.13.0.post1 and 2.13.0rc1."""
    return ".".join(map(str, numbers(text)))


def _release(text: str) -> tuple[tuple[int, ...], int]:
    post = re.search(r"\.post(\d+)", text)
    return numbers(text)[:3], int(post[1]) if post else 0
