"""The five primitives as tool schemas, and the system text that lists a model's tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import PRIMITIVES, ToolSchema, ToolSchemas
from rollout_service.chat.nesting import MAX_DEPTH, is_too_deep

Preamble = Literal["full", "compact"]
"""`full` is Qwen's own wording with whole schemas; `compact` one line for very small models."""


def _schema(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Any:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_STRING = {"type": "string"}
_STEP = {"type": "integer", "minimum": 0}

PRIMITIVE_SCHEMAS: dict[str, ToolSchema] = {
    "fork": _schema(
        "fork",
        "Start parallel branches. Each sees everything so far and works on its own sub-task "
        "with a fresh token budget.",
        {
            "branches": {
                "type": "object",
                "description": "Branch name to sub-task.",
                "additionalProperties": _STRING,
            }
        },
        ["branches"],
    ),
    "rewind": _schema(
        "rewind",
        "Go back to the end of an earlier step and drop what came after it; its tokens return "
        "to your budget.",
        {
            "step": {**_STEP, "description": "Step to return to; 0 is the beginning."},
            "note": {**_STRING, "description": "What to remember about the dropped steps."},
        },
        ["step", "note"],
    ),
    "read_thread": _schema(
        "read_thread",
        "Look at the steps of another branch directly, at no cost to your budget.",
        {
            "branch": {**_STRING, "description": "Name of the branch."},
            "steps": {
                "type": "array",
                "items": _STEP,
                "minItems": 2,
                "maxItems": 2,
                "description": "First and last step to read.",
            },
        },
        ["branch", "steps"],
    ),
    "wait": _schema(
        "wait",
        "Wait until branches that you started have ended, and get their answers.",
        {
            "branches": {
                "type": "array",
                "items": _STRING,
                "description": "Names of the branches; leave it out for all of yours.",
            }
        },
        [],
    ),
    "done": _schema(
        "done",
        "Finish with your answer.",
        {
            "answer": _STRING,
            "evidence": {**_STRING, "description": "What the answer rests on."},
        },
        ["answer"],
    ),
}
"""Schema of each of `harness_sdk.types.PRIMITIVES`."""

_REMEDY = "give a JSON array of function schemas, or nothing"


def static_schemas(primitives: Sequence[str]) -> list[ToolSchema]:
    """Schemas of the primitives that the first prompt lists; `read_thread` follows later."""
    chosen = [name for name in PRIMITIVES if name in primitives and name != "read_thread"]
    return [PRIMITIVE_SCHEMAS[name] for name in chosen]


def parse_tools(tools_json: str) -> list[ToolSchema]:
    """The schemas of a request.

    Raises:
        InvalidRequest: The text is no JSON array of function schemas, or nested too deeply.
    """
    if not tools_json.strip():
        return []
    try:
        tools: Any = json.loads(tools_json)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("tools are no valid JSON", value=error, remedy=_REMEDY) from error
    if not isinstance(tools, list):
        raise InvalidRequest("tools are no JSON array", value=type(tools).__name__, remedy=_REMEDY)
    if is_too_deep(tools):
        raise InvalidRequest(
            "tools are nested too deeply",
            value=tools_json[:80],
            limit=f"{MAX_DEPTH} levels",
            remedy="flatten the tools' parameters",
        )
    for index, tool in enumerate(tools):
        if not _is_schema(tool):
            raise InvalidRequest(
                f"tool {index} is no function schema",
                value=json.dumps(tool)[:200],
                limit='{"type": "function", "function": {"name": ..., "parameters": ...}}',
                remedy=_REMEDY,
            )
    return tools


def _is_schema(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    parameters = function.get("parameters", {})
    return isinstance(parameters, dict) and isinstance(parameters.get("properties", {}), dict)


def tools_section(
    tools: ToolSchemas, preamble: Preamble, call_example: str = ""
) -> tuple[str, str, str]:
    """The part of the system message that lists `tools`, for templates that do not list them.

    Args:
        tools: What to list.
        preamble: In which words.
        call_example: How this model writes a call; Hermes' form without it.

    Returns:
        Our wording before the list, the list (the agent's text), our wording after it; all empty
        without tools.
    """
    if not tools:
        return "", "", ""
    if preamble == "compact":
        return "Tools: ", ", ".join(signature(tool) for tool in tools), ""
    form = f"call it in this form:\n{call_example}" if call_example else _HERMES_FORM
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
        "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        f"\n</tools>\n\nFor each function call, {form}",
    )


_HERMES_FORM = (
    "return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def signature(tool: ToolSchema) -> str:
    """One line: name and argument names.

    Example:
        `done(answer, evidence)`
    """
    function = tool["function"]
    properties = function.get("parameters", {}).get("properties", {})
    return f"{function['name']}({', '.join(properties)})"
