"""How many collectives this process has entered and left: what tells, when ranks wait for ever, which did not come.

Counted on the host. Ranks of one group run the same collectives in the same order, so equal numbers mean the same
place in the program.
"""

from __future__ import annotations


class CollectiveProgress:
    """`entered` runs ahead of `left` by one while a collective is waited for."""

    __slots__ = ("entered", "left")

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *exc: object) -> None:
        self.left += 1


PROGRESS = CollectiveProgress()
