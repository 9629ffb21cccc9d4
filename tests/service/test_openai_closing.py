"""Requests and closings that meet: a name is free once its record is written, and not before."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from harness_sdk.errors import Unavailable
from harness_sdk.record import EpisodeRecord
from harness_sdk.types import SamplingOptions
from rollout_service.openai.ask import Ask, Placed, Reply, SessionNames
from rollout_service.openai.conversation import Conversation
from rollout_service.openai.conversations import Conversations
from rollout_service.openai.messages import ChatMessage
from tests.service.openai_service import Endpoint, endpoint
from tests.service.sdk_service import Records
from tests.unit.scripted_server import until

QUESTION: Any = [{"role": "user", "content": "q"}]


@dataclass(kw_only=True)
class SlowRecords(Records):
    """A stream that takes records when it is told to."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    failures: int = 0
    """Writes that fail before one is taken."""
    writing: int = 0

    async def write(self, record: EpisodeRecord) -> str:
        """Keep `record` once the gate is open."""
        self.writing += 1
        await self.opened.wait()
        if self.failures:
            self.failures -= 1
            raise Unavailable("Redis is away")
        return await super().write(record)


@pytest.fixture
async def service() -> AsyncIterator[Endpoint]:
    records = SlowRecords()
    async with endpoint(lambda text: "fine", records=records, idle_s=0.3) as started:
        yield started
        slow(started).failures = 0
        slow(started).opened.set()


def slow(service: Endpoint) -> SlowRecords:
    assert isinstance(service.records, SlowRecords)
    return service.records


async def ask(service: Endpoint, messages: Any = QUESTION, **options: Any) -> Any:
    create = service.client.chat.completions.create
    completion = await create(model="m", messages=messages, **options)
    return completion.model_dump()


async def test_request_to_a_session_that_is_being_closed_begins_anew(service: Endpoint) -> None:
    await ask(service, user="s")
    await until(lambda: slow(service).writing == 1)
    task = asyncio.create_task(ask(service, user="s"))
    await asyncio.sleep(0.1)
    assert not task.done()
    slow(service).opened.set()
    answer = await task
    assert answer["octopus"]["session"] == "s" and answer["octopus"]["thread"] == "root"
    await service.close("s", 1.0)
    assert [record.reward for record in service.records.written] == [None, 1.0]
    first, second = service.records.written
    assert first.episode_id != second.episode_id and len(second.nodes) == len(first.nodes)


async def test_history_of_a_session_that_is_being_closed_begins_anew(service: Endpoint) -> None:
    before = await ask(service)
    await until(lambda: slow(service).writing == 1)
    reply = {"role": "assistant", "content": before["choices"][0]["message"]["content"]}
    after = await ask(service, [*QUESTION, reply, *QUESTION])
    assert after["octopus"]["session"] != before["octopus"]["session"]


async def test_response_of_a_session_that_is_being_closed_is_gone(service: Endpoint) -> None:
    first = await service.client.responses.create(model="m", input="q")
    await until(lambda: slow(service).writing == 1)
    with pytest.raises(openai.BadRequestError, match="no such response"):
        await service.client.responses.create(model="m", input="q", previous_response_id=first.id)


async def test_closings_at_once_tell_the_one_reward_that_is_recorded(service: Endpoint) -> None:
    await ask(service, user="s")
    rewards = [0.25, 0.5, 1.0]
    tasks = [asyncio.create_task(service.close("s", reward)) for reward in rewards]
    await until(lambda: slow(service).writing == 1)
    slow(service).opened.set()
    told = {closed["reward"] for closed in await asyncio.gather(*tasks)}
    (record,) = service.records.written
    assert told == {record.reward}


async def test_reward_of_a_closing_that_failed_is_kept(service: Endpoint) -> None:
    slow(service).failures = 1
    slow(service).opened.set()
    await ask(service, user="s")
    with pytest.raises(openai.InternalServerError, match="Redis is away"):
        await service.close("s", 0.75)
    # Whether its sweep or the next request closes it.
    await ask(service, user="s")
    assert [record.reward for record in service.records.written] == [0.75]


async def test_session_called_while_another_is_being_closed_stays_open(
    service: Endpoint,
) -> None:
    await asyncio.gather(ask(service, user="a"), ask(service, user="b"))
    await until(lambda: slow(service).writing == 1)
    used = "b" if "a" in await being_closed(service) else "a"
    before = await ask(service, user=used)
    slow(service).opened.set()
    await until(lambda: len(service.records.written) == 1)
    await asyncio.sleep(0.1)
    assert len(service.records.written) == 1
    assert (await ask(service, user=used))["octopus"]["thread"] != before["octopus"]["thread"]


async def being_closed(service: Endpoint) -> str:
    """The session that does not answer, of a and b."""
    for name in ("a", "b"):
        try:
            async with asyncio.timeout(0.1):
                await ask(service, user=name)
        except TimeoutError:
            return name
    raise AssertionError("neither is being closed")


async def test_reply_that_meets_a_closing_leaves_nothing_behind(service: Endpoint) -> None:
    slow(service).opened.set()
    others = conversations_held()
    conversations = Conversations(service.sessions, max_threads=1, idle_s=100, spare_s=100)
    request = Ask(
        messages=(ChatMessage(role="user", content="q"),),
        sampling=SamplingOptions(),
        names=SessionNames(session="s"),
    )
    events = conversations.take(request, "r")
    assert isinstance(await anext(events), Placed)
    await anext(events)
    # The turn ends while its reply is not yet taken.
    await asyncio.sleep(0.2)
    await conversations.close("s", reward=None)
    assert [type(event) async for event in events][-1] is Reply
    del events
    assert all(each in others for each in conversations_held())


def conversations_held() -> list[Conversation]:
    """Those that something still refers to, other tests' included."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Conversation]
