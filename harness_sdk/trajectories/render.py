"""A run as token ids: ChatML, append-only, so that runs with one beginning share their tokens."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from harness_sdk.trajectories.runs import RecordedTurn, Run, RunMessage
from harness_sdk.trajectories.tokenizers import Tokenizer


class Flag(enum.IntEnum):
    """Whether a token carries loss."""

    CONTEXT = 0
    SAMPLED = 1
    COPIED = 2
    """A reply carried as history: takes the flag of the token it merges with, else no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPath:
    """One root-to-leaf sequence of a run.

    Example:
        A one-byte question and a one-byte reply, with bytes as tokens: `cuts` is `(0, n)` where
        `n` is the place of the generation prompt, and the flags end `..., SAMPLED, SAMPLED`.
    """

    run: Run
    token_ids: tuple[int, ...]
    flags: tuple[Flag, ...]
    """One for each token."""
    sampled_logprobs: tuple[float, ...]
    """Nats, one for each SAMPLED token; 0.0 where the recording kept none."""
    cuts: tuple[int, ...]
    """Ascending places at which a context or a turn begins; the first is 0."""
    steps: tuple[int, ...]
    """Model turn of each piece between two cuts; 0 before the first turn."""
    recorded: bool
    """Whether the ids were recorded rather than rendered."""


def render(run: Run, tokenizer: Tokenizer) -> list[RenderedPath]:
    """The paths of `run`: one, or more where its recorded prompts are not append-only.

    What follows the last reply is left out, since nothing is predicted from it.
    """
    if run.recorded_turns:
        return _recorded_paths(run)
    writer = _Writer(run)
    context: list[RunMessage] = []
    for message in run.messages:
        if message.role != "assistant":
            context.append(message)
            continue
        _write_context(writer, context, tokenizer)
        _write_turn(writer, message, tokenizer)
        context = []
    return [writer.path(recorded=False)] if writer.step else []


class _Writer:
    """Collects the pieces of one path."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.token_ids: list[int] = []
        self.flags: list[Flag] = []
        self.sampled_logprobs: list[float] = []
        self.cuts: list[int] = []
        self.steps: list[int] = []
        self.step = 0

    def cut(self) -> None:
        """Begin a new piece."""
        self.cuts.append(len(self.token_ids))
        self.steps.append(self.step)

    def add(
        self, token_ids: Sequence[int], flag: Flag, logprobs: Sequence[float] | None = None
    ) -> None:
        """Append tokens of one flag."""
        self.token_ids += token_ids
        self.flags += [flag] * len(token_ids)
        if flag is Flag.SAMPLED:
            self.sampled_logprobs += [0.0] * len(token_ids) if logprobs is None else logprobs

    def path(self, *, recorded: bool) -> RenderedPath:
        """What was collected."""
        return RenderedPath(
            run=self.run,
            token_ids=tuple(self.token_ids),
            flags=tuple(self.flags),
            sampled_logprobs=tuple(self.sampled_logprobs),
            cuts=tuple(self.cuts),
            steps=tuple(self.steps),
            recorded=recorded,
        )


def _write_turn(writer: _Writer, message: RunMessage, tokenizer: Tokenizer) -> None:
    """Generation prompt, reply and the marker that ends it."""
    writer.step += 1
    writer.cut()
    writer.add([tokenizer.turn_start, *tokenizer.encode("assistant\n")], Flag.CONTEXT)
    flag = Flag.COPIED if message.copied else Flag.SAMPLED
    writer.add([*tokenizer.encode(message.content), tokenizer.turn_end], flag)


def _write_context(writer: _Writer, messages: Sequence[RunMessage], tokenizer: Tokenizer) -> None:
    """The rest of the turn before, if there was one, and the messages."""
    if not writer.step and not messages:
        return
    writer.cut()
    if writer.step:
        writer.add(tokenizer.encode("\n"), Flag.CONTEXT)
    for message in messages:
        role = "user" if message.role == "tool" else message.role
        writer.add(
            [
                tokenizer.turn_start,
                *tokenizer.encode(f"{role}\n{message.content}"),
                tokenizer.turn_end,
                *tokenizer.encode("\n"),
            ],
            Flag.CONTEXT,
        )


def _recorded_paths(run: Run) -> list[RenderedPath]:
    """A path for each prompt that does not extend what stood before it."""
    paths: list[RenderedPath] = []
    writer: _Writer | None = None
    for turn in run.recorded_turns:
        before = writer.token_ids if writer is not None else []
        if writer is not None and list(turn.prompt_token_ids[: len(before)]) != before:
            paths.append(writer.path(recorded=True))
            writer = None
        if writer is None:
            writer = _Writer(run)
            writer.step = len(paths)
        _write_recorded(writer, turn, is_first=not paths)
    return [*paths, writer.path(recorded=True)] if writer is not None else paths


def _write_recorded(writer: _Writer, turn: RecordedTurn, *, is_first: bool) -> None:
    new = turn.prompt_token_ids[len(writer.token_ids) :]
    if new:
        # A later prompt repeats earlier replies; which of its tokens those are was not recorded.
        begins_anew = not writer.token_ids and not is_first
        writer.cut()
        writer.add(new, Flag.COPIED if begins_anew else Flag.CONTEXT)
    writer.step += 1
    writer.cut()
    writer.add(turn.token_ids, Flag.SAMPLED, turn.sampled_logprobs)
