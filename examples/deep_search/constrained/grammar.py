"""Grammars of one Hermes tool call, for engines that constrain what is sampled (vLLM)."""

from __future__ import annotations

from collections.abc import Sequence

from harness_sdk import StructuredOutput

# What a JSON string may hold without an escape; 100 characters are a long query.
_RULES = r"""
text ::= [^"\\\n\r\t]{1,100}
short ::= [^"\\\n\r\t]{1,40}
number ::= [1-9]
"""

_ARGUMENTS = {
    "search": r'"{\"query\": \"" text "\"}"',
    "open_page": r'"{\"passage_id\": \"d" [0-9]{5} "\"}"',
    "fork": r'"{\"branches\": {\"first\": \"" text "\", \"second\": \"" text "\"}}"',
    "read_thread": r'"{\"branch\": \"" ("first" | "second") "\", \"steps\": [1, " number "]}"',
    "wait": r'"{}"',
    "done": r'"{\"answer\": \"" short "\", \"evidence\": \"" short "\"}"',
}
"""How the arguments of each call are written, as EBNF."""


def one_call(names: Sequence[str]) -> StructuredOutput:
    """One call of one of `names`, and nothing beside it.

    Example:
        `one_call(["search"])` allows `<tool_call>` around
        `{"name": "search", "arguments": {"query": "author of Emma"}}`.
    """
    calls = " | ".join(
        rf'("{name}\", \"arguments\": " {_ARGUMENTS[name]})' for name in dict.fromkeys(names)
    )
    root = rf'root ::= "<tool_call>\n{{\"name\": \"" ({calls}) "}}\n</tool_call>"'
    return StructuredOutput(grammar=root + _RULES)
