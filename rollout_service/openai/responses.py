"""Replies as objects of the Responses API: whole, and as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rollout_service.openai.ask import Reply, Said
from rollout_service.openai.completions import extras
from rollout_service.openai.responses_body import ResponsesBody


class Response:
    """One response, while it comes about.

    Args:
        reply_id: Its id.
        model: Name of the model that serves.
        body: The request.
    """

    def __init__(self, reply_id: str, model: str, body: ResponsesBody) -> None:
        self._id = reply_id
        self._model = model
        self._body = body
        self._created = int(time.time())
        self._number = 0
        self._text = ""
        self._reasoning = ""
        self._output: list[dict[str, Any]] = []

    def whole(self, reply: Reply) -> dict[str, Any]:
        """The finished response."""
        output = [_reasoning_item(self._id, reply.reasoning)] if reply.reasoning else []
        if reply.message.content or not reply.message.tool_calls:
            output.append(_message_item(self._id, reply.message.content))
        output += _call_items(self._id, reply)
        cut = reply.finish_reason == "length"
        sampled = len(reply.turn.token_ids)
        return {
            **self._frame("incomplete" if cut else "completed", output),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + sampled,
            },
            "octopus": extras(reply),
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        """The events that begin it."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._frame("in_progress", []))

    def said(self, said: Said) -> Iterator[dict[str, Any]]:
        """The events of what was said: text as it comes, reasoning whole before it."""
        self._reasoning += said.reasoning
        if not said.content:
            return
        if not self._text:
            yield from self._begin_message()
        self._text += said.content
        yield self._event("response.output_text.delta", **self._part(), delta=said.content)

    def ending(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """The events that end it."""
        if self._text or not reply.message.tool_calls:
            if not self._text:
                yield from self._begin_message()
            yield from self._end_message()
        else:
            yield from self._whole_reasoning()
        for item in _call_items(self._id, reply):
            yield from self._call(item)
        whole = self.whole(reply)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        yield from self._whole_reasoning()
        item = {**_message_item(self._id, ""), "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        yield self._event("response.content_part.added", **self._part(), part=_part(""))

    def _end_message(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.output_text.done", **self._part(), text=self._text)
        yield self._event("response.content_part.done", **self._part(), part=_part(self._text))
        yield self._done(_message_item(self._id, self._text))

    def _whole_reasoning(self) -> Iterator[dict[str, Any]]:
        if self._reasoning:
            item = _reasoning_item(self._id, self._reasoning)
            yield self._event(
                "response.output_item.added", output_index=len(self._output), item=item
            )
            yield self._done(item)

    def _call(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        place = {"output_index": len(self._output)}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", **place, item=begun)
        place["item_id"] = item["id"]
        arguments = item["arguments"]
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event(
            "response.function_call_arguments.done",
            **place,
            name=item["name"],
            arguments=arguments,
        )
        yield self._done(item)

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        self._output.append(item)
        return self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=item
        )

    def _part(self) -> dict[str, Any]:
        return {
            "item_id": f"msg_{self._id}", "output_index": len(self._output), "content_index": 0,
            "logprobs": [],
        }  # fmt: skip

    def _event(self, kind: str, **known: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **known}

    def _frame(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        tools = [tool.model_dump() for tool in body.tools or ()]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": [{**tool, "strict": False} for tool in tools],
            "top_p": 1.0 if body.top_p is None else body.top_p,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(reply_id: str, text: str) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id}", "type": "message", "role": "assistant", "status": "completed",
        "content": [_part(text)],
    }  # fmt: skip


def _reasoning_item(reply_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{reply_id}", "type": "reasoning", "summary": [], "content": content}


def _call_items(reply_id: str, reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": f"fc_{index}_{reply_id}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for index, call in enumerate(reply.message.tool_calls)
    ]
