"""`octopus trees`: recorded runs merged into prefix trees, their overlap, and training records."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_sdk.cli.option_file import render_options
from harness_sdk.cli.settings import add_file_arguments
from harness_sdk.errors import InvalidRequest

if TYPE_CHECKING:
    from harness_sdk.trajectories.merge import PrefixTree
    from harness_sdk.trajectories.runs import Run

# More trees than this are summed up in the last line of the table.
_MAX_ROWS = 40
_TASK_WIDTH = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="files or folders of recorded runs: ReAct (reflexion), Responses (nemo_gym), ATIF, "
        "SWE-agent .traj, chat messages (mini-swe-agent)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR|FILE",
        help="a tokenizer.json or a folder that holds one (default: bytes)",
    )
    parser.add_argument(
        "--min-reward",
        type=float,
        metavar="Y",
        help="keep only runs with at least this reward, to imitate successes alone",
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FILE",
        help="write the trees for `octopus trainer --objective sft --records FILE`",
    )
    parser.add_argument("--run", default="trees", help="name of the run written to the records")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_file_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Merge, report, and write the records where asked."""
    if args.dry_run:
        sys.stdout.write(render_options(args))
        return 0
    from harness_sdk.records_file import write_records
    from harness_sdk.trajectories.episode_records import tree_to_record
    from harness_sdk.trajectories.formats import read_runs
    from harness_sdk.trajectories.merge import merge
    from harness_sdk.trajectories.render import render
    from harness_sdk.trajectories.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    runs = _rewarded(read_runs(args.paths), args.min_reward)
    trees = merge([path for recorded in runs for path in render(recorded, tokenizer)])
    if args.records is not None:
        write_records(
            args.records, (tree_to_record(tree, tokenizer, run=args.run) for tree in trees)
        )
    figures = summary(trees)
    text = json.dumps(figures, indent=2) if args.json else _table(figures)
    sys.stdout.write(text + "\n")
    return 0


def _rewarded(runs: list[Run], min_reward: float | None) -> list[Run]:
    if min_reward is None:
        return runs
    kept = [recorded for recorded in runs if (recorded.reward or 0.0) >= min_reward]
    if not kept:
        best = max(recorded.reward or 0.0 for recorded in runs)
        raise InvalidRequest(
            "no run has the reward asked for", value=f"--min-reward {min_reward}", limit=best
        )
    return kept


def summary(trees: Sequence[PrefixTree]) -> dict[str, Any]:
    """The figures of `--json`: totals, and one entry a tree under `per_tree`."""
    from harness_sdk.trajectories.episode_records import tree_reward
    from harness_sdk.trajectories.merge import overlap_ratio

    unique = sum(tree.tokens_unique for tree in trees)
    flat = sum(tree.tokens_flat for tree in trees)
    return {
        "trees": len(trees),
        "paths": sum(len(tree.paths) for tree in trees),
        "tokens_unique": unique,
        "tokens_flat": flat,
        "por": overlap_ratio(unique, flat),
        "per_tree": [
            {
                "task": tree.task_id,
                "paths": len(tree.paths),
                "leaves": tree.num_leaves,
                "tokens_unique": tree.tokens_unique,
                "tokens_flat": tree.tokens_flat,
                "tokens_flat_distinct": tree.tokens_flat_distinct,
                "por": tree.overlap,
                "reward": tree_reward(tree),
                "rewards": [path.run.reward for path in tree.paths],
                "runs": [path.run.run_id for path in tree.paths],
            }
            for tree in trees
        ],
    }


def _table(figures: dict[str, Any]) -> str:
    head = (
        f"{'task':{_TASK_WIDTH}} {'paths':>6} {'leaves':>6} {'unique':>9} {'flat':>9} {'por':>7} "
    )
    lines = [head + f"{'reward':>6}"]
    rows = sorted(figures["per_tree"], key=lambda row: row["tokens_flat"], reverse=True)
    lines += [_row(row["task"], row, row["leaves"], row["reward"]) for row in rows[:_MAX_ROWS]]
    if len(rows) > _MAX_ROWS:
        lines.append(f"... and {len(rows) - _MAX_ROWS} smaller trees")
    leaves = sum(row["leaves"] for row in rows)
    lines.append("-" * len(lines[0]))
    lines.append(_row(f"{figures['trees']} trees", figures, leaves, None))
    lines.append(f"por {figures['por']:.1%}: packed training computes {_speedup(figures)}x less")
    repeats = figures["paths"] - leaves
    if repeats:
        distinct = sum(row["tokens_flat_distinct"] for row in rows)
        rest = 1.0 - figures["tokens_unique"] / distinct
        lines.append(
            f"{repeats} paths repeat another or its beginning; without them por {rest:.1%}"
        )
    return "\n".join(lines)


def _speedup(figures: dict[str, Any]) -> str:
    return f"{figures['tokens_flat'] / max(figures['tokens_unique'], 1):.2f}"


def _row(name: str, row: dict[str, Any], leaves: int, reward: float | None) -> str:
    name = name if len(name) <= _TASK_WIDTH else name[: _TASK_WIDTH - 3] + "..."
    # A task's text may hold control characters, which a terminal would obey.
    name = "".join(char if char.isprintable() else " " for char in name)
    return (
        f"{name:{_TASK_WIDTH}} {row['paths']:6} {leaves:6} {row['tokens_unique']:9} "
        f"{row['tokens_flat']:9} {row['por']:7.1%} {'-' if reward is None else f'{reward:.2f}':>6}"
    )
