"""Fenced code blocks of a Markdown file. A block whose info string ends in `run` can be executed as it stands; if it
is followed by one that ends in `output`, that is what it prints.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    file: str
    info: tuple[str, ...]  # ("bash", "run")
    text: str

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def runs(self) -> bool:
        return self.info[1:] == ("run",)

    @property
    def is_output(self) -> bool:
        return self.info[1:] == ("output",)


def blocks(name: str) -> list[Block]:
    return [Block(name, tuple(m[1].split()), m[2]) for m in _FENCE.finditer((ROOT / name).read_text("utf-8"))]


def examples(name: str) -> list[tuple[Block, Block | None]]:
    """Every block that runs, with the output that is shown for it."""
    found = blocks(name)
    pairs = zip(found, [*found[1:], None])
    return [(block, after if after and after.is_output else None) for block, after in pairs if block.runs]


def launch_flags(name: str, kind: str, line: int) -> list[str]:
    """What follows the model in one `xllm-npu serve MODEL ...` line of the block whose info string ends in `kind`."""
    (block,) = [b for b in blocks(name) if b.info == ("bash", kind)]
    words = block.text.splitlines()[line].split()
    assert words[:2] == ["xllm-npu", "serve"]
    return words[3:]
