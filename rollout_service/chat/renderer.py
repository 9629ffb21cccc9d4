"""Messages to token ids, appended and never rendered again (design.md section 5).

`x(c') = x(c) + turn terminator + render_delta(new messages)`; what was appended never changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.types import Message, Role, ToolCall, ToolSchemas
from rollout_service.chat.calls import family_of
from rollout_service.chat.increments import CallForm, Increments, WrittenTurn, as_rendered
from rollout_service.chat.proof import probe
from rollout_service.chat.template import Template, chatml
from rollout_service.chat.tokenizer import ChatTokenizer
from rollout_service.chat.tools import Preamble, tools_section

_FORMAT = "increments-1"
"""Rises whenever the same messages would give other tokens."""
_SAMPLE = "A question,\nin two lines: é"
_OTHER_TOKENIZER = "serve a model whose tokenizer keeps white space, as byte-level ones do"


class ChatRenderer:
    """A model's chat template as token ids.

    Args:
        tokenizer: The model's tokenizer.
        template: The model's template; ChatML without it.
        preamble: How tools are described where the template does not list them itself; `compact`
            takes the place of its list too.

    Raises:
        ConfigError: The template cannot be appended to, or the tokenizer breaks increments.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template: Template | None = None,
        *,
        preamble: Preamble = "full",
    ) -> None:
        template = template or chatml()
        self.tokenizer = tokenizer
        self.preamble: Preamble = preamble
        self.probed = probe(template)
        self.call_format = family_of(template.source)
        """How the model writes tool calls: a family of `chat.calls`."""
        self._template = template
        self._shape = shape = self.probed.shape
        self._increments = Increments(template, shape)
        self.terminator = tokenizer.encode(shape.terminator)
        """Ids that end a turn that was cut; empty where the next message's opening ends it."""
        self._openings = {role: tokenizer.encode(text) for role, text in shape.openings.items()}
        first = tokenizer.first_control
        self._stops = tuple(tokenizer.added_ids.get(first(text)) for text in shape.stops)
        """Of a plain turn and of one that ends with a call."""
        self.stop_token_ids = tokenizer.eos_token_ids.union(i for i in self._stops if i is not None)
        self._after_stop = self._what_follows_stops()
        self._barred = self._barred_in_replies()
        hashed = f"{_FORMAT}/{preamble}/{sorted(template.special_tokens.items())}/{template.source}"
        if template.variables:
            hashed += f"/{json.dumps(template.variables, sort_keys=True)}"
        self.template_hash = hashlib.sha256(hashed.encode()).hexdigest()
        self._check_tokens()

    @property
    def generation_prompt(self) -> tuple[int, ...]:
        """Ids that open the model's turn after a user message."""
        return self._openings["user"]

    @property
    def longest_opening(self) -> int:
        """Tokens that open a turn, at most."""
        return max(map(len, self._openings.values()))

    def opening(self, after: Role) -> tuple[int, ...]:
        """Ids that open the model's turn after a message of a role; some templates need none."""
        return self._openings.get(after, self.generation_prompt)

    def ending(self, last: int | None) -> tuple[int, ...]:
        """Ids that end a turn whose last sampled id is `last`; all of the end if it was cut."""
        return self.terminator if last is None else self._after_stop.get(last, self.terminator)

    def keeps(self, stop: int) -> bool:
        """Whether a sampled stop id opens the turn's end, and so stays in the history."""
        return stop in self._after_stop

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> tuple[int, ...]:
        """Token ids of a thread's first messages and its tool list.

        Raises:
            InvalidRequest: The template refuses the messages or the tools.
        """
        first = next((i for i, m in enumerate(messages) if m.role == "tool"), len(messages))
        opening, rest = [self._guarded(m) for m in messages[:first]], messages[first:]
        listed: Any = ()
        if tools and self._shape.tools_printed and self.preamble == "full":
            listed = self._guard_all(list(tools))
        elif tools:
            opening = self._with_tools(opening, tools)
        rendered = as_rendered(opening, self._shape.call_form or CallForm())
        text = self._template.render(rendered, tools=listed) if rendered or listed else ""
        _check_shown(opening, text)
        return self.tokenizer.encode(text, begins=True) + self.delta(rest)

    def delta(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids that `messages` append after a finished turn; no generation prompt.

        Raises:
            InvalidRequest: The template cannot append them.
        """
        return self.tokenizer.encode(self._increments.delta([self._guarded(m) for m in messages]))

    def reply(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole turn as a model would have sampled it, stop included.

        Its own control tokens structure it; those that end or open a turn stay text.
        """
        ids = self.tokenizer.encode(self.tokenizer.guard(text, self._barred))
        plain, call = self._stops
        called = bool(self._shape.call_opening) and self._shape.call_opening.strip() in text
        stop = call if called and call is not None else plain
        return (*ids, stop if stop is not None else min(self.stop_token_ids))

    def _guarded(self, message: Message) -> Message:
        guard = self.tokenizer.guard
        if isinstance(message, WrittenTurn):
            calls = (self._guarded_call(call) for call in message.tool_calls)
            message = dataclasses.replace(message, tool_calls=tuple(calls))
        guarded = dataclasses.replace(
            message,
            content=guard(message.content),
            name=guard(message.name),
            tool_call_id=guard(message.tool_call_id),
        )
        if isinstance(guarded, WrittenTurn) and self._shape.call_form is None:
            return guarded.as_text()
        return guarded

    def _guarded_call(self, call: ToolCall) -> ToolCall:
        return dataclasses.replace(
            call,
            call_id=self.tokenizer.guard(call.call_id),
            name=self.tokenizer.guard(call.name),
            arguments=self._guard_all(dict(call.arguments)),
        )

    def _guard_all(self, value: Any) -> Any:
        """A copy of JSON whose strings hold no control tokens."""
        if isinstance(value, str):
            return self.tokenizer.guard(value)
        if isinstance(value, dict):
            return {self._guard_all(key): self._guard_all(each) for key, each in value.items()}
        return [self._guard_all(each) for each in value] if isinstance(value, list) else value

    def _with_tools(self, messages: list[Message], tools: ToolSchemas) -> list[Message]:
        """`messages` whose system message lists the tools."""
        before, listed, after = tools_section(tools, self.preamble, self._shape.call_example)
        text = before + self.tokenizer.guard(listed) + after
        if messages and messages[0].role == "system":
            text = f"{messages.pop(0).content}\n\n{text}"
        return [Message(role="system", content=text), *messages]

    def _what_follows_stops(self) -> dict[int, tuple[int, ...]]:
        ends = (self.tokenizer.encode(self._shape.call_terminator), self.terminator)
        return {end[0]: end[1:] for end in ends if end and end[0] in self.stop_token_ids}

    def _barred_in_replies(self) -> set[str]:
        """Control tokens that end a turn, or open one and stand in none."""
        first, shape = self.tokenizer.first_control, self._shape
        openers = {first(text) for text in (*self._sample_deltas(), *shape.openings.values())}
        inside = self.tokenizer.control_names(shape.turn_example + shape.call_example)
        added = self.tokenizer.added_ids.items()
        return {name for name, i in added if i in self.stop_token_ids} | (openers - inside)

    def _sample_deltas(self) -> tuple[str, str]:
        user, tool = (Message(role=role, content=_SAMPLE) for role in ("user", "tool"))
        return self._increments.delta([user]), self._increments.delta([tool])

    def _check_tokens(self) -> None:
        """Refuse a tokenizer that reads an increment otherwise than the whole."""
        if not self.stop_token_ids:
            raise ConfigError(
                "no control token ends this model's turns",
                value=self._shape.end or "an empty turn end",
                remedy="give tokenizer and template of one model; name its eos_token_id in "
                "generation_config.json",
            )
        user, tool = self._sample_deltas()
        shape, openings, encode = self._shape, self._shape.openings, self.tokenizer.encode
        first = self._template.render([{"role": "user", "content": _SAMPLE}])
        prompt = encode(first, begins=True)
        whole = self.tokenizer.encode_whole(first + openings["user"])
        _check_same(prompt + encode(openings["user"]), whole, first)
        for end, delta, opening in (
            (shape.terminator, user, openings["user"]),
            (shape.call_terminator, tool, openings["tool"]),
        ):
            parts = encode(end) + encode(delta) + encode(opening)
            _check_same(parts, encode(end + delta + opening), end + delta)
        if _SAMPLE not in self.tokenizer.decode(prompt):
            raise ConfigError(
                "the tokenizer does not read back what it encodes",
                value=self.tokenizer.decode(prompt)[:200],
                remedy=_OTHER_TOKENIZER,
            )


def _check_shown(messages: Sequence[Message], text: str) -> None:
    """Refuse what the template would leave out of a first prompt without a word."""
    for message in messages:
        said = message.content.strip()
        # A turn beside calls is left out by design.
        if message.role == "assistant" or said in text:
            continue
        if json.dumps(said, ensure_ascii=False)[1:-1] not in text:
            raise InvalidRequest(
                f"this model's chat template does not show a {message.role} message there",
                value=said[:80],
                remedy="put the system message first, and alone",
            )


def _check_same(parts: tuple[int, ...], whole: tuple[int, ...], text: str) -> None:
    if parts != whole:
        raise ConfigError(
            "the tokenizer does not allow append-only prompts",
            value=f"{len(whole)} tokens at once, {len(parts)} in increments, for {text[-80:]!r}",
            remedy=_OTHER_TOKENIZER,
        )
