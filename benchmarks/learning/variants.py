"""What is compared: the same world and policy, with a primitive or a part of the loop left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ending = Literal["prompt", "strict", "fallback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to play and train."""

    primitives: tuple[str, ...] = ("fork", "rewind", "read_thread", "wait", "done")
    """What the model is offered."""
    copies_text: bool = False
    """`read_thread` is a tool of the agent that returns the pages as text, in place of a mount."""
    longest_path: bool = False
    """Only each tree's longest path carries loss, in place of all of it."""
    max_policy_lag: int = 0
    """Versions that a sampled token may be behind; 0 takes turns."""
    groups_per_step: int = 8
    """Groups of one step. Episodes without branches generate a third of the tokens, so they come in
    three times as many: all variants take as many steps over about as many generated tokens."""
    plain_replies: float = 0.0
    """Share of the scripted roots that fork and then answer without calling `done`."""
    ending: Ending = "prompt"
    """What a root's turn without a call leads to: the service's termination prompt; the end of the
    episode, scored 0; or the end, scored by the number in the text."""

    @property
    def forks(self) -> bool:
        """Whether there are branches."""
        return "fork" in self.primitives

    @property
    def rewinds(self) -> bool:
        """Whether a thread can go back."""
        return "rewind" in self.primitives


VARIANTS: dict[str, Variant] = {
    "octopus": Variant(),
    "no_mounts": Variant(primitives=("fork", "rewind", "wait", "done"), copies_text=True),
    "no_rewind": Variant(primitives=("fork", "read_thread", "wait", "done")),
    "no_fork": Variant(primitives=("rewind", "done"), groups_per_step=24),
    "single": Variant(primitives=("done",), groups_per_step=24),
    "longest_path": Variant(longest_path=True),
    "asynchronous": Variant(max_policy_lag=2),
    "prompt": Variant(plain_replies=0.5),
    "strict": Variant(plain_replies=0.5, ending="strict"),
    "fallback": Variant(plain_replies=0.5, ending="fallback"),
    "prompt_90": Variant(plain_replies=0.9),
    "strict_90": Variant(plain_replies=0.9, ending="strict"),
}
