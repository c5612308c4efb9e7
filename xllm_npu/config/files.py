"""The file that settings are read from, and the one they are written to."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from xllm_npu.config.section import Section
from xllm_npu.config.values import FilePath, Metavar


class FileSettings(Section):
    """Configuration files"""

    config_json_file: FilePath = Field(
        default=None, description="JSON object of settings; flags and environment win over it"
    )
    enable_dump_config_json: bool = Field(
        default=False, description="write the settings that are not at their default at start"
    )
    dump_config_json_file: Annotated[str, Metavar("FILE")] = Field(
        default="xllm_config.json", min_length=1, description="where enable-dump-config-json writes"
    )
