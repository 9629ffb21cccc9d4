"""The routes: each reads a body, takes completions, and writes them whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict

from rollout_service.access import Access
from rollout_service.openai.ask import Ask, Placed, Reply, Said
from rollout_service.openai.bodies import read_body
from rollout_service.openai.chat_body import ChatBody
from rollout_service.openai.completions import Completion
from rollout_service.openai.conversations import Conversations
from rollout_service.openai.exchange import SESSION_HEADER, Events, received, stream
from rollout_service.openai.responses import Response
from rollout_service.openai.responses_body import ResponsesBody
from rollout_service.sessions import Sessions

Taken = AsyncGenerator[Placed | Said | Reply, None]


class _CloseBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reward: float | None = None


class Endpoint:
    """The handlers of one server.

    Args:
        sessions: The episodes.
        conversations: The sessions that clients have open.
        model: Path or name of the model.
        access: The tokens.
        stall_s: Seconds that a client has to send its body, and to take a piece of a stream.
    """

    def __init__(
        self,
        sessions: Sessions,
        conversations: Conversations,
        model: str,
        *,
        access: Access,
        stall_s: float,
    ) -> None:
        self._sessions = sessions
        self._conversations = conversations
        self._model = Path(model).name
        self._access = access
        self._stall_s = stall_s

    def routes(self) -> list[web.RouteDef]:
        """What is served where."""
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.post("/v1/chat/completions", self.chat_completions),
            web.post("/v1/responses", self.responses),
            web.post("/v1/octopus/sessions/{session}/close", self.close_session),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """The one model that serves, by whatever name requests call it."""
        return web.json_response({"object": "list", "data": [_model_json(self._model)]})

    async def model(self, request: web.Request) -> web.Response:
        """Every name is the one model's."""
        return web.json_response(_model_json(request.match_info["model"]))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """A chat completion of one or more choices."""
        body = read_body(ChatBody, await received(request, self._stall_s))
        ask = self._ask(request, body)
        reply_id = f"chatcmpl-{uuid.uuid4().hex}"
        completion = Completion(reply_id, self._model, logprobs=bool(body.logprobs))
        choices = _choices(ask, reply_id, body.n)
        if body.stream:
            events = self._chunks(choices, completion, with_usage=body.wants_usage)
            return await stream(request, events, stall_s=self._stall_s, ends_with="[DONE]")
        wholes = await self._whole_choices(choices)
        return web.json_response(
            completion.whole(wholes), headers={SESSION_HEADER: wholes[0][0].session}
        )

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """A response of text and function calls."""
        body = read_body(ResponsesBody, await received(request, self._stall_s))
        ask = self._ask(request, body)
        reply_id = f"resp_{uuid.uuid4().hex}"
        response = Response(reply_id, self._model, body)
        taken = self._conversations.take(ask, reply_id)
        if body.stream:
            events = _response_events(taken, response)
            return await stream(request, events, stall_s=self._stall_s)
        reply, _ = await _whole(taken)
        headers = {SESSION_HEADER: reply.session}
        return web.json_response(response.whole(reply), headers=headers)

    async def close_session(self, request: web.Request) -> web.Response:
        """The end of a session, with its reward."""
        body = read_body(_CloseBody, await received(request, self._stall_s) or b"{}")
        key = request.match_info["session"]
        owner = self._owner(request)
        closed = await self._conversations.close(key, owner=owner, reward=body.reward)
        return web.json_response(
            {
                "object": "octopus.session",
                "session": closed.session,
                "episode_id": closed.episode_id,
                "reward": closed.reward,
                "stop_reason": closed.result.stop_reason,
                "entry_id": closed.result.entry_id,
                "num_nodes": closed.result.num_nodes,
                "num_tokens": closed.result.num_tokens,
            }
        )

    def _ask(self, request: web.Request, body: ChatBody | ResponsesBody) -> Ask:
        ask = body.to_ask(request.headers, self._sessions.options)
        return replace(ask, names=replace(ask.names, owner=self._owner(request)))

    def _owner(self, request: web.Request) -> str:
        return self._access.caller(request.headers.get("Authorization", "")).name

    async def _whole_choices(
        self, choices: Sequence[tuple[Ask, str]]
    ) -> list[tuple[Reply, list[Said]]]:
        first = await _whole(self._conversations.take(*choices[0]))
        # The others branch from the prompt that the first has appended.
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_whole(self._conversations.take(*choice)))
                    for choice in choices[1:]
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [first, *(task.result() for task in tasks)]

    async def _chunks(
        self, choices: Sequence[tuple[Ask, str]], completion: Completion, *, with_usage: bool
    ) -> Events:
        replies: list[Reply] = []
        for index, choice in enumerate(choices):
            begun = False
            async with contextlib.aclosing(self._conversations.take(*choice)) as events:
                async for event in events:
                    if isinstance(event, Placed):
                        yield event
                        continue
                    if not begun:
                        yield completion.opening(index)
                        begun = True
                    if isinstance(event, Said):
                        chunk = completion.said(index, event)
                        if chunk is not None:
                            yield chunk
                        continue
                    replies.append(event)
                    for chunk in completion.ending(index, event):
                        yield chunk
        if with_usage:
            yield completion.used(replies)


def _model_json(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "octopus"}


def _choices(ask: Ask, reply_id: str, count: int) -> list[tuple[Ask, str]]:
    """Each choice's request and reply id; one seed would give one text, so they count up."""
    choices = [(ask, reply_id)]
    for index in range(1, count):
        seed = ask.sampling.seed
        sampling = replace(ask.sampling, seed=None if seed is None else seed + index)
        choices.append((replace(ask, sampling=sampling), f"chatcmpl-{uuid.uuid4().hex}"))
    return choices


async def _whole(taken: Taken) -> tuple[Reply, list[Said]]:
    said: list[Said] = []
    async with contextlib.aclosing(taken) as events:
        async for event in events:
            if isinstance(event, Reply):
                return event, said
            if isinstance(event, Said):
                said.append(event)
    raise AssertionError("a completion ends with its reply")


async def _response_events(taken: Taken, response: Response) -> Events:
    begun = False
    async with contextlib.aclosing(taken) as events:
        async for event in events:
            if isinstance(event, Placed):
                yield event
                continue
            if not begun:
                for each in response.opening():
                    yield each
                begun = True
            told = response.said(event) if isinstance(event, Said) else response.ending(event)
            for each in told:
                yield each
