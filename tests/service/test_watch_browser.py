"""The live page and the picture of an episode in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness_sdk.cli.processes import free_port
from harness_sdk.cli.watch.server import watching
from harness_sdk.control import ReplicaState
from harness_sdk.record import BYTES_HASH, NodeKind
from harness_sdk.trajectories.tokenizers import ByteTokenizer
from harness_sdk.view import episode_html
from tests.branching import EVIL, branching_record
from tests.browser import BINARY, BrowserPage, browser_page
from tests.records import small_record
from tests.watched import ANNOUNCEMENT, RUN, WatchedRun, renamed, watched_run

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium: apt-get install chromium")

ODD = (
    "\u202eright to left\u202c\u200b zero\u0000width \ufeff\U0001f469\u200d\U0001f467 e\u0301 "
    "\U0001f3f4 \ufdfd \x1b[31m &lt; ${x} "
)
TABLES = (
    "[...document.querySelectorAll('#{} tr')].map(r => [...r.children].map(c => c.textContent))"
)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[WatchedRun]:
    async with watched_run(tmp_path) as run:
        yield run


def shows(text: str) -> str:
    """Whether the page's visible text has `text` in it."""
    return f"document.body.innerText.includes({json.dumps(text)})"


def is_clean(page: BrowserPage, url: str) -> None:
    """No error of the page, nothing asked for from elsewhere, no violation of the policy."""
    assert page.problems == []
    assert all(each.startswith((url, "data:")) for each in page.requested), page.requested


async def test_page_shows_what_the_server_sends_and_follows(
    run: WatchedRun, tmp_path: Path
) -> None:
    await run.add(renamed(branching_record(), 0, group_id="g0", closed_at_s=time.time()))
    await run.add_step(1, **{"reward/mean": 0.125, "divergence/kl_mean": 2e-6})
    await run.retain(ANNOUNCEMENT)
    await run.retain(ReplicaState(replica_id="a", alive=True, versions=(5, 7)))
    async with (
        watching(RUN, redis_url=run.valkey.url, mqtt_url=run.mqtt_url) as url,
        browser_page(tmp_path) as page,
    ):
        await page.goto(url)
        await page.until(shows("0.125"))
        await page.until("document.querySelectorAll('#replicas tr, #episodes tr').length === 2")
        tiles = await page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('#tiles .fact')]"
            ".map(f => [f.children[0].textContent, f.children[1].textContent]))"
        )
        assert (tiles["mean reward"], tiles["KL"], tiles["announced version"]) == (
            "0.125", "2.0e-06", "7",
        )  # fmt: skip
        (replica,) = await page.evaluate(TABLES.format("replicas"))
        assert replica[:3] == ["a", "there", "5, 7"]
        (group,) = await page.evaluate(TABLES.format("groups"))
        assert group[:4] == ["g0", "task", "1", "1.000"]
        (episode,) = await page.evaluate(TABLES.format("episodes"))
        assert episode[1:10] == ["task", "1.000", "done", "3", "0", "280", "916", "1,474", "224"]
        titles = "[...document.querySelectorAll('.chart circle title')].map(t => t.textContent)"
        assert "Mean reward, step 1: 0.125" in await page.evaluate(titles)
        # News move nothing that has the focus.
        await page.evaluate("document.querySelector('#episodes a').focus()")
        await run.add(renamed(branching_record(), 1, task_id="second", group_id="g0"))
        await run.add_step(2, **{"reward/mean": 0.5})
        await page.until("document.querySelectorAll('#episodes tr').length === 2")
        await page.until(f"{titles}.includes('Mean reward, step 2: 0.5')")
        assert await page.evaluate("document.activeElement.textContent") == "task"
        rows = await page.evaluate(TABLES.format("episodes"))
        assert [row[1] for row in rows] == ["second", "task"]
        (group,) = await page.evaluate(TABLES.format("groups"))
        assert group[:3] == ["g0", "second", "2"]
        # `/` filters; the rest of the page stays.
        await page.press("/")
        for letter in "sec":
            await page.press(letter)
        await page.until("document.querySelectorAll('#episodes tr').length === 1")
        is_clean(page, url)


async def test_hostile_text_stays_text(run: WatchedRun, tmp_path: Path) -> None:
    text = EVIL + ODD
    record = branching_record(text=text, task=text)
    record = replace(
        record, tokenizer_hash=BYTES_HASH, group_id=text, replica_id=text, stop_reason=text,
        error_kind=text, error_message="x" * 500_000, engine=text,
        threads=tuple(replace(t, status=text, answer=text * 2000) for t in record.threads),
    )  # fmt: skip
    (entry,) = await run.add(record)
    await run.add_step(1, **{"reward/mean": 0.1}, objective=EVIL)
    await run.retain(ReplicaState(replica_id="a", alive=True, error=EVIL, waiting_for=EVIL))
    async with (
        watching(RUN, redis_url=run.valkey.url, mqtt_url=run.mqtt_url) as url,
        browser_page(tmp_path) as page,
    ):
        await page.goto(f"{url}#episode/{entry}")
        await page.until("document.querySelectorAll('#dag .node').length === 16")
        assert (await page.evaluate("document.getElementById('task').textContent")) == text
        await page.evaluate("document.querySelector('#dag [data-node=\"0\"]').focus()")
        await page.until("document.querySelectorAll('.tokens span').length > 100")
        tokens = await page.evaluate("document.querySelector('.tokens').textContent")
        assert tokens == "You may fork. " * 9 + text
        await page.evaluate("location.hash = ''")
        await page.until("document.querySelectorAll('#episodes tr, #replicas tr').length === 2")
        (replica,) = await page.evaluate(TABLES.format("replicas"))
        assert replica[-1] == EVIL
        made = "document.querySelectorAll('img, script:not([src]), iframe').length"
        assert await page.evaluate(made) == 0
        is_clean(page, url)


async def test_page_is_walked_by_keys_at_phone_width_and_in_the_dark(
    run: WatchedRun, tmp_path: Path
) -> None:
    await run.add(*(renamed(branching_record(), n, task_id=f"t{n}") for n in range(3)))
    await run.add_step(1, **{"reward/mean": 0.1, "divergence/kl_mean": 1e-9})
    async with (
        watching(RUN, redis_url=run.valkey.url, mqtt_url=None) as url,
        browser_page(tmp_path, width=400) as page,
    ):
        await page.goto(url)
        await page.until("document.querySelectorAll('#episodes tr').length === 3")
        too_wide = "document.documentElement.scrollWidth > 400"
        assert not await page.evaluate(too_wide)
        nameless = (
            "[...document.querySelectorAll('a,button,input,[role=region],[role=button],svg')]"
            ".filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length"
        )
        assert await page.evaluate(nameless) == 0
        await page.evaluate("document.querySelector('#episodes a').focus()")
        await page.press("ArrowDown")
        await page.press("Enter")
        await page.until(f"{shows('Episode ep-1')} && document.querySelector('#dag .node')")
        await page.evaluate("document.querySelector('#dag .node').focus()")
        await page.press("ArrowRight")
        await page.until(shows("turn of root, step 1"))
        assert not await page.evaluate(too_wide) and await page.evaluate(nameless) == 0
        colour = "getComputedStyle(document.body).backgroundColor"
        assert await page.evaluate(colour) == "rgb(255, 255, 255)"
        await page.prefer("dark")
        await page.until(f"{colour} === 'rgb(16, 21, 29)'")
        await page.evaluate("document.getElementById('theme').click()")
        assert await page.evaluate(colour) == "rgb(255, 255, 255)"
        await page.press("Escape")
        assert await page.evaluate("document.getElementById('detail').hidden")
        await page.press("Escape")
        await page.until("!document.getElementById('run').hidden")
        assert await page.evaluate("document.activeElement.textContent") == "t1"
        is_clean(page, url)


async def test_page_says_when_octopus_is_gone_and_comes_back(
    run: WatchedRun, tmp_path: Path
) -> None:
    port = free_port()
    await run.add(small_record("one"))
    async with browser_page(tmp_path) as page:
        async with watching(RUN, redis_url=run.valkey.url, mqtt_url=None, port=port) as url:
            await page.goto(url)
            await page.until(shows("live"))
        await page.until(shows("octopus does not answer"))
        await run.add(small_record("two"))
        async with watching(RUN, redis_url=run.valkey.url, mqtt_url=None, port=port):
            await page.until("document.querySelectorAll('#episodes tr').length === 2")
            await page.until(shows("live"))
            await run.valkey.stop()
            await page.until("document.querySelector('#sources .away')")


async def test_long_episode_is_read_piece_by_piece(run: WatchedRun, tmp_path: Path) -> None:
    ids = tuple(32 + n % 90 for n in range(50_000))
    record = small_record("long", token_ids=ids, num_prompt=10)
    (entry,) = await run.add(replace(record, tokenizer_hash=BYTES_HASH))
    async with (
        watching(RUN, redis_url=run.valkey.url, mqtt_url=None) as url,
        browser_page(tmp_path) as page,
    ):
        await page.goto(f"{url}#episode/{entry}")
        await page.until("document.querySelector('#dag .node')")
        await page.evaluate("document.querySelector('#dag .node').focus()")
        spans = "document.querySelectorAll('.tokens span').length"
        await page.until(f"{spans} === 2000")
        await page.evaluate("document.querySelector('#detail .meta button').click()")
        await page.until(f"{spans} === 4000")
        text = await page.evaluate("document.querySelector('.tokens').textContent")
        assert text == bytes(ids[:4000]).decode()
        is_clean(page, url)


async def test_picture_of_an_episode_works_in_a_browser(tmp_path: Path) -> None:
    file = tmp_path / "episode.html"
    record = branching_record(text=EVIL, task=EVIL)
    file.write_text(episode_html(record, ByteTokenizer().decode), "utf-8")
    async with browser_page(tmp_path) as page:
        await page.goto(file.as_uri())
        await page.evaluate("document.querySelector('.node').focus()")
        await page.until(shows("context of root, step 0"))
        await page.press("ArrowRight")
        await page.until(shows("turn of root, step 1"))
        sampled = sum(node.kind == NodeKind.TURN for node in record.nodes)
        assert await page.evaluate("document.querySelectorAll('.node.turn').length") == sampled
        text = await page.evaluate("document.querySelector('.tokens').textContent")
        assert text == bytes(record.nodes[1].token_ids).decode()
        fill = "getComputedStyle(document.querySelector('.turn .box')).fill"
        assert await page.evaluate(fill) == "rgb(191, 230, 221)"
        await page.press("Escape")
        assert await page.evaluate("document.getElementById('detail').hidden")
        assert page.problems == []
