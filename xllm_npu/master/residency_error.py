"""Why a model does not pause, sleep, wake up or get other weights; what is said of arguments before anything is tried.
"""

from __future__ import annotations

from collections.abc import Collection

from xllm_npu.config.model import ModelSettings
from xllm_npu.state.messages import TAGS, PauseMode

MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
LEVELS = (1, 2)


class ResidencyError(RuntimeError):
    """A transition did not come about; the model is what it was, unless `code` is "gone".

    `code`: "invalid" an argument; "unsupported" by these settings; "asleep" where it would have to be awake;
    "not_ready" the model is not loaded; "memory" there is not enough of it now; "failed" a worker could not keep its
    weights, get them back or load others; "checkpoint" it is not one that can take the place of what is served;
    "shared" the weights are those of several models; "gone" the engines have ended.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


WEIGHTS_KEPT = ("The weights are kept for the wake-up: wake the model up, or have it sleep at level 2, before they are "
                "replaced.")


def check_mode(mode: str) -> PauseMode:
    for known in MODES:
        if mode == known:
            return known
    raise ResidencyError("invalid", f"mode must be one of {', '.join(MODES)}, got {mode!r}.")


def check_level(level: int) -> None:
    if level not in LEVELS:
        raise ResidencyError("invalid", f"level must be 1 or 2, got {level}.")


def check_tags(tags: Collection[str]) -> None:
    unknown = sorted(set(tags) - set(TAGS))
    if unknown:
        raise ResidencyError("invalid", f"tags are out of {', '.join(TAGS)}; got {', '.join(unknown)}.")


def check_can_update(model: ModelSettings) -> None:
    """Whether the weights of such a model can be replaced by those of another checkpoint."""
    if model.load_format == "dummy":
        raise ResidencyError("unsupported", "This model has dummy weights (--load-format dummy), which no checkpoint "
                             "replaces.")
    if model.model.endswith(".gguf"):
        raise ResidencyError("unsupported", "The weights of a model from a .gguf file cannot be replaced: serve the "
                             "safetensors checkpoint.")


def check_can_sleep(weights_are_virtual: bool) -> None:
    if not weights_are_virtual:
        raise ResidencyError("unsupported", "This model cannot sleep: its weights are not in virtual memory. Start it "
                             "with --enable-vmm-weights.")
