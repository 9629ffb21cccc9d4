"""Tools of an agent: plain functions whose signature and docstring become a JSON schema.

Arguments that a model sends are checked against the signature before the function runs.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, cast

from harness_sdk._arguments import coerce, json_schema
from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.types import ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument of a tool."""

    name: str
    annotation: Any
    required: bool
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model may call.

    Example:
        `async def search(query: str, k: int = 5) -> str: ...` becomes a tool with a required
        string `query` and an optional integer `k`.
    """

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]

    @classmethod
    def from_function(cls, function: Callable[..., Any], *, name: str = "") -> Tool:
        """The tool that `function`, async or not, is.

        Description and arguments' descriptions come from its docstring (`Args:` in Google form).

        Raises:
            ConfigError: It is no function, or an argument has no type hint, one that JSON cannot
                express, or is positional-only, `*args` or `**kwargs`.
        """
        given: object = function
        if not callable(given):
            raise ConfigError(
                "a tool is neither a function nor a Tool",
                value=f"{type(given).__name__} {given!r:.100}",
                remedy="give the function itself, not its name",
            )
        tool_name = name or getattr(function, "__name__", "")
        if not tool_name.isidentifier():
            raise ConfigError(
                "a tool needs a name that is an identifier",
                value=tool_name or function,
                remedy="give Tool.from_function a name",
            )
        description, about = _read_docstring(inspect.getdoc(function) or "")
        hints = _type_hints(function, tool_name)
        parameters = tuple(
            _parameter(tool_name, parameter, hints, about)
            for parameter in inspect.signature(function).parameters.values()
        )
        return cls(
            name=tool_name, description=description, parameters=parameters, function=function
        )

    @property
    def schema(self) -> ToolSchema:
        """Its function schema."""
        properties: dict[str, Any] = {}
        for parameter in self.parameters:
            properties[parameter.name] = json_schema(parameter.annotation)
            if parameter.description:
                properties[parameter.name]["description"] = parameter.description
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": [p.name for p in self.parameters if p.required],
                },
            },
        }

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`arguments` as the function takes them, each coerced to its type.

        Raises:
            InvalidRequest: An argument is missing, unknown, or not of its type.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in arguments:
            if name not in known:
                raise InvalidRequest(
                    f"{self.name} has no argument `{name:.100}`", limit=", ".join(known) or "none"
                )
        for parameter in self.parameters:
            if parameter.required and parameter.name not in arguments:
                raise InvalidRequest(
                    f"{self.name} needs the argument `{parameter.name}`",
                    value=", ".join(arguments) or "no arguments",
                    limit=", ".join(known),
                )
        return {
            name: coerce(value, known[name].annotation, f"argument `{name}` of {self.name}")
            for name, value in arguments.items()
        }

    async def run(self, bound: Mapping[str, Any]) -> str:
        """Run the function on what `bind` returned, in a thread where it is not async."""
        if inspect.iscoroutinefunction(self.function):
            return as_text(await self.function(**bound))
        result = await asyncio.to_thread(self.function, **bound)
        return as_text(await result if inspect.isawaitable(result) else result)


def tool_schema(tool: Tool | Callable[..., Any]) -> ToolSchema:
    """The function schema of a tool or of the function that would be one."""
    return (tool if isinstance(tool, Tool) else Tool.from_function(tool)).schema


def tools_by_name(tools: Iterable[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """`tools` by name.

    Raises:
        ConfigError: Two of them share a name.
    """
    found: dict[str, Tool] = {}
    for given in tools:
        tool = given if isinstance(given, Tool) else Tool.from_function(given)
        if tool.name in found:
            raise ConfigError(
                "two tools share a name", value=tool.name, remedy="give Tool.from_function a name"
            )
        found[tool.name] = tool
    return found


def as_text(result: object) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    if result is None:
        return "ok"
    return json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(cast("set[str]", value))
    return str(value)


def _type_hints(function: Callable[..., Any], tool_name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"the type hints of tool {tool_name} cannot be resolved",
            value=error,
            remedy="use names of the module's top level",
        ) from error


def _parameter(
    tool_name: str,
    parameter: inspect.Parameter,
    hints: Mapping[str, Any],
    about: Mapping[str, str],
) -> Parameter:
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ConfigError(
            f"tool {tool_name} takes `{name}` in a way that JSON cannot send",
            value=parameter.kind.description,
            limit="keyword arguments",
        )
    if name not in hints:
        raise ConfigError(
            f"argument `{name}` of tool {tool_name} has no type hint",
            remedy="annotate it, so that the model is told its type",
        )
    json_schema(hints[name], f"argument `{name}` of tool {tool_name}")
    return Parameter(
        name=name,
        annotation=hints[name],
        required=parameter.default is parameter.empty,
        description=about.get(name, ""),
    )


_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples|Note):\s*$")
_ARGUMENT = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and each argument's description."""
    section, name, indent = "", "", 0
    description: list[str] = []
    about: dict[str, str] = {}
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section, name = found[1], ""
        elif not section:
            description.append(line)
        elif section.startswith("Arg") and line.strip():
            depth = len(line) - len(line.lstrip())
            found = _ARGUMENT.match(line)
            if found and (not name or depth <= indent):
                name, indent, about[found[1]] = found[1], depth, found[2].strip()
            elif name:
                about[name] = f"{about[name]} {line.strip()}".strip()
    return "\n".join(description).strip(), about
