"""Which ranks did not come, when others have waited too long: told from the collectives that each has entered."""

from __future__ import annotations

from dataclasses import dataclass

STALE_SECONDS = 2.0  # a process that runs speaks several times in it; else it is stopped, or its machine is gone


@dataclass(frozen=True, slots=True)
class RankProgress:
    entered: int  # collectives; see xllm_platform.progress
    left: int
    heard_at: float  # time.monotonic()


def describe_hang(ranks: dict[int, RankProgress | None], waited: float, now: float) -> str:
    """One sentence. `ranks`: what each rank last said of itself; None: it never said anything."""
    known = {rank: p for rank, p in ranks.items() if p is not None}
    furthest = max((p.entered for p in known.values()), default=0)
    waiting = [rank for rank, p in known.items() if p.entered == furthest and p.left < furthest]
    missing = [rank for rank in ranks if rank not in known or known[rank].entered < furthest]
    head = f"A step has not ended after {waited:g} s"
    silent = [rank for rank in ranks if rank not in known or now - known[rank].heard_at > STALE_SECONDS]
    if not missing and silent and waiting:  # stopped after it came: no count tells
        others = [rank for rank in waiting if rank not in silent]
        return (f"{head}: {_name(silent)} {_verb(silent, 'has', 'have')} given no sign of life since coming to "
                f"collective {furthest}" + (f", where {_name(others)} {_verb(others)}." if others else "."))
    if not missing:
        place = f"at collective {furthest}" if waiting else "outside of any collective"
        return f"{head}: {_name(list(ranks))} of this engine {_verb(list(ranks))} {place}."
    silent = [rank for rank in silent if rank in missing]
    note = f" ({_name(silent)} {_verb(silent, 'has', 'have')} given no sign of life)" if silent else ""
    return (f"{head}: {_name(missing)} did not arrive at collective {furthest}, where {_name(waiting or list(known))} "
            f"{_verb(waiting or list(known))}{note}.")


def _name(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, sorted(ranks)))


def _verb(ranks: list[int], one: str = "waits", many: str = "wait") -> str:
    return one if len(ranks) == 1 else many
