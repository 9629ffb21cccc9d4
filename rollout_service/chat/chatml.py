"""ChatML with Hermes tools, rendered as append-only increments (design.md section 5).

`x(c') = x(c) + turn terminator + render_delta(new messages)`; what was appended never changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from harness_sdk.errors import ConfigError
from harness_sdk.types import Message, ToolSchemas
from rollout_service.chat.tokenizer import IM_END, IM_START, ChatTokenizer, Fragment, Trust
from rollout_service.chat.tools import Preamble, tools_section

_FORMAT = "chatml-hermes-1"
"""Rises whenever the same messages would give other tokens."""

_PROBE: tuple[Message, ...] = (
    Message(role="system", content="s"),
    Message(role="user", content="A question,\nin two lines: é"),
    Message(role="tool", content='{"hits": 4}'),
    Message(role="tool", content=""),
    Message(role="user", content=" more"),
)


class ChatML:
    """The one template served here: Qwen's and SmolLM2's.

    Args:
        tokenizer: The model's tokenizer.
        preamble: How tools are described.

    Raises:
        ConfigError: The tokenizer breaks increments: they differ from a rendering in one piece.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, preamble: Preamble = "full") -> None:
        self.tokenizer = tokenizer
        self.preamble: Preamble = preamble
        self.terminator = tokenizer.encode([_template(f"{IM_END}\n")])
        """Ids that end an assistant turn; a sampled `<|im_end|>` is the first of them."""
        self.generation_prompt = tokenizer.encode([_template(f"{IM_START}assistant\n")])
        self.stop_token_ids = tokenizer.stop_token_ids
        self.template_hash = hashlib.sha256(f"{_FORMAT}/{preamble}".encode()).hexdigest()
        self._probe()

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> tuple[int, ...]:
        """Token ids of a thread's first messages, the tool list in its system section."""
        before, listed, after = tools_section(tools, self.preamble)
        if not listed:
            return self.delta(messages)
        system: list[Fragment] = [_template(f"{IM_START}system\n")]
        rest = list(messages)
        if rest and rest[0].role == "system":
            system += [_content(rest.pop(0).content), _template("\n\n")]
        system += [_template(before), _content(listed), _template(f"{after}{IM_END}\n")]
        return self.tokenizer.encode([*system, *_fragments(rest)])

    def delta(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids that `messages` append after a finished turn; no generation prompt."""
        return self.tokenizer.encode(_fragments(messages))

    def reply(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole assistant turn as a model would have sampled it, stop included."""
        return (*self.tokenizer.encode([(text, Trust.REPLY)]), self.tokenizer.im_end)

    def _probe(self) -> None:
        whole = self.delta(_PROBE)
        parts = self.delta(_PROBE[:2]) + self.delta(_PROBE[2:4]) + self.delta(_PROBE[4:])
        if self.terminator[:1] != (self.tokenizer.im_end,) or whole != parts:
            raise ConfigError(
                "the tokenizer does not allow append-only prompts",
                value=f"{len(whole)} tokens at once, {len(parts)} in increments",
                remedy="serve a model with a byte-level ChatML tokenizer",
            )
        if "A question,\nin two lines: é" not in self.tokenizer.decode(whole):
            raise ConfigError(
                "the tokenizer does not read back what it encodes",
                value=self.tokenizer.decode(whole)[:200],
                remedy="serve a model with a byte-level ChatML tokenizer",
            )


def _fragments(messages: Sequence[Message]) -> list[Fragment]:
    """Fragments of `messages`; neighbouring tool answers share one user turn."""
    fragments: list[Fragment] = []
    for index, message in enumerate(messages):
        if message.role != "tool":
            fragments += [
                _template(f"{IM_START}{message.role}\n"),
                _content(message.content),
                _template(f"{IM_END}\n"),
            ]
            continue
        if index == 0 or messages[index - 1].role != "tool":
            fragments.append(_template(f"{IM_START}user"))
        fragments += [
            _template("\n<tool_response>\n"),
            _content(message.content),
            _template("\n</tool_response>"),
        ]
        if index + 1 == len(messages) or messages[index + 1].role != "tool":
            fragments.append(_template(f"{IM_END}\n"))
    return fragments


def _template(text: str) -> Fragment:
    return text, Trust.TEMPLATE


def _content(text: str) -> Fragment:
    return text, Trust.CONTENT
