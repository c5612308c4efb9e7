"""What the HTTP process knows of a model's text: its tokenizer, its chat template, and the markup that it writes."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from xllm_npu.config.errors import SettingsError
from xllm_npu.config.settings import Settings
from xllm_npu.state.messages import EngineReady

if TYPE_CHECKING:
    from xllm_npu.text.chat_template import ChatTemplate
    from xllm_npu.text.output_format import OutputFormat
    from xllm_npu.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def check_parsers(settings: Settings) -> None:
    """Raises SettingsError for the name of a parser that there is not."""
    from xllm_npu.text.output_format import ModelHints, output_format

    try:
        output_format(settings.service.tool_call_parser, settings.service.reasoning_parser, ModelHints())
    except ValueError as error:
        raise SettingsError(str(error)) from error


def import_text() -> None:
    """What `load_text` needs and is slow to import."""
    with contextlib.suppress(ImportError):  # reported when it is used
        import xllm_npu.text.tokenizer  # noqa: F401


def load_text(settings: Settings, ready: EngineReady) -> tuple[Tokenizer, ChatTemplate, OutputFormat]:
    """Of the model that an engine has loaded. Raises what is wrong with its files. Takes seconds."""
    from xllm_npu.text.chat_template import ChatTemplate
    from xllm_npu.text.output_format import ModelHints, output_format
    from xllm_npu.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(Path(settings.model.tokenizer or ready.tokenizer_dir))
    tokenizer.encode("The first call builds tables that no request should wait for.")
    template = ChatTemplate.of(tokenizer, settings.model.chat_template)
    hints = ModelHints(ready.architecture, template.text, tokenizer.marker_ids, frozenset(tokenizer.added_tokens))
    chosen = output_format(settings.service.tool_call_parser, settings.service.reasoning_parser, hints)
    log.info("tool calls: %s; reasoning: %s", chosen.name_of_tools or "none", chosen.name_of_reasoning or "none")
    return tokenizer, template, chosen
