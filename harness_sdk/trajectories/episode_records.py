"""A prefix tree as an episode record, so that the trainer trains on recorded runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from harness_sdk.record import EpisodeRecord, Node, NodeKind, ThreadSummary
from harness_sdk.trajectories.merge import PrefixTree, TreeNode
from harness_sdk.trajectories.render import Flag
from harness_sdk.trajectories.tokenizers import Tokenizer
from harness_sdk.types import ROOT_THREAD, StopReason


@dataclass(slots=True, kw_only=True)
class _Thread:
    """A path's own part of the tree, while it is collected."""

    thread_id: str
    parent: str
    depth: int
    num_turns: int = 0
    num_tokens: int = 0


def tree_reward(tree: PrefixTree) -> float | None:
    """Mean reward of the paths that have one."""
    known = [path.run.reward for path in tree.paths if path.run.reward is not None]
    return sum(known) / len(known) if known else None


def tree_to_record(tree: PrefixTree, tokenizer: Tokenizer, *, run: str) -> EpisodeRecord:
    """The tree with every path's own nodes as one thread.

    Replies are demonstrations: sampled, with log-probability 0.0 where the recording kept none.
    The reward is the paths' mean, since a record has one.

    Args:
        tree: At least one path.
        tokenizer: What rendered it; its fingerprint is stored, unless the ids were recorded.
        run: Name of the run that the record belongs to.
    """
    threads: dict[int, _Thread] = {}
    placed: dict[int, tuple[int, int, int]] = {}
    nodes: list[Node] = []
    for node, parent in tree.nodes():
        above = placed[id(parent)] if parent is not None else (-1, 0, node.path)
        parent_id, position, parent_path = above
        thread = threads.get(node.path) or _open_thread(threads, node, parent_path)
        nodes.append(_node(node, len(nodes), parent_id, position, thread.thread_id))
        placed[id(node)] = (nodes[-1].node_id, position + len(node.token_ids), node.path)
        thread.num_tokens += len(node.token_ids)
        thread.num_turns = max(thread.num_turns, node.step)
    recorded = tree.paths[0].recorded
    digest = hashlib.sha256(
        repr([path.run.run_id for path in tree.paths]).encode() + tree.task_id.encode()
    ).hexdigest()
    return EpisodeRecord(
        run=run,
        episode_id=f"tree-{digest[:16]}",
        group_id=tree.task_id,
        task_id=tree.task_id,
        replica_id="recorded",
        nodes=tuple(nodes),
        threads=tuple(_summary(tree, index, thread) for index, thread in threads.items()),
        reward=tree_reward(tree),
        answer=tree.paths[tree.root.path].run.answer,
        stop_reason=StopReason.DONE.value,
        opened_at_s=0.0,
        closed_at_s=0.0,
        mount_layers=(),
        model_hash="",
        tokenizer_hash=tree.paths[0].run.recorded_model if recorded else tokenizer.fingerprint,
        template_hash="chatml",
        engine="recorded",
    )


def _open_thread(threads: dict[int, _Thread], node: TreeNode, parent_path: int) -> _Thread:
    if not threads:
        thread = _Thread(thread_id=ROOT_THREAD, parent="", depth=0)
    else:
        parent = threads[parent_path]
        thread = _Thread(
            thread_id=f"run-{node.path + 1}", parent=parent.thread_id, depth=parent.depth + 1
        )
    threads[node.path] = thread
    return thread


def _node(node: TreeNode, node_id: int, parent: int, position: int, thread_id: str) -> Node:
    sampled = tuple(flag is Flag.SAMPLED for flag in node.flags)
    return Node(
        node_id=node_id,
        parent=parent,
        thread_id=thread_id,
        step=node.step,
        kind=NodeKind.DEMONSTRATION if any(sampled) else NodeKind.CONTEXT,
        token_ids=node.token_ids,
        sampled=sampled,
        sampled_logprobs=node.sampled_logprobs,
        policy_version=0,
        position_start=position,
    )


def _summary(tree: PrefixTree, index: int, thread: _Thread) -> ThreadSummary:
    run = tree.paths[index].run
    return ThreadSummary(
        thread_id=thread.thread_id,
        parent=thread.parent,
        depth=thread.depth,
        status=run.status,
        answer=run.answer,
        num_turns=thread.num_turns,
        num_tokens=thread.num_tokens,
    )
