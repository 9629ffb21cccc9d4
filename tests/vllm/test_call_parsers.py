"""Calls as vLLM's own parsers read them: an independent reference for whole replies."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from rollout_service.chat.calls import parse_reply
from tests.call_cases import WRITERS

# Of vLLM's, the parser of gpt-oss reads token ids alone, and that of Mistral's lists goes by the
# version of Mistral's own tokenizer.
PARSERS = {
    "hermes": "hermes",
    "qwen_xml": "qwen3_coder",
    "llama_json": "llama3_json",
    "mistral, by name": "mistral",
    "deepseek": "deepseek_v31",
    "deepseek, with types": "deepseek_v3",
    "glm": "glm45",
    "granite": "granite",
    "granite 4": "granite4",
    "kimi_k2": "kimi_k2",
    "pythonic": "llama4_pythonic",
    "dsml": "deepseek_v32",
    "dsml, of V4": "deepseek_v4",
}
TYPES = {
    "q": "string",
    "n": "number",
    "i": "integer",
    "yes": "boolean",
    "l": "array",
    "d": "object",
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in TYPES.items()},
        },
    },
}
CALLS: list[dict[str, Any]] = [
    {"q": "a"},
    {"q": "3", "i": 3, "n": -1.5, "yes": True},
    {"q": 'quotes " and \\ and\nlines', "i": -(10**12)},
    {"q": "漢字 é 🦑", "n": 1e-05, "yes": False},
    {"l": [], "d": {}, "q": ""},
    {"l": [1, "b", {"c": None}], "d": {"e": {"f": [True]}}, "q": "true"},
    {"q": "{ [ } null <b> </b>"},
    {"q": "  spaces  "},
]


class Tokenizer:
    """As much of a tokenizer as vLLM's parsers ask for: a token for each marker or character."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()
    _MARKER = re.compile(r"<[|｜][^<>]*[|｜]>|</?[a-z_]+=?>?|\[[A-Z_]+\]")

    def __init__(self) -> None:
        text = "".join(write("look", {"q": ""}) for _, write in WRITERS.values())
        markers = {*self._MARKER.findall(text), "<think>", "</think>", "<|python_tag|>"}
        self._ids = {marker: index for index, marker in enumerate(sorted(markers))}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        pieces = re.split(f"({'|'.join(map(re.escape, self._ids))})", text)
        return [
            token
            for piece in pieces
            for token in ([self._ids[piece]] if piece in self._ids else map(_of_character, piece))
        ]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        names = {index: marker for marker, index in self._ids.items()}
        return "".join(names.get(each) or chr(each - _of_character("\0")) for each in token_ids)


def _of_character(character: str) -> int:
    return 1000 + ord(character)


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield (
            importlib.import_module("vllm.tool_parsers"),
            importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol"),
        )


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("arguments", CALLS)
def test_calls_are_those_that_vllm_reads(
    form: str, arguments: dict[str, Any], modules: tuple[ModuleType, ModuleType]
) -> None:
    parsers, protocol = modules
    family, write = WRITERS[form]
    raw = write("look", arguments).strip()
    request = protocol.ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "go"}], tools=[TOOL]
    )
    parser = parsers.ToolParserManager.get_tool_parser(PARSERS[form])(Tokenizer(), request.tools)
    read = parser.extract_tool_calls(raw, request).tool_calls
    theirs = [(call.function.name, json.loads(call.function.arguments)) for call in read]
    ours = parse_reply(raw, family=family, step=1, tools=[TOOL]).tool_calls
    assert [(call.name, dict(call.arguments)) for call in ours] == theirs
    assert theirs == [("look", arguments)]
