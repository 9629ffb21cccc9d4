"""The picture of an episode: well-formed, self-contained, harmless whatever the text says."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness_sdk import control
from harness_sdk.cli.__main__ import main
from harness_sdk.record import (
    EpisodeRecord,
    ThreadSummary,
    record_to_bytes,
)
from harness_sdk.records_file import write_records
from harness_sdk.trajectories.tokenizers import ByteTokenizer
from harness_sdk.view import episode_html, episode_png, episode_svg
from harness_sdk.view.layout import lay_out
from harness_sdk.view.nodes import text_pieces
from harness_sdk.view.shading import k3, stripes, token_shades
from tests.branching import EVIL, branching_record
from tests.valkey import embedded_valkey

DECODE = ByteTokenizer().decode


class _Page(HTMLParser):
    """Collects what a browser would see: elements, attributes, scripts."""

    VOID = ("meta", "link", "img", "br", "input", "rect", "path")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.shown: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.shown).append(data)

    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def test_page_is_balanced_and_shows_every_node() -> None:
    record = branching_record()
    page = _Page(episode_html(record, DECODE))
    assert page.open == []
    shapes = [a for tag, a in page.tags if tag == "g" and "data-node" in a]
    assert {int(str(a["data-node"])) for a in shapes} == {n.node_id for n in record.nodes}
    # Reachable and announced without a mouse.
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in shapes)
    assert sum("rewound" in str(a["class"]) for a in shapes) == 2
    assert sum(a.get("class") == "mount" for tag, a in page.tags if tag == "path") == 1
    assert sum(a.get("class") == "rewind" for tag, a in page.tags if tag == "path") == 1


def test_page_carries_text_logprobs_and_mounts_of_each_token() -> None:
    record = branching_record()
    nodes = _Page(episode_html(record, DECODE)).data()["nodes"]
    for shown, node in zip(nodes, record.nodes, strict=True):
        assert "".join(shown["text"]) == DECODE(node.token_ids)
        assert shown["ids"] == list(node.token_ids)
        known = [logprob for logprob in shown["logprobs"] if logprob is not None]
        assert known == pytest.approx(node.sampled_logprobs, abs=1e-5)
        assert shown["mounts"] == [[m.node_id, m.begin, m.end] for m in node.mounts]


def test_page_without_tokenizer_has_ids_only() -> None:
    nodes = _Page(episode_html(branching_record())).data()["nodes"]
    assert all(node["text"] is None for node in nodes)


def test_page_refers_to_nothing_outside() -> None:
    text = episode_html(branching_record(), DECODE)
    assert not re.search(r"https?:|//[a-z]", text)
    for tag, attributes in _Page(text).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "action"} & set(attributes)
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(", text)


def test_markup_in_any_text_stays_text() -> None:
    record = branching_record(text=EVIL, task=EVIL)
    evil_threads = tuple(
        ThreadSummary(thread_id=t.thread_id, parent=t.parent, depth=0, status=EVIL, answer=EVIL)
        for t in record.threads
    )
    fields = {name: getattr(record, name) for name in record.__slots__}
    fields |= {"threads": evil_threads, "episode_id": EVIL, "engine": EVIL, "stop_reason": EVIL}
    fields |= {"error_kind": EVIL, "error_message": EVIL}
    page = _Page(episode_html(EpisodeRecord(**fields), DECODE))
    assert page.open == []
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    # The text itself is still there to read.
    assert any(EVIL in shown for shown in page.shown)
    assert EVIL in "".join(page.data()["nodes"][0]["text"])


def test_page_script_never_writes_markup() -> None:
    script = _Page(episode_html(branching_record())).scripts[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


def test_standalone_svg_is_xml_with_one_lane_a_thread() -> None:
    root = ElementTree.fromstring(episode_svg(branching_record(text=EVIL)))
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    assert len(root.findall(f".//{name}rect[@class='lane']")) == 3
    assert len(root.findall(f".//{name}rect[@class='span']")) == 2


def test_layout_keeps_boxes_apart_and_time_forward() -> None:
    record = branching_record()
    layout = lay_out(record)
    boxes = list(layout.boxes.values())
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            assert one.y != other.y or one.right <= other.x or other.right <= one.x
        for mount in one.node.mounts:
            assert layout.boxes[mount.node_id].right <= one.x
        if one.node.parent >= 0:
            assert layout.boxes[one.node.parent].right <= one.x
        assert one.right <= layout.width
    assert [lane.thread.thread_id for lane in layout.lanes] == ["root", "root.1", "root.2"]
    rewound = [box.y for box in boxes if box.node.rewound]
    kept = {box.y for box in boxes if box.node.thread_id == "root.1" and not box.node.rewound}
    assert len(kept) == 1 and min(rewound) > max(kept)


def test_shades_follow_surprise_and_kl() -> None:
    turn = branching_record().nodes[1]
    shades = token_shades(turn)
    assert shades[:2] == [None, None]
    known = [shade for shade in shades if shade is not None]
    assert known == pytest.approx([min(-lp / 6, 1.0) for lp in turn.sampled_logprobs])
    agreeing = token_shades(turn, {1: turn.sampled_logprobs})
    assert {shade for shade in agreeing if shade is not None} == {0.0}
    assert k3(-1.0, -1.1) == pytest.approx(0.0048374, abs=1e-6)
    assert stripes([None] * 100 + [0.0] * 99 + [1.0])[-1][2] == 1.0


def test_characters_of_several_tokens_are_shown_whole() -> None:
    ids = list("né€😀x".encode())
    pieces = text_pieces(ids, DECODE)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == "né€😀x"
    assert "".join(text_pieces([0xFF, 65, 0xC3], DECODE)) == "\ufffdA\ufffd"


def test_png_has_the_picture_in_it(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "episode.png"
    episode_png(branching_record(text="costs $5 and $6"), path)
    pixels = imread(path)
    height, width = pixels.shape[:2]
    assert height > 200 and width > 800
    colours = {tuple(round(float(c), 1) for c in pixel[:3]) for pixel in pixels.reshape(-1, 4)}
    # White, lanes, node kinds, mounts and shading.
    assert len(colours) > 20


def test_command_draws_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "episodes.records"
    write_records(file, [branching_record(), branching_record(task="second")])
    outs = [tmp_path / f"episode.{suffix}" for suffix in ("html", "svg", "png")]
    options = [option for out in outs for option in ("--out", str(out))]
    assert main(["view", str(file), *options]) == 0
    assert all(out.stat().st_size > 1000 for out in outs)
    assert "second" in outs[0].read_text()
    assert main(["view", str(file), "--episode", "0", "--out", str(outs[0])]) == 0
    assert "second" not in outs[0].read_text()
    capsys.readouterr()
    for arguments, problem in (
        ([str(file), "--episode", "nine"], "0 to 1"),
        ([str(file), "--out", "x.gif"], ".html, .svg, .png"),
        ([str(tmp_path / "none")], "no such records file"),
        ([], "neither"),
        ([str(file), "--redis", "redis://x"], "both"),
        (["--redis-url", "redis://x"], "--run"),
    ):
        assert main(["view", *arguments]) == 1
        assert problem in capsys.readouterr().err


async def test_command_draws_from_the_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import redis.asyncio

    out = tmp_path / "episode.html"
    async with embedded_valkey(tmp_path / "valkey") as url, redis.asyncio.Redis.from_url(url) as db:
        base = ["view", "--redis", url, "--run", "r", "--out", str(out)]
        assert await asyncio.to_thread(main, base) == 1
        assert "0 episodes" in capsys.readouterr().err
        for task in ("first", "second"):
            data = record_to_bytes(branching_record(task=task))
            await db.xadd(control.episodes_key("r"), {control.RECORD_FIELD: data})
        assert await asyncio.to_thread(main, base) == 0
        assert "second" in out.read_text()
        assert await asyncio.to_thread(main, [*base, "--episode", "0"]) == 0
        assert "first" in out.read_text()
    assert await asyncio.to_thread(main, base) == 1
    assert "Redis cannot be read" in capsys.readouterr().err
