"""Merged trees hold each shared token once: counted by brute force on real and random runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_sdk.trajectories.formats import read_runs
from harness_sdk.trajectories.merge import PrefixTree, TreeNode, merge
from harness_sdk.trajectories.render import Flag, RenderedPath, render
from harness_sdk.trajectories.runs import Run, RunMessage
from harness_sdk.trajectories.tokenizers import ByteTokenizer

DATA = Path(__file__).parents[1] / "data" / "trajectories"
BYTES = ByteTokenizer()
REPLIES = st.lists(
    st.tuples(st.sampled_from(["a", "ab", "abc", "b", ""]), st.sampled_from(["", "x", "xy"])),
    min_size=1,
    max_size=4,
)


def _render(name: str) -> list[RenderedPath]:
    return [path for run in read_runs([DATA / name]) for path in render(run, BYTES)]


def _run(task: str, number: int, turns: list[tuple[str, str]], system: str = "") -> Run:
    """Replies, each followed by an observation unless that is empty."""
    messages = [RunMessage(role="user", content=system + task)]
    for reply, observation in turns:
        messages.append(RunMessage(role="assistant", content=reply))
        if observation:
            messages.append(RunMessage(role="user", content=observation))
    return Run(run_id=f"{task}:{number}", task_id=task, messages=tuple(messages))


def _prefixes(paths: list[RenderedPath]) -> set[tuple[object, ...]]:
    """Every different beginning of every path, by task, ids and flags."""
    return {
        (path.run.task_id, path.token_ids[:end], path.flags[:end])
        for path in paths
        for end in range(1, len(path.token_ids) + 1)
    }


def _walks(tree: PrefixTree) -> dict[int, tuple[tuple[int, ...], tuple[Flag, ...]]]:
    """What each path reads on its way from the root."""
    found: dict[int, tuple[tuple[int, ...], tuple[Flag, ...]]] = {}

    def walk(node: TreeNode, ids: tuple[int, ...], flags: tuple[Flag, ...]) -> None:
        ids, flags = ids + node.token_ids, flags + node.flags
        found.update(dict.fromkeys(node.ends, (ids, flags)))
        for child in node.children.values():
            walk(child, ids, flags)

    walk(tree.root, (), ())
    return found


def _check_tree(tree: PrefixTree) -> None:
    walks = _walks(tree)
    assert sorted(walks) == list(range(len(tree.paths)))
    for index, path in enumerate(tree.paths):
        assert walks[index][0] == path.token_ids
        if Flag.COPIED not in path.flags:
            assert walks[index][1] == path.flags
    for node, _ in tree.nodes():
        assert node.token_ids
        assert len(node.sampled_logprobs) == node.flags.count(Flag.SAMPLED)
        assert len({(c.token_ids[0], c.flags[0]) for c in node.children.values()}) == len(
            node.children
        )


@pytest.mark.parametrize(
    "name", ["react.jsonl", "responses_swe.jsonl", "responses_tools.jsonl", "mini_local.traj.json"]
)
def test_real_runs_count_like_brute_force(name: str) -> None:
    paths = _render(name)
    trees = merge(paths)
    assert sum(len(tree.paths) for tree in trees) == len(paths)
    assert sum(tree.tokens_flat for tree in trees) == sum(len(path.token_ids) for path in paths)
    # Strings of prefixes would be quadratic in memory: hash chains count the same.
    seen: set[int] = set()
    for path in paths:
        chain = hash(path.run.task_id)
        for token_id, flag in zip(path.token_ids, path.flags, strict=True):
            chain = hash((chain, token_id, int(flag)))
            seen.add(chain)
    assert sum(tree.tokens_unique for tree in trees) == len(seen)
    for tree in trees:
        _check_tree(tree)


@given(st.lists(st.tuples(st.sampled_from("QR"), REPLIES), min_size=1, max_size=7))
def test_random_runs_count_like_brute_force(specs: list[tuple[str, list[tuple[str, str]]]]) -> None:
    runs = [_run(task, number, turns) for number, (task, turns) in enumerate(specs)]
    paths = [path for run in runs for path in render(run, BYTES)]
    trees = merge(paths)
    assert sum(tree.tokens_unique for tree in trees) == len(_prefixes(paths))
    assert len(trees) == len({run.task_id for run in runs})
    for tree in trees:
        _check_tree(tree)


def test_paths_part_within_a_message() -> None:
    paths = [
        path
        for number, reply in enumerate(("look left", "look right"))
        for path in render(_run("Q", number, [(reply, "")]), BYTES)
    ]
    (tree,) = merge(paths)
    shared = len("Q") + len("<user\n>\n") + len("<assistant\n") + len("look ")
    assert tree.tokens_unique == sum(len(p.token_ids) for p in paths) - shared
    forks = [node for node, _ in tree.nodes() if len(node.children) == 2]
    assert [BYTES.decode(node.token_ids) for node in forks] == ["<|im_start|>assistant\nlook "]


def test_tasks_never_share_tokens() -> None:
    runs = [_run("Q", 0, [("same", "")]), _run("R", 0, [("same", "")])]
    trees = merge([path for run in runs for path in render(run, BYTES)])
    assert len(trees) == 2
    assert all(tree.overlap == 0.0 for tree in trees)


def test_repeated_run_counts_in_the_flat_tokens_only() -> None:
    paths = [p for n in range(5) for p in render(_run("Q", n, [("yes", "")]), BYTES)]
    (tree,) = merge(paths)
    assert tree.tokens_flat == 5 * tree.tokens_unique
    assert tree.tokens_flat_distinct == tree.tokens_unique
    assert (len(tree.paths), tree.num_leaves) == (5, 1)
    assert tree.overlap == pytest.approx(0.8)


def test_same_text_with_other_loss_flags_is_not_shared() -> None:
    """A user who quotes the reply writes the same tokens, which carry no loss."""
    reply = "Paris"
    said = Run(
        run_id="a",
        task_id="Q",
        messages=(
            RunMessage(role="user", content="q"),
            RunMessage(role="assistant", content=reply),
            RunMessage(role="assistant", content="end"),
        ),
    )
    (path,) = render(said, BYTES)
    quoted = RenderedPath(
        run=said,
        token_ids=path.token_ids,
        flags=tuple(
            Flag.CONTEXT if i < path.cuts[2] else flag for i, flag in enumerate(path.flags)
        ),
        sampled_logprobs=path.sampled_logprobs[-4:],
        cuts=path.cuts,
        steps=path.steps,
        recorded=False,
    )
    (tree,) = merge([path, quoted])
    first_sampled = path.flags.index(Flag.SAMPLED)
    assert len(tree.root.token_ids) <= first_sampled
    assert tree.tokens_unique == 2 * len(path.token_ids) - first_sampled


def test_copied_reply_takes_the_flag_of_its_original() -> None:
    original = _run("Q", 0, [("first", "obs"), ("second", "")])
    copying = Run(
        run_id="sub",
        task_id="Q",
        messages=(
            original.messages[0],
            RunMessage(role="assistant", content="first", copied=True),
            RunMessage(role="user", content="other"),
            RunMessage(role="assistant", content="third"),
        ),
    )
    # The copy comes first in the file, and is merged after its original all the same.
    (tree,) = merge([*render(copying, BYTES), *render(original, BYTES)])
    sampled = [
        BYTES.decode([t for t, f in zip(n.token_ids, n.flags, strict=True) if f is Flag.SAMPLED])
        for n, _ in tree.nodes()
    ]
    assert sorted(text for text in sampled if text) == [
        "first<|im_end|>",
        "second<|im_end|>",
        "third<|im_end|>",
    ]
    (alone,) = merge(render(copying, BYTES))
    assert sum(n.flags.count(Flag.SAMPLED) for n, _ in alone.nodes()) == len("third") + 1


def test_recorded_prompt_that_drops_reasoning_begins_a_second_path() -> None:
    """Turn 2's prompt shares 3,089 ids with turn 1 and then lacks its reasoning."""
    paths = _render("responses_ids.json")
    assert [len(path.token_ids) for path in paths] == [3088 + 495, 3637 + 207]
    (tree,) = merge(paths)
    assert tree.tokens_flat - tree.tokens_unique == 3089
    assert sum(n.flags.count(Flag.SAMPLED) for n, _ in tree.nodes()) == 495 + 207
    first = next(n for n, _ in tree.nodes() if Flag.SAMPLED in n.flags)
    assert first.sampled_logprobs[0] == pytest.approx(-1.19e-7, rel=0.01)


def test_text_after_the_last_reply_is_left_out() -> None:
    longer = _run("Q", 0, [("yes", "never read")])
    shorter = _run("Q", 1, [("yes", "")])
    assert render(longer, BYTES)[0].token_ids == render(shorter, BYTES)[0].token_ids
