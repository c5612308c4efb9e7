"""What a request says about tools: which the model may call, and whether it must.

`read_tools` takes OpenAI's chat form; the other APIs are brought into it first. Checks shapes and bounds; whether a
parameter schema can be enforced is the grammar compiler's matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from xllm_npu.service.body import depth_exceeds
from xllm_npu.service.errors import quote
from xllm_npu.state.sampling_params import InvalidParameter
from xllm_npu.text.tool_spec import ToolSpec

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARS = 32 * 1024
MAX_PARAMETERS_BYTES = 64 * 1024  # of one tool's schema, as JSON
MAX_PARAMETERS_DEPTH = 32
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(slots=True, frozen=True)
class Tools:
    """`shown` go into the prompt, as the client gave them; `callable` are those that the model may call."""

    shown: tuple[dict[str, Any], ...] = ()
    callable: tuple[ToolSpec, ...] = ()
    mode: Mode = "none"
    parallel: bool = True  # more than one call a reply

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def strict(self) -> bool:
        """Whether calls must follow the schema of one at least."""
        return any(tool.strict for tool in self.callable)


NO_TOOLS = Tools()


def read_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools:
    """Raises InvalidParameter for what is not OpenAI's form. With choice "none" there are no tools."""
    specs = _specs(tools or ())
    mode, names = _choice(choice, bool(specs))
    if mode == "none" or not specs:
        return NO_TOOLS
    known = {spec.name for spec in specs}
    for name in names:
        if name not in known:
            raise InvalidParameter("tool_choice", f"tool_choice names {quote(name)}, which is not among tools.")
    shown = tuple(_shown(tool) for tool in tools or ())
    if names:
        specs = [spec for spec in specs if spec.name in names]
        if mode != "named":  # a named tool is enforced: the prompt can stay the same for all choices
            shown = tuple(tool for tool in shown if tool["function"]["name"] in names)
    return Tools(shown, tuple(specs), mode, parallel is not False and mode != "named")


def _specs(tools: Sequence[Any]) -> list[ToolSpec]:
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", f"tools takes at most {MAX_TOOLS} tools, got {len(tools)}.")
    specs = [_spec(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    names = [spec.name for spec in specs]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidParameter(f"tools[{i}].function.name", f"tools[{i}].function.name: there are two tools of "
                                   f"the name {quote(name)}.")
    return specs


def _spec(where: str, tool: Any) -> ToolSpec:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise InvalidParameter(f"{where}.type", f"{where}.type must be 'function', got {quote(kind)}.")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidParameter(f"{where}.function", f"{where}.function must be an object, got {quote(function)}.")
    where += ".function"
    name = function.get("name")
    if not isinstance(name, str) or not NAME.match(name):
        raise InvalidParameter(f"{where}.name", f"{where}.name must be 1 to 128 letters, digits, '_', '-' or '.', "
                               f"got {quote(name)}.")
    description = function.get("description") or ""
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARS:
        raise InvalidParameter(f"{where}.description", f"{where}.description must be a string of at most "
                               f"{MAX_DESCRIPTION_CHARS} characters.")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{where}.strict", f"{where}.strict must be a boolean, got {quote(strict)}.")
    return ToolSpec(name=name, parameters=_parameters(f"{where}.parameters", function.get("parameters")),
                    description=description, strict=bool(strict))


def _parameters(where: str, parameters: Any) -> dict[str, Any]:
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidParameter(where, f"{where} must be a JSON schema of an object, got {quote(parameters)}.")
    if parameters.get("type", "object") != "object":
        raise InvalidParameter(where, f"{where}: its type must be 'object', got {quote(parameters['type'])}.")
    if len(msgspec.json.encode(parameters)) > MAX_PARAMETERS_BYTES:
        raise InvalidParameter(where, f"{where} is larger than {MAX_PARAMETERS_BYTES} bytes.")
    if depth_exceeds(parameters, MAX_PARAMETERS_DEPTH):
        raise InvalidParameter(where, f"{where} is nested deeper than {MAX_PARAMETERS_DEPTH} levels.")
    return parameters


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as templates expect it: every one of them reads these four keys."""
    function = {key: value for key, value in tool["function"].items() if value is not None}
    return {"type": "function", "function": {"description": "", "parameters": {"type": "object", "properties": {}},
                                             **function}}


def _choice(choice: Any, has_tools: bool) -> tuple[Mode, list[str]]:
    """The mode and, if not all tools may be called, the names of those that may."""
    mode: Mode
    names: list[str] = []
    if choice is None:
        mode = "auto"
    elif choice in ("none", "auto", "required"):
        mode = choice
    elif isinstance(choice, dict) and choice.get("type") == "function":
        mode, names = "named", [_name_in("tool_choice.function", choice.get("function"))]
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        mode, names = _allowed(choice.get("allowed_tools"))
    else:
        raise InvalidParameter("tool_choice", "tool_choice must be 'none', 'auto', 'required' or an object such as "
                               '{"type": "function", "function": {"name": "..."}}, got ' + f"{quote(choice)}.")
    if not has_tools and mode in ("required", "named"):
        raise InvalidParameter("tool_choice", "tool_choice asks for a call, but there are no tools.")
    return mode, names


def _allowed(allowed: Any) -> tuple[Mode, list[str]]:
    where = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode", "auto") not in ("auto", "required"):
        raise InvalidParameter(where, f"{where} must be an object with a mode, 'auto' or 'required'.")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise InvalidParameter(f"{where}.tools", f"{where}.tools must be a list of 1 to {MAX_TOOLS} tools.")
    names = [_name_in(f"{where}.tools[{i}].function", tool.get("function") if isinstance(tool, dict) else None)
             for i, tool in enumerate(tools)]
    return allowed.get("mode", "auto"), names


def _name_in(where: str, function: Any) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidParameter(f"{where}.name", f"{where}.name must be the name of a tool, got {quote(name)}.")
    return name
