"""The live page's server over real Valkey and broker: figures, bounds, outages, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import pytest

from harness_sdk import control
from harness_sdk._cancellation import end
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.cli.processes import free_port
from harness_sdk.cli.watch import server as watch_server
from harness_sdk.cli.watch import sources
from harness_sdk.cli.watch.board import Board, Source
from harness_sdk.cli.watch.episodes import Episodes, read_entry
from harness_sdk.cli.watch.panes import EPISODE_COLUMNS, GROUP_COLUMNS, REPLICA_COLUMNS
from harness_sdk.cli.watch.server import watching
from harness_sdk.cli.watch.texts import MAX_TOKENS, Texts
from harness_sdk.control import ReplicaState
from harness_sdk.errors import ConfigError, EpisodeNotFound, InvalidRequest
from harness_sdk.record import BYTES_HASH, record_to_bytes
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from rollout_service.bus import BusState
from tests.branching import branching_record
from tests.records import small_record
from tests.unit.scripted_server import ScriptedServer, serving
from tests.watched import ANNOUNCEMENT, RUN, WatchedRun, renamed, watched_run, watcher


async def get(url: str, **headers: str) -> tuple[int, Any, Any]:
    """Status, JSON or text, headers."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(text) if is_json else text, response.headers


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[WatchedRun]:
    async with watched_run(tmp_path) as run:
        yield run


@contextlib.asynccontextmanager
async def watched(
    run: WatchedRun, *, mqtt_url: str | None = None, **options: Any
) -> AsyncIterator[str]:
    # amqtt never closes a connection that went before its greeting: only who waits for the
    # broker's news connects to it.
    async with watching(RUN, redis_url=run.valkey.url, mqtt_url=mqtt_url, **options) as url:
        yield url


FIGURES = {
    "reward/mean": 0.6251, "divergence/kl_mean": 1.26e-7, "divergence/dlogp_max": 2.5e-4,
    "policy/lag_max": 2.0, "policy/version": 7.0, "tokens/packed": 12_345.0,
    "tokens/flat": 23_456.0, "tokens/per_s": 12_344.6, "seconds/step": 1.25, "dropped/total": 3.0,
}  # fmt: skip


class SpeakingServer(ScriptedServer):
    """A replica that samples 1,000 tokens a second."""

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return pb.StatusReply(
            replica_id="a", engine="dry", model="m", open_episodes=3, queued_episodes=1,
            live_threads=5, kv_use=0.25, tokens_resident=1024, tokens_capacity=4096,
            policy_versions=(0, 6, 7), metrics={"tokens/sampled": 1000 * time.monotonic()},
        )  # fmt: skip


async def test_figures_equal_what_the_sources_say(run: WatchedRun) -> None:
    records = [
        renamed(branching_record(), n, group_id=f"g{n // 2}", reward=reward, closed_at_s=9.5)
        for n, reward in enumerate((0.25, 0.5, 1.0, None))
    ]
    entries = await run.add(*records)
    await run.add_step(1, **FIGURES | {"reward/mean": 0.5})
    await run.add_step(2, **FIGURES)
    await run.set_permits(granted=12, taken=9, group_size=4)
    async with (
        serving(SpeakingServer()) as address,
        watched(run, mqtt_url=run.mqtt_url) as url,
        watcher(url) as page,
    ):
        await run.retain(ANNOUNCEMENT)
        state = ReplicaState(
            replica_id="a", alive=True, address=address, versions=(0, 6, 7), waiting_version=8,
            waiting_for="episode e", waiting_s=12.3,
        )  # fmt: skip
        await run.retain(state)
        await run.retain(ReplicaState(replica_id="b", alive=False))
        await page.until(lambda p: p.tile("KV use") != "-" and len(p.panes["replicas"]) == 2)
        await page.until(lambda p: len(p.episodes) == 4 and len(p.panes["steps"]) == 2)
        await page.until(lambda p: p.tile("episodes waiting") == "4")
        await page.until(lambda p: p.tile("sampled tokens/s") != "-")
    tiles = dict(page.panes["tiles"])
    speed = float(tiles.pop("sampled tokens/s").replace(",", ""))
    assert speed == pytest.approx(1000, rel=0.1)
    assert tiles == {
        "mean reward": "0.625",
        "KL": "1.3e-07",
        "policy lag": "2",
        "step": "2",
        "announced version": "7",
        "KV use": "25.0%",
        "trained tokens/s": "12,345",
        "packed / flat": "12,345 / 23,456",
        "groups begun / permitted": "9 / 12",
        "episodes waiting": "4",
        "episodes pending": "0",
        "dead records": "0",
    }
    newest, oldest = page.panes["steps"]
    assert newest["cells"] == [
        "dag_grpo", "2", "7", "0.625", "1.3e-07", "2.5e-04", "2", "12,345", "23,456", "12,345", "3",
        "1.25",
    ]  # fmt: skip
    assert oldest["cells"][3] == "0.500"
    assert [curve["last"] for curve in page.panes["curves"]] == ["0.625", "1.26e-07", "2", "12,345"]
    groups = page.table("groups", GROUP_COLUMNS)
    assert [(g["group"], g["episodes"], g["unscored"]) for g in groups] == [
        ("g1", "2", "1"), ("g0", "2", "0"),
    ]  # fmt: skip
    assert [(g["reward"], g["lowest"], g["highest"]) for g in groups] == [
        ("1.000", "1.000", "1.000"), (f"{fmean((0.25, 0.5)):.3f}", "0.250", "0.500"),
    ]  # fmt: skip
    for entry, record in zip(entries, records, strict=True):
        row: dict[str, str] = dict(zip(EPISODE_COLUMNS, page.episodes[entry], strict=True))
        assert row["tokens"] == f"{sum(len(node.token_ids) for node in record.nodes):,}"
        assert row["reward"] == ("-" if record.reward is None else f"{record.reward:.3f}")
        expected = {"threads": "3", "mounted": "280", "version": "3", "s": "9.5", "sampled": "224"}
        assert {name: row[name] for name in expected} == expected
    here, gone = page.table("replicas", REPLICA_COLUMNS)
    assert (here["versions"], here["state"], gone["state"]) == ("0, 6, 7", "there", "gone")
    assert [here[name] for name in ("episodes open", "queued", "threads", "engine", "model")] == [
        "3", "1", "5", "dry", "m",
    ]  # fmt: skip
    assert here["KV use"] == "25.0%" and here["tokens held"] == "1,024 of 4,096"
    assert here["says"] == "version 8 waits for a slot, for 12 s and more: episode e"


async def test_news_come_as_they_happen_and_alone(run: WatchedRun) -> None:
    await run.add(renamed(branching_record(), 0))
    async with watched(run) as url, watcher(url) as page:
        await page.until(lambda p: len(p.episodes) == 1)
        await run.add(renamed(branching_record(), 1), renamed(branching_record(), 1))
        await page.until(lambda p: len(p.episodes) == 2)
        sent = len(page.events)
        await run.add_step(5, **FIGURES)
        await page.until(lambda p: p.tile("step") == "5")
        # A repeated send of an episode was dropped, and rows that were sent do not come again.
        assert len(page.episodes) == 2
        assert all("episodes" not in event for event in page.events[sent:])
        # A trainer that resumed from step 3 does 4 again: 5 is no longer.
        await run.add_step(4, **FIGURES)
        await page.until(lambda p: p.tile("step") == "4" and len(p.panes["steps"]) == 1)
        # Whoever comes later gets everything.
        async with watcher(url) as late:
            await late.until(lambda p: len(p.episodes) == 2 and p.tile("step") == "4")


async def test_tokens_are_those_of_the_record(run: WatchedRun) -> None:
    text = "héé 😀 <b>" * 20
    record = replace(branching_record(text=text), tokenizer_hash=BYTES_HASH)
    (entry,) = await run.add(record)
    async with watched(run) as url, watcher(url) as page:
        await page.until(lambda p: p.episodes)
        _, shown, _ = await get(f"{url}episodes/{entry}")
        assert shown["answer"] == text and shown["note"] == ""
        assert [node["count"] for node in shown["nodes"]] == [
            len(n.token_ids) for n in record.nodes
        ]
        assert shown["nodes"][11]["mounts"] == [[6, 0, 10], [7, 0, 270]]
        assert [node["rewound"] for node in shown["nodes"]] == [n.rewound for n in record.nodes]
        for node in (record.nodes[0], record.nodes[6]):
            parts = []
            # 7 divides no character's bytes.
            for begin in range(0, len(node.token_ids), 7):
                end = min(begin + 7, len(node.token_ids))
                address = f"{url}episodes/{entry}/nodes/{node.node_id}?begin={begin}&end={end}"
                parts.append((await get(address))[1])
            assert [i for part in parts for i in part["ids"]] == list(node.token_ids)
            assert (
                "".join(t for part in parts for t in part["text"]) == bytes(node.token_ids).decode()
            )
            logprobs = [lp for part in parts for lp in part["logprobs"]]
            assert [lp for lp in logprobs if lp is not None] == pytest.approx(node.sampled_logprobs)
            assert [lp is not None for lp in logprobs] == list(node.sampled)
        for wrong in (
            "nodes/99?begin=0&end=1",
            "nodes/0?begin=0&end=9999",
            "nodes/0?begin=5&end=2",
        ):
            assert (await get(f"{url}episodes/{entry}/{wrong}"))[0] == 404
        assert (await get(f"{url}episodes/{entry}/nodes/0?begin=-1&end=2"))[0] == 400
        assert (await get(f"{url}episodes/1-1"))[0] == 404


def test_one_answer_takes_so_many_tokens() -> None:
    record = small_record("long", token_ids=tuple(range(MAX_TOKENS + 1)))
    texts = Texts(None)
    assert len(texts.tokens("1-0", record, 0, 1, MAX_TOKENS + 1)["ids"]) == MAX_TOKENS
    with pytest.raises(InvalidRequest, match=f"{MAX_TOKENS} at once"):
        texts.tokens("1-0", record, 0, 0, MAX_TOKENS + 1)


def test_only_the_newest_are_kept_and_their_records_as_far_as_they_fit() -> None:
    size = len(read_entry("1-0", record_to_bytes(small_record("e1")))[1])
    episodes = Episodes(5, max_bytes=3 * size + size // 2)
    for number in (3, 1, 2, *range(4, 9)):
        entry = f"{number}-0"
        if episodes.has_room_for(entry):
            episodes.add(*read_entry(entry, record_to_bytes(small_record(f"e{number}"))))
    assert [row.entry_id for row in episodes.rows()] == ["8-0", "7-0", "6-0", "5-0", "4-0"]
    assert episodes.num_bytes <= 3 * size + size // 2
    assert episodes.record("8-0").episode_id == "e8" and episodes.record("6-0").episode_id == "e6"
    with pytest.raises(EpisodeNotFound, match="only the figures are kept"):
        episodes.record("5-0")
    with pytest.raises(EpisodeNotFound, match="no longer kept"):
        episodes.record("3-0")
    assert not episodes.has_room_for("2-0")
    # One that was forgotten may come again; the id of one that is here may not.
    assert episodes.num_seen == 8
    episodes.add(*read_entry("9-0", record_to_bytes(small_record("e8"))))
    assert "9-0" not in episodes


async def test_catching_up_takes_the_newest_of_a_long_stream(run: WatchedRun) -> None:
    entries = await run.add(*(small_record(f"e{n}") for n in range(70)))
    async with watched(run, max_episodes=50) as url, watcher(url) as page:
        await page.until(lambda p: "50 episodes here" in p.panes["kept"])
        await page.until(lambda p: set(p.episodes) == set(entries[20:]))


async def test_servers_that_are_down_are_shown_and_recovered_from(run: WatchedRun) -> None:
    await run.valkey.stop()
    mqtt_port = free_port()
    async with (
        watching(RUN, redis_url=run.valkey.url, mqtt_url=f"mqtt://127.0.0.1:{mqtt_port}") as url,
        watcher(url) as page,
    ):
        await page.until(lambda p: p.source("Redis") == p.source("MQTT broker") == "away")
        await run.valkey.start()
        await page.until(lambda p: p.source("Redis") == "connected")
        run.mqtt_url = f"mqtt://127.0.0.1:{mqtt_port}"
        async with embedded_broker(mqtt_port):
            await run.retain(ReplicaState(replica_id="a", alive=True))
            await page.until(lambda p: p.source("MQTT broker") == "connected")
            await page.until(lambda p: len(p.panes["replicas"]) == 1)
        await page.until(lambda p: p.source("MQTT broker") == "away")
        await run.add(small_record("before"))
        await page.until(lambda p: len(p.episodes) == 1)
        await run.valkey.stop()
        await page.until(lambda p: p.source("Redis") == "away")
        await run.valkey.start()
        await run.add(small_record("after"))
        await page.until(lambda p: len(p.episodes) == 2 and p.source("Redis") == "connected")


async def test_bad_entries_are_shown_and_harm_nothing(run: WatchedRun) -> None:
    await run._append(control.episodes_key(RUN), control.RECORD_FIELD, b"\xff no record")
    await run._append(control.episodes_key(RUN), "other", b"x")
    for bad in ("[1]", "{", '{"step": "x"}', '{"step": 1, "time_s": "y", "reward/mean": "z"}'):
        await run._append(control.steps_key(RUN), control.FIGURES_FIELD, bad)
    wild = replace(small_record("wild"), closed_at_s=float("nan"), reward=float("nan"))
    (entry,) = await run.add(wild)
    await run.add_step(2, **FIGURES | {"reward/mean": float("nan")})
    async with watched(run) as url, watcher(url) as page:
        await page.until(lambda p: len(p.episodes) == 3 and p.tile("mean reward") == "nan")
        ended = [cells[3] for key, cells in page.episodes.items() if key != entry]
        assert all(text.startswith("unreadable record") for text in ended)
        bad = next(key for key in page.episodes if key != entry)
        status, found, _ = await get(f"{url}episodes/{bad}")
        assert status == 404 and "record" in found["error"]


async def test_page_can_only_be_read_and_only_from_here(run: WatchedRun) -> None:
    async with watched(run) as url:
        for path in ("", "watch.js", "watch.css", "icon.svg", "episodes/1-1", "nothing"):
            status, _, headers = await get(url + path)
            assert status == (404 if path in ("episodes/1-1", "nothing") else 200)
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert "Set-Cookie" not in headers and "Access-Control-Allow-Origin" not in headers
        async with aiohttp.ClientSession() as session:
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                async with session.request(method, url) as response:
                    assert response.status == 405 and response.headers["Allow"] == "GET, HEAD"
        assert (await get(url, Host="evil.example:80"))[0] == 403
        assert (await get(url, Host="localhost:1234"))[0] == 200
        for path in ("", "events", "episodes/1-1"):
            for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                assert (await get(url + path, **headers))[0] == 403
        markup = (await get(url))[1]
        assert "http" not in markup and "<style" not in markup and " style=" not in markup


async def test_too_many_pages_are_told_so(run: WatchedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "MAX_PAGES", 1)
    async with watched(run) as url:
        async with watcher(url) as page:
            await page.until(lambda p: p.panes)
            async with asyncio.timeout(10):
                assert await _events_status(url) == 503
        async with asyncio.timeout(10):
            while (status := await _events_status(url)) == 503:
                await asyncio.sleep(0.05)
        assert status == 200


async def _events_status(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}events") as response:
        return response.status


async def test_episodes_are_read_one_after_the_other_though_their_pages_close(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be cancelled: the next one waits for it all the same."""
    (entry,) = await run.add(small_record("e"))
    reading: list[int] = []
    most: list[int] = []

    def slow(*_: Any) -> dict[str, Any]:
        reading.append(1)
        most.append(len(reading))
        time.sleep(0.3)
        reading.pop()
        return {}

    monkeypatch.setattr(Texts, "episode", slow)
    async with watched(run) as url:
        address = f"{url}episodes/{entry}"
        while (await get(address))[0] != 200:
            await asyncio.sleep(0.05)
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await get(address)
        assert (await get(address))[0] == 200
    assert max(most) == 1


async def test_replicas_are_asked_only_while_a_page_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def status(address: str, *_: object) -> dict[str, Any]:
        asked.append(address)
        return {"status": None, "unreachable": ""}

    monkeypatch.setattr(sources, "replica_status", status)
    monkeypatch.setattr(sources, "LOOK_S", 0.02)
    state = ReplicaState(replica_id="a", alive=True, address="there:1")
    board = Board(run=RUN, episodes=Episodes(1), bus=BusState(policy=None, replicas=(state,)))
    board.sources[sources.REPLICAS] = Source(name=sources.REPLICAS, address="")
    following = asyncio.create_task(sources.follow_replicas(board, None))
    await asyncio.sleep(0.1)
    assert not asked
    async with asyncio.timeout(10):
        with board.open_page():
            with board.open_page():
                pass
            # Of two pages one is open still.
            while len(asked) < 3:
                await asyncio.sleep(0.01)
    count = len(asked)
    await asyncio.sleep(0.2)
    # One look may have begun already.
    assert len(asked) <= count + 1
    await end(following)


async def test_client_that_is_not_installed_is_told_on_the_page(
    run: WatchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "harness_sdk.cli.watch.sources", None)
    async with watched(run) as url, watcher(url) as page:
        await page.until(lambda p: p.source("Redis") == "away")
        (shown,) = page.panes["sources"]
    assert "pip install" in shown["error"]


async def test_unusable_addresses_and_tokenizers_are_refused(run: WatchedRun) -> None:
    async with watched(run) as url:
        port = int(url.rsplit(":", 1)[1].strip("/"))
        with pytest.raises(ConfigError, match="cannot bind"):
            async with watched(run, port=port):
                pass
    with pytest.raises(ConfigError, match="no tokenizer there"):
        async with watched(run, tokenizer=Path("/nowhere")):
            pass


async def test_command_starts_at_once_and_leaves_nothing_behind(run: WatchedRun) -> None:
    begin = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "harness_sdk.cli", "watch", "--run", RUN,
        "--redis-url", run.valkey.url, "--mqtt-url", run.mqtt_url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().split()[1]
    print(f"page after {time.monotonic() - begin:.2f} s")
    async with watcher(url) as page:
        await page.until(lambda p: p.source("Redis") == p.source("MQTT broker") == "connected")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            out, err = await process.communicate()
    assert process.returncode == 0 and out.decode().endswith("stopped\n")
    assert "Traceback" not in err.decode()
