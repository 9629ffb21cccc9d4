"""Replies as chat completions: whole, and as the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rollout_service.openai.ask import Reply, Said


class Completion:
    """The frame that a completion and its chunks share.

    Args:
        reply_id: Its id.
        model: Name of the model that serves.
        logprobs: Whether log-probabilities are asked for.
    """

    def __init__(self, reply_id: str, model: str, *, logprobs: bool) -> None:
        self._id = reply_id
        self._model = model
        self._created = int(time.time())
        self._logprobs = logprobs

    def whole(self, choices: Sequence[tuple[Reply, Sequence[Said]]]) -> dict[str, Any]:
        """The completion, with what was said for each choice."""
        return {
            **self._frame("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": _message(reply),
                    "logprobs": self._token_logprobs(said),
                    "finish_reason": reply.finish_reason,
                }
                for index, (reply, said) in enumerate(choices)
            ],
            "usage": usage([reply for reply, _ in choices]),
            "octopus": extras(choices[0][0]),
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that begins a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def said(self, index: int, said: Said) -> dict[str, Any] | None:
        """A chunk with what was said; None where there is nothing to tell."""
        delta: dict[str, Any] = {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.content:
            delta["content"] = said.content
        if not delta and not (self._logprobs and said.tokens):
            return None
        return self._chunk(index, delta, logprobs=self._token_logprobs([said]))

    def ending(self, index: int, reply: Reply) -> list[dict[str, Any]]:
        """The chunks that end a choice: its calls, then why it ended."""
        calls = [{"index": at, **call} for at, call in enumerate(_tool_calls(reply))]
        chunks = [self._chunk(index, {"tool_calls": calls})] if calls else []
        last = self._chunk(index, {}, finish_reason=reply.finish_reason)
        return [*chunks, {**last, "octopus": extras(reply)}]

    def used(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The chunk with the usage."""
        return {**self._frame("chat.completion.chunk"), "choices": [], "usage": usage(replies)}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model
        }  # fmt: skip

    def _chunk(self, index: int, delta: dict[str, Any], **known: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **known}
        return {**self._frame("chat.completion.chunk"), "choices": [choice]}

    def _token_logprobs(self, said: Iterable[Said]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        tokens = [token for each in said for token in each.tokens]
        return {
            "content": [
                {
                    "token": text,
                    "logprob": value,
                    "bytes": list(text.encode("utf-8", "replace")),
                    "top_logprobs": [],
                }
                for text, value in tokens
            ],
            "refusal": None,
        }


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Tokens of choices of one prompt."""
    prompt = replies[0].prompt_tokens
    sampled = sum(len(reply.turn.token_ids) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }


def extras(reply: Reply) -> dict[str, Any]:
    """What OpenAI's form has no place for."""
    return {
        "session": reply.session,
        "thread": reply.thread_id,
        "step": reply.turn.step,
        "policy_version": reply.turn.policy_version,
        "bad_tool_calls": [{"name": call.name, "error": call.error} for call in reply.bad_calls],
    }


def _message(reply: Reply) -> dict[str, Any]:
    calls = _tool_calls(reply)
    content = reply.message.content
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in reply.message.tool_calls
    ]
