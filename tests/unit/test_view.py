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
from harness_sdk.cli.embedded import embedded_valkey
from harness_sdk.record import (
    EpisodeRecord,
    MountSpan,
    Node,
    NodeKind,
    ThreadSummary,
    record_to_bytes,
)
from harness_sdk.records_file import write_records
from harness_sdk.trajectories.tokenizers import ByteTokenizer
from harness_sdk.view import episode_html, episode_png, episode_svg
from harness_sdk.view.layout import lay_out
from harness_sdk.view.page import flat_tokens, text_pieces
from harness_sdk.view.shading import k3, stripes, token_shades

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
DECODE = ByteTokenizer().decode


class _Builder:
    """Writes an episode node by node, as the rollout service would."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(
        self,
        parent: int,
        thread: str,
        step: int,
        kind: NodeKind,
        text: str,
        *,
        mounts: tuple[MountSpan, ...] = (),
        rewound: bool = False,
    ) -> int:
        token_ids = tuple(text.encode())
        above = self.nodes[parent] if parent >= 0 else None
        own = above.position_start + len(above.token_ids) if above else 0
        visible = (above.mounts if above else ()) + mounts
        ends = [self.nodes[m.node_id].position_start + m.end for m in visible]
        turn = kind in (NodeKind.TURN, NodeKind.DEMONSTRATION)
        sampled = tuple(turn and i >= 2 for i in range(len(token_ids)))
        self.nodes.append(
            Node(
                node_id=len(self.nodes),
                parent=parent,
                thread_id=thread,
                step=step,
                kind=kind,
                token_ids=token_ids,
                sampled=sampled,
                sampled_logprobs=tuple(-0.07 * (i % 60) for i in range(sum(sampled))),
                policy_version=3,
                position_start=max([own, *ends]),
                mounts=visible,
                rewound=rewound,
            )
        )
        return len(self.nodes) - 1


def branching_record(text: str = "What do the siblings know?", task: str = "task") -> EpisodeRecord:
    """Root, two children, a rewind in the first, the second reading the first."""
    build = _Builder()
    prompt = build.add(-1, "root", 0, NodeKind.CONTEXT, "You may fork. " * 9 + text)
    turn = build.add(prompt, "root", 1, NodeKind.TURN, "<|fork: look left, look right")
    left = build.add(turn, "root.1", 1, NodeKind.NOTE, "your part: left")
    dropped = build.add(
        left, "root.1", 1, NodeKind.TURN, "<|search(wrong) and much more of it", rewound=True
    )
    build.add(dropped, "root.1", 1, NodeKind.CONTEXT, "0 hits. " * 20, rewound=True)
    note = build.add(left, "root.1", 1, NodeKind.NOTE, "rewound: try another word")
    found = build.add(note, "root.1", 1, NodeKind.TURN, "<|search(right)" + text * 3)
    hits = build.add(found, "root.1", 1, NodeKind.CONTEXT, "10 hits. " * 30)
    build.add(hits, "root.1", 2, NodeKind.TURN, "<|done(the key is red)")
    right = build.add(turn, "root.2", 1, NodeKind.NOTE, "your part: right")
    asks = build.add(right, "root.2", 1, NodeKind.TURN, "<|read_thread(root.1)")
    spans = (
        MountSpan(node_id=found, begin=0, end=10),
        MountSpan(node_id=hits, begin=0, end=270),
    )
    stub = build.add(asks, "root.2", 1, NodeKind.STUB, "mounted 280 tokens", mounts=spans)
    build.add(stub, "root.2", 2, NodeKind.TURN, "<|done(the door is red too)")
    joined = build.add(turn, "root", 1, NodeKind.NOTE, "both are done")
    nudge = build.add(joined, "root", 2, NodeKind.TERMINATION, "call done")
    build.add(nudge, "root", 2, NodeKind.TURN, "<|done(red)")
    threads = (
        ThreadSummary(thread_id="root", parent="", depth=0, status="done", answer=text),
        ThreadSummary(thread_id="root.1", parent="root", depth=1, status="done", answer="key"),
        ThreadSummary(thread_id="root.2", parent="root", depth=1, status="done", orphan=True),
    )
    return EpisodeRecord(
        run="test",
        episode_id="ep-1",
        group_id="g",
        task_id=task,
        replica_id="r",
        nodes=tuple(build.nodes),
        threads=threads,
        reward=1.0,
        answer=text,
        stop_reason="done",
        opened_at_s=0.0,
        closed_at_s=1.0,
        mount_layers=(2,),
        model_hash="m",
        tokenizer_hash="t",
        template_hash="c",
        engine="transformers",
    )


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


def test_flat_tokens_count_every_path() -> None:
    record = branching_record()
    by_id = {node.node_id: node for node in record.nodes}
    total = 0
    for node in record.nodes:
        if any(other.parent == node.node_id for other in record.nodes):
            continue
        at: Node | None = node
        while at is not None:
            total += len(at.token_ids)
            at = by_id.get(at.parent)
    assert flat_tokens(record) == total


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
